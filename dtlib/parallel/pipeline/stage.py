"""A stage of a model on a rank, and its work for one micro-batch."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from dtlib.comm import AnyCommunicator, Communicator, as_communicator
from dtlib.comm.waiting import Operation
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline.edges import Activations, Gradients, NextStage, Place, runs_of, send_gradients
from dtlib.parallel.pipeline.linear import defer_weight_gradients, second_halves_to, weights_at_once


class PipelineStage:
    """Stage ``stage_index`` of a model of ``num_stages``; stage s is on rank s modulo the size of ``comm``.

    Args:
        submodule: this stage's layers. It takes the outputs of the previous stage: one tensor or several.
        stage_index, num_stages: the index of this stage and the number of stages.
        comm: a dtlib communicator or an mpi4py communicator.
        device: the device for computing. Default: the device of its parameters.

    torch's ``clip_grad_norm_`` would use the norm of this stage only. ``gradient_clipping`` of ``dtlib.initialize``
    uses the norm of all stages. Batch normalisation uses the statistics of each micro-batch.

    Counterpart: ``torch.distributed.pipelining.PipelineStage``.

    Raises:
        DtlibError: if the stage belongs to another rank, if ``num_stages`` is not a multiple of the ranks, or if the
            module contains torch's ``DistributedDataParallel``.
    """

    def __init__(self, submodule: nn.Module, stage_index: int, num_stages: int, comm: AnyCommunicator,
                 device: torch.device | str | None = None):  # fmt: skip
        self.submodule, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        # The first stage takes the inputs, and the last one computes the loss.
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.comm = as_communicator(comm)
        if num_stages % self.comm.size:
            raise DtlibError(
                f"PipelineStage(num_stages={num_stages}): stages cannot be divided equally among {self.comm.size} "
                f"ranks: use a multiple of {self.comm.size}, or a communicator of fewer ranks, with comm.split()."
            )
        if stage_index not in (here := range(self.comm.rank, num_stages, self.comm.size)):
            raise DtlibError(
                f"PipelineStage(stage_index={stage_index}): rank {self.comm.rank} of {self.comm.size} has stages "
                f"{[*here]} of {num_stages}."
            )
        if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in submodule.modules()):
            raise DtlibError(
                "torch's DistributedDataParallel would not average the gradients of a stage, because it decides this "
                "in the forward pass: wrap the stage in dtlib.parallel.data.DataParallel."
            )
        averaged = getattr(getattr(submodule, "comm", None), "members", ()) if hasattr(submodule, "no_sync") else ()
        if len(both := sorted({*averaged} & {*self.comm.members})) > 1:
            raise DtlibError(
                f"{type(submodule).__name__} averages over ranks {both}, which have other stages of the pipeline: wrap "
                "the stage only over the data axis, with mesh['data']."
            )
        parameter = next(submodule.parameters(), None)
        self.device = torch.device(device or (parameter.device if parameter is not None else "cpu"))


class RunningStage:
    """A stage during one step of a schedule.

    Args:
        stage: a PipelineStage.
        comm: a communicator that is used for nothing else.
        inputs: for the first stage, the positional and keyword arguments of each micro-batch.
        targets, loss_fn, weights: for the last stage, the target of each micro-batch and its weight in the mean.
        recompute: keep only inputs and recompute activations in the backward pass. The last micro-batch is not
            recomputed: its backward pass follows immediately on the last stage of 1F1B (but not of GPipe, which
            starts with micro-batch 0).
        keep_outputs: keep the outputs of the last stage.
        local_messages: tensors passed between stages of this rank, by receiving stage, kind and micro-batch.

    No reference is kept to a sent tensor after its message has left, or to a received tensor after its backward pass.
    So their memory is freed at these times.
    """

    def __init__(self, stage: PipelineStage, comm: Communicator, microbatches: int, inputs: list[tuple] | None,
                 targets: list | None, loss_fn: Callable | None, weights: list[float], recompute: bool,
                 keep_outputs: bool, local_messages: dict[tuple[int, str, int], list]):  # fmt: skip
        self.stage, self.comm, self.microbatches = stage, comm, microbatches
        self.inputs, self.targets, self.loss_fn, self.weights = inputs, targets, loss_fn, weights
        self.recompute, self.keep_outputs, self.local_messages = recompute, keep_outputs, local_messages
        self.sending: list[Operation] = []
        self.losses: dict[int, torch.Tensor] = {}  # keyed by micro-batch, like the dictionaries below
        self.outputs: dict[int, object] = {}
        self._received: dict[int, list] = {}  # kept until the backward pass
        self._sent: dict[int, list[Place | None]] = {}
        self._sent_tensors: list[tuple[torch.Tensor, int]] = []  # the tensors sent last, and their versions then
        self._halves: dict[int, list[Callable]] = {}  # second halves of split backward passes
        self._left = microbatches  # backward passes that remain
        self._no_sync = getattr(stage.submodule, "no_sync", nullcontext)
        index = stage.stage_index
        self._activations = self._gradients = self._next = None
        alone = comm.size == 1  # otherwise the neighbouring stages are on other ranks
        if not stage.is_first and not alone:
            self._activations = Activations(comm, (index - 1) % comm.size, index, stage.device)
        if not stage.is_last and not alone:
            self._next = NextStage(comm, (index + 1) % comm.size, index + 1)
            self._gradients = Gradients(comm, (index + 1) % comm.size, index + 1)
        if self._activations:
            # Shapes of activations depend on the shapes of the inputs, so the first stage counts inputs of equal shape.
            # Later stages receive these counts.
            self._same_shapes = self._activations.same_shapes
        else:
            self._same_shapes = runs_of([samples_of(one) for one in inputs]) if inputs else [0] * microbatches

    def post(self, kind: str, microbatch: int) -> None:
        """Post the receives of an action, as far as its shapes are known."""
        if kind == "F" and self._activations:
            self._activations.post(microbatch)
        elif kind in "BI" and self._gradients and microbatch in self._sent:
            self._gradients.post(microbatch, self._sent[microbatch])

    def forward(self, microbatch: int) -> None:
        """Run the forward pass of a micro-batch and send its output to the next stage."""
        stage = self.stage
        if self.inputs is not None:
            received, keywords = self.inputs[microbatch]
        else:
            received, keywords = self._receive_activations(microbatch), {}
        module = stage.submodule
        with self._no_sync():
            if self.recompute and microbatch < self.microbatches - 1 and torch.is_grad_enabled():
                output = _recomputed(module, received, keywords)
            else:
                own = _entry if not stage.is_first else torch.clone if self.recompute else _own
                taken, named = [_each(own, one) for one in received], _each(own, keywords) if keywords else {}
                output = module(*taken, **named)
        # Messages are sent from the tensor's own memory, so an in-place change could corrupt a message in flight.
        if any(tensor._version != version for tensor, version in self._sent_tensors):
            raise DtlibError(
                f"Stage {stage.stage_index} changed in place its output of the previous micro-batch, which may still "
                "be in flight: return a copy, tensor.clone()."
            )
        sent = list(output) if isinstance(output, (tuple, list)) else [output]
        if stage.is_last:
            if self.keep_outputs:
                self.outputs[microbatch] = _each(torch.Tensor.detach, output)
            if self.loss_fn is not None and self.targets is not None:
                loss = self.loss_fn(output, self.targets[microbatch])
                if loss.numel() != 1:
                    raise DtlibError(
                        f"loss_fn returned shape {tuple(loss.shape)}: return one number, the mean over samples."
                    )
                # Clone the loss, because its storage may be as large as a batch for some of torch's losses.
                self.losses[microbatch] = loss.detach().clone()
                sent = [loss]
        else:
            _check_sent(sent, output, stage.stage_index)
            self._send_activations(microbatch, sent)
        if torch.is_grad_enabled():
            self._received[microbatch], self._sent[microbatch] = received, [Place.of(tensor) for tensor in sent]

    def backward(self, microbatch: int, later: bool = False) -> None:
        """Run the backward pass of a micro-batch and send the gradients of its inputs to the previous stage.

        With ``later``, gradients of weights wait for ``weights_of`` if their layers can split the backward pass.
        """
        received, sent = self._received.pop(microbatch), self._sent.pop(microbatch)
        self._left -= 1
        # A data-parallel module averages accumulated gradients once, in the backward pass of the last micro-batch.
        with self._no_sync() if self._left else nullcontext():
            gradients = self._receive_gradients(microbatch, sent)
            with defer_weight_gradients() if later else weights_at_once() as halves:
                # A neighbouring stage on this rank returns None for outputs that it did not use.
                pairs = [(p.edge, g) for p, g in zip(sent, gradients, strict=True) if p and g is not None]
                if pairs:
                    torch.autograd.backward([edge for edge, _ in pairs], [g for _, g in pairs])
        if halves:
            self._halves[microbatch] = halves
        if not self.stage.is_first:
            self._send_gradients(microbatch, received)

    def weights_of(self, microbatch: int) -> None:
        """Run the second half of a split backward pass."""
        for half in self._halves.pop(microbatch, ()):
            half()

    def free_finished_sends(self) -> None:
        """Drop the handles of finished sends, and with them their tensors."""
        for handle in [handle for handle in self.sending if handle.done()]:
            handle.wait()  # raises the error of a failed send
            self.sending.remove(handle)

    @property
    def in_flight(self) -> int:
        """The number of micro-batches whose activations are kept."""
        return len(self._received) + len(self._halves)

    # Neighbouring stages exchange tensors directly on the same rank, and messages between ranks.

    def _receive_activations(self, microbatch):
        if self._activations:
            return self._activations.take(microbatch)
        return self.local_messages.pop((self.stage.stage_index, "F", microbatch))

    def _send_activations(self, microbatch, tensors):
        if self._next:
            self._sent_tensors = [(_without_memory(tensor), tensor._version) for tensor in tensors]
            self.sending += self._next.send(tensors, self._same_shapes[microbatch])
        else:  # copy, because either stage may change its own tensor in place
            copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
            self.local_messages[self.stage.stage_index + 1, "F", microbatch] = copies

    def _receive_gradients(self, microbatch, sent):
        if self.stage.is_last:
            return [place and place.empty().fill_(self.weights[microbatch]) for place in sent]
        if self._gradients:
            return self._gradients.take(microbatch, sent)
        return self.local_messages.pop((self.stage.stage_index, "B", microbatch))

    def _send_gradients(self, microbatch, received):
        if self._activations:
            self.sending += send_gradients(self.comm, self._activations.source, self.stage.stage_index, received)
        else:
            self.local_messages[self.stage.stage_index - 1, "B", microbatch] = [tensor.grad for tensor in received]


def _entry(received):
    """Return the received tensor in the same memory, neither a leaf nor a view, so a layer may change it in place."""
    return torch.ops.aten._unsafe_view(received, received.shape)


def _without_memory(tensor):
    """Return an empty tensor that shares the version counter of ``tensor``, to detect in-place changes."""
    counts = tensor.detach()
    counts.data = tensor.new_empty(0)
    return counts


def _own(tensor):
    """Return an input's rows with a separate version counter, because layers may change them in place."""
    return tensor.clone() if tensor.requires_grad else tensor.data


def _recomputed(module, received, keywords):
    """Return the output of ``module`` and recompute its activations in the backward pass.

    The recomputation uses the same inputs and buffers, which may have changed since, and does not update statistics
    again.
    """
    # All names of all buffers: this or a later micro-batch may change each.
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
    passes = []

    def run(*received, **keywords):
        passes.append(1)
        received, keywords = tree_map_only(torch.Tensor, torch.clone, (received, keywords))
        if len(passes) == 1:
            return module(*received, **keywords)
        with second_halves_to(None):  # a recomputation by other code may not want gradients of weights
            copies = {name: old.clone() for name, old in before.items()}
            return functional_call(module, copies, received, keywords, tie_weights=False)

    return checkpoint(run, *received, use_reentrant=False, **keywords)


def _check_sent(sent, output, index: int) -> None:
    if not sent or any(not isinstance(tensor, torch.Tensor) for tensor in sent):
        kinds = ", ".join(type(one).__name__ for one in sent) if isinstance(output, (tuple, list)) else ""
        raise DtlibError(
            f"Stage {index} returned a {type(output).__name__}{f' of {kinds}' if kinds else ''}: return a tensor, or a "
            "tuple of tensors."
        )


def samples_of(microbatch: object) -> int:
    """Return the number of samples of a micro-batch, on which the shapes of its activations may depend."""
    leaves = [microbatch] if isinstance(microbatch, torch.Tensor) else tree_leaves(microbatch)
    return next(len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _each(function, value):
    """Apply ``function`` to every tensor in tuples, lists and dictionaries."""
    return function(value) if isinstance(value, torch.Tensor) else tree_map_only(torch.Tensor, function, value)
