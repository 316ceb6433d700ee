"""Fits the planner's coefficients on published rows, and says how far off it is on rows that it was not fitted on.

Coefficients are physical: each is positive, has a unit and a range that it may not leave, and a value that is expected
before any row is seen, with how far it may be from that (a factor, one standard deviation). So that few rows do not
carry it away, a fit is a compromise: squared errors of log seconds over 6 % of each row, and squared distances from
what was expected. A row that is off by far counts little (arctan)."""

import csv
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from dtlib.planner.memory import memory
from dtlib.planner.mesh import Plan
from dtlib.planner.model import DEVICES, GIB, MODELS, Model, PlanError
from dtlib.planner.time import Speeds, Work, parts, work

DATA = Path(__file__).parents[1] / "data"
SIGMA = 0.06
# name: expected, factor of one standard deviation, lowest, highest, unit
EXPECTED = {
    "matrix": (0.70, 1.1, 0.3, 0.95, "of peak"),
    # Held at what is expected: where sequences are short, a fit drives it anywhere, and long sequences pay for it.
    "attention": (0.35, 1.0001, 0.349, 0.351, "of peak"),
    "bandwidth": (0.75, 1.28, 0.3, 1.0, "of peak"),
    "launch": (9e-4, 2.0, 1e-5, 5e-3, "s"),
    "call": (1e-4, 2.7, 1e-6, 5e-3, "s"),
    "hop": (8e-6, 2.0, 1e-6, 1e-4, "s"),
    "hop_outside": (3e-5, 2.0, 2e-6, 3e-4, "s"),
    "inside": (1.5e11, 1.5, 2e10, 4.5e11, "B/s"),
    "outside": (8e10, 1.8, 5e9, 4e11, "B/s"),
    "boundary": (2e-4, 2.7, 1e-6, 1e-2, "s"),
    "hidden": (0.5, 1.65, 0.01, 0.99, "share"),
    "step": (0.01, 2.7, 1e-3, 0.5, "s"),
    "straggle": (0.01, 2.7, 1e-4, 0.2, "share"),
}
NAMES = tuple(EXPECTED)
USABLE = (0.80, 0.90)  # of a GPU: the rest is CUDA's, NCCL's, and lost between blocks of the allocator
NOTHING_HIDDEN = {
    **EXPECTED,
    "hidden": (1e-9, 1.01, 1e-10, 1e-8, "share"),
}  # Megatron-LM of 2021 reduced after the pass
SCAN_MODELS = {  # inferred from the scan's own tokens a second and MFU: 6 P + 12 L h s operations a token
    "1B": Model(16, 2048, 32, 131072, 4096, 8192, gated=True, tied=True, name="1B"),
    "8B": Model(32, 4096, 32, 131072, 4096, 14336, gated=True, tied=False, name="8B"),
}


@dataclass(frozen=True)
class Row:
    """A published measurement: seconds of a step, or None where it crashed; GiB where they were printed."""

    model: Model
    plan: Plan
    seconds: float | None
    group: str  # what is left out together: a model's size
    gib: float | None = None


def seconds(done: Work, speeds: Speeds) -> float:
    """Of a step; amounts may also be arrays, where many rows are fitted at once."""
    return sum(parts(done, speeds).values())


def published(name: str) -> list[dict]:
    with (DATA / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def vtrain(which: str) -> list[Row]:
    """``single`` (without recomputation) or ``multi`` (with it, as Megatron-LM's own tables for these models)."""
    rows = []
    for row in published(f"vtrain_ground_truth_{which}"):
        number = {name: int(float(value)) for name, value in row.items() if name != "source"}
        model = Model(
            number["# layers"], number["hidden size"], number["attention heads"], 51200, number["sequence length"]
        )
        plan = Plan(
            data=number["data parallelism"], tensor=number["tensor parallelism"], pipe=number["pipeline parallelism"],
            batch=number["global batch"], micro_batch=number["micro batch"], sequence_parallel=False, flash=False,
            recompute="none" if which == "single" else "full",
        )  # fmt: skip
        rows.append(Row(model, plan, float(row["iteration time (ms)"]) / 1e3, str(model.hidden)))
    return rows


def scan() -> list[Row]:
    """Ultra-Scale's: those that ran, and those that crashed or had no memory."""
    rows = []
    for row in published("ultrascale_scan_1B_8B"):
        model, nodes = SCAN_MODELS[row["model"]], int(row["nodes"])
        plan = Plan(
            data=int(row["dp"]), tensor=int(row["tp"]), pipe=int(row["pp"]), zero=int(row["zero"]),
            batch=int(row["gbs"]), micro_batch=int(row["mbs"]), scheme="mixed_adam_two_gradients",
        )  # fmt: skip
        measured = row["status"] == "measured"
        took = int(row["gbs"]) * model.seq / (float(row["tok_s_gpu"]) * 8 * nodes) if measured else None
        rows.append(Row(model, plan, took, row["model"], float(row["memory_GB_as_printed"]) if measured else None))
    return rows


def without_pipeline(rows: list[Row]) -> list[Row]:
    """Those with a time, of one stage, on at most 16 nodes."""
    return [row for row in rows if row.seconds and row.plan.pipe == 1 and row.plan.gpus <= 128]


def torchtitan() -> list[Row]:
    """Llama 3 on H100: memory as its own counter gives it, GiB reserved by the allocator."""
    rows = []
    for row in published("torchtitan_llama3_h100"):
        axes = {"FSDP": 1, "TP": 1, "PP": 1, "CP": 1}
        axes |= {name: int(ways) for name, ways in re.findall(r"(FSDP|TP|PP|CP) ?(\d+)", row["parallelism"])}
        model = replace(MODELS[f"llama3-{row['model'].lower()}"], seq=int(row["seq_len"]))
        micro = int(row["local_batch"]) // axes["PP"]  # its default: as many micro-batches as stages
        plan = Plan(
            data=axes["FSDP"], tensor=axes["TP"], pipe=axes["PP"], context=axes["CP"], zero=3, micro_batch=micro,
            batch=int(row["local_batch"]) * axes["FSDP"], scheme="adam",
            recompute={"selective": "operators", "full": "full", "none": "none"}[row["act_ckpt"]],
        )  # fmt: skip
        tokens = plan.batch * model.seq / plan.gpus
        rows.append(Row(model, plan, tokens / float(row["tps_per_gpu"]), row["model"], float(row["memory_GiB"])))
    return rows


def amounts(rows: list[Row], device: str) -> tuple[Work, np.ndarray]:
    """The work of all rows as arrays, and their seconds."""
    done = [work(row.model, row.plan, DEVICES[device]) for row in rows]
    arrays = {field.name: np.array([getattr(each, field.name) for each in done], float) for field in fields(Work)}
    return Work(**arrays), np.array([row.seconds for row in rows])


def of_rows(done: Work, which) -> Work:
    return Work(**{field.name: getattr(done, field.name)[which] for field in fields(Work)})


def fit(done: Work, took: np.ndarray, expected: dict = EXPECTED) -> Speeds:
    first, factor, low, high = (np.array([expected[name][i] for name in NAMES]) for i in range(4))

    def made(logs):
        return Speeds(**dict(zip(NAMES, map(float, np.exp(logs)), strict=True)))

    def residuals(logs):
        off = np.log(seconds(done, made(logs)) / took) / SIGMA
        return np.concatenate([3 * np.arctan(off / 3), (logs - np.log(first)) / np.log(factor)])

    best = least_squares(
        residuals, np.log(first), bounds=(np.log(low), np.log(high)), x_scale=np.log(factor), max_nfev=80
    )
    return made(best.x)


def errors(done: Work, took: np.ndarray, speeds: Speeds) -> np.ndarray:
    """Predicted over measured, less 1."""
    return seconds(done, speeds) / took - 1


def band_of(off: np.ndarray) -> tuple[float, float]:
    """Between which factors of the prediction nine of ten measurements lie."""
    low, high = np.quantile(1 / (1 + off), (0.05, 0.95))
    return float(low), float(high)


def folds(size: int, parts: int = 5, seed: int = 0) -> list[np.ndarray]:
    return np.array_split(np.random.default_rng(seed).permutation(size), parts)


def held_out(done: Work, took: np.ndarray, expected: dict = EXPECTED) -> np.ndarray:
    """The error of each row, by a fit without its fifth of the rows."""
    off = np.empty(len(took))
    for fold in folds(len(took)):
        rest = np.setdiff1d(np.arange(len(took)), fold)
        off[fold] = errors(of_rows(done, fold), took[fold], fit(of_rows(done, rest), took[rest], expected))
    return off


def halves(rows: list[Row], device: str, expected: dict = EXPECTED, seeds: int = 20) -> list[dict]:
    """Fitted on a random half, tried on the other: mean error, that of the largest model, and what the band covered,
    which is drawn from rows of the first half that were left out there."""
    done, took = amounts(rows, device)
    largest = np.array([row.model.hidden == max(other.model.hidden for other in rows) for row in rows])
    found = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(rows))
        first, second = order[: len(rows) // 2], order[len(rows) // 2 :]
        known, seen = of_rows(done, first), took[first]
        off = errors(of_rows(done, second), took[second], fit(known, seen, expected))
        low, high = band_of(held_out(known, seen, expected))
        covered = (low <= 1 / (1 + off)) & (1 / (1 + off) <= high)
        found.append({
            "error": np.abs(off).mean(), "largest": np.abs(off[largest[second]]).mean(), "covered": covered.mean(),
        })  # fmt: skip
    return found


def left_out(rows: list[Row], device: str, expected: dict = EXPECTED) -> dict[str, np.ndarray]:
    """Errors of each group of rows, fitted on the others."""
    done, took = amounts(rows, device)
    groups, found = np.array([row.group for row in rows]), {}
    for group in dict.fromkeys(groups):
        out = groups == group
        found[str(group)] = errors(of_rows(done, out), took[out], fit(of_rows(done, ~out), took[~out], expected))
    return found


def bytes_of(rows: list[Row]) -> np.ndarray:
    """Predicted bytes, without any fit; infinite where the plan cannot be."""

    def of(row):
        try:
            return memory(row.model, row.plan).total
        except PlanError:
            return np.inf

    return np.array([of(row) for row in rows])


def usable_share(rows: list[Row], capacity: float = 80 * GIB) -> float:
    """The share of a GPU below which 99 % of what ran was predicted, within ``USABLE``."""
    ran = bytes_of([row for row in rows if row.seconds])
    return float(np.clip(np.quantile(ran, 0.99) / capacity, *USABLE))


def judged(rows: list[Row], usable: float, capacity: float = 80 * GIB) -> dict[str, float]:
    """How well "fits" tells what ran from what crashed."""
    says, ran = bytes_of(rows) <= usable * capacity, np.array([row.seconds is not None for row in rows])
    right = (says & ran).sum()
    return {"F1": 2 * right / (says.sum() + ran.sum()), "recall": right / ran.sum(), "precision": right / says.sum(),
            "always": 2 * ran.sum() / (len(ran) + ran.sum()), "rows": len(rows)}  # fmt: skip
