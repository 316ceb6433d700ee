"""Preconditions of the plain classes, checked here so that a plain class contains only its algorithm.

    at construction     all ranks have the same parameters, of a kind that the class supports
    forward pass        the parameters are those of the construction; no gradients are left from an earlier pass
    step                each parameter has one gradient on each rank; all ranks have equally many samples and tokens,
                        and equally many True elements in masks, or use the loss of mean_over_tokens (tokens.py); in the
                        first steps, all ranks have equal parameters

A violation raises a ``DtlibError``. Its message names the alternative, which is usually the full class. The checks at
construction and at the step compare all ranks, and raise on every rank.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from hashlib import blake2b
from types import ModuleType

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from dtlib.comm import AnyCommunicator, Communicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.local_gradient import FreedGradient, UnaveragedGradient, drop_placeholder
from dtlib.gradients.same_model import PASSES, check_same_model, digest_of
from dtlib.gradients.shard_info import hooks_of_others, info_of, set_gradient_type
from dtlib.gradients.tokens import divided_by_all_tokens


class Preconditions:
    """The preconditions of the plain class named ``caller``, for ``model`` on ``comm``; all ranks construct it.

    Args:
        caller: the name of the class in error messages.
        model: the model to train; its forward passes are checked.
        comm: all ranks that average gradients.
        units: modules of which each parameter is in exactly one. All parameters must be trained, and of one dtype,
            float32 or float64. With units (ZeRO), gradients are averaged after the hook, not in it, and all ranks must
            compute them in the same order.
    """

    def __init__(self, caller: str, model: nn.Module, comm: Communicator, units: Sequence[nn.Module] = ()):
        self.caller, self.model, self.in_units, self.steps = caller, model, bool(units), 0
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.names = {parameter: name for name, parameter in trained.items()}
        self.shards = [parameter for parameter in self.names if info_of(parameter).differs()]
        check_same_model(trained, comm, caller, model)
        if any(map(hooks_of_others, self.names)):
            self._refuse("this model still has hooks of another wrapper: build it again")
        if units:
            self._check_units(units)
        # The checks use a communicator of their own, because a rank may still wait for gradients on ``comm``.
        self.whole, self.comm = comm, comm.split(0)
        self.samples: tuple = ()  # the sizes of the last forward pass's batch, and True elements of each mask
        self.ready: list = []  # parameters that got a gradient since the last step, in this order
        model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)

    def gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """Record that autograd has computed the gradient of ``parameter``; a hook of the plain class calls it."""
        if self.in_units and not self.ready:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        self.ready.append(parameter)
        # Until the average exists, ``grad`` is of this rank's batch only. The subclass makes torch's clipping fail.
        if self.in_units and parameter.grad is not None:
            parameter.grad = parameter.grad.as_subclass(UnaveragedGradient)

    def _backward_ends(self) -> None:
        """Set placeholders where gradients were freed, so that torch's clipping fails and does not skip them."""
        for parameter in self.ready:
            if parameter.grad is None:
                parameter.grad = FreedGradient.like(parameter)

    def check_step(self, closure: Callable | None = None) -> None:
        """Raise an error if a precondition was violated since the last step; all ranks call it."""
        if closure is not None:
            self._refuse("step() takes no closure: call loss.backward() first, and then step()")
        # With the loss of mean_over_tokens, ranks may have different numbers of tokens.
        divided = self.whole in divided_by_all_tokens
        divided_by_all_tokens.discard(self.whole)
        for parameter in self.shards:
            set_gradient_type(parameter)
        ready = [self.names[parameter] for parameter in self.ready]
        kept = sorted(ready) == sorted(self.names.values())
        # Each rank contributes one hash. Only if the hashes differ do ranks exchange the facts themselves.
        digest = digest_of(self.names) if self.steps < PASSES else b""
        self.steps += 1
        note = repr((kept, divided, divided or self.samples, self.in_units and ready, digest)).encode()
        notes = np.zeros(self.comm.size, dtype=np.int64)
        notes[self.comm.rank] = int.from_bytes(blake2b(note, digest_size=7).digest(), "little")
        self.comm.all_reduce(notes)
        if not kept or (notes != notes[0]).any():
            self._refuse_differences(ready, divided)
        for parameter in self.ready if self.in_units else ():
            drop_placeholder(parameter)
        self.ready = []

    def _refuse_differences(self, ready: list[str], divided: bool) -> None:
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
                f"ranks had batches of {samples} (shapes, and samples counted by masks): use equal batches, or "
                "the loss of mean_over_tokens"
            )
        if self.in_units and any(others != ready[0] for others in ready):
            self._refuse("layers ran in different orders on different ranks: compute the same on all ranks")
        self._refuse("parameters differ between ranks: load the same values, and take the same steps, on all ranks")

    def _forward_begins(self, model, inputs, named) -> None:
        if not torch.is_grad_enabled():
            return
        if self.ready:
            self._refuse("a backward pass was interrupted, or a step() is missing: build model and optimizer again")
        if {parameter for parameter in model.parameters() if parameter.requires_grad} != set(self.names):
            self._refuse("a parameter was frozen, unfrozen or replaced after construction: build all again")
        tensors = [one for one in (*inputs, *named.values()) if isinstance(one, torch.Tensor) and one.dim()]
        if not tensors:
            self._refuse("the model got no tensor of samples: pass the batch as its first argument")
        # The first tensor is the batch. Boolean tensors are masks, whose True elements count in the loss.
        first, masks = tensors[0], [int(one.sum()) for one in tensors if one.dtype == torch.bool]
        has_tokens = first.dim() > 2 or not first.is_floating_point()  # (samples, tokens, ...)
        self.samples = (tuple(first.shape[: 1 + has_tokens]), *masks)

    def _check_units(self, units) -> None:
        if not all(isinstance(unit, nn.Module) for unit in units):
            self._refuse(f"units are {units}: pass a list of modules")
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
        raise DtlibError(f"{self.caller}: {why}.")


def around(kind: type | ModuleType, name: str, function: Callable) -> None:
    """Wrap method or function ``name`` of ``kind``, a class or module: calls become ``function(original, ...)``."""
    original = vars(kind)[name]

    @wraps(original)
    def contracted(*args, **named):
        return function(original, *args, **named)

    setattr(kind, name, contracted)


def check_first(kind: type | ModuleType, name: str, check: Callable) -> None:
    """Make method or function ``name`` of ``kind`` call ``check`` first, with the same arguments."""

    def checked(original, *args, **named):
        check(*args, **named)
        return original(*args, **named)

    around(kind, name, checked)


def group_and_communicator(group: AnyCommunicator | None) -> tuple[ProcessGroup | None, Communicator]:
    """Return torch's process group and dtlib's communicator for ``group``, which is either, or None for the default."""
    comm = as_communicator(group or dist.group.WORLD)  # type: ignore[arg-type]  # as_communicator refuses None
    return comm.group, comm
