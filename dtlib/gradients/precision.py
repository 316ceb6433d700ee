"""Mixed precision: the model in 16 bits, its master copy and the optimizer's states in 32.

    16 bits   parameters ---> forward, backward ---> gradients
                  ^                                     | / loss scale
    32 bits   master weights <--- optimizer step <--- gradients

P. Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from dtlib.errors import DtlibError
from dtlib.gradients.shard_info import info_of

if TYPE_CHECKING:
    from dtlib.comm import Communicator


class MasterWeights:
    """float32 copies of parameters in 16 bits; an optimizer is made of ``masters`` instead of the parameters.

    float32 and float64 parameters are their own masters, unless their masters live on another ``device``. What others
    write into the parameters, such as ``load_state_dict``, reaches the masters with the next gradients (what is written
    behind autograd's back, as into ``parameter.data``, does not). ``wholes`` are what they write into, where
    ``parameters`` are shards of it.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], device: torch.device | str | None = None,
        wholes: Iterable[torch.Tensor] | None = None,
    ):  # fmt: skip
        self.parameters = list(parameters)
        self.wholes = list(self.parameters if wholes is None else wholes)
        self.versions = [whole._version for whole in self.wholes]
        self.masters = [
            self._master_of(parameter, torch.device(device or parameter.device)) for parameter in self.parameters
        ]

    def __iadd__(self, other: MasterWeights) -> MasterWeights:
        for name in ("parameters", "wholes", "versions", "masters"):
            getattr(self, name).extend(getattr(other, name))
        return self

    @staticmethod
    def _master_of(parameter, device):
        dtype = torch.float32 if parameter.dtype.itemsize == 2 else parameter.dtype
        if (dtype, device) == (parameter.dtype, parameter.device):
            return parameter
        return torch.nn.Parameter(parameter.detach().to(device, dtype))

    def take_gradients(self, scale: float = 1.0) -> None:
        """Give the masters the gradients of the parameters, divided by ``scale``; copies take their place."""
        self._take_values()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                gradient = parameter.grad
                master.grad = None if gradient is None else gradient.detach().to(master.device, master.dtype)
                parameter.grad = gradient = None
            if master.grad is not None and scale != 1:
                master.grad.div_(scale)

    @torch.no_grad()
    def _take_values(self) -> None:
        """Where others have written into a parameter since ``give_values``: its master takes what is new there."""
        for i, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            if parameter is not master and self.wholes[i]._version != self.versions[i]:
                value = parameter.to(master.device)
                master.copy_(torch.where(value == master.to(value.dtype), master, value.to(master.dtype)))
                self.versions[i] = self.wholes[i]._version

    @torch.no_grad()
    def give_values(self) -> None:
        """Give the parameters the values of their masters, rounded."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)
        self.versions = [whole._version for whole in self.wholes]  # slices of one memory count together


class LossScale:
    """What the loss is multiplied with, so that small gradients do not vanish in float16.

    It doubles after ``window`` good steps in a row and halves after ``hysteresis`` steps with an overflow; a step that
    overflows is skipped. ``dynamic=False`` keeps it as it is. Counterpart: DeepSpeed's ``DynamicLossScaler``.
    """

    def __init__(
        self, scale: float = 1.0, dynamic: bool = False, window: int = 1000, hysteresis: int = 2, smallest: float = 1.0
    ):
        self.scale = scale
        self.dynamic = dynamic
        self.window, self.hysteresis, self.smallest = window, hysteresis, smallest
        self._good, self._patience = 0, hysteresis

    def state_dict(self) -> dict:
        return {"scale": self.scale, "good": self._good, "patience": self._patience}

    def load_state_dict(self, state: dict) -> None:
        self.scale, self._good, self._patience = state["scale"], state["good"], state["patience"]

    def update(self, overflow: bool) -> None:
        """Tell it how a step went."""
        if not self.dynamic:
            return
        if overflow:
            self._good = 0
            self._patience -= 1
            if self._patience <= 0:
                self.scale = max(self.smallest, self.scale / 2)
                self._patience = 1
            return
        self._good += 1
        if self._good % self.window == 0:
            self.scale *= 2
            self._patience = self.hysteresis


def all_finite(gradients: Iterable[torch.Tensor | None], comm: Communicator | None = None) -> bool:
    """True if no gradient has an infinity or a NaN; with ``comm``, on any of its ranks, each of which has others."""
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)
    if comm is not None:
        return bool(comm.all_reduce(torch.tensor(finite), op="min"))
    return finite


def refuse_shards(parameters: Iterable[torch.Tensor], what: str) -> None:
    """A norm over parameters that tensor parallelism has cut, or of experts, would be that of one rank's share.

    Raises:
        DtlibError: on every rank, as all have shards.
    """
    parameters = list(parameters)
    if any(len(info_of(parameter).experts) > 1 for parameter in parameters):
        raise DtlibError(
            f"{what}: each expert's parameters are on one rank, so this is not the norm of all parameters: clip with "
            "dtlib.parallel.expert.clip_grad_norm_ between backward and step."
        )
    count = sum(len(info_of(parameter).tensor) > 1 for parameter in parameters)
    if count:
        raise DtlibError(
            f"{what}: {count} parameters are shards of tensor-parallel layers, so this is not the norm of the whole: "
            "train them without ZeRO, and clip with dtlib.parallel.tensor.clip_grad_norm_ between backward and step."
        )


def clip_by_norm(
    gradients: Iterable[torch.Tensor | None], largest: float, comm: Communicator | None = None,
    counted: Iterable[torch.Tensor] | None = None, norm_type: float = 2.0,
) -> float:  # fmt: skip
    """Scale gradients down together so that their joint norm is at most ``largest``; returns the norm before.

    With ``comm`` they are shards: every rank has others, and the norm is that of all. ``counted`` are those that count
    in it, if not all do: what several ranks have must count on one of them. ``norm_type`` is a number above 0;
    ``inf`` is the largest absolute value.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise DtlibError(f"clip_grad_norm_(norm_type={norm_type:g}): pass a number above 0, such as 2, or inf.")
    # Ordinary tensors: ShardedGradient refuses norms, as those who ask rarely know of the other ranks.
    ordinary = [gradient.as_subclass(torch.Tensor) for gradient in gradients if gradient is not None]
    counted = ordinary if counted is None else [gradient.as_subclass(torch.Tensor) for gradient in counted]
    norms = [torch.linalg.vector_norm(one, norm_type) for one in counted if one.numel()]
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=torch.float64)
    if comm is not None and norm_type == float("inf"):
        norm = comm.all_reduce(norm.double(), op="max")
    elif comm is not None:
        norm = comm.all_reduce(norm.double() ** norm_type).pow(1 / norm_type)
    if ordinary:
        torch._foreach_mul_(ordinary, float(torch.clamp(largest / (norm + 1e-6), max=1.0)))
    return float(norm)
