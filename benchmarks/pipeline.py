"""Pipelines against torch.distributed.pipelining on gloo, tensor parallelism against torch's DTensor; with
``--ranks 4`` sleeping stages against the simulation.

Our stages are of dtlib's ``Linear``, which adds to gradients while it multiplies; torch's are of ``nn.Linear``. The
bound is what no schedule without interleaving can beat: the slowest of our stages' passes alone, and the bubble. The
bare loop is GPipe on mpi4py without anything else, on stages like ours (bare_pipeline.py).
"""

import os
import time
from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks import bare_pipeline, tensor_parallel
from benchmarks.compare import in_turns, repeated, row, seconds_of
from benchmarks.peers import torch_group
from dtlib import schedule as schedules
from dtlib.parallel.pipeline import (
    Linear,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubbleH1,
    defer_weight_gradients,
    plain,
)
from dtlib.parallel.pipeline.linear import defer, weights_at_once

RANKS = 2
SLEEP = 0.02  # seconds of a forward pass, of a gradient of inputs, of a gradient of weights
MICROBATCHES = 8
SIZES = {  # width, samples of a micro-batch, and steps that are timed together
    "width 256, micro-batches of 8": (256, 8, 20),
    "width 1024, micro-batches of 32": (1024, 32, 1),
}
LAYERS = 4  # linear layers a stage
HOPS = 24
KINDS = {  # with the stages that a rank has
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
    "ZB-H1": (ScheduleZeroBubbleH1, 1),
}


def rows(world, repeats: int):
    if world.size == 2:
        yield from _against_torch(world, repeats)
        yield from tensor_parallel.rows(world, repeats)
    else:
        yield from _against_simulation(world, repeats)


def _against_torch(world, repeats):
    from torch.distributed import pipelining

    mse = nn.functional.mse_loss
    for size, (width, samples, times) in SIZES.items():
        pairs = {
            "GPipe": (ScheduleGPipe, pipelining.ScheduleGPipe, "gpipe"),
            "1F1B": (Schedule1F1B, pipelining.Schedule1F1B, "1f1b"),
        }
        x, y = torch.randn(2, MICROBATCHES * samples, width)
        arguments, target = ([x], None) if world.rank == 0 else ([], y)
        for name, (ours, theirs, plainly) in pairs.items():
            layers = Linear, nn.Linear, Linear, Linear, Linear
            first, second, third, fourth, fifth = (_stage(width, layer) for layer in layers)
            device, group = torch.device("cpu"), torch_group(world)
            ours = ours(PipelineStage(first, world.rank, 2, world.comm), MICROBATCHES, mse)
            theirs = theirs(pipelining.PipelineStage(second, world.rank, 2, device, group=group), MICROBATCHES, mse)
            steps = {
                "ours": repeated(partial(ours.step, *arguments, target=target), times),
                "theirs": repeated(partial(theirs.step, *arguments, target=target), times),
                "plain": repeated(partial(_plain_step, world, third, x, y, plainly), times),
                "passes": repeated(partial(_passes, world, fourth, x, y), times),
            }
            if name == "GPipe":
                steps["bare"] = repeated(partial(_bare_step, world.comm.mpi.Dup(), fifth, x, y), times)
            seconds = in_turns(world.comm, steps, repeats)
            bound = seconds["passes"] * (MICROBATCHES + world.size - 1) / MICROBATCHES
            for who, said in (("ours", ""), ("plain", "plain, "), ("theirs", "torch, ")):
                if who != "theirs":
                    yield row(f"{said}{name}, {size}", "torch pipelining, gloo", seconds[who], seconds["theirs"])
                    if name == "GPipe":
                        yield row(f"{said}{name}, {size}", "a bare loop on mpi4py", seconds[who], seconds["bare"])
                yield row(f"{said}{name}, {size}", "the bound", seconds[who], bound)


def _bare_step(mpi, stage, x, y):
    ends = (x, None) if mpi.Get_rank() == 0 else (None, y)
    like = x[: len(x) // MICROBATCHES]
    with weights_at_once():
        bare_pipeline.gpipe(mpi, stage, *ends, like, MICROBATCHES, nn.functional.mse_loss)


def _plain_step(world, stage, x, y, schedule):
    ends = (x, None) if world.rank == 0 else (None, y)
    with weights_at_once():
        plain.step(world.comm, stage, *ends, nn.functional.mse_loss, MICROBATCHES, schedule)


def _passes(world, stage, x, y):
    """What this rank computes in a step, without messages: all ranks do it at once, and the slowest counts."""
    is_first = world.rank == 0
    for inputs, targets in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        output = stage(inputs if is_first else inputs.detach().requires_grad_())
        last = output if is_first else nn.functional.mse_loss(output, targets) / MICROBATCHES
        with weights_at_once():
            last.backward(targets if is_first else None)


def _stage(width: int, linear) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (linear(width, width), nn.Tanh())])


def takes(seconds: float) -> None:
    """Leave the core to others for so long, and not the tenths of a millisecond longer that a sleep takes."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 0.0005))
    while time.perf_counter() < end:
        os.sched_yield()


class Sleeping(torch.autograd.Function):
    """A stage that takes its time and leaves the core alone; its messages are 4 kB."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        takes(seconds)
        return x + weight

    @staticmethod
    def backward(ctx, gradient):
        takes(ctx.seconds)
        defer(lambda: takes(ctx.seconds))
        return gradient, None, None


class SleepingStage(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(())), seconds

    def forward(self, x):
        return Sleeping.apply(x, self.weight, self.seconds)


def _seconds_of_a_message(world) -> float:
    """How much longer than its sleeps a chain takes in which each rank waits for 4 kB, sleeps, and sends them on."""
    comm, x = world.comm, torch.zeros(1, 1024)

    def chain():
        for hop in range(HOPS):
            if hop % comm.size == comm.rank:
                if hop:
                    comm.recv(x, (comm.rank - 1) % comm.size)
                takes(SLEEP)
                if hop < HOPS - 1:
                    comm.send(x, (comm.rank + 1) % comm.size)

    return (seconds_of(comm, chain) - HOPS * SLEEP) / HOPS


def _seconds_of_actions(seconds: float, repeats: int) -> dict:
    """What a sleeping stage takes on its own: its sleeps, and what autograd adds to them on a core that has slept."""
    stage, moments = SleepingStage(seconds), []
    for _ in range(repeats):
        moments.append([time.perf_counter()])
        output = stage(torch.zeros(1, 1024, requires_grad=True))
        moments[-1].append(time.perf_counter())
        with defer_weight_gradients() as halves:
            output.backward(torch.ones_like(output))
        moments[-1].append(time.perf_counter())
        halves[0]()
        moments[-1].append(time.perf_counter())
    forward, of_input, of_weight = np.median(np.diff(moments), axis=0).tolist()
    return {
        "forward": forward, "backward": of_input + of_weight,
        "input_gradient": of_input, "weight_gradient": of_weight,
    }  # fmt: skip


def _against_simulation(world, repeats):
    """All ranks begin together; the step is over when the last one has finished. Simulated twice: with the times that
    stages are told to sleep, and with those that a stage takes on its own and a message from rank to rank."""
    message = float(np.median([_seconds_of_a_message(world) for _ in range(repeats)]))
    idle = {}
    for name, (kind, chunks) in KINDS.items():
        schedule, step = _sleeping(world, kind, chunks)
        step()
        seconds = SLEEP / chunks
        told = {"forward": seconds, "backward": 2 * seconds, "input_gradient": seconds, "weight_gradient": seconds}
        alone = _seconds_of_actions(seconds, repeats)
        measured = np.array([seconds_of(world.comm, step) for _ in range(repeats)])
        idle[name] = measured - MICROBATCHES * chunks * (alone["forward"] + alone["backward"])
        order = kind.order(world.size, MICROBATCHES, world.size * chunks)
        for peer, times in {
            "simulation": told,
            f"simulation with measured times, {1000 * message:.1f} ms a message": alone | {"message": message},
        }.items():
            simulated = schedules.simulate(order, **times)
            yield row(f"makespan of {name}, {world.size} ranks", peer, measured, simulated.makespan)
        peaks = world.comm.all_gather_object(schedule.peak_in_flight)
        yield row(
            f"activations in flight of {name}, most of any rank", "simulation",
            np.array([float(max(peaks))]), float(max(simulated.peak_activations)),
        )  # fmt: skip
    yield row("idle time of ZB-H1", "1F1B", idle["ZB-H1"], idle["1F1B"])


def _sleeping(world, kind, chunks):
    """A schedule whose stages sleep, and its step."""
    stages = world.size * chunks
    own = [
        PipelineStage(SleepingStage(SLEEP / chunks), index, stages, world.comm)
        for index in range(world.rank, stages, world.size)
    ]
    schedule = kind(own, MICROBATCHES, lambda output, target: output.mean())
    x = torch.zeros(MICROBATCHES, 1024)  # a micro-batch has 4 kB
    arguments, target = ([x] if world.rank == 0 else []), x if own[-1].is_last else None
    return schedule, partial(schedule.step, *arguments, target=target)
