"""A part of a model on a rank, and what one micro-batch does there."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtlib.comm import as_communicator
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline.edges import Activations, Gradients, NextStage, kinds_of, runs_of, send_gradients
from dtlib.parallel.pipeline.linear import weights_at_once, weights_later


class PipelineStage:
    """Stage ``stage_index`` of a model of ``num_stages``; stage s is on rank s modulo the ranks of ``comm``.

    Args:
        submodule: this stage's part of the model. It takes what the stage before gives: a tensor or several.
        stage_index, num_stages: which part of how many.
        comm: a dtlib communicator or an mpi4py communicator.
        device: where it computes; by default where its parameters are.

    Counterpart: ``torch.distributed.pipelining.PipelineStage``.

    Raises:
        DtlibError: for a stage that is not this rank's.
    """

    def __init__(self, submodule: nn.Module, stage_index: int, num_stages: int, comm, device=None):
        self.submodule, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.comm = as_communicator(comm)
        if not 0 <= stage_index < num_stages:
            raise DtlibError(f"PipelineStage(stage_index={stage_index}): there are stages 0 to {num_stages - 1}.")
        if stage_index % self.comm.size != self.comm.rank:
            raise DtlibError(
                f"Stage {stage_index} of {num_stages} is on rank {stage_index % self.comm.size} of {self.comm.size}, "
                f"and this is rank {self.comm.rank}."
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
        targets, loss_fn, weights: for the last: of each micro-batch the target and its share in the mean.
        recompute: keep inputs only and compute activations anew for the backward pass; not for the last micro-batch,
            whose backward pass follows at once (Y. Huang et al., "GPipe", NeurIPS 2019, section 2.3).
        neighbours: running stages on this rank, by stage: they are given to directly.
    """

    def __init__(self, stage, comm, microbatches, inputs, targets, loss_fn, weights, recompute, neighbours):
        self.stage, self.comm, self.microbatches = stage, comm, microbatches
        self.inputs, self.targets, self.loss_fn, self.weights = inputs, targets, loss_fn, weights
        self.recompute, self.neighbours = recompute, neighbours
        self.sending = []  # handles
        self.handed = {}  # tensors for neighbours on this rank, by micro-batch and direction
        self.losses, self.outputs = {}, {}
        self._received, self._sent = {}, {}  # by micro-batch, until its backward pass
        self._halves = {}  # second halves of backward passes, by micro-batch
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
            self._alike = runs_of([_kinds_of_inputs(*one) for one in inputs]) if inputs else [0] * microbatches

    def post(self, kind: str, microbatch: int) -> None:
        """Ask for what an action will need, as far as one can before it."""
        if kind == "F" and self._activations:
            self._activations.post(microbatch)
        elif kind in "BI" and self._gradients and microbatch in self._sent:
            self._gradients.post(microbatch, self._sent[microbatch])

    def forward(self, microbatch: int) -> None:
        stage = self.stage
        if stage.is_first:
            received, keywords = self.inputs[microbatch]
        else:
            received, keywords = self._take_activations(microbatch), {}
        module = stage.submodule
        with self._no_sync():
            if self.recompute and microbatch < self.microbatches - 1 and torch.is_grad_enabled():
                output = checkpoint(module, *received, use_reentrant=False, **keywords)
            else:
                output = module(*received, **keywords)
        sent = list(output) if isinstance(output, (tuple, list)) else [output]
        if stage.is_last:
            self.outputs[microbatch] = output
            if self.loss_fn is not None and self.targets is not None:
                loss = self.loss_fn(output, self.targets[microbatch])
                if loss.numel() != 1:
                    raise DtlibError(
                        f"loss_fn gave shape {tuple(loss.shape)}: it gives one number, the mean of samples."
                    )
                self.losses[microbatch] = loss.detach()
                sent = [loss]
            if torch.is_grad_enabled():
                self.outputs[microbatch] = _detached(output)
        else:
            self._give_activations(microbatch, sent)
        if torch.is_grad_enabled():
            self._received[microbatch], self._sent[microbatch] = received, sent

    def backward(self, microbatch: int, later: bool = False) -> None:
        """``later``: the gradients of weights wait for ``weights_of``, as far as they can."""
        received, sent = self._received.pop(microbatch), self._sent[microbatch]
        self._left -= 1
        # Gradients of a module that averages them over ranks are averaged once, with the last micro-batch.
        with self._no_sync() if self._left else nullcontext():
            gradients = self._take_gradients(microbatch, sent)
            with weights_later() if later else weights_at_once() as halves:
                pairs = [(t, g) for t, g in zip(sent, gradients, strict=True) if t.requires_grad]
                if pairs:
                    torch.autograd.backward(*zip(*pairs, strict=True))
        if halves:
            self._halves[microbatch] = halves
        del self._sent[microbatch]
        if not self.stage.is_first:
            self._give_gradients(microbatch, received)

    def weights_of(self, microbatch: int) -> None:
        """The second half of a backward pass."""
        for half in self._halves.pop(microbatch, ()):
            half()

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are kept."""
        return len(self._received) + len(self._halves)

    # Neighbours on this rank are given tensors; others are sent messages.

    def _take_activations(self, microbatch):
        before = self.neighbours.get(self.stage.stage_index - 1)
        if before is None:
            return self._activations.take(microbatch)
        return [t.detach().requires_grad_(t.requires_grad) for t in before.handed.pop((microbatch, "F"))]

    def _give_activations(self, microbatch, tensors):
        index = self.stage.stage_index
        if index + 1 in self.neighbours:
            self.handed[microbatch, "F"] = tensors
        else:
            self.sending += self._next.send(tensors, self._alike[microbatch])

    def _take_gradients(self, microbatch, sent):
        if self.stage.is_last:
            return [None if self.weights is None else torch.full_like(sent[0], self.weights[microbatch])]
        after = self.neighbours.get(self.stage.stage_index + 1)
        if after is None:
            return self._gradients.take(microbatch, sent)
        return [t.grad for t in after.handed.pop((microbatch, "B"))]

    def _give_gradients(self, microbatch, received):
        index = self.stage.stage_index
        if index - 1 in self.neighbours:
            self.handed[microbatch, "B"] = received
        else:
            self.sending += send_gradients(self.comm, (index - 1) % self.comm.size, index, received)


def _kinds_of_inputs(positional, keywords) -> tuple:
    """What the shapes of activations may depend on."""
    tensors = [value for value in (*positional, *keywords.values()) if isinstance(value, torch.Tensor)]
    return kinds_of(tensors)


def _detached(output):
    if isinstance(output, (tuple, list)):
        return type(output)(_detached(part) for part in output)
    return output.detach() if isinstance(output, torch.Tensor) else output
