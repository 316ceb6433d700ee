"""Schedules that run: one interpreter for all, over lists of actions (dtlib/schedule).

    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=cross_entropy)
    rank 0             schedule.step(x)
    between            schedule.step()
    the last rank      schedule.step(target=y, losses=losses)

A rank works off its list in order. For each action it takes what has come, computes, and sends on without waiting for
it to arrive; what its next actions need is asked for beforehand.
"""

import torch

from dtlib import schedule as schedules
from dtlib.comm import recorder
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline.stage import PipelineStage, RunningStage

AHEAD = 2  # actions whose messages are asked for beforehand, beside the one at hand


class _Schedule:
    """A schedule of a pipeline, with the contract of torch's classes of the same names.

    Args:
        stage: this rank's PipelineStage; a list of them where a rank has several.
        n_microbatches: into how many parts a batch is cut; they may differ by a sample.
        loss_fn: a function of output and target that gives a mean over samples; only the last stage calls it.
        recompute: keep the inputs of micro-batches only, and compute activations anew for the backward pass.

    Raises:
        DtlibError: for a number of micro-batches that the schedule cannot take, and for an order of one's own in which
            a stage does not take micro-batches in their order; on every rank that has one.
    """

    def __init__(self, stage, n_microbatches: int, loss_fn=None, recompute: bool = False):
        self.stages = [stage] if isinstance(stage, PipelineStage) else list(stage)
        first = self.stages[0]
        expected = list(range(first.comm.rank, first.num_stages, first.comm.size))
        if sorted(one.stage_index for one in self.stages) != expected:
            raise DtlibError(
                f"{type(self).__name__}: stages {', '.join(map(str, expected))} of {first.num_stages} are on rank "
                f"{first.comm.rank} of {first.comm.size}, and it got {[one.stage_index for one in self.stages]}."
            )
        self.n_microbatches, self.loss_fn, self.recompute = n_microbatches, loss_fn, recompute
        comm = first.comm
        self.actions = self.order(comm.size, n_microbatches, first.num_stages)[comm.rank]
        for stage, kind in {(action.stage, action.kind) for action in self.actions}:
            turns = [action.microbatch for action in self.actions if (action.stage, action.kind) == (stage, kind)]
            if turns != sorted(turns):
                raise DtlibError(
                    f"{type(self).__name__}: stage {stage} does {kind} of micro-batches {turns}; messages come in the "
                    "order of micro-batches, so each stage does all its F in this order, and all its B, I and W."
                )
        # Messages of other parts of a program must not meet these.
        self.comm = comm if getattr(comm, "simulated", False) else comm.split(0)
        self.peak_in_flight = 0  # micro-batches whose activations this rank kept at a time, in the last step

    @staticmethod
    def order(ranks: int, microbatches: int, stages: int) -> list[list[schedules.Action]]:
        """The actions of every rank."""
        raise NotImplementedError

    def step(self, *args, target=None, losses: list | None = None, return_outputs: bool = True, **kwargs):
        """Forward and backward of a whole batch, in micro-batches; gradients are those of the mean over its samples.

        The first stage gets the inputs, with samples in their first dimension, and the last one the target; ``losses``
        is filled there with the mean of each micro-batch. Returns the last stage's output for the whole batch, None
        elsewhere. Counterpart: ``step`` of torch's schedules, which count micro-batches alike where their sizes differ.
        """
        return self._run(self.actions, args, kwargs, target, losses, return_outputs)

    def eval(self, *args, target=None, losses: list | None = None, **kwargs):
        """The forward passes alone; returns the last stage's output."""
        forward = [action for action in self.actions if action.kind == "F"]
        with torch.no_grad():
            return self._run(forward, args, kwargs, target, losses, True)

    def _run(self, actions, args, kwargs, target, losses, return_outputs):
        running = {}
        for stage in self.stages:
            inputs = self._microbatches(args, kwargs) if stage.is_first else None
            targets, weights = self._targets(target) if stage.is_last else (None, None)
            running[stage.stage_index] = RunningStage(
                stage, self.comm, self.n_microbatches, inputs, targets, self.loss_fn, weights, self.recompute, running
            )
        self.peak_in_flight = 0
        for place, action in enumerate(actions):
            for coming in actions[place : place + 1 + AHEAD]:
                running[coming.stage].post(coming.kind, coming.microbatch)
            self._perform(running[action.stage], action)
            self.peak_in_flight = max(self.peak_in_flight, sum(one.in_flight for one in running.values()))
        for one in running.values():
            for handle in one.sending:
                handle.wait()
        last = running.get(self.stages[0].num_stages - 1)
        if last is None:
            return None
        if losses is not None:
            losses[:] = [last.losses[m] for m in sorted(last.losses)]
        return _joined([last.outputs[m] for m in sorted(last.outputs)]) if return_outputs else None

    def _perform(self, stage: RunningStage, action) -> None:
        with recorder.phase(action, self.comm.world_rank):
            match action.kind:
                case "F":
                    stage.forward(action.microbatch)
                case "B":
                    stage.backward(action.microbatch)
                    stage.weights_of(action.microbatch)
                case "I":
                    stage.backward(action.microbatch, later=True)
                case "W":
                    stage.weights_of(action.microbatch)

    def _microbatches(self, args, kwargs) -> list:
        if not args and not kwargs:
            raise DtlibError(f"{type(self).__name__}.step() on the first stage needs the inputs: step(x).")
        parts = [self._cut(arg) for arg in args]
        named = {name: self._cut(value) for name, value in kwargs.items()}
        return [
            ([part[m] for part in parts], {name: part[m] for name, part in named.items()})
            for m in range(self.n_microbatches)
        ]

    def _targets(self, target):
        if target is None:
            return None, None
        targets = self._cut(target)
        samples = sum(len(part) for part in targets)
        return targets, [len(part) / samples for part in targets]

    def _cut(self, value) -> list:
        if not isinstance(value, torch.Tensor):
            return [value] * self.n_microbatches
        if len(value) < self.n_microbatches:
            raise DtlibError(
                f"A batch of {len(value)} samples cannot be cut into {self.n_microbatches} micro-batches: take fewer, "
                "or a larger batch."
            )
        return list(value.tensor_split(self.n_microbatches))


class ScheduleGPipe(_Schedule):
    """All forward passes, then all backward passes. Y. Huang et al., "GPipe", NeurIPS 2019."""

    @staticmethod
    def order(ranks, microbatches, stages):
        return schedules.gpipe(ranks, microbatches)


class Schedule1F1B(_Schedule):
    """One forward, one backward: no more micro-batches in flight than stages. D. Narayanan et al., SC 2021."""

    @staticmethod
    def order(ranks, microbatches, stages):
        return schedules.one_f_one_b(ranks, microbatches)


class ScheduleInterleaved1F1B(_Schedule):
    """1F1B with several stages a rank, which make the bubble smaller. D. Narayanan et al., SC 2021, section 2.2."""

    @staticmethod
    def order(ranks, microbatches, stages):
        return schedules.interleaved(ranks, microbatches, stages // ranks)


class ScheduleZeroBubbleH1(_Schedule):
    """1F1B whose backward passes come in two halves. P. Qi et al., "Zero bubble pipeline parallelism", ICLR 2024,
    section 2.1.

    Backward passes of our ``Linear`` are split; those of other layers, and of layers whose parameters have hooks (of
    data parallelism or ZeRO), are done in the first half.
    """

    @staticmethod
    def order(ranks, microbatches, stages):
        return schedules.zero_bubble_h1(ranks, microbatches)


def _joined(outputs: list):
    """The output for the whole batch from those of its micro-batches."""
    first = outputs[0]
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(list(same)) for same in zip(*outputs, strict=True))
    if not isinstance(first, torch.Tensor):
        return outputs
    return torch.cat(outputs) if first.dim() else torch.stack(outputs)
