"""A stage of a model on a rank, and what one micro-batch does there."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from dtlib.comm import AnyCommunicator, Communicator, as_communicator
from dtlib.comm.waiting import Operation
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline.edges import Activations, Gradients, NextStage, Place, runs_of, send_gradients
from dtlib.parallel.pipeline.linear import weights_at_once, weights_by_autograd, weights_later


class PipelineStage:
    """Stage ``stage_index`` of a model of ``num_stages``; stage s is on rank s modulo the ranks of ``comm``.

    Args:
        submodule: this stage's layers. It takes what the stage before gives: a tensor or several.
        stage_index, num_stages: which stage of how many.
        comm: a dtlib communicator or an mpi4py communicator.
        device: where it computes; by default where its parameters are.

    Counterpart: ``torch.distributed.pipelining.PipelineStage``.

    Raises:
        DtlibError: for a stage that is not this rank's, ranks that stages cannot be dealt out to evenly, and torch's
            ``DistributedDataParallel`` within it.
    """

    def __init__(self, submodule: nn.Module, stage_index: int, num_stages: int, comm: AnyCommunicator,
                 device: torch.device | str | None = None):  # fmt: skip
        self.submodule, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.comm = as_communicator(comm)
        if not 0 <= stage_index < num_stages:
            raise DtlibError(f"PipelineStage(stage_index={stage_index}): there are stages 0 to {num_stages - 1}.")
        if num_stages % self.comm.size:
            raise DtlibError(
                f"PipelineStage(num_stages={num_stages}): {self.comm.size} ranks cannot have as many stages each: use "
                f"a multiple of {self.comm.size} stages, or a communicator of fewer ranks, by comm.split()."
            )
        if stage_index % self.comm.size != self.comm.rank:
            raise DtlibError(
                f"Stage {stage_index} of {num_stages} is on rank {stage_index % self.comm.size} of {self.comm.size}, "
                f"and this is rank {self.comm.rank}."
            )
        if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in submodule.modules()):
            raise DtlibError(
                "torch's DistributedDataParallel would not average the gradients of a stage, as it decides that in the "
                "forward pass: wrap it in dtlib.parallel.data.DataParallel."
            )
        averaged = getattr(getattr(submodule, "comm", None), "members", ()) if hasattr(submodule, "no_sync") else ()
        if len(both := sorted({*averaged} & {*self.comm.members})) > 1:
            raise DtlibError(
                f"{type(submodule).__name__} averages over ranks {both}, which are ranks of the pipeline and have "
                "other stages: wrap the stage over the data axis alone, as by mesh['data']."
            )
        parameter = next(submodule.parameters(), None)
        self.device = torch.device(device or (parameter.device if parameter is not None else "cpu"))

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


class RunningStage:
    """A stage during one step of a schedule.

    Args:
        stage: a PipelineStage.
        comm: a communicator that carries nothing else.
        inputs: for the first stage: positional and keyword arguments of each micro-batch.
        targets, loss_fn, weights: for the last: of each micro-batch the target and its weight in the mean.
        recompute: keep inputs only and compute activations anew for the backward pass; not for the last micro-batch,
            whose backward pass follows at once (Y. Huang et al., "GPipe", NeurIPS 2019, section 2.3).
        keep_outputs: of the last stage.
        handed: what stages on this rank give each other, by the receiving stage, kind and micro-batch.

    A tensor that has been sent is freed as soon as its message has left, one that was received after its backward pass:
    nothing here refers to either any longer.
    """

    def __init__(self, stage: PipelineStage, comm: Communicator, microbatches: int, inputs: list[tuple] | None,
                 targets: list | None, loss_fn: Callable | None, weights: list[float], recompute: bool,
                 keep_outputs: bool, handed: dict[tuple[int, str, int], list]):  # fmt: skip
        self.stage, self.comm, self.microbatches = stage, comm, microbatches
        self.inputs, self.targets, self.loss_fn, self.weights = inputs, targets, loss_fn, weights
        self.recompute, self.keep_outputs, self.handed = recompute, keep_outputs, handed
        self.sending: list[Operation] = []
        self.losses: dict[int, torch.Tensor] = {}  # by micro-batch, as all that follows
        self.outputs: dict[int, object] = {}
        self._received: dict[int, list] = {}  # until its backward pass
        self._sent: dict[int, list[Place | None]] = {}
        self._given: list[tuple[torch.Tensor, int]] = []  # last to the next stage, and how often it had been changed
        self._halves: dict[int, list[Callable]] = {}  # second halves of backward passes
        self._left = microbatches  # backward passes
        self._no_sync = getattr(stage.submodule, "no_sync", nullcontext)
        index = stage.stage_index
        self._activations = self._gradients = self._next = None
        alone = comm.size == 1  # otherwise the stages before and behind are on other ranks
        if not stage.is_first and not alone:
            self._activations = Activations(comm, (index - 1) % comm.size, index, stage.device)
        if not stage.is_last and not alone:
            self._next = NextStage(comm, (index + 1) % comm.size, index + 1)
            self._gradients = Gradients(comm, (index + 1) % comm.size, index + 1)
        if self._activations:
            self._alike = self._activations.alike
        else:
            self._alike = runs_of([samples_of(one) for one in inputs]) if inputs else [0] * microbatches

    def post(self, kind: str, microbatch: int) -> None:
        """Ask for what an action will need, as far as one can before it."""
        if kind == "F" and self._activations:
            self._activations.post(microbatch)
        elif kind in "BI" and self._gradients and microbatch in self._sent:
            self._gradients.post(microbatch, self._sent[microbatch])

    def forward(self, microbatch: int) -> None:
        stage = self.stage
        if self.inputs is not None:
            received, keywords = self.inputs[microbatch]
        else:
            received, keywords = self._take_activations(microbatch), {}
        module = stage.submodule
        with self._no_sync():
            if self.recompute and microbatch < self.microbatches - 1 and torch.is_grad_enabled():
                output = _recomputed(module, received, keywords)
            else:
                own = _entry if not stage.is_first else torch.clone if self.recompute else _own
                taken, named = [_each(own, one) for one in received], _each(own, keywords) if keywords else {}
                output = module(*taken, **named)
        if any(tensor._version != version for tensor, version in self._given):
            raise DtlibError(
                f"Stage {stage.stage_index} changed in place what it had given for the micro-batch before, which may "
                "still be under way: give a copy, tensor.clone()."
            )
        sent = list(output) if isinstance(output, (tuple, list)) else [output]
        if stage.is_last:
            if self.keep_outputs:
                self.outputs[microbatch] = _each(torch.Tensor.detach, output)
            if self.loss_fn is not None and self.targets is not None:
                loss = self.loss_fn(output, self.targets[microbatch])
                if loss.numel() != 1:
                    raise DtlibError(
                        f"loss_fn gave shape {tuple(loss.shape)}: it gives one number, the mean of samples."
                    )
                self.losses[microbatch] = loss.detach().clone()  # torch's losses may have the memory of a batch
                sent = [loss]
        else:
            _check_sent(sent, output, stage.stage_index)
            self._give_activations(microbatch, sent)
        if torch.is_grad_enabled():
            self._received[microbatch], self._sent[microbatch] = received, [Place.of(tensor) for tensor in sent]

    def backward(self, microbatch: int, later: bool = False) -> None:
        """``later``: the gradients of weights wait for ``weights_of``, as far as they can."""
        received, sent = self._received.pop(microbatch), self._sent.pop(microbatch)
        self._left -= 1
        # Gradients of a module that averages them over ranks are averaged once, with the last micro-batch.
        with self._no_sync() if self._left else nullcontext():
            gradients = self._take_gradients(microbatch, sent)
            with weights_later() if later else weights_at_once() as halves:
                # A neighbour on this rank has no gradient for what it did not use.
                pairs = [(p.edge, g) for p, g in zip(sent, gradients, strict=True) if p and g is not None]
                if pairs:
                    torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs])
        if halves:
            self._halves[microbatch] = halves
        if not self.stage.is_first:
            self._give_gradients(microbatch, received)

    def weights_of(self, microbatch: int) -> None:
        """The second half of a backward pass."""
        for half in self._halves.pop(microbatch, ()):
            half()

    def free_what_has_left(self) -> None:
        """Drop the handles of finished sends, and with them the tensors."""
        for handle in [handle for handle in self.sending if handle.done()]:
            handle.wait()  # raises what went wrong
            self.sending.remove(handle)

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are kept."""
        return len(self._received) + len(self._halves)

    # Neighbours on this rank are given tensors; others are sent messages.

    def _take_activations(self, microbatch):
        if self._activations:
            return self._activations.take(microbatch)
        return self.handed.pop((self.stage.stage_index, "F", microbatch))

    def _give_activations(self, microbatch, tensors):
        if self._next:
            self._given = [(_without_memory(tensor), tensor._version) for tensor in tensors]
            self.sending += self._next.send(tensors, self._alike[microbatch])
        else:  # copies, as messages are: either stage may change its own in place
            copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
            self.handed[self.stage.stage_index + 1, "F", microbatch] = copies

    def _take_gradients(self, microbatch, sent):
        if self.stage.is_last:
            return [place and place.full(self.weights[microbatch]) for place in sent]
        if self._gradients:
            return self._gradients.take(microbatch, sent)
        return self.handed.pop((self.stage.stage_index, "B", microbatch))

    def _give_gradients(self, microbatch, received):
        if self._activations:
            self.sending += send_gradients(self.comm, self._activations.source, self.stage.stage_index, received)
        else:
            self.handed[self.stage.stage_index - 1, "B", microbatch] = [tensor.grad for tensor in received]


def _entry(received):
    """What has arrived, in the same memory, but neither a leaf of the graph nor a view of one: a layer may change it in
    place."""
    return torch.ops.aten._unsafe_view(received, received.shape)


def _without_memory(tensor):
    """A tensor without elements whose version counts the changes in place of this one."""
    counts = tensor.detach()
    counts.data = tensor.new_empty(0)
    return counts


def _own(tensor):
    """A micro-batch's rows of an input, counted by itself where layers change it in place."""
    return tensor.clone() if tensor.requires_grad else tensor.data


def _recomputed(module, received, keywords):
    """``module``'s output, whose activations the backward pass computes anew: from the same inputs and buffers, which
    may have changed in the meantime, and without moving statistics twice."""
    before = [
        (owner, name, buffer, buffer._version, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    anew = _Anew([(owner, name, old) for owner, name, _, _, old in before])

    def run(*received, **keywords):
        received, keywords = tree_map_only(torch.Tensor, torch.clone, (received, keywords))
        return module(*received, **keywords)

    output = checkpoint(run, *received, use_reentrant=False, context_fn=lambda: (nullcontext(), anew), **keywords)
    anew.buffers = [
        (owner, name, old)
        for owner, name, buffer, version, old in before
        # torch's normalisations move their statistics without counting a version.
        if owner._buffers.get(name) is not buffer or buffer._version != version or isinstance(owner, _NormBase)
    ]
    return output


class _Anew:
    """A context in which modules have copies of former buffers; may be entered several times."""

    def __init__(self, buffers):
        self.buffers, self._undo = buffers, ExitStack()

    def __enter__(self):
        self._undo = ExitStack()
        self._undo.enter_context(weights_by_autograd())
        for owner, name, old in self.buffers:
            self._undo.callback(owner._buffers.__setitem__, name, owner._buffers[name])
            owner._buffers[name] = old.clone()

    def __exit__(self, *error):
        self._undo.close()


def _check_sent(sent, output, index: int) -> None:
    if not sent or any(not isinstance(tensor, torch.Tensor) for tensor in sent):
        kinds = ", ".join(type(one).__name__ for one in sent) if isinstance(output, (tuple, list)) else ""
        raise DtlibError(
            f"Stage {index} gave a {type(output).__name__}{f' of {kinds}' if kinds else ''} to the next one: a stage "
            "gives a tensor, or a tuple of tensors."
        )


def samples_of(microbatch: object) -> int:
    """Its samples; what shapes of activations may depend on, as all micro-batches are cut from the same tensors."""
    leaves = [microbatch] if isinstance(microbatch, torch.Tensor) else tree_leaves(microbatch)
    return next(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _each(function, value):
    """``function`` of every tensor in tuples, lists and dictionaries."""
    return function(value) if isinstance(value, torch.Tensor) else tree_map_only(torch.Tensor, function, value)
