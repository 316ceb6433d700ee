"""An optimizer that averages gradients over replicas before its step."""

import torch

from dtlib.errors import DtlibError
from dtlib.gradients.reducer import check_dense
from dtlib.parallel.replicator.exchange import APPLY, Exchange, exchanged


class ReplicatedOptimizer:
    """An optimizer with ``minimize(loss)``: backward pass, average over replicas, step. Returned by ``wrap_optimizer``.

    The torch optimizer in ``optimizer`` does the step, on every process or once for all in-graph replicas. So its
    learning rate may be scheduled, its states can be saved, and its step hooks see the averaged gradients, for example
    to clip them.

    Raises:
        DtlibError: for LBFGS, for parameters of several dtypes, and if no parameter requires a gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchange: Exchange, number: int, in_graph: bool):
        self.optimizer = optimizer
        self.number = number  # identifies this optimizer in a graph
        self._exchange, self._in_graph = exchange, in_graph
        self._wrapped = self.everything()
        if isinstance(optimizer, torch.optim.LBFGS):
            raise DtlibError("LBFGS computes the loss several times per step: wrap another optimizer, such as AdamW.")
        if not self.parameters:
            raise DtlibError("wrap_optimizer: no parameter of this optimizer requires a gradient.")
        if len(dtypes := {parameter.dtype for parameter in self._wrapped}) > 1:
            raise DtlibError(f"wrap_optimizer: parameters of {dtypes}; wrap one optimizer for each dtype.")

    @property
    def parameters(self) -> list:
        """The parameters that currently require a gradient.

        Raises:
            DtlibError: for a parameter group that was added after construction, because its values may differ between
                replicas.
        """
        if len(everything := self.everything()) != len(self._wrapped):
            raise DtlibError(
                f"The optimizer has {len(everything) - len(self._wrapped)} new parameters since wrap_optimizer: call "
                "add_param_group before it, so that replicas start with equal values."
            )
        return [parameter for parameter in everything if parameter.requires_grad]

    def everything(self) -> list:
        """Return all parameters of the torch optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def minimize(self, loss: torch.Tensor) -> None:
        """Compute this replica's gradients of ``loss``, average them over replicas, and step.

        ``loss`` is one number. A parameter that no replica has used keeps ``grad=None``. If only some replicas have
        used it, the others contribute zeros. The averages stay in ``.grad``.
        """
        if loss.dim() or not loss.requires_grad:
            raise DtlibError(
                f"minimize(loss) needs one number that depends on the parameters; this has shape {tuple(loss.shape)}"
                f"{'' if loss.requires_grad else ' and no gradient'}."
            )
        parameters = self.parameters
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        # Send all gradients in one message. At its end, one number per parameter says whether this replica has used it.
        pieces = [_flat(gradient, parameter) for gradient, parameter in zip(gradients, parameters, strict=True)]
        used_here = [pieces[0].new_full((1,), float(gradient is not None)) for gradient in gradients]
        flat = exchanged(torch.cat([*pieces, *used_here]).detach(), "mean", self._exchange)
        *averages, used = flat.split([*(len(piece) for piece in pieces), len(parameters)])
        averages = [average.view_as(parameter) for average, parameter in zip(averages, parameters, strict=True)]
        if self._in_graph:
            with torch.no_grad():
                APPLY(parameters, averages, used, self.number)  # a mark in the graph
        else:
            self.apply(averages, used)

    def apply(self, gradients: list[torch.Tensor], used: torch.Tensor) -> None:
        """Step with gradients that have been averaged."""
        for parameter in self._wrapped:
            parameter.grad = None  # also for a parameter that was frozen since
        for parameter, gradient, is_used in zip(self.parameters, gradients, used.tolist(), strict=True):
            parameter.grad = gradient if is_used else None
        self.optimizer.step()


def _flat(gradient, parameter):
    check_dense(gradient)
    return (torch.zeros_like(parameter) if gradient is None else gradient).flatten()
