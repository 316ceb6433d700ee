"""ZeRO, to be read from top to bottom: three stages, each a few lines more than the one before.

Data parallelism holds parameters, gradients and optimizer states N times over. Here each rank owns 1/N of them, its
shards, and has the rest only while it is needed:

    stage   forward pass          backward pass                        step
    1                                                                  reduce_scatter, update, all_gather all units
    2                             reduce_scatter each unit             update, all_gather all units
    3       all_gather each unit  all_gather, reduce_scatter each      update

A unit is a module whose parameters travel together. They lie in one flat memory, cut into equal shards:

    flat memory   [ w w w w w w b | b b v v v . ]      . padding
    shards           of rank 0       of rank 1
"""

from functools import partial

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.utils import vector_to_parameters


class Unit:
    """A module whose parameters are views of ``flat`` memory, and this rank's ``shard`` of that, which it updates."""

    def __init__(self, module: nn.Module, rank: int, ranks: int):
        self.module, self.parameters = module, list(module.parameters())
        module.zero_grad()
        self.padding = self.parameters[0].new_zeros(-sum(p.numel() for p in self.parameters) % ranks)
        self.flat = torch.cat([*(p.detach().flatten() for p in self.parameters), self.padding])
        vector_to_parameters(self.flat, self.parameters)
        self.shard = nn.Parameter(self.flat.chunk(ranks)[rank])


class Stage1:
    """Optimizer states in shards: ``loss.backward()``, ``zero.step()``. Rank 0's values hold at construction.

    Contract: ``model(x)`` with as many samples on all ranks; one backward pass a step, which reaches all parameters
    in one order on all ranks; one dtype, float32 or float64; ``units`` are modules that share out all parameters.
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
        """A hook: all of this parameter's gradient is there. Stage 1 waits for the step."""

    def step(self, closure: None = None) -> None:
        for unit in self.units:
            if unit.shard.grad is None:  # else the backward pass has done it
                self.reduce(unit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            self.give(unit)

    def reduce(self, unit: Unit) -> None:
        """This rank's shard of the mean of all ranks' gradients; the gradients themselves go."""
        whole = torch.cat([*(p.grad.flatten() for p in unit.parameters if p.grad is not None), unit.padding])
        unit.module.zero_grad()
        unit.shard.grad = torch.empty_like(unit.shard)
        dist.reduce_scatter_single(unit.shard.grad, whole, group=self.group)
        unit.shard.grad /= self.size

    def give(self, unit: Unit) -> None:
        dist.all_gather_single(unit.flat, unit.shard.detach(), group=self.group)


class Stage2(Stage1):
    """Gradients in shards too: those of a unit are reduced, and freed, as soon as the last of them is ready."""

    def gradient_is_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        super().gradient_is_ready(unit, parameter)
        if all(parameter.grad is not None for parameter in unit.parameters):
            self.reduce(unit)


class Stage3(Stage2):
    """Parameters in shards too: those of a unit are whole while it computes, forward and backward."""

    def __init__(self, *arguments: object, **settings: object):
        super().__init__(*arguments, **settings)
        for unit in self.units:
            unit.shard.data = unit.shard.detach().clone()  # it stays when flat memory goes
            unit.module.register_forward_pre_hook(lambda *_, unit=unit: self.gather(unit))
            unit.module.register_forward_hook(partial(self.forward_ends, unit))
            self.free(unit)

    def gather(self, unit: Unit) -> None:
        if not unit.flat.untyped_storage().nbytes():
            unit.flat.untyped_storage().resize_(unit.flat.nbytes)
            # Under another tensor: dtlib's ranks show it to numpy, and such a storage cannot be resized.
            dist.all_gather_single(torch.from_dlpack(unit.flat), unit.shard.detach(), group=self.group)
            vector_to_parameters(unit.flat, unit.parameters)

    def forward_ends(self, unit: Unit, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # else activation checkpointing computes it anew
            self.free(unit)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.gather(unit))

    def reduce(self, unit: Unit) -> None:
        super().reduce(unit)
        self.free(unit)

    def free(self, unit: Unit) -> None:
        """The memory goes. The views stay, for autograd; whoever looks at a parameter meanwhile sees NaN."""
        for parameter in unit.parameters:
            parameter.data = unit.flat.new_full((), torch.nan).expand_as(parameter)
        unit.flat.untyped_storage().resize_(0)

    give = free  # the next use gathers the new values


# ZeroOptimizer (stages 1, 2), fully_shard (stage 3) add frozen, unused and tied parameters, 16 bits, several backward
# passes a step, unequal batches, clipping, checkpoints, sending while autograd computes, and prefetching the next unit.
# contract.py refuses what lies outside of the contract above, where dtlib is installed: this file needs torch alone.
