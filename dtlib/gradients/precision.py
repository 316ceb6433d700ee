"""Mixed precision: a model in 16 bits; master weights and optimizer states in 32 bits.

    16 bits   parameters ---> forward, backward ---> gradients
                  ^                                     | / loss scale
    32 bits   master weights <--- optimizer step <--- gradients

P. Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from collections.abc import Iterable

import torch
from torch import nn

from dtlib.comm import AnyCommunicator, Communicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.shard_info import info_of


class MasterWeights:
    """float32 copies of 16-bit parameters. Construct the optimizer from ``masters`` instead of the parameters.

    float32 and float64 parameters are their own masters, unless ``device`` is another device. If other code writes into
    a parameter, as ``load_state_dict`` does, the next ``take_gradients`` copies the new values to the master. Writes
    that bypass autograd's version counter, such as writes to ``parameter.data``, are not noticed.

    Args:
        parameters: the parameters to train, or this rank's shards of them.
        device: the device of the masters; by default that of the parameters.
        wholes: if ``parameters`` are shards, the unsharded parameters that other code modifies.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], device: torch.device | str | None = None,
                 wholes: Iterable[torch.Tensor] | None = None):  # fmt: skip
        self.parameters = list(parameters)
        self.wholes = list(self.parameters if wholes is None else wholes)
        self.versions = [whole._version for whole in self.wholes]
        self.masters = [self._master_of(parameter, device) for parameter in self.parameters]

    @staticmethod
    def _master_of(parameter, device):
        value = parameter.detach()
        master = value.to(device or value.device, torch.float32 if value.dtype.itemsize == 2 else value.dtype)
        return parameter if master is value else torch.nn.Parameter(master)

    def take_gradients(self, scale: float = 1.0) -> None:
        """Move gradients from parameters to masters: convert them to the master's dtype and divide by ``scale``."""
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
        """Copy values that other code wrote into parameters since ``copy_to_parameters`` to the masters."""
        for i, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            # An element that still equals its rounded master is unchanged, and the master has more digits: keep it.
            if parameter is not master and self.wholes[i]._version != self.versions[i]:
                value = parameter.to(master.device)
                master.copy_(torch.where(value == master.to(value.dtype), master, value.to(master.dtype)))
                self.versions[i] = self.wholes[i]._version

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Copy the masters' values into the parameters, rounded to the parameters' dtype."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)
        # Views of one buffer share a version counter, so read it after the last copy.
        self.versions = [whole._version for whole in self.wholes]


class LossScale:
    """The factor that multiplies the loss, so that small gradients do not underflow in float16.

    The scale doubles after ``window`` steps in a row without overflow. After ``hysteresis`` steps with an overflow the
    scale halves, and then again with each further overflow until it has doubled. The smallest scale is ``smallest``.
    The caller skips the optimizer's step if there is an overflow. With ``dynamic=False`` the scale is constant.

    Counterpart: DeepSpeed's ``DynamicLossScaler``.
    """

    def __init__(self, scale: float = 1.0, dynamic: bool = False, window: int = 1000, hysteresis: int = 2,
                 smallest: float = 1.0):  # fmt: skip
        self.scale = scale
        self.dynamic = dynamic
        self.window, self.hysteresis, self.smallest = window, hysteresis, smallest
        self._good, self._patience = 0, hysteresis

    def state_dict(self) -> dict:
        """Return the scale and its counters, for a checkpoint."""
        return {"scale": self.scale, "good": self._good, "patience": self._patience}

    def load_state_dict(self, state: dict) -> None:
        """Restore a state that ``state_dict`` returned."""
        self.scale, self._good, self._patience = state["scale"], state["good"], state["patience"]

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step; ``overflow`` is whether a gradient had an infinity or a NaN."""
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
    """Return whether no gradient has an infinity or a NaN; with ``comm``, on all ranks (one all-reduce)."""
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)
    if comm is not None:
        return bool(comm.all_reduce(torch.tensor(finite), op="min"))
    return finite


def refuse_shards(parameters: Iterable[torch.Tensor], what: str) -> None:
    """Refuse tensor-parallel shards and experts: a norm over them would include this rank's parameters only.

    Raises:
        DtlibError: on every rank, because every rank has such parameters. ``what`` begins the message.
    """
    for info in map(info_of, parameters):
        if info.differs():
            raise DtlibError(
                f"{what}: other ranks have other shards of layers, or other experts, so this is not the norm of all: "
                f"train shards of layers without ZeRO, and clip with dtlib.parallel."
                f"{'expert' if len(info.experts) > 1 else 'tensor'}.clip_grad_norm_ between backward and step."
            )


def clip_by_norm(
    gradients: Iterable[torch.Tensor | None], largest: float, comm: Communicator | None = None,
    counted: Iterable[torch.Tensor] | None = None,
) -> float:  # fmt: skip
    """Scale gradients so that their joint 2-norm is at most ``largest``; return the norm before scaling.

    Args:
        gradients: are scaled in place.
        largest: the norm above which gradients are scaled down.
        comm: if set, gradients are shards, and the norm is over the shards of all ranks (one all-reduce).
        counted: the gradients that enter the norm; by default all. A gradient that several ranks have must be counted
            on one rank only.
    """
    # ShardedGradient refuses norms, so convert to ordinary tensors. This function includes the other ranks' shards.
    ordinary = [gradient.as_subclass(torch.Tensor) for gradient in gradients if gradient is not None]
    counted = ordinary if counted is None else [gradient.as_subclass(torch.Tensor) for gradient in counted]
    norm = torch.nn.utils.get_total_norm(counted)
    if comm is not None:
        norm = comm.all_reduce(norm.double().square()).sqrt()
    if ordinary:
        torch._foreach_mul_(ordinary, float(torch.clamp(largest / (norm + 1e-6), max=1.0)))
    return float(norm)


def clip_grad_norm_(model: nn.Module, max_norm: float, comm: AnyCommunicator) -> float:
    """Scale all gradients so that the 2-norm of the whole model's gradient is at most ``max_norm``.

    Call it between ``backward()`` and ``step()`` on all ranks of ``comm``, the tensor or the expert axis. Returns the
    norm before scaling. Gradients inside a ``ZeroOptimizer`` are not included.

    ``nn.utils.clip_grad_norm_`` would see only this rank's shards or experts, so each rank would use another factor.
    Here their squares are summed over ranks, and parameters that every rank has are counted once. Gradients must
    already be averaged over the data axis, for example by ``DataParallel``.

    Raises:
        DtlibError: if ``comm`` is not the axis that shares a parameter of the model.
    """
    comm = as_communicator(comm)
    gradients, counted = [], []
    for name, parameter in model.named_parameters():
        sharing = info_of(parameter).tensor or info_of(parameter).experts
        if sharing and sharing != comm.members:
            raise DtlibError(
                f"clip_grad_norm_: ranks {list(sharing)} have the other shards or experts of {name}, but comm has "
                f"ranks {list(comm.members)}: pass mesh['tensor'] or mesh['expert']."
            )
        if parameter.grad is not None:
            gradients.append(parameter.grad)
            if sharing or comm.rank == 0:  # rank 0 counts the parameters that all ranks have
                counted.append(parameter.grad)
    return clip_by_norm(gradients, max_norm, comm, counted)
