"""ZeRO, to be read from top to bottom: three stages; each extends the previous one.

Data parallelism keeps N copies of parameters, gradients and optimizer states. Stage 1 shards the optimizer states,
stage 2 also the gradients, and stage 3 also the parameters, which it gathers while a unit runs. A shard is 1/N:

    stage   forward pass          backward pass                        step
    1                                                                  reduce_scatter, update, all_gather all units
    2                             reduce_scatter each unit             update, all_gather all units
    3       all_gather each unit  all_gather, reduce_scatter each      update

A unit is a module whose parameters are sent together. They are views of one flat tensor, divided into equal shards:

    flat tensor   [ w w w w w w b | b b v v v . ]      . padding
    shards           of rank 0       of rank 1
"""

from functools import partial

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.utils import vector_to_parameters


class Unit:
    """A module with its parameters as views of one tensor ``flat``, and the ``shard`` of it that this rank updates."""

    def __init__(self, module: nn.Module, rank: int, ranks: int):
        self.module, self.parameters = module, list(module.parameters())
        module.zero_grad()
        self.padding = self.parameters[0].new_zeros(-sum(p.numel() for p in self.parameters) % ranks)
        self.flat = torch.cat([*(p.detach().flatten() for p in self.parameters), self.padding])
        vector_to_parameters(self.flat, self.parameters)
        self.shard = nn.Parameter(self.flat.chunk(ranks)[rank])


class Stage1:
    """Shard optimizer states. Call ``loss.backward()``, then ``step()``. Rank 0's parameters are broadcast first.

    Contract: ``model(x)`` with equal batch sizes; one backward pass per step, which computes all gradients in the same
    order on all ranks; float32 or float64; ``units`` are modules that contain each parameter exactly once.
    """

    def __init__(self, group: ProcessGroup | None, model: nn.Module, optimizer_class: type, units: list | None = None,
                 **settings: object):  # fmt: skip
        self.group = group or dist.group.WORLD
        self.rank, self.size = self.group.rank(), self.group.size()
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), group_src=0, group=self.group)
        self.units = [Unit(module, self.rank, self.size) for module in units or [model]]
        self.optimizer = optimizer_class([unit.shard for unit in self.units], **settings)
        for owner, parameter in [(unit, parameter) for unit in self.units for parameter in unit.parameters]:
            parameter.register_post_accumulate_grad_hook(partial(self.gradient_is_ready, owner))

    def gradient_is_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Do nothing here: stage 1 waits for the step. Autograd calls this hook when a gradient is complete."""

    def step(self, closure: None = None) -> None:
        """Reduce gradients, update the shards, and gather the new parameters."""
        for unit in self.units:
            if unit.shard.grad is None:  # stages 2 and 3 have reduced in the backward pass
                self.reduce(unit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            self.update_parameters(unit)

    def reduce(self, unit: Unit) -> None:
        """Reduce this unit's gradients to this rank's shard of their mean, and free them."""
        whole = torch.cat([*(p.grad.flatten() for p in unit.parameters if p.grad is not None), unit.padding])
        unit.module.zero_grad()
        unit.shard.grad = torch.empty_like(unit.shard)
        dist.reduce_scatter_single(unit.shard.grad, whole, group=self.group)
        unit.shard.grad /= self.size

    def update_parameters(self, unit: Unit) -> None:
        """Gather the new parameters of a unit from all ranks."""
        dist.all_gather_single(unit.flat, unit.shard.detach(), group=self.group)


class Stage2(Stage1):
    """Shard the gradients, too: reduce and free a unit's gradients when the last of them is ready."""

    def gradient_is_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        super().gradient_is_ready(unit, parameter)
        if all(parameter.grad is not None for parameter in unit.parameters):
            self.reduce(unit)


class Stage3(Stage2):
    """Shard the parameters, too: a unit's parameters are whole only while it computes, forward and backward."""

    def __init__(self, *arguments: object, **settings: object):
        super().__init__(*arguments, **settings)
        for unit in self.units:
            unit.shard.data = unit.shard.detach().clone()  # a copy, because ``flat`` will be freed
            unit.module.register_forward_pre_hook(lambda *_, unit=unit: self.gather(unit))
            unit.module.register_forward_hook(partial(self.forward_ends, unit))
            self.free(unit)

    def gather(self, unit: Unit) -> None:
        if not unit.flat.untyped_storage().nbytes():
            unit.flat.untyped_storage().resize_(unit.flat.nbytes)
            # Receive into a second tensor with the same memory, because torch cannot resize one exported to numpy.
            dist.all_gather_single(torch.from_dlpack(unit.flat), unit.shard.detach(), group=self.group)
            vector_to_parameters(unit.flat, unit.parameters)

    def forward_ends(self, unit: Unit, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # not in a backward pass, which needs a recomputed unit
            self.free(unit)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.gather(unit))

    def reduce(self, unit: Unit) -> None:
        super().reduce(unit)
        self.free(unit)

    def free(self, unit: Unit) -> None:
        """Free the memory of ``flat``, not the tensor: autograd needs its views. Parameters are NaN until gathered."""
        for parameter in unit.parameters:
            parameter.data = unit.flat.new_full((), torch.nan).expand_as(parameter)
        unit.flat.untyped_storage().resize_(0)

    update_parameters = free  # the next use gathers the new values


# ZeroOptimizer (stages 1, 2) and fully_shard (stage 3) add: frozen, unused and tied parameters, 16 bits, gradient
# accumulation, unequal batches, clipping, checkpoints, sending while gradients are computed, prefetching. Where dtlib
# is installed, checks.py checks the contract above. This file imports only torch.
