"""``python -m tools.planner``: fits the planner's coefficients (tools/planner_fit.py), writes
dtlib/planner/calibrated.py, and docs/planner.md with docs/planner_rows.csv: how far off it is, row by row."""

import csv
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np

from dtlib.planner.memory import layer_activations
from dtlib.planner.mesh import Plan
from dtlib.planner.model import DEVICES, GIB, Model
from dtlib.planner.time import work
from tools import planner_fit as fits

ROOT = Path(__file__).parents[1]
PAGE, ROWS = ROOT / "docs" / "planner.md", ROOT / "docs" / "planner_rows.csv"
CALIBRATED = ROOT / "dtlib" / "planner" / "calibrated.py"
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
AXES = ("data", "tensor", "pipe", "context", "expert", "zero", "micro_batch")


def percent(off) -> str:
    return f"{100 * np.abs(off).mean():.1f} %"


def signed(off: float) -> str:
    return f"{100 * off:+.0f} %"


def table(headers, rows) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [headers, ["---"] * len(headers), *rows]]
    return "\n".join(lines)


def calibration(name: str):
    """The fit on all rows, and the errors of each row when it is left out."""
    rows, device, expected, source = SETS[name]
    rows = rows()
    done, took = fits.amounts(rows, device)
    return rows, fits.fit(done, took, expected), fits.held_out(done, took, expected), source


def write_calibrated(found: dict, usable: float) -> None:
    lines = [
        '"""Coefficients of the planner, with their bands: written by ``python -m tools.planner``."""', "",
        "from dtlib.planner.time import Calibration, Speeds", "", "# Of a GPU's memory, before it is full.",
        f"USABLE = {usable:.3f}", "CALIBRATIONS = {",
    ]  # fmt: skip
    for name, (rows, speeds, off, source) in found.items():
        seen = {axis: (min(v), max(v)) for axis in AXES if (v := [getattr(row.plan, axis) for row in rows])}
        for size, of in {
            "gpus": lambda row: row.plan.gpus,
            "hidden": lambda row: row.model.hidden,
            "seq": lambda row: row.model.seq,
        }.items():
            seen[size] = (min(map(of, rows)), max(map(of, rows)))
        seen["recompute"] = tuple(sorted({row.plan.recompute for row in rows}))
        low, high = fits.band_of(off)
        lines += [f'    "{name}": Calibration(', f'        device="{SETS[name][1]}", rows={len(rows)},']
        lines += [f'        source="{source}",']
        lines += [f"        error={np.abs(off).mean():.3f}, band=({low:.3f}, {high:.3f}),", "        speeds=Speeds("]
        lines += _several_a_line(f"{key}={float(f'{value:.3g}')!r}," for key, value in vars(speeds).items())
        lines += ["        ),", "        seen={"]
        lines += _several_a_line(f'"{key}": {value!r},'.replace("'", '"') for key, value in seen.items())
        lines += ["        },", "    ),"]
    CALIBRATED.write_text("\n".join([*lines, "}  # fmt: skip"]) + "\n", encoding="utf-8")


def _several_a_line(entries) -> list[str]:
    """Entries of a call or dictionary, as many in a line as fit."""
    text = textwrap.fill(" ".join(each.replace(" ", "\0") for each in entries), 120 - 12, break_on_hyphens=False)
    return textwrap.indent(text.replace("\0", " "), " " * 12).split("\n")


def random_halves() -> str:
    rows = []
    published = {"a100-node": "vTrain's own 8.4 %", "a100-cluster": "vTrain's own 14.7 %", "h100-cluster": "-"}
    for name, (make, device, expected, _) in SETS.items():
        found = fits.halves(make(), device, expected)
        mean = {key: np.mean([each[key] for each in found]) for key in found[0]}
        worst = max(each["error"] for each in found)
        rows.append([
            name, len(make()), f"{100 * mean['error']:.1f} %", f"{100 * worst:.1f} %", f"{100 * mean['largest']:.1f} %",
            f"{100 * mean['covered']:.0f} %", published[name],
        ])  # fmt: skip
    return table(
        ["calibration", "rows", "mean error", "worst seed", "of the largest model", "covered by the band", "published"],
        rows,
    )


def whole_models() -> str:
    rows = []
    for name, (make, device, expected, _) in SETS.items():
        for group, off in fits.left_out(make(), device, expected).items():
            rows.append([name, group, len(off), percent(off), signed(off.mean()), signed(np.median(off))])
    return table(["calibration", "left out", "rows", "mean error", "mean", "median"], rows)


def memory_of_torchtitan() -> str:
    rows, offs = [], []
    for row in fits.torchtitan():
        says = fits.bytes_of([row])[0] / GIB
        offs.append(says / row.gib - 1)
        rows.append([f"Llama 3 {row.group}", str(row.plan), row.model.seq, row.gib, f"{says:.1f}", signed(offs[-1])])
    rows.append(["mean", "", "", "", "", percent(np.array(offs))])
    return table(["model", "plan", "tokens", "measured GiB", "planner", "off"], rows)


def fits_of_the_scan() -> str:
    rows, both = [], fits.scan()
    for known, asked in (("1B", "8B"), ("8B", "1B")):
        usable = fits.usable_share([row for row in both if row.group == known and row.plan.pipe <= 8])
        for stages, which in (("at most 8", lambda p: p <= 8), ("more", lambda p: p > 8)):
            says = fits.judged([row for row in both if row.group == asked and which(row.plan.pipe)], usable)
            rows.append([
                f"{known}, then {asked}", stages, says["rows"], f"{usable:.3f}",
                *(f"{says[key]:.3f}" for key in ("F1", "recall", "precision", "always")),
            ])  # fmt: skip
    return table(
        ["fitted on, tried on", "stages", "rows", "usable share", "F1", "recall", "precision", '"always fits"'], rows
    )


def peers() -> str:
    """Every row of vTrain's on many nodes: left out in fifths, beside llm-analysis."""
    rows, _, off, _ = calibration("a100-cluster")
    peer = fits.published("llm_analysis_vtrain")
    by_hand = [
        np.array([float(each[f"efficiency_{e}_s"]) / float(each["measured_s"]) - 1 for each in peer])
        for e in (0.43, 0.5)
    ]
    shown = [
        [row.model.hidden, str(row.plan), f"{row.seconds:.1f}", *(signed(each[i]) for each in (off, *by_hand))]
        for i, row in enumerate(rows)
    ]
    closer = int((np.abs(off) < np.abs(by_hand[0])).sum())
    shown.append(["mean", "", "", *(percent(each) for each in (off, *by_hand))])
    says = f"The planner is closer than llm-analysis at 0.43 on {closer} of {len(rows)} rows, else further off.\n\n"
    return says + table(
        ["hidden", "plan", "measured s", "planner, left out", "llm-analysis 0.43", "llm-analysis 0.5"], shown
    )


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


def others(speeds: dict) -> str:
    shown, offs = [], []
    for where, model, plan, took, said in other_papers():
        known = speeds["a100-node" if plan.gpus <= 8 else "a100-cluster"]
        offs.append(fits.seconds(work(model, plan, DEVICES["a100"]), known) / took - 1)
        shown.append([where, model.hidden, str(plan), f"{took:.2f}", signed(offs[-1]), said])
    shown.append(["mean", "", "", "", percent(np.array(offs)), ""])
    return table(["from", "hidden", "plan", "measured s", "planner", "others"], shown)


MPT = {"1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
       "70b": (80, 8192, 64)}  # layers, hidden, heads  # fmt: skip


def another_framework(speeds: dict) -> str:
    """LLM Foundry's MPT models under FSDP, on which nothing was fitted: by device and length."""
    found = {}
    for each in fits.published("llm_foundry_mpt_mfu"):
        if each["model"] not in MPT:
            continue  # of less than a billion parameters
        model = Model(*MPT[each["model"]], 50432, int(each["seq_len"]))
        plan = Plan(
            data=int(each["gpus"]), zero=3 if each["sharding"] == "FULL_SHARD" else 2, batch=int(each["global_batch"]),
            micro_batch=int(each["microbatch"]), scheme="adam",
            recompute="full" if each["act_ckpt"] == "True" else "none",
        )  # fmt: skip
        device = each["gpu"][:4]
        known = replace(
            speeds[f"{device}-cluster"], hidden=speeds["h100-cluster"].hidden
        )  # FSDP hides, Megatron did not
        took = plan.batch * model.seq / float(each["tokens_per_s_per_gpu"]) / plan.gpus
        off = fits.seconds(work(model, plan, DEVICES[device]), known) / took - 1
        length = "at most 2,048" if model.seq <= 2048 else "4,096 and 8,192" if model.seq <= 8192 else "16,384 and more"
        found.setdefault((device, length), []).append(off)
    rows = [[*key, len(off), percent(off), signed(np.mean(off))] for key, off in sorted(found.items())]
    return table(["device", "tokens a sample", "rows", "mean error", "mean"], rows)


def activations() -> str:
    rows = []
    sizes = {"22B": (6144, 64, 48), "175B": (12288, 96, 96), "530B": (20480, 128, 105), "1T": (25600, 160, 128)}
    for each in fits.published("korthikanti2022_fig7_activation_percent"):
        hidden, heads, layers = sizes[each["model"]]
        says = percent_of_activations(Model(layers, hidden, heads, 51200, 2048))
        rows += [[each["model"], name, each[name], f"{says[name]:.2f}"] for name in says]
    return table(["model", "what", "published %", "planner %"], rows)


def percent_of_activations(model: Model) -> dict[str, float]:
    """Activations of a layer on 8 tensor ranks, in % of those with none of the three."""
    plan = Plan(tensor=8, sequence_parallel=False, flash=False)
    cuts = {
        "none": plan, "seq": replace(plan, sequence_parallel=True), "selective": replace(plan, recompute="selective"),
        "seq+selective": replace(plan, recompute="selective", sequence_parallel=True),
        "full": replace(plan, recompute="full"),
    }  # fmt: skip
    whole = layer_activations(model, plan)
    return {name: 100 * layer_activations(model, cut) / whole for name, cut in cuts.items()}


def coefficients(speeds: dict) -> str:
    rows = []
    for name, (expected, factor, low, high, unit) in fits.EXPECTED.items():
        values = [f"{getattr(each, name):.3g}" for each in speeds.values()]
        rows.append([name, unit, f"{expected:.3g} (x/ {factor:g})", f"{low:.3g} to {high:.3g}", *values])
    return table(["coefficient", "unit", "expected", "may not leave", *speeds], rows)


def write_rows(found: dict) -> None:
    with ROWS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["calibration", "model", "plan", "measured_s", "off_pct_left_out"])
        for name, (rows, _, off, _) in found.items():
            for row, each in zip(rows, off, strict=True):
                writer.writerow([name, row.group, str(row.plan), f"{row.seconds:.4g}", f"{100 * each:.1f}"])


def main() -> None:
    found = {name: calibration(name) for name in SETS}
    speeds = {name: each[1] for name, each in found.items()}
    write_calibrated(found, fits.usable_share([row for row in fits.scan() if row.plan.pipe <= 8]))
    write_rows(found)
    deep = [row for row in fits.scan() if row.seconds and 1 < row.plan.pipe <= 8]
    done, took = fits.amounts(deep, "h100")
    off = fits.errors(done, took, speeds["h100-cluster"])
    text = (ROOT / "tools" / "data" / "planner_text.md").read_text(encoding="utf-8")
    pieces = {
        "halves": random_halves(), "models": whole_models(), "torchtitan": memory_of_torchtitan(),
        "scan": fits_of_the_scan(),
        "peers": peers(), "others": others(speeds),
        "foundry": another_framework(speeds), "activations": activations(), "coefficients": coefficients(speeds),
        "deep": f"{len(deep)} rows: mean {percent(off)}, half of them within {100 * np.median(np.abs(off)):.0f} %",
    }  # fmt: skip
    for name, piece in pieces.items():
        text = text.replace("{" + name + "}", piece)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
