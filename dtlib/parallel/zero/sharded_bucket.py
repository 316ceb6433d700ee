"""Flat memory of ZeRO's stages 1 and 2: parameters that lie together, and what each rank owns of them."""

import torch
from torch import nn

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import FlatBuffer, Shards
from dtlib.gradients.local_gradient import UnaveragedGradient
from dtlib.gradients.shards import GradientShard, check_dense


class ShardedBucket:
    """Parameters that lie in one flat memory, of which each rank owns an equal shard."""

    def __init__(self, parameters: list[nn.Parameter], comm: Communicator, stage: int):
        self.parameters = parameters
        self.shards = Shards([parameter.shape for parameter in parameters], comm.rank, comm.size)
        self.values = self._flat_buffer()
        with torch.no_grad():
            for parameter, view in zip(parameters, self.values.views, strict=True):
                view.copy_(parameter)
                parameter.data = view
        comm.broadcast(self.values.flat)
        self.owned = [nn.Parameter(view) for view in self.shards.views(self.shards.own(self.values.flat))]
        self.gradients = self._flat_buffer() if stage == 1 else GradientShard(parameters, self.shards)
        self.views = [view.as_subclass(UnaveragedGradient) for view in self.whole().views] if stage == 1 else []

    def check(self, names: dict) -> None:
        """Refuse to step where parameters have left this memory, as the model would never see the new values."""
        for parameter, view in zip(self.parameters, self.values.views, strict=True):
            if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype:
                _refuse_converted(names[parameter])

    def _flat_buffer(self) -> FlatBuffer:
        first = self.parameters[0]
        return FlatBuffer(self.shards.shapes, first.dtype, first.device, self.shards.padding)

    def whole(self) -> FlatBuffer:
        """Stage 1: whole gradients."""
        assert isinstance(self.gradients, FlatBuffer)
        return self.gradients

    def used(self) -> torch.Tensor:
        """Stage 1: which parameters have a gradient."""
        return torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.int8)

    @torch.no_grad()  # backward(create_graph=True) records what hooks do
    def keep(self, parameter: nn.Parameter, view: torch.Tensor) -> None:
        """Stage 1: a gradient moves into flat memory, where autograd adds those of later passes to it."""
        if parameter.dtype != view.dtype:
            _refuse_converted("A parameter")
        gradient = parameter.grad
        if gradient is not None and gradient is not view:
            check_dense(gradient)
            view.copy_(gradient)
            parameter.grad = view

    def reduce(self, comm: Communicator, weight: float | None) -> None:
        """Stage 1: average the gradients over ranks; this rank gets its shard of them, in place."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                self.keep(parameter, view)  # it may have been given by hand
            parameter.grad = None
        whole = self.whole().flat
        if weight is not None:
            whole.mul_(weight)
        average = whole.new_empty(self.shards.length)
        comm.reduce_scatter(average, whole, "mean" if weight is None else "sum", overwrite=True)
        self.shards.own(whole).copy_(average)

    def averages(self) -> list[torch.Tensor]:
        """This rank's shard of each gradient's average, once it has been reduced; none before."""
        own = self.shards.own(self.gradients.flat) if isinstance(self.gradients, FlatBuffer) else self.gradients.average
        return [] if own is None else self.shards.views(own)


def names_of(number: int, group: dict) -> dict:
    """What to call each parameter of a group in an error: its name, where the optimizer was given names."""
    given = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
    return dict(zip(group["params"], given, strict=True))


def _refuse_converted(name: str):
    raise DtlibError(
        f"{name} has got other memory since ZeroOptimizer was made, as by model.to() or model.half(): convert the "
        "model first, and make the optimizer of it afterwards."
    )
