"""Flat memory of ZeRO's stages 1 and 2: parameters that lie together, and what each rank owns of them."""

import torch
from torch import nn

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import FlatBuffer, Shards
from dtlib.gradients.local_gradient import GoneGradient, UnaveragedGradient, drop_placeholder
from dtlib.gradients.reducer import GradientShard, check_dense


class ShardedBucket(GradientShard):
    """Parameters that lie in one flat memory, of which each rank owns an equal shard.

    Stage 2: after a backward pass placeholders stand for gradients that have left.
    """

    def __init__(self, parameters: list[nn.Parameter], comm: Communicator):
        super().__init__(parameters, Shards([parameter.shape for parameter in parameters], comm.rank, comm.size))
        self.values = self._flat_buffer()
        with torch.no_grad():
            for parameter, view in zip(parameters, self.values.views, strict=True):
                view.copy_(parameter)
                parameter.data = view
        comm.broadcast(self.values.flat)
        self.owned = [nn.Parameter(view) for view in self.shards.views(self.shards.own(self.values.flat))]

    def check(self, names: dict) -> None:
        """Refuse to step where parameters have left this memory, as the model would never see the new values."""
        for parameter, view in zip(self.parameters, self.values.views, strict=True):
            if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype:
                _refuse_converted(names[parameter])

    def _flat_buffer(self) -> FlatBuffer:
        first = self.parameters[0]
        return FlatBuffer(self.shards.shapes, first.dtype, first.device, self.shards.padding)

    def complete(self) -> None:
        for parameter in self.parameters:
            drop_placeholder(parameter)
        super().complete()

    def finish(self, factor: float | None, used: list) -> None:
        super().finish(factor, used)
        for parameter in self.parameters:
            parameter.grad = GoneGradient.like(parameter)

    def gradients(self) -> list[torch.Tensor]:
        """What is kept of gradients between passes: this rank's shard of each average, if any has arrived."""
        return [] if self.average is None else self.shards.views(self.average)


class WholeGradients(ShardedBucket):
    """Stage 1: gradients stay in flat memory until the step, and averages arrive in place."""

    def __init__(self, parameters: list[nn.Parameter], comm: Communicator):
        super().__init__(parameters, comm)
        self.memory = self._flat_buffer()
        self.views = {
            parameter: view.as_subclass(UnaveragedGradient)
            for parameter, view in zip(parameters, self.memory.views, strict=True)
        }

    @torch.no_grad()  # backward(create_graph=True) records what hooks do
    def keep(self, parameter: nn.Parameter) -> None:
        """A hook: a gradient moves into flat memory, where autograd adds those of later passes to it."""
        gradient, view = parameter.grad, self.views[parameter]
        if parameter.dtype != view.dtype:
            _refuse_converted("A parameter")
        if gradient is not None and gradient is not view:
            check_dense(gradient)
            view.copy_(gradient)
            parameter.grad = view

    def flat_gradients(self, weight: float | None) -> torch.Tensor:
        for parameter, view in self.views.items():
            if parameter.grad is None:
                view.zero_()
            self.keep(parameter)  # it may have been given by hand
            parameter.grad = None
        return self.memory.flat if weight is None else self.memory.flat.mul_(weight)

    def take(self, shard: torch.Tensor, weighted: bool) -> None:
        self.average = self.shards.own(self.memory.flat).copy_(shard)

    def finish(self, factor: float | None, used: list) -> None:
        GradientShard.finish(self, factor, used)

    def gradients(self) -> list[torch.Tensor]:
        return self.memory.views


def names_of(number: int, group: dict) -> dict:
    """What to call each parameter of a group in an error: its name, where the optimizer was given names."""
    given = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
    return dict(zip(group["params"], given, strict=True))


def _refuse_converted(name: str):
    raise DtlibError(
        f"{name} has got other memory since ZeroOptimizer was made, as by model.to() or model.half(): convert the "
        "model first, and make the optimizer of it afterwards."
    )
