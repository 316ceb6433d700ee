"""An optimizer whose gradients are averaged over replicas before the step."""

import torch

from dtlib.errors import DtlibError
from dtlib.parallel.replicator.exchange import APPLY, Exchange, InGraph, all_reduce


class ReplicatedOptimizer:
    """What ``replicator.wrap_optimizer`` gives: ``minimize(loss)`` stands for backward, average, step.

    The torch optimizer inside, ``optimizer``, does the step, on every process or once for all replicas in it. So its
    learning rate may be scheduled, its states saved, and its step hooks see the averaged gradients, to clip them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchange: Exchange, number: int):
        if isinstance(optimizer, torch.optim.LBFGS):
            raise DtlibError("LBFGS computes the loss several times a step: wrap one that does it once, such as AdamW.")
        self.optimizer = optimizer
        self.number = number  # by which a graph names it
        self._exchange = exchange
        self._wrapped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if not self.parameters:
            raise DtlibError("wrap_optimizer: no parameter of this optimizer requires a gradient.")

    @property
    def parameters(self) -> list:
        """Those that require a gradient at the moment.

        Raises:
            DtlibError: for those of a group that was added later, which replicas may have with other values.
        """
        everything = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if added := [parameter for parameter in everything if parameter not in self._wrapped]:
            raise DtlibError(
                f"The optimizer has got {len(added)} parameters since wrap_optimizer, the first of shape "
                f"{tuple(added[0].shape)}: call add_param_group before it, so that replicas begin with the same values."
            )
        return [parameter for parameter in everything if parameter.requires_grad]

    def __repr__(self) -> str:
        return f"ReplicatedOptimizer({type(self.optimizer).__name__}, {len(self.parameters)} parameters)"

    def minimize(self, loss: torch.Tensor) -> None:
        """Compute this replica's gradients of ``loss``, average them over replicas, and step.

        ``loss`` is one number. A parameter that no replica has used keeps ``grad=None``; one that some have used
        counts as zero on the others. The averages stay in ``.grad``.
        """
        if loss.dim() or not loss.requires_grad:
            raise DtlibError(
                f"minimize(loss) needs one number that depends on the parameters; this has shape {tuple(loss.shape)}"
                f"{'' if loss.requires_grad else ' and no gradient'}."
            )
        parameters = self.parameters
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        averages: dict[int, tuple] = {}  # with flags
        # All gradients of a type travel in one message, and behind them a number a parameter: is it used here?
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            of_type = [i for i, parameter in enumerate(parameters) if parameter.dtype == dtype]
            pieces = [_flat(gradients[i], parameters[i], i) for i in of_type]
            used_here = [pieces[0].new_full((1,), float(gradients[i] is not None)) for i in of_type]
            flat = all_reduce(torch.cat([*pieces, *used_here]).detach(), "mean", self._exchange)
            *pieces, used = flat.split([*(len(piece) for piece in pieces), len(of_type)])
            for i, piece, flag in zip(of_type, pieces, used.unbind(), strict=True):
                averages[i] = piece.view_as(parameters[i]), flag
        flags = torch.stack([averages[i][1].to(torch.float32) for i in range(len(gradients))])
        together = [averages[i][0] for i in range(len(gradients))]
        if isinstance(self._exchange, InGraph):
            with torch.no_grad():
                APPLY(parameters, together, flags, self.number)  # a mark
        else:
            self.apply(together, flags)

    def apply(self, gradients: list[torch.Tensor], used: torch.Tensor) -> None:
        """Step with gradients that are averaged already."""
        for parameter in self._wrapped:
            parameter.grad = None  # also of what has been frozen since
        for parameter, gradient, is_used in zip(self.parameters, gradients, used.tolist(), strict=True):
            parameter.grad = gradient if is_used else None
        self.optimizer.step()


def _flat(gradient, parameter, i):
    if gradient is None:
        return torch.zeros_like(parameter).flatten()
    if gradient.layout != torch.strided:
        shape = tuple(parameter.shape)
        raise DtlibError(f"The gradient of parameter {i}, of shape {shape}, is sparse: build it with sparse=False.")
    return gradient.flatten()
