"""What plain classes rely on, looked after on all ranks: their own lines are about their idea alone.

    at construction     the same parameters on all ranks, and of a kind that the class takes
    forward pass        the same parameters as at construction; no gradients left over from before
    step                of each parameter one gradient on each rank; as many samples and tokens on all ranks, and
                        as many that count in masks, or a loss of mean_over_tokens (tokens.py)

Whatever lies outside is refused on every rank, with a sentence that names the way round: mostly the full class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from hashlib import blake2b
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.local_gradient import GoneGradient, UnaveragedGradient, drop_placeholder
from dtlib.gradients.same_model import check_same_model
from dtlib.gradients.shard_info import give_kind, hooks_of_others, info_of
from dtlib.gradients.tokens import divided_by_all_tokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dtlib.comm import Communicator


class Contract:
    """The contract of class ``who`` about ``model`` on ``comm``; all ranks make one.

    Args:
        units: modules that have to share out all parameters, all trained, of one dtype, float32 or float64.
        in_order: gradients have to be computed in one order on all ranks.
    """

    def __init__(
        self, who: str, model: nn.Module, comm: Communicator, units: Iterable[nn.Module] | None = None,
        in_order: bool = False,
    ):  # fmt: skip
        self.who, self.model, self.in_order = who, model, in_order
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.names = {parameter: name for name, parameter in trained.items()}
        self.shards = [parameter for parameter in self.names if info_of(parameter).differs()]
        if not trained:
            self._refuse("no parameter of this model requires a gradient")
        check_same_model(trained, comm, who)
        for name, module in model.named_modules():
            if getattr(module, "sparse", False):
                self._refuse(f"{name} gives sparse gradients: build it with sparse=False")
        if any(map(hooks_of_others, self.names)):
            self._refuse("this model has hooks, of an earlier wrapper: build it anew")
        self.averaged_later = units is not None
        if units is not None:
            self._check_units(units)
        self.whole, self.comm = comm, comm.split(0)  # apart from gradients, which some ranks may wait for
        self.samples: tuple = ()
        self.ready: list = []  # of the last forward pass; parameters with a gradient since the last step
        model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)

    def gradient_is_ready(self, parameter: nn.Parameter) -> None:
        if self.averaged_later and not self.ready:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        self.ready.append(parameter)
        if self.averaged_later and parameter.grad is not None:  # torch's clipping would take it for the average
            parameter.grad = parameter.grad.as_subclass(UnaveragedGradient)

    def _backward_ends(self) -> None:
        """Until the step torch's clipping finds tensors that refuse it, in place of gradients that have left."""
        for parameter in self.ready:
            if parameter.grad is None:
                parameter.grad = GoneGradient.like(parameter)

    def check_step(self, closure: Callable | None = None) -> None:
        """Refuse what happened since the last step; all ranks call it."""
        if closure is not None:
            self._refuse("step() takes no closure: call loss.backward() first, and then step()")
        divided = self.whole in divided_by_all_tokens
        divided_by_all_tokens.discard(self.whole)
        for parameter in self.shards:
            give_kind(parameter)
        ready = [self.names[parameter] for parameter in self.ready]
        kept = sorted(ready) == sorted(self.names.values())
        # A number a rank: where all are the same, all have done the same, and no rank need tell what.
        note = repr((kept, divided, divided or self.samples, self.in_order and ready)).encode()
        notes = np.zeros(self.comm.size, dtype=np.int64)
        notes[self.comm.rank] = int.from_bytes(blake2b(note, digest_size=7).digest(), "little")
        self.comm.all_reduce(notes)
        if not kept or (notes != notes[0]).any():
            self._refuse_what_differs(ready, divided)
        for parameter in self.ready if self.averaged_later else ():
            drop_placeholder(parameter)
        self.ready = []

    def _refuse_what_differs(self, ready: list[str], divided: bool) -> None:
        samples, ready = zip(*self.comm.all_gather_object((self.samples, ready)), strict=True)
        for name in self.names.values():
            counts = [others.count(name) for others in ready]
            if set(counts) != {1}:
                self._refuse(
                    f"{name} got {counts} gradients on ranks 0 to {self.comm.size - 1}, but needs one per step: for "
                    "unused parameters and several backward passes, use the full class"
                )
        if len(set(samples)) > 1 and not divided:
            self._refuse(
                f"ranks had batches of {samples} (shapes, and how many count in masks): take equal ones, the loss of "
                "mean_over_tokens, or batch_size of the full class"
            )
        if self.in_order and any(others != ready[0] for others in ready):
            self._refuse("layers ran in another order on another rank: let all ranks compute the same")

    def _forward_begins(self, model, inputs, named) -> None:
        if not torch.is_grad_enabled():
            return
        if self.ready:
            self._refuse("a backward pass was interrupted, or no step() followed it: build all of it anew")
        if {parameter for parameter in model.parameters() if parameter.requires_grad} != set(self.names):
            self._refuse("a parameter was frozen, unfrozen or replaced after construction: build all again")
        tensors = [one for one in (*inputs, *named.values()) if isinstance(one, torch.Tensor) and one.dim()]
        if not tensors:
            self._refuse("the model got no tensor of samples: pass the batch as its first argument")
        first, masks = tensors[0], [int(one.sum()) for one in tensors if one.dtype == torch.bool]
        has_tokens = first.dim() > 2 or not first.is_floating_point()  # (samples, tokens, ...)
        self.samples = (tuple(first.shape[: 1 + has_tokens]), *masks)

    def _check_units(self, units) -> None:
        if not all(isinstance(unit, nn.Module) for unit in units):
            self._refuse(f"units are {units}: give a list of modules")
        owned = [id(parameter) for unit in units for parameter in unit.parameters()]
        kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in self.model.parameters()}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                self._refuse(f"{name} is frozen: use the full class")
            if len(kinds) > 1 or parameter.dtype not in (torch.float32, torch.float64):
                self._refuse(f"parameters are {sorted(kinds)}: use one of float32 and float64, or the full class")
            if not parameter.is_contiguous():
                self._refuse(f"{name} is not contiguous: set {name}.data = {name}.data.contiguous() before")
            if owned.count(id(parameter)) != 1:
                self._refuse(
                    f"{name} is in {owned.count(id(parameter))} units, but must be in one: choose modules that cover "
                    "all parameters once, with tied parameters in the same unit"
                )

    def _refuse(self, why: str):
        raise DtlibError(f"{self.who}: {why}.")


def check_input(x: torch.Tensor, weight: torch.Tensor, who: str) -> None:
    """Refuse an input that is not what this rank's ``weight``, (out_features, in_features), multiplies."""
    if x.shape[-1:] != weight.shape[1:] or (x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type)):
        raise DtlibError(
            f"{who} takes {weight.shape[1]} features a rank, of {weight.dtype}: this input is {x.dtype} of shape "
            f"{tuple(x.shape)}."
        )


def around(kind: type | ModuleType, name: str, function: Callable) -> None:
    """Let a method of a plain class, or a function of a plain file, be ``function(plainly, ...)``."""
    plainly = vars(kind)[name]

    @wraps(plainly)
    def contracted(*args, **named):
        return function(plainly, *args, **named)

    setattr(kind, name, contracted)


def beforehand(kind: type | ModuleType, name: str, check: Callable) -> None:
    """Let it call ``check`` first, with the same arguments."""

    def checked(plainly, *args, **named):
        check(*args, **named)
        return plainly(*args, **named)

    around(kind, name, checked)


def group_and_communicator(group: AnyCommunicator | None) -> tuple[ProcessGroup | None, Communicator]:
    """torch's group for a plain class, and its communicator, from either; None is torch's default group."""
    comm = as_communicator(group or dist.group.WORLD)  # type: ignore[arg-type]  # which refuses None
    return comm.group, comm
