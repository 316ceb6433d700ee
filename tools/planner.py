"""Fit the planner's coefficients (tools/planner_fit.py): ``python -m tools.planner``.

Writes dtlib/planner/calibrated.py, and docs/explanation/how_far_off_the_planner_is.md with its picture and its rows
(tools/planner_families.py).
"""

import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np

from dtlib.planner.estimate import estimate
from dtlib.planner.memory import layer_activations
from dtlib.planner.mesh import Plan
from dtlib.planner.model import DEVICES, GIB, Model
from dtlib.planner.time import work
from tools import planner_families
from tools import planner_fit as fits
from tools.planner_families import (
    SETS,
    band_of_families,
    deep_rows,
    foundry,
    foundry_says,
    other_papers,
    papers_as_families,
    percent,
    signed,
    table,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "how_far_off_the_planner_is.md"
CALIBRATED = ROOT / "dtlib" / "planner" / "calibrated.py"
AXES = ("data", "tensor", "pipe", "context", "expert", "zero", "micro_batch")


def calibration(name: str):
    """The fit on all rows, and the errors of each row when it is left out."""
    rows, device, expected, source = SETS[name]
    rows = rows()
    done, took = fits.amounts(rows, device)
    return rows, fits.fit(done, took, expected), fits.held_out(done, took, expected), source


def memory_off() -> np.ndarray:
    """Errors of memory: torchtitan's rows and the scan's, each as one family."""
    found = []
    for rows in (fits.torchtitan(), [row for row in fits.scan() if row.gib]):
        says = fits.bytes_of(rows) / GIB
        found.append(np.abs(says / np.array([row.gib for row in rows]) - 1)[np.isfinite(says)].mean())
    return np.array(found)


def write_calibrated(found: dict, usable: float) -> None:
    speeds = {name: each[1] for name, each in found.items()}
    low, high = band_of_families([each.measured / each.predicted for each in papers_as_families(speeds)])
    done, took = fits.amounts(deep_rows(), "h100")
    least, most = np.quantile(took / fits.seconds(done, speeds["h100-cluster"]), (0.05, 0.95))
    lines = [
        '"""Coefficients of the planner, with their bands: written by ``python -m tools.planner``."""', "",
        "from dtlib.planner.time import Calibration, Speeds", "", "# Of a GPU's memory, before it is full.",
        f"USABLE = {usable:.3f}", "# Mean error of memory, on the family of rows where it is larger.",
        f"MEMORY_ERROR = {memory_off().max():.2f}",
        "# Factors of a prediction between which nine of ten rows lie on which nothing was fitted; and with pipelines,",
        "# where the calibration has seen none.",
        f"OUTSIDE, OUTSIDE_PIPE = ({low:.3f}, {high:.3f}), ({least:.3f}, {most:.3f})", "CALIBRATIONS = {",
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


def memory_of_torchtitan() -> str:
    rows, offs = [], []
    for row in fits.torchtitan():
        says = fits.bytes_of([row])[0] / GIB
        offs.append(says / row.gib - 1)
        rows.append([f"Llama 3 {row.group}", str(row.plan), row.model.seq, row.gib, f"{says:.1f}", signed(offs[-1])])
    rows.append(["mean", "", "", "", "", percent(np.array(offs))])
    return table(["model", "plan", "tokens", "measured GiB", "planner", "off"], rows)


def memory_of_the_scan() -> str:
    rows = [row for row in fits.scan() if row.gib]
    off = fits.bytes_of(rows) / GIB / np.array([row.gib for row in rows]) - 1
    return f"{len(rows)} rows, mean error {percent(off)}, median {signed(np.median(off))}"


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
    says = f"On {closer} of {len(rows)} rows the planner is closer than llm-analysis at 0.43, on the others less close."
    return f"{says}\n\n" + table(
        ["hidden", "plan", "measured s", "planner, left out", "llm-analysis 0.43", "llm-analysis 0.5"], shown
    )


def others(speeds: dict) -> str:
    shown, offs = [], []
    for where, model, plan, took, said in other_papers():
        known = speeds["a100-node" if plan.gpus <= 8 else "a100-cluster"]
        offs.append(fits.seconds(work(model, plan, DEVICES["a100"]), known) / took - 1)
        shown.append([where, model.hidden, str(plan), f"{took:.2f}", signed(offs[-1]), said])
    shown.append(["mean", "", "", "", percent(np.array(offs)), ""])
    return table(["from", "hidden", "plan", "measured s", "planner", "others"], shown)


def another_framework(speeds: dict) -> str:
    """LLM Foundry's rows by device and length."""
    found: dict[tuple, list] = {}
    for model, plan, device, took in foundry():
        off = foundry_says(model, plan, device, speeds) / took - 1
        length = "at most 2,048" if model.seq <= 2048 else "4,096 and 8,192" if model.seq <= 8192 else "16,384 and more"
        found.setdefault((device, length), []).append(off)
    rows = [[*key, len(off), percent(off), signed(np.mean(off))] for key, off in sorted(found.items())]
    return table(["device", "tokens per sample", "rows", "mean error", "mean"], rows)


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
    rows, now = [], planner_families.without("attention")  # which is held anyway
    for name, (expected, factor, low, high, unit) in fits.EXPECTED.items():
        values = [f"{getattr(each, name):.3g}" for each in speeds.values()]
        more = [f"{100 * (a - b):+.1f}" for a, b in zip(planner_families.without(name), now, strict=True)]
        rows.append([name, unit, f"{expected:.3g} (x/ {factor:g})", f"{low:.3g} to {high:.3g}", *values, *more])
    return table(["coefficient", "unit", "expected", "allowed range", *speeds, "held: inside", "other papers"], rows)


def main() -> None:
    found = {name: calibration(name) for name in SETS}
    speeds = {name: each[1] for name, each in found.items()}
    write_calibrated(found, fits.usable_share([row for row in fits.scan() if row.plan.pipe <= 8]))
    deep = [row for row in fits.scan() if row.seconds and 1 < row.plan.pipe <= 8]
    done, took = fits.amounts(deep, "h100")
    off = fits.errors(done, took, speeds["h100-cluster"])
    text = (ROOT / "tools" / "data" / "planner_text.md").read_text(encoding="utf-8")
    pieces = {
        "families": planner_families.main(), "halves": random_halves(), "torchtitan": memory_of_torchtitan(),
        "scan": fits_of_the_scan(),
        "peers": peers(), "others": others(speeds),
        "foundry": another_framework(speeds), "memory": memory_of_the_scan(),
        "activations": activations(), "coefficients": coefficients(speeds),
        "foundry_a100": percent(np.array([
            estimate(model, plan, DEVICES[device]).seconds / took - 1
            for model, plan, device, took in foundry() if device == "a100"
        ])),
        "deep": f"{len(deep)} rows: mean {percent(off)}, half of them within {100 * np.median(np.abs(off)):.0f} %",
    }  # fmt: skip
    for name, piece in pieces.items():
        text = text.replace("{" + name + "}", piece)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
