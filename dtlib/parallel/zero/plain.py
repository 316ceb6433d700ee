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
from torch import nn
from torch.nn.utils import vector_to_parameters

from dtlib.comm import Communicator, as_communicator
from dtlib.gradients.contract import Contract
from dtlib.parallel.zero.arguments import check_elementwise, check_output


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

    def __init__(self, comm: Communicator, model: nn.Module, optimizer_class: type, units: list | None = None,
                 **settings: object):  # fmt: skip
        self.comm, modules = as_communicator(comm), list(units or [model])
        check_elementwise(optimizer_class, type(self).__name__)
        self.contract = Contract(type(self).__name__, model, self.comm, modules, in_order=True)
        for tensor in [*model.parameters(), *model.buffers()]:
            self.comm.broadcast(tensor)
        self.units = [Unit(module, self.comm.rank, self.comm.size) for module in modules]
        self.optimizer = optimizer_class([unit.shard for unit in self.units], **settings)
        for owner, parameter in [(unit, parameter) for unit in self.units for parameter in unit.parameters]:
            parameter.register_post_accumulate_grad_hook(partial(self.gradient_is_ready, owner))

    def gradient_is_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        self.contract.gradient_is_ready(parameter)

    def step(self, closure: None = None) -> None:
        self.contract.check_step(closure)
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
        unit.shard.grad = self.comm.reduce_scatter(torch.empty_like(unit.shard), whole, op="mean")

    def give(self, unit: Unit) -> None:
        self.comm.all_gather(unit.flat, unit.shard)


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
            # Under another tensor: the storage of one that numpy has seen cannot be resized.
            self.comm.all_gather(torch.from_dlpack(unit.flat), unit.shard)
            vector_to_parameters(unit.flat, unit.parameters)

    def forward_ends(self, unit: Unit, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        check_output(output, type(self).__name__)
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
