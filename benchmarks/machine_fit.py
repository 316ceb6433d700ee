"""Measure how fast this machine's ranks are: ``python -m benchmarks.machine_fit``.

Small models run on four ranks for some seconds. A few coefficients are fitted to the times of their steps:

    seconds = operations / rate + bytes / bandwidth + messages x latency + micro-batches x host + step

Each run has one width and one mesh of data and pipe axes. The amounts are those of the busiest rank, from
planner/exact.py. The error is measured on runs that were left out of the fit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dtlib.errors import DtlibError
from dtlib.files import private_temp_folder
from dtlib.planner import Plan
from dtlib.planner.exact import of_rank
from dtlib.world.launch import forked_ranks, run_ranks, settings_of_mpi

if TYPE_CHECKING:
    from dtlib.training.engine import Engine

RANKS = 4
DEPTH, STEPS = 8, 5  # linear layers of equal width, so that stages are equal; steps per run
WIDTHS = (64, 256)
MESHES = (
    Plan(data=4, batch=32, micro_batch=8), Plan(data=4, batch=128, micro_batch=32),
    Plan(data=4, zero=1, batch=32, micro_batch=8), Plan(data=4, zero=2, batch=64, micro_batch=8),
    Plan(data=4, zero=3, batch=32, micro_batch=8), Plan(data=4, zero=3, batch=64, micro_batch=8),
    Plan(data=2, pipe=2, batch=32, micro_batch=4), Plan(data=2, pipe=2, zero=1, batch=64, micro_batch=8),
    Plan(pipe=4, batch=32, micro_batch=4), Plan(pipe=4, batch=64, micro_batch=8, schedule="gpipe"),
)  # fmt: skip
COEFFICIENTS = ("s an operation", "s a byte", "s a message", "s a micro-batch", "s a step")


def layer_sizes(width: int) -> list[list[int]]:
    """Return the number of elements of weight and bias, for each linear layer."""
    return [[width * width, width]] * DEPTH


def stages_of(width: int, pipe: int) -> tuple[list, list[int]]:
    """Return the layers of each of ``pipe`` equal stages, and the elements per sample at each boundary."""
    each = DEPTH // pipe
    units = layer_sizes(width)
    return [units[each * stage : each * (stage + 1)] for stage in range(pipe)], [width] * (pipe - 1)


def amounts(width: int, plan: Plan) -> list[float]:
    """Return operations, bytes, messages, micro-batches and 1, for one step of the busiest rank."""
    stages, boundaries = stages_of(width, plan.pipe)
    sent = max(sum(of_rank(stages, boundaries, plan, rank)["sent"].values()) for rank in range(plan.gpus))
    m = plan.micro_batches
    turns = m + plan.pipe - 1
    # A parameter costs 6 operations per sample: 2 forward and 4 backward. A pipeline step takes m + p - 1 turns.
    operations = max(6 * sum(map(sum, stage)) for stage in stages) * plan.micro_batch * turns
    # Passes around the data ring per step, by ZeRO stage. Stages 0 and 1: a reduce-scatter and an all-gather. Stage 2:
    # a reduce-scatter per micro-batch, and an all-gather. Stage 3: two all-gathers and a reduce-scatter, per layer and
    # micro-batch.
    rings = {0: 2, 1: 2, 2: m + 1, 3: 3 * m * len(stages[0])}[plan.zero] if plan.data > 1 else 0
    return [operations, sent, rings * (plan.data - 1) + (plan.pipe > 1) * 2 * turns, turns, 1.0]


def measure() -> tuple[list[dict], dict[str, float], dict]:
    """Return rows, coefficients, and the error on rows that were left out of the fit.

    Rows have ``plan, width, seconds, left_out``. The error has the mean relative ``error`` and the 5 % and 95 %
    quantiles ``low`` and ``high`` of measured over predicted time.

    Raises:
        DtlibError: if a rank fails.
    """
    with private_temp_folder("plan") as folder, forked_ranks():
        path = folder / "rows.json"
        if status := run_ranks(["-m", "benchmarks.machine_fit", str(path)], RANKS):
            raise DtlibError(
                f"The ranks ended with status {status}: run `dtlib doctor` to find the cause.{settings_of_mpi()}"
            )
        seconds = json.loads(path.read_text())
    runs = [(width, plan) for width in WIDTHS for plan in MESHES]
    return fitted([amounts(*run) for run in runs], seconds, runs)


def fitted(table: list, seconds: list[float], runs: list) -> tuple[list[dict], dict[str, float], dict]:
    """Fit non-negative coefficients with the least relative error; leave out each mesh once to measure the error."""
    import numpy as np
    from scipy.optimize import nnls

    # Each row is divided by its measured time, so that the target is 1 and the residual is the relative error.
    per_second = np.array(table) / np.array(seconds)[:, None]

    def fit(rows):
        return nnls(per_second[rows], np.ones(len(rows)))[0]

    everything = np.arange(len(runs))
    # Predicted over measured time of each run, predicted without the runs on the same mesh.
    ratio = np.empty(len(runs))
    for plan in dict.fromkeys(plan for _, plan in runs):
        out = np.array([other == plan for _, other in runs])
        ratio[out] = per_second[out] @ fit(everything[~out])
    low, high = np.quantile(1 / np.maximum(ratio, 1e-9), (0.05, 0.95))
    rows = [
        {"plan": str(plan), "width": width, "seconds": took, "left_out": took * float(off)}
        for (width, plan), took, off in zip(runs, seconds, ratio, strict=True)
    ]
    says = {"error": float(np.abs(ratio - 1).mean()), "low": float(low), "high": float(high)}
    return rows, dict(zip(COEFFICIENTS, map(float, fit(everything)), strict=True)), says


def show() -> int:
    """Measure, and print both tables and the error; return exit status 0."""
    from tabulate import tabulate

    rows, coefficients, says = measure()
    shown = [
        (row["plan"], row["width"], f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['left_out']:.2f}",
         f"{100 * (row['left_out'] / row['seconds'] - 1):+.0f} %") for row in rows
    ]  # fmt: skip
    print(tabulate(shown, ("mesh on four ranks", "width", "ms a step", "left out", "off"), disable_numparse=True), "\n")
    print(tabulate([(name, f"{value:.3g}") for name, value in coefficients.items()], tablefmt="plain"), "\n")
    print(
        f"Held-out error: {100 * says['error']:.0f} % of {len(rows)} runs, each predicted from the other meshes; "
        f"nine of ten took {says['low']:.2g} to {says['high']:.2g} times what was predicted."
    )
    return 0


def engine_of(width: int, plan: Plan) -> tuple[Engine, Callable[[], object]]:
    """Return an engine on this rank, as `dtlib train` makes it, and a function that runs one step."""
    import torch
    from torch import nn

    import dtlib
    from dtlib.parallel.pipeline import LayerSpec, PipelineModule
    from dtlib.planner.configs import for_dtlib

    config = for_dtlib(None, plan)
    if plan.zero < 3:
        config["zero_optimization"]["reduce_bucket_size"] = 10**8  # one bucket for all parameters
    layers = [LayerSpec(nn.Linear, width, width) for _ in range(DEPTH)]
    if plan.pipe > 1:
        model = PipelineModule(layers, plan.pipe, nn.functional.cross_entropy, base_seed=0)
    else:
        model = nn.Sequential(*(layer.build() for layer in layers))
    engine, *_ = dtlib.initialize(model=model, config=config)
    batch = torch.zeros(plan.micro_batch, width), torch.zeros(plan.micro_batch, dtype=torch.long)
    loss = {} if plan.pipe > 1 else {"loss_fn": nn.functional.cross_entropy}
    return engine, lambda: engine.train_batch(iter([batch] * plan.micro_batches), **loss)


def _on_this_rank(path: str) -> None:
    from dtlib.world import init

    comm, found = init().comm, []
    for width in WIDTHS:
        for plan in MESHES:
            _, step = engine_of(width, plan)
            took = []
            for _ in range(STEPS):
                comm.barrier()
                began = time.perf_counter()
                step()
                comm.barrier()
                took.append(time.perf_counter() - began)
            # The median without the first two steps, which allocate buffers and optimizer states.
            found.append(sorted(took[2:])[(STEPS - 2) // 2])
    if comm.rank == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(_on_this_rank(sys.argv[1]) if sys.argv[1:] else show())
