"""How far off the planner is on rows of families that its fit has not seen: ``python -m tools.planner_families``.

Draws docs/explanation/predicted_against_measured.svg, and writes tools/data/planner_rows.csv, its points. A family is
what one model or one paper has measured. Inside of a calibration each family is predicted by a fit on the others.
"""

import csv
from dataclasses import dataclass, replace
from importlib import reload
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogLocator

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.drawing import MARKERS, shown, subplots, units
from dtlib.planner import calibrated
from dtlib.planner.mesh import Plan
from dtlib.planner.model import DEVICES, Model
from dtlib.planner.time import work
from tools import planner_fit as fits

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "tools" / "data" / "planner_rows.csv"
PICTURE = ROOT / "docs" / "explanation" / "predicted_against_measured.svg"
# name: (rows, device, what is expected, where from)
SETS = {
    "a100-node": (
        lambda: fits.vtrain("single"), "a100", fits.NOTHING_HIDDEN,
        "vTrain, arXiv:2312.12391, one node of 8 A100, Megatron-LM",
    ),
    "a100-cluster": (
        lambda: fits.vtrain("multi"), "a100", fits.NOTHING_HIDDEN,
        "vTrain, arXiv:2312.12391, 8 to 64 nodes of 8 A100, Megatron-LM",
    ),
    "h100-cluster": (
        lambda: fits.without_pipeline(fits.scan()), "h100", fits.EXPECTED,
        "Ultra-Scale Playbook's scan, nanotron, 1 to 16 nodes of 8 H100, without pipelines",
    ),
}  # fmt: skip


def percent(off) -> str:
    return f"{100 * np.abs(off).mean():.1f} %"


def signed(off: float) -> str:
    return f"{100 * off:+.0f} %"


def table(headers, rows) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [headers, ["---"] * len(headers), *rows]]
    return "\n".join(lines)


PAPERS = {  # beside those that calibrations are fitted on: measured by, and the table in data/
    "Korthikanti 2022": (
        "V. Korthikanti et al., arXiv:2205.05198, table 5, A100",
        "korthikanti2022_table5_iteration_time",
    ),
    "MegaScale 2024": ("MegaScale, arXiv:2402.15627, table 2, A100", "megascale_table2_175B_strong_scaling"),
    "Megatron-LM 2021": ("Megatron-LM, arXiv:2104.04473, table 1, A100", "megatron2021_table1_weak_scaling"),
    "MT-NLG 2022": ("MT-NLG, arXiv:2201.11990, A100", "mtnlg2022_iteration_time"),
    "torchtitan": ("torchtitan, Llama 3, H100", "torchtitan_llama3_h100"),
    "a100": ("LLM Foundry, MPT, A100", "llm_foundry_mpt_mfu"),
    "h100": ("LLM Foundry, MPT, H100", "llm_foundry_mpt_mfu"),
}


@dataclass(frozen=True)
class Family:
    """Rows that were left out of a fit together, and the band that the other rows give."""

    source: str
    file: str
    name: str
    inside: bool
    plans: list[tuple[Model, Plan]]
    measured: np.ndarray  # seconds
    predicted: np.ndarray
    band: tuple[float, float]

    @property
    def held(self) -> np.ndarray:
        return (self.band[0] <= self.measured / self.predicted) & (self.measured / self.predicted <= self.band[1])


def families(speeds: dict) -> list[Family]:
    """Of all sources, inside of a calibration first."""
    return [*inside_families(), *scan_beyond(), *papers_as_families(speeds)]


def inside_families() -> list[Family]:
    found = []
    files = ("vtrain_ground_truth_single", "vtrain_ground_truth_multi", "ultrascale_scan_1B_8B")
    for (make, device, expected, source), file in zip(SETS.values(), files, strict=True):
        rows = make()
        done, took = fits.amounts(rows, device)
        groups = np.array([row.group for row in rows])
        for group in dict.fromkeys(groups):
            out = groups == group
            rest, seconds = fits.of_rows(done, ~out), took[~out]
            found.append(Family(
                source, file, f"{'hidden ' * group.isdigit()}{group}", True,
                [(row.model, row.plan) for row in rows if row.group == group], took[out],
                fits.seconds(fits.of_rows(done, out), fits.fit(rest, seconds, expected)),
                fits.band_of(fits.held_out(rest, seconds, expected)),
            ))  # fmt: skip
    return found


def scan_beyond() -> list[Family]:
    """Rows of the scan with pipelines, by a fit on the other model's rows without; the band is the other model's."""
    found, rows = [], deep_rows()
    for name, other in (("1B", "8B"), ("8B", "1B")):
        known = fits.fit(*fits.amounts([r for r in fits.without_pipeline(fits.scan()) if r.group == other], "h100"))
        of = {group: fits.amounts([row for row in rows if row.group == group], "h100") for group in (name, other)}
        predicted = {group: fits.seconds(done, known) for group, (done, _) in of.items()}
        low, high = np.quantile(of[other][1] / predicted[other], (0.05, 0.95))
        found.append(Family(
            "Ultra-Scale Playbook's scan, H100, pipelines", "ultrascale_scan_1B_8B", name, False,
            [(row.model, row.plan) for row in rows if row.group == name], of[name][1], predicted[name], (low, high),
        ))  # fmt: skip
    return found


def papers_as_families(speeds: dict) -> list[Family]:
    """Other papers and frameworks, on which nothing was fitted, by the calibrations as they are."""
    rows: dict[tuple, list] = {}
    for where, model, plan, took, _ in other_papers():
        known = speeds["a100-node" if plan.gpus <= 8 else "a100-cluster"]
        said = fits.seconds(work(model, plan, DEVICES["a100"]), known)
        rows.setdefault(PAPERS[where.split(",")[0]], []).append((model, plan, took, said))
    for row in fits.torchtitan():
        said = fits.seconds(work(row.model, row.plan, DEVICES["h100"]), speeds["h100-cluster"])
        rows.setdefault(PAPERS["torchtitan"], []).append((row.model, row.plan, row.seconds, said))
    for model, plan, device, took in foundry():
        said = foundry_says(model, plan, device, speeds)
        rows.setdefault(PAPERS[device], []).append((model, plan, took, said))
    ratios = {key: np.array([took / said for _, _, took, said in each]) for key, each in rows.items()}
    found = []
    for (source, file), each in rows.items():
        others = [ratio for key, ratio in ratios.items() if key != (source, file)]
        measured, predicted = np.array([row[2:] for row in each]).T
        plans = [(model, plan) for model, plan, *_ in each]
        found.append(Family(source, file, "all", False, plans, measured, predicted, band_of_families(others)))
    return found


def band_of_families(families) -> tuple[float, float]:
    """Between which factors nine of ten rows lie, if each family counts as much as each other."""
    ratios = np.concatenate(list(families))
    weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in families])
    order = np.argsort(ratios)
    share = np.cumsum(weights[order]) / weights.sum()
    return tuple(float(ratios[order][np.searchsorted(share, edge)]) for edge in (0.05, 0.95))


def deep_rows() -> list[fits.Row]:
    """Rows of the scan with pipelines, which the H100 calibration has not seen."""
    return [row for row in fits.scan() if row.seconds and row.plan.pipe > 1]


def other_papers() -> list[list]:
    """Rows of other papers, on which nothing was fitted: where from, plan, measured, what others said."""
    rows = []
    for each in fits.published("korthikanti2022_table5_iteration_time"):
        model = Model(int(each["layers"]), int(each["hidden_size"]), int(each["attention_heads"]), 51200, 2048)
        stages, chunks = int(each["pipeline_parallel"]), int(each["interleave_chunks"])
        plan = Plan(
            data=1, tensor=8, pipe=stages, chunks=chunks, batch=int(each["global_batch"]),
            micro_batch=int(each["microbatch"]),
            schedule="interleaved" if chunks > 1 else "one_f_one_b", flash=False,
        )  # fmt: skip
        for how, key, calculon in (
            ("full", "iter_s_full_recompute", "calculon_pred_full_s"),
            ("selective", "iter_s_selective+seqpar", "calculon_pred_seqsel_s"),
        ):
            own = replace(plan, recompute=how, sequence_parallel=how == "selective")
            said = float(each[calculon]) / float(each[key]) - 1
            rows.append(["Korthikanti 2022, table 5", model, own, float(each[key]), f"Calculon {signed(said)}"])
    for each in fits.published("megascale_table2_175B_strong_scaling"):
        if each["method"] == "Megatron-LM":
            model = Model(96, 12288, 128, 64000, 2048)
            plan = Plan(
                data=int(each["dp"]), tensor=8, pipe=8, batch=int(each["global_batch"]), micro_batch=1, chunks=6,
                schedule="interleaved", recompute="selective", flash=True,
            )  # fmt: skip
            rows.append(["MegaScale 2024, table 2 (Megatron-LM)", model, plan, float(each["iter_s"]), ""])
    for each in fits.published("megatron2021_table1_weak_scaling"):
        model = Model(int(each["layers"]), int(each["hidden_size"]), int(each["attention_heads"]), 51200, 2048)
        plan = Plan(
            data=int(each["data_parallel_derived"]), tensor=int(each["tensor_parallel"]),
            pipe=int(each["pipeline_parallel"]), batch=int(each["global_batch"]), micro_batch=1, recompute="full",
            sequence_parallel=False, flash=False,
        )  # fmt: skip
        took = model.operations(plan.batch * 2048, again=True) / (plan.gpus * float(each["tflops_per_gpu"]) * 1e12)
        rows.append(["Megatron-LM 2021, table 1 (micro-batch not published: 1)", model, plan, took, ""])
    for each in fits.published("mtnlg2022_iteration_time"):
        model = Model(105, 20480, 128, 51200, 2048)
        plan = Plan(
            data=int(each["dp"]), tensor=8, pipe=35, batch=int(each["global_batch"]), micro_batch=1, recompute="full",
            sequence_parallel=False, flash=False,
        )  # fmt: skip
        rows.append(["MT-NLG 2022, section 2.4", model, plan, float(each["iter_s"]), ""])
    return rows


MPT = {"1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
       "70b": (80, 8192, 64)}  # layers, hidden, heads  # fmt: skip


def foundry() -> list[tuple]:
    """LLM Foundry's MPT models under FSDP, on which nothing was fitted: model, plan, device, seconds."""
    rows = []
    for each in fits.published("llm_foundry_mpt_mfu"):
        if each["model"] not in MPT:
            continue  # of less than a billion parameters
        model = Model(*MPT[each["model"]], 50432, int(each["seq_len"]))
        plan = Plan(
            data=int(each["gpus"]), zero=3 if each["sharding"] == "FULL_SHARD" else 2, batch=int(each["global_batch"]),
            micro_batch=int(each["microbatch"]), scheme="adam",
            recompute="full" if each["act_ckpt"] == "True" else "none",
        )  # fmt: skip
        took = plan.batch * model.seq / float(each["tokens_per_s_per_gpu"]) / plan.gpus
        rows.append((model, plan, each["gpu"][:4], took))
    return rows


def foundry_says(model: Model, plan: Plan, device: str, speeds: dict) -> float:
    # FSDP hides messages, Megatron-LM did not.
    known = replace(speeds[f"{device}-cluster"], hidden=speeds["h100-cluster"].hidden)
    return fits.seconds(work(model, plan, DEVICES[device]), known)


def errors_of_families(found: list[Family]) -> str:
    """A row for each family, and one for all inside and all outside of a calibration."""
    rows = []
    for each in found:
        low, high = (f"{factor:.2f}" if factor < 10 else f"{factor:.0f}" for factor in each.band)
        rows.append([
            each.source, f"`{each.file}.csv`", each.name, *_errors([each]), f"{low} to {high}", _share([each]),
        ])  # fmt: skip
    inside, beyond = [each for each in found if each.inside], [each for each in found if not each.inside]
    papers = [each for each in beyond if each.name == "all"]
    for name, some in (("inside of a calibration", inside), ("other papers", papers), ("all outside", beyond)):
        rows.append([f"**{name}**", "", "", *_errors(some), "", _share(some)])
    return table(
        ["measured by", "table in `data/`", "left out", "rows", "mean error", "median", "band of the others", "held"],
        rows,
    )


def _errors(some: list[Family]) -> tuple:
    off = np.concatenate([each.predicted / each.measured for each in some]) - 1
    return len(off), percent(off), signed(float(np.median(off)))


def _share(some: list[Family]) -> str:
    return f"{np.concatenate([each.held for each in some]).mean():.0%}"


def without(name: str) -> list[float]:
    """Mean errors of families inside, and of other papers, if a coefficient keeps the value that was expected of it."""
    speeds, inside = {}, []
    for calibration, (make, device, expected, _) in SETS.items():
        first, _, _, _, unit = expected[name]
        held = {**expected, name: (first, 1.0001, 0.999 * first, 1.001 * first, unit)}
        inside += fits.left_out(make(), device, held).values()
        speeds[calibration] = fits.fit(*fits.amounts(make(), device), held)
    papers = [each.predicted / each.measured - 1 for each in papers_as_families(speeds)]
    return [float(np.abs(np.concatenate(some)).mean()) for some in (inside, papers)]


@shown
def predicted_against_measured(found: list[Family], bands: dict[str, tuple[float, float]]) -> tuple:
    """A point for each row, and the band that ``dtlib plan`` prints: a panel for each of ``bands``."""
    figure, axes = subplots(3, 2, height=11.5)
    *panels, legend = axes.flat
    alts = []
    for panel, (title, (low, high)), some in zip(panels, bands.items(), _panels(found), strict=True):
        ends = np.array([
            min(min(each.predicted.min(), each.measured.min()) for each in some) / 1.3,
            max(max(each.predicted.max(), each.measured.max()) for each in some) * 1.3,
        ])  # fmt: skip
        panel.fill_between(ends, low * ends, high * ends, color="#dfe9f5")
        panel.plot(ends, ends, color="#555555", linewidth=1)
        for number, each in enumerate(some):
            name = each.name if each.name != "all" else f"{each.source.split(',')[0]}, {each.source[-4:]}"
            panel.scatter(
                each.predicted, each.measured, 18, RANK_COLOURS[number], marker=MARKERS[number], label=name, alpha=0.6,
                linewidths=0, rasterized=len(each.measured) > 50,
            )  # fmt: skip
        panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 3) if ends[1] < 40 * ends[0] else (1,)))
            units(axis, "s")
        ratios = np.concatenate([each.measured / each.predicted for each in some])
        within = np.mean((low <= ratios) & (ratios <= high))
        says = f"band: {low:.2f} to {high:.3g}\n{within:.0%} of {len(ratios)} rows"
        paper = {"facecolor": "white", "alpha": 0.8, "linewidth": 0}
        panel.text(0.03, 0.97, says, va="top", transform=panel.transAxes, bbox=paper)
        alts.append(f"{title}: {within:.0%} of {len(ratios)} rows in the band")
        if len(some) > 4:
            marks, names = panel.get_legend_handles_labels()
            legend.legend(marks, names, loc="center", title=title)
        else:
            panel.legend(loc="lower right")
    legend.axis("off")
    for panel in (axes[1, 1], axes[2, 0]):
        panel.set_xlabel("predicted")
    for panel in axes[:, 0]:
        panel.set_ylabel("measured")
    return figure, f"Predicted against measured seconds of a step. {'; '.join(alts)}."


def _panels(found: list[Family]) -> list[list[Family]]:
    """Families of each calibration, those of other papers, and pipelines of the scan."""
    sources = [source for *_, source in SETS.values()]
    inside = [[each for each in found if each.source == source] for source in sources]
    beyond = [each for each in found if not each.inside]
    return [*inside, [e for e in beyond if e.name == "all"], [e for e in beyond if e.name != "all"]]


def write_rows(found: list[Family]) -> None:
    with ROWS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["measured_by", "table", "left_out", "inside", "plan", "measured_s", "predicted_s", "in_band"])
        for each in found:
            for (_, plan), measured, predicted, held in zip(
                each.plans, each.measured, each.predicted, each.held, strict=True
            ):
                row = [each.source, each.file, each.name, int(each.inside), str(plan), f"{measured:.4g}"]
                writer.writerow([*row, f"{predicted:.4g}", int(held)])


def main() -> str:
    """Write picture and rows; return the table and what the page says of the picture."""
    known = reload(calibrated)  # which may just have been written
    found = families({name: each.speeds for name, each in known.CALIBRATIONS.items()})
    titles = ("A100, one node", "A100, 8 to 64 nodes", "H100, no pipeline")
    bands = {title: each.band for title, each in zip(titles, known.CALIBRATIONS.values(), strict=True)}
    bands |= {"other papers": known.OUTSIDE, "H100, pipelines": known.OUTSIDE_PIPE}
    drawn = predicted_against_measured.drawn(found, bands)
    PICTURE.write_text(drawn.svg + "\n", encoding="utf-8")
    write_rows(found)
    return f"![{drawn.alt}]({PICTURE.name})\n\n{errors_of_families(found)}"


if __name__ == "__main__":
    print(main())
