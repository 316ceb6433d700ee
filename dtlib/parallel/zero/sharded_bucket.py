"""Flat buffers of ZeRO stages 1 and 2: parameters that are stored together, and each rank's shard of them."""

import torch
from torch import nn

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import FlatBuffer, Shards
from dtlib.gradients.local_gradient import FreedGradient, UnaveragedGradient, drop_placeholder
from dtlib.gradients.reducer import GradientShard, check_dense


class ShardedBucket(GradientShard):
    """Parameters that are views of one flat buffer. Each rank owns an equal shard of the buffer.

    Used directly for stage 2: after a backward pass, placeholders replace the gradients that were sent.
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
        """Refuse to step if a parameter has left the flat buffer, because the model would never see the new values."""
        for parameter, view in zip(self.parameters, self.values.views, strict=True):
            if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype:
                _refuse_converted(names[parameter])

    def _flat_buffer(self) -> FlatBuffer:
        first = self.parameters[0]
        return FlatBuffer(self.shards.shapes, first.dtype, first.device, self.shards.padding)

    def complete(self) -> None:
        """Prepare the bucket for its launch."""
        for parameter in self.parameters:
            drop_placeholder(parameter)
        super().complete()

    def finish(self, used: list) -> None:
        """Store the average and put placeholders in place of the gradients that were sent."""
        super().finish(used)
        for parameter in self.parameters:
            parameter.grad = FreedGradient.like(parameter)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that are kept between passes: this rank's shard of each average, if it has arrived."""
        return [] if self.average is None else self.shards.views(self.average)


class WholeGradients(ShardedBucket):
    """Stage 1: gradients stay in a flat buffer until the step, and the averages are written into the same buffer."""

    def __init__(self, parameters: list[nn.Parameter], comm: Communicator):
        super().__init__(parameters, comm)
        self.memory = self._flat_buffer()
        self.views = {
            parameter: view.as_subclass(UnaveragedGradient)
            for parameter, view in zip(parameters, self.memory.views, strict=True)
        }

    # With backward(create_graph=True), autograd would record the operations of this hook.
    @torch.no_grad()
    def keep(self, parameter: nn.Parameter) -> None:
        """Copy a gradient into the flat buffer. Autograd calls this hook and adds later gradients to the view."""
        gradient, view = parameter.grad, self.views[parameter]
        if parameter.dtype != view.dtype:
            _refuse_converted("A parameter")
        if gradient is not None and gradient is not view:
            check_dense(gradient)
            view.copy_(gradient)
            parameter.grad = view

    def flat_gradients(self) -> torch.Tensor:
        """Return all gradients as one flat tensor; unused parameters contribute zeros."""
        for parameter, view in self.views.items():
            if parameter.grad is None:
                view.zero_()
            self.keep(parameter)  # it may have been set by hand, without the hook
            parameter.grad = None
        return self.memory.flat

    def take(self, shard: torch.Tensor) -> None:
        """Store this rank's shard of the average."""
        self.average = self.shards.own(self.memory.flat).copy_(shard)

    def finish(self, used: list) -> None:
        """Finish without placeholders, because the gradients have not been freed."""
        GradientShard.finish(self, used)

    def gradients(self) -> list[torch.Tensor]:
        """Return the flat buffer's views, one for each parameter."""
        return self.memory.views


def names_of(number: int, group: dict) -> dict:
    """Return the names of a group's parameters for errors; numbers if the optimizer received no names."""
    given = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
    return dict(zip(group["params"], given, strict=True))


def _refuse_converted(name: str):
    raise DtlibError(
        f"{name} has other memory since ZeroOptimizer was created, for example after model.to() or model.half(): "
        "convert the model first, and create the optimizer afterwards."
    )
