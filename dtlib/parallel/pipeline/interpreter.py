"""Execute schedules: one interpreter for all lists of actions (dtlib/schedule).

    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=cross_entropy)
    rank 0             schedule.step(x)
    between            schedule.step()
    the last rank      schedule.step(target=y, losses=losses)

A rank executes its list in order. For each action it waits for the received tensors, computes, and starts to send the
result without waiting. The receives of its next actions are posted in advance.
"""

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtlib import schedule as schedules
from dtlib.comm.watch import recorder
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline.stage import PipelineStage, RunningStage, samples_of

AHEAD = 2  # receives are posted this many actions in advance


class _Schedule:
    """A schedule of a pipeline, with the contract of torch's classes of the same names.

    Args:
        stage: this rank's PipelineStage, or a list if the rank has several.
        n_microbatches: number of micro-batches of a batch; their sizes may differ by one sample.
        loss_fn: a function of output and target that returns a mean over samples; only the last stage calls it.
        recompute: keep only the inputs of micro-batches and recompute activations in the backward pass.

    Raises:
        DtlibError: if the schedule does not support this number of micro-batches, or if a custom order takes the
            micro-batches of a stage out of order; on every rank concerned.
    """

    def __init__(self, stage, n_microbatches: int, loss_fn=None, recompute: bool = False):
        self.stages = [stage] if isinstance(stage, PipelineStage) else list(stage)
        first = self.stages[0]
        expected = list(range(first.comm.rank, first.num_stages, first.comm.size))
        if sorted(one.stage_index for one in self.stages) != expected:
            raise DtlibError(
                f"{type(self).__name__}: stages {', '.join(map(str, expected))} of {first.num_stages} are on rank "
                f"{first.comm.rank} of {first.comm.size}, but you passed {[one.stage_index for one in self.stages]}."
            )
        self.n_microbatches, self.loss_fn, self.recompute = n_microbatches, loss_fn, recompute
        comm = first.comm
        self.actions = self.order(comm.size, n_microbatches, first.num_stages)[comm.rank]
        performed = {(action.stage, action.microbatch) for action in self.actions if action.kind == "F"}
        if performed != {(stage, microbatch) for stage in expected for microbatch in range(n_microbatches)}:
            raise DtlibError(
                f"{type(self).__name__} runs stages {sorted({stage for stage, _ in performed})} of micro-batches 0 to "
                f"{n_microbatches - 1} on rank {comm.rank}, which has stages {expected}: for several stages per rank, "
                "use ScheduleInterleaved1F1B."
            )
        for stage, kind in {(action.stage, action.kind) for action in self.actions}:
            order = [action.microbatch for action in self.actions if (action.stage, action.kind) == (stage, kind)]
            # Receives are matched in order within a tag, so a stage must process micro-batches in order.
            if order != sorted(order):
                raise DtlibError(
                    f"{type(self).__name__}: stage {stage} does {kind} of micro-batches {order}; messages come in the "
                    "order of micro-batches, so each stage must do all its F in this order, and all its B, I and W."
                )
        # A separate communicator, so that no other message of the program can match these receives.
        self.comm = comm if getattr(comm, "simulated", False) else comm.split(0)
        self._plan = _planned(self.actions)
        # The most micro-batches whose activations this rank kept at the same time in the last step.
        self.peak_in_flight = 0
        self._ended_by: str | None = None  # the type of the error that ended a step

    @staticmethod
    def order(ranks: int, microbatches: int, stages: int) -> list[list[schedules.Action]]:
        """Return the actions of every rank."""
        raise NotImplementedError

    def step(self, *args, target=None, losses: list | None = None, return_outputs: bool = True, **kwargs):
        """Run forward and backward of a whole batch; gradients are those of the mean over its samples.

        The first stage passes the inputs and the last stage the target. Inputs and target are tensors with samples in
        the first dimension, or tuples, lists and dictionaries of such tensors. The tensors are divided into
        micro-batches. Other values are passed to every micro-batch. On the last stage, ``losses`` is filled with the
        mean loss of each micro-batch.

        Returns the output for the whole batch on the last stage, None on other stages. If ``loss_fn`` weights samples
        differently (``ignore_index``, class weights), the mean is a mean of micro-batch means. An output that the next
        stage does not use has a gradient of zeros. Counterpart: ``step`` of torch's schedules, which weight
        micro-batches equally even if their sizes differ.

        Raises:
            DtlibError: under ``no_grad``, without a loss, for inputs that cannot be divided, or if an error ended an
                earlier step.
        """
        name = type(self).__name__
        if not torch.is_grad_enabled():
            raise DtlibError(f"{name}.step() cannot compute gradients under no_grad: call eval(), or leave no_grad.")
        if (target is None or self.loss_fn is None) and any(stage.is_last for stage in self.stages):
            raise DtlibError(f"{name}.step() on the last stage needs a loss: {name}(..., loss_fn).step(target=y).")
        return self._run(self._plan, args, kwargs, target, losses, return_outputs)

    def eval(self, *args, target=None, losses: list | None = None, **kwargs):
        """Run only the forward passes and return the last stage's output."""
        forward = [action for action in self.actions if action.kind == "F"]
        with torch.no_grad():
            return self._run(_planned(forward), args, kwargs, target, losses, True)

    def _run(self, plan, args, kwargs, target, losses, return_outputs):
        if self._ended_by:
            raise DtlibError(
                f"A step of this {type(self).__name__} ended with {self._ended_by}, and its messages may still be in "
                "flight: create a new one on all ranks, after dtlib.reset() if ranks still wait."
            )
        # Divide the inputs before anything is sent: an error here can be fixed while the other ranks still wait.
        inputs = None
        if any(stage.is_first for stage in self.stages):
            if not args and not kwargs:
                raise DtlibError(f"{type(self).__name__}.step() on the first stage needs the inputs: step(x).")
            inputs = self._cut((args, kwargs), "The inputs")
        try:
            return self._interpret(plan, inputs, target, losses, return_outputs)
        except BaseException as error:
            self._ended_by = type(error).__name__ if self.comm.size > 1 else None
            raise

    def _interpret(self, plan, inputs, target, losses, return_outputs):
        running: dict[int, RunningStage] = {}
        local_messages: dict[tuple[int, str, int], list] = {}
        for stage in self.stages:
            targets, weights = self._targets(target) if stage.is_last else (None, [])
            running[stage.stage_index] = RunningStage(
                stage, self.comm, self.n_microbatches, inputs if stage.is_first else None, targets, self.loss_fn,
                weights, self.recompute, return_outputs, local_messages,
            )  # fmt: skip
        self.peak_in_flight = in_flight = 0
        for action, asked_for in plan:
            # Post receives before computing, so that messages arrive during the computation.
            for coming in asked_for:
                running[coming.stage].post(coming.kind, coming.microbatch)
            stage = running[action.stage]
            in_flight -= stage.in_flight
            with recorder.phase(action, self.comm.world_rank):
                if action.kind == "F":
                    stage.forward(action.microbatch)
                if action.kind in "BI":
                    stage.backward(action.microbatch, later=action.kind == "I")
                if action.kind in "BW":
                    stage.weights_of(action.microbatch)
            in_flight += stage.in_flight
            stage.free_finished_sends()
            self.peak_in_flight = max(self.peak_in_flight, in_flight)
        # A step ends when all its sends have been completed, because the buffers are then free to change.
        for one in running.values():
            for handle in one.sending:
                handle.wait()
        last = running.get(self.stages[0].num_stages - 1)
        if last is None:
            return None
        if losses is not None:
            losses[:] = [last.losses[m] for m in sorted(last.losses)]
        return _joined([last.outputs[m] for m in sorted(last.outputs)]) if return_outputs else None

    def _targets(self, target):
        if target is None:
            return None, []
        if self.loss_fn is None:
            raise DtlibError(f"{type(self).__name__} got a target but has no loss_fn: pass loss_fn to the constructor.")
        targets = self._cut(target, "The targets")
        sizes = [samples_of(one) for one in targets]
        return targets, [size / sum(sizes) for size in sizes]

    def _cut(self, value, what: str) -> list:
        """Divide ``value`` into micro-batches, with the same nesting of tuples, lists and dictionaries."""
        leaves, spec = tree_flatten(value, is_leaf=lambda one: isinstance(one, PackedSequence))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and _holds_values(leaf):
                raise DtlibError(
                    f"{what} have a {type(leaf).__name__}, which cannot be cut into micro-batches: pass tensors, in "
                    "tuples, lists or dictionaries."
                )
        sizes = [len(tensor) if tensor.dim() else -1 for tensor in tensors]
        if not sizes or -1 in sizes or len(set(sizes)) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
            raise DtlibError(
                f"{what} have tensors of shapes {shapes}: the first dimension of each is the samples, the same number "
                "in all; pass a single number as a Python number, not as a tensor."
            )
        if sizes[0] < self.n_microbatches:
            raise DtlibError(
                f"A batch of {sizes[0]} samples cannot be cut into {self.n_microbatches} micro-batches: use fewer "
                "micro-batches, or a larger batch."
            )
        count = self.n_microbatches
        if isinstance(value, torch.Tensor):
            return list(value.tensor_split(count))
        cut = [leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves]
        return [tree_unflatten([leaf[m] for leaf in cut], spec) for m in range(count)]


class ScheduleGPipe(_Schedule):
    """Run all forward passes, then all backward passes. Y. Huang et al., "GPipe", NeurIPS 2019."""

    order = staticmethod(lambda ranks, microbatches, stages: schedules.gpipe(ranks, microbatches))


class Schedule1F1B(_Schedule):
    """Alternate one forward and one backward, with at most as many micro-batches in flight as stages.

    D. Narayanan et al., SC 2021.
    """

    order = staticmethod(lambda ranks, microbatches, stages: schedules.one_f_one_b(ranks, microbatches))


class ScheduleInterleaved1F1B(_Schedule):
    """1F1B with several stages per rank, which reduces the bubble. D. Narayanan et al., SC 2021, section 2.2."""

    order = staticmethod(
        lambda ranks, microbatches, stages: schedules.interleaved(ranks, microbatches, stages // ranks)
    )


class ScheduleZeroBubbleH1(_Schedule):
    """1F1B with split backward passes. P. Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.1.

    Only backward passes of our ``Linear`` are split. Other layers, and layers whose parameters have hooks (from data
    parallelism or ZeRO), compute everything in the first half.
    """

    order = staticmethod(lambda ranks, microbatches, stages: schedules.zero_bubble_h1(ranks, microbatches))


def _planned(actions: list) -> list[tuple]:
    """Pair each action with the later actions whose receives are posted just before it.

    Receives are posted AHEAD actions early. A backward pass's receive is posted after its forward pass, which
    determines the shapes.
    """
    places = {action: place for place, action in enumerate(actions)}
    asked_for: list[list] = [[] for _ in actions]
    for place, action in enumerate(actions):
        # Shapes of gradients are known after the forward pass of the same micro-batch.
        known = places[action._replace(kind="F")] + 1 if action.kind in "BI" else 0
        asked_for[max(place - AHEAD, known, 0)].append(action)
    return list(zip(actions, asked_for, strict=True))


def _holds_values(leaf) -> bool:
    """Return whether a leaf may hold samples that would not be divided: an array, or an object with tensors."""
    inside = tree_leaves(dict(getattr(leaf, "__dict__", {})))
    return isinstance(leaf, PackedSequence) or any(getattr(one, "ndim", 0) for one in (leaf, *inside))


def _joined(outputs: list):
    """Join the outputs of micro-batches into one for the whole batch. Values that are not tensors become a list."""
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return _joined_leaf(outputs)
    leaves, specs = zip(*map(tree_flatten, outputs), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise DtlibError(f"The last stage returned {specs[0]}, and sometimes not: return the same each time.")
    return tree_unflatten([_joined_leaf(list(same)) for same in zip(*leaves, strict=True)], specs[0])


def _joined_leaf(outputs: list):
    if not isinstance(outputs[0], torch.Tensor):
        return outputs
    return torch.cat(outputs) if outputs[0].dim() else torch.stack(outputs)
