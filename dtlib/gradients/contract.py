"""What plain classes rely on, looked after on all ranks: their own lines are about their idea alone.

    at construction     the same parameters on all ranks, and of a kind that the class takes
    forward pass        the same parameters as at construction; no gradients left over from before
    step                of each parameter one gradient on each rank; as many samples on all ranks

Whatever lies outside is refused on every rank, with a sentence that names the way round: mostly the full class.
"""

import torch

from dtlib.errors import DtlibError
from dtlib.gradients.local_gradient import refuse_torch_clipping
from dtlib.gradients.same_model import check_same_model


class Contract:
    """The contract of class ``who`` about ``model`` on ``comm``; all ranks make one.

    Args:
        units: modules that have to share out all parameters, all trained, of one dtype, float32 or float64.
        in_order: gradients have to come in one order on all ranks.
    """

    def __init__(self, who: str, model, comm, units=None, in_order: bool = False):
        self.who, self.model, self.in_order = who, model, in_order
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.names = {parameter: name for name, parameter in trained.items()}
        if not trained:
            self._refuse("no parameter of this model requires a gradient")
        check_same_model(trained, comm, who)
        if any(parameter._post_accumulate_grad_hooks for parameter in self.names):
            self._refuse("this model has hooks, of an earlier wrapper: build it anew")
        if units is not None:
            self._check_units(units)
        self.comm = comm.split(0)  # apart from gradients, which some ranks may wait for
        self.samples, self.come = 0, []  # of the last forward pass; parameters with a gradient since the last step
        model.register_forward_pre_hook(self._forward_begins)

    def gradient_has_come(self, parameter) -> None:
        self.come.append(parameter)

    def check_step(self) -> None:
        """Refuse what happened since the last step; all ranks call it."""
        notes = self.comm.all_gather_object((self.samples, [self.names[parameter] for parameter in self.come]))
        samples, come = zip(*notes, strict=True)
        for name in self.names.values():
            counts = [others.count(name) for others in come]
            if set(counts) != {1}:
                self._refuse(
                    f"{name} got {counts} gradients on ranks 0 to {self.comm.size - 1}, and each needs one a step; for "
                    "unused parameters and several backward passes take the full class"
                )
        if len(set(samples)) > 1:
            self._refuse(f"ranks had batches of {samples} samples: take equal ones, or batch_size of the full class")
        if self.in_order and any(others != come[0] for others in come):
            self._refuse("layers ran in another order on another rank: let all ranks compute the same")
        self.come = []

    def _forward_begins(self, model, inputs) -> None:
        if not torch.is_grad_enabled():
            return
        if self.come:
            self._refuse("a backward pass was interrupted, or no step() followed it: build all of it anew")
        if {parameter for parameter in model.parameters() if parameter.requires_grad} != set(self.names):
            self._refuse("a parameter was frozen, unfrozen or replaced after construction: build all of it anew")
        self.samples = len(inputs[0])

    def _check_units(self, units) -> None:
        owned = [id(parameter) for unit in units for parameter in unit.parameters()]
        kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in self.model.parameters()}
        for name, parameter in self.model.named_parameters():
            refuse_torch_clipping(parameter)
            if not parameter.requires_grad:
                self._refuse(f"{name} is frozen: take the full class")
            if len(kinds) > 1 or parameter.dtype not in (torch.float32, torch.float64):
                self._refuse(f"parameters are {sorted(kinds)}: take one of float32 and float64, or the full class")
            if owned.count(id(parameter)) != 1:
                self._refuse(
                    f"{name} is in {owned.count(id(parameter))} units, and has to be in one: choose modules that share "
                    "out all parameters, with tied ones in the same"
                )

    def _refuse(self, why: str):
        raise DtlibError(f"{self.who}: {why}.")


def check_optimizer(optimizer_class, known, who: str) -> None:
    """Refuse an optimizer that may not work element by element: it would see shards of parameters."""
    if optimizer_class not in known:
        name, choice = getattr(optimizer_class, "__name__", optimizer_class), ", ".join(one.__name__ for one in known)
        raise DtlibError(f"{who} cuts parameters anywhere, and {name} may not work element by element: take {choice}.")


def check_output(output, who: str) -> None:
    """Refuse a module that gives something else than one tensor."""
    if not isinstance(output, torch.Tensor):
        raise DtlibError(f"{who}: a module gave {type(output).__name__}, and has to give one tensor: join them.")
