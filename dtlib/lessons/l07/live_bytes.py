"""Live bytes of each rank over time, beside the measured schedule. Stages sleep (EMULATED), bytes are counted."""

import time
from typing import NamedTuple

import torch
from torch import nn

import dtlib
from dtlib.comm.waiting import progress_thread
from dtlib.lab.colours import rank_colour
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table
from dtlib.lessons.l07.explorer import ORDERS, SECONDS, EmulatedStage
from dtlib.lessons.l07.figures import draw_schedule, measured
from dtlib.measure.live import Live
from dtlib.measure.trace import Timeline
from dtlib.parallel.pipeline import PipelineStage
from dtlib.schedule import Simulation

ROWS, WIDTH = 128, 64  # shape of a micro-batch in float32: 32 kB


class Found(NamedTuple):
    """A measured schedule, and for each rank the changes of its live bytes as (time, bytes)."""

    simulation: Simulation
    curves: list[list[tuple[float, int]]]

    @property
    def peaks(self) -> list[int]:
        """Peak live bytes of each rank."""
        return [max(count for _, count in curve) for curve in self.curves]


def run(name: str, ranks: int, microbatches: int) -> tuple:
    """Run one step on the first ``ranks`` ranks; return this rank's trace, and times and live bytes.

    All ranks call this function. Memory from before the step does not count: parameters, gradients and the batch.
    """
    world = dtlib.init()
    comm = world.comm.split(0 if world.rank < ranks else None)
    curve: list[tuple[float, int]] = []
    if comm is not None:
        stage = EmulatedStage(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), 0, 0)
        last = comm.rank == ranks - 1
        running = PipelineStage(stage, comm.rank, ranks, comm)
        schedule = ORDERS[name].runs([running], microbatches, nn.functional.mse_loss)
        x = torch.ones(ROWS * microbatches, WIDTH)
        arguments = [x] if comm.rank == 0 else []
        schedule.step(*arguments, target=x if last else None)  # the first step of a process takes longer
        stage.forward_seconds, stage.backward_seconds = SECONDS, 2 * SECONDS
    world.comm.barrier()
    with dtlib.trace() as trace, progress_thread(), Live() as live:
        live.changed = lambda now: curve.append((time.monotonic(), now))
        if comm is not None:
            schedule.step(*arguments, target=x if last else None, return_outputs=False)
    return trace, curve


def measure(name: str, ranks: int, microbatches: int) -> Found:
    """Call ``run`` on the engines of this notebook; times are in forward passes."""
    from dtlib.lab.engines.engine_set import current

    answers = current().view.apply_async(run, name, ranks, microbatches)
    while not answers.done():
        answers.wait(0.1)  # short, so that Stop can interrupt it
    traces, curves = zip(*answers.get()[:ranks], strict=True)
    timeline = Timeline(list(traces))
    begin = min(event.start for trace in traces for event in trace.events if event.action is not None)
    return Found(
        measured(timeline, SECONDS), [[((at - begin) / SECONDS, count) for at, count in curve] for curve in curves]
    )


@shown
def picture(panels: dict):
    """Draw for each entry of ``panels`` (title -> ``Found``) the schedule, and live bytes below it."""
    heights = [1, 1.5] * len(panels)
    figure, grid = subplots(len(heights), height=3.2 * len(panels) + 0.6, sharex=True, height_ratios=heights)
    longest = max(found.simulation.makespan for found in panels.values())
    most = max(max(found.peaks) for found in panels.values()) / 1024
    for (above, below), (title, found) in zip(grid.reshape(-1, 2), panels.items(), strict=True):
        draw_schedule(above, found.simulation, longest)
        above.set_title(title, loc="left")
        for rank, curve in enumerate(found.curves):
            times, counts = zip((0.0, 0), *curve, strict=True)
            style = {"color": rank_colour(rank), "linestyle": ("-", "--", "-.", ":")[rank % 4], "lw": 1.8}
            below.step(times, [count / 1024 for count in counts], where="post", label=f"rank {rank}", **style)
        below.set(ylabel="live kB", ylim=(0, 1.05 * most))
    grid[-1].set(xlabel="time in forward passes", xlim=(0, 1.01 * longest))
    grid[1].legend(frameon=False, ncols=2)
    alt = f"Work of the ranks over time, and below it the live bytes on each rank, for {', '.join(panels)}."
    return figure, alt, peaks(panels)


def peaks(panels: dict) -> Table:
    """Return a table of the peak live bytes of each rank."""
    ranks = max(len(found.curves) for found in panels.values())
    rows = [(title, *found.peaks) for title, found in panels.items()]
    return Table(rows, ("peak of live bytes", *(f"rank {rank}" for rank in range(ranks))))
