"""Pipelines against torch.distributed.pipelining on gloo; with ``--ranks 4`` sleeping stages against the simulation."""

import time
from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks.compare import in_turns, row, seconds_of
from benchmarks.peers import torch_group
from dtlib import schedule as schedules
from dtlib.parallel.pipeline import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubbleH1,
)
from dtlib.parallel.pipeline.linear import defer

RANKS = 2
SLEEP = 0.02  # seconds of a forward pass, of a gradient of inputs, of a gradient of weights
MICROBATCHES = 8
SIZES = {"width 256, micro-batches of 8": (256, 8), "width 1024, micro-batches of 32": (1024, 32)}
LAYERS = 4  # linear layers a stage


def rows(world, repeats: int):
    if world.size == 2:
        yield from _against_torch(world, repeats)
    else:
        yield from _against_simulation(world, repeats)


def _against_torch(world, repeats):
    from torch.distributed import pipelining

    mse = nn.functional.mse_loss
    for size, (width, samples) in SIZES.items():
        pairs = {
            "GPipe": (ScheduleGPipe, pipelining.ScheduleGPipe),
            "1F1B": (Schedule1F1B, pipelining.Schedule1F1B),
        }  # fmt: skip
        x, y = torch.randn(2, MICROBATCHES * samples, width)
        arguments, target = ([x], None) if world.rank == 0 else ([], y)
        for name, (ours, theirs) in pairs.items():
            first, second = (_stage(width) for _ in range(2))
            device, group = torch.device("cpu"), torch_group(world)
            ours = ours(PipelineStage(first, world.rank, 2, world.comm), MICROBATCHES, mse)
            theirs = theirs(pipelining.PipelineStage(second, world.rank, 2, device, group=group), MICROBATCHES, mse)
            steps = {
                "ours": partial(ours.step, *arguments, target=target),
                "theirs": partial(theirs.step, *arguments, target=target),
            }
            seconds = in_turns(world.comm, steps, repeats)
            yield row(f"{name}, {size}", "torch pipelining, gloo", seconds["ours"], seconds["theirs"])


def _stage(width: int) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.Tanh())])


class Sleeping(torch.autograd.Function):
    """A stage that takes its time and leaves the core alone; its messages are 4 kB."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        defer(lambda: time.sleep(ctx.seconds))
        return gradient, None, None


class SleepingStage(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(())), seconds

    def forward(self, x):
        return Sleeping.apply(x, self.weight, self.seconds)


def _against_simulation(world, repeats):
    """All ranks begin together; the step is over when the last one has finished."""
    kinds = {
        "GPipe": (ScheduleGPipe, 1), "1F1B": (Schedule1F1B, 1), "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
        "ZB-H1": (ScheduleZeroBubbleH1, 1),
    }  # fmt: skip
    for name, (kind, chunks) in kinds.items():
        stages, seconds = world.size * chunks, SLEEP / chunks
        own = [
            PipelineStage(SleepingStage(seconds), index, stages, world.comm)
            for index in range(world.rank, stages, world.size)
        ]
        schedule = kind(own, MICROBATCHES, lambda output, target: output.mean())
        x = torch.zeros(MICROBATCHES, 1024)  # a micro-batch has 4 kB
        arguments, target = ([x] if world.rank == 0 else []), x if own[-1].is_last else None
        step = partial(schedule.step, *arguments, target=target)
        times = {"forward": seconds, "backward": 2 * seconds, "input_gradient": seconds, "weight_gradient": seconds}
        simulated = schedules.simulate(kind.order(world.size, MICROBATCHES, stages), **times)
        step()
        measured = np.array([seconds_of(world.comm, step) for _ in range(repeats)])
        yield row(f"makespan of {name}, {world.size} ranks", "simulation", measured, simulated.makespan)
        peaks = world.comm.all_gather_object(schedule.peak_in_flight)
        yield row(
            f"activations in flight of {name}, most of any rank", "simulation",
            np.array([float(max(peaks))]), float(max(simulated.peak_activations)),
        )  # fmt: skip
