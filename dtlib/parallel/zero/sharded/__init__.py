"""ZeRO stage 3: every rank keeps an equal shard of everything; parameters are whole only while they are used.

    at rest     rank 0: shard 0    rank 1: shard 1 ...    parameters, gradients, optimizer states
    forward     all_gather, compute, free                 unit by unit
    backward    all_gather, compute, reduce_scatter, free

A *unit* is a module whose parameters are gathered and freed together; at the top of a model there is one for all that
is in no other. A rank never holds more than its shards and the units that compute now. Parameters travel twice and
gradients once: 3 P (N-1)/N elements a step, where data parallelism sends 2 P (N-1)/N.

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, section 5.3;
Y. Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 16(12), 2023.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import nn

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.precision import clip_by_norm, refuse_shards
from dtlib.parallel.zero.sharded.policy import Policy
from dtlib.parallel.zero.sharded.unit import Unit, plan_of, unit_of
from dtlib.world import init


def fully_shard(module: nn.Module, comm: AnyCommunicator | None = None, reshard_after_forward: bool = True,
                prefetch: bool | None = None, progress: str | None = None, device: torch.device | str = "cpu",
                mp_policy: object = None) -> nn.Module:  # fmt: skip
    """Make ``module`` a unit of stage 3, in place, with those of its parameters that are in no unit yet; returns it.

    Call it on the blocks of a model first, then on the model. Between steps the model's parameters are this rank's
    shards: one-dimensional, maybe empty. Make the optimizer afterwards, of these: one that was made before has the
    whole parameters, and trains nothing, without an error. All values are rank 0's.

        for layer in model.layers:
            fully_shard(layer, comm)
        fully_shard(model, comm)
        optimizer = torch.optim.AdamW(model.parameters())     # element-wise ones only

    Args:
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``; by default that of
            ``dtlib.init()``.
        reshard_after_forward: free parameters after the forward pass and gather them anew for the backward pass; else
            they stay, as in stage 2.
        prefetch: gather the next unit, in the order of the last forward pass, while this one computes. By default
            where computing leaves the cores idle: on an accelerator, or with an emulated network.
        progress: who moves messages on meanwhile, as for ``DataParallel``.
        device: where parameters on the meta device come to life, unit by unit, by ``reset_parameters()`` of their
            modules: a model that is built under ``torch.device("meta")`` is never whole on any rank.
        mp_policy: torch's ``MixedPrecisionPolicy``: whole parameters and floating inputs in ``param_dtype``, gradients
            averaged in ``reduce_dtype``, floating outputs in ``output_dtype``; what the optimizer has stays as it is.
            Within ``no_sync()`` gradients add up in ``param_dtype``.

    The module gets ``no_sync()``, ``clip_grad_norm_(max_norm)``, ``summon_full_params()``, and ``batch_size``, which
    weights this rank's gradients by its samples, if set on all ranks. All ranks must run the units in the
    same order; one without samples runs an empty batch.

    Counterparts: ``torch.distributed.fsdp.fully_shard``; DeepSpeed's ZeRO stage 3.

    Raises:
        DtlibError: for a parameter that modules of two units share, one that cannot be averaged, and a module that
            cannot be brought to life; by name.
    """
    if unit_of(module) is not None:
        raise DtlibError(f"This {type(module).__name__} is a unit already: call fully_shard once for each module.")
    policy = None if mp_policy is None else Policy.of(mp_policy)
    comm = as_communicator(init().comm if comm is None else comm)
    module.__dict__["_unit"] = Unit(module, comm, reshard_after_forward, prefetch, progress, device, policy)
    module.__class__ = type(f"Sharded{type(module).__name__}", (FullySharded, type(module)), {})
    return module


class FullySharded(nn.Module):
    """What ``fully_shard`` adds to a module; called on the whole model."""

    batch_size: float | None = None
    _unit: Unit

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise DtlibError(
            "A model of fully_shard cannot be copied, because all ranks would have to do it together: build another "
            "one, and load the state_dict() that you read within summon_full_params()."
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context add up whole gradients on each rank; the first one after it averages them.
        ``zero_grad()`` drops them, with ``set_to_none=True``."""
        plan = plan_of(self._unit)
        before, plan.synchronising = plan.synchronising, False
        try:
            yield
        finally:
            plan.synchronising = before

    @contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """All parameters whole on every rank in this context, for ``state_dict()``, to look at, or to change in place;
        afterwards rank 0's values hold. All ranks enter it, between passes; nothing is computed with the model inside.

        Counterparts: ``FullyShardedDataParallel.summon_full_params``; ``unshard()`` of each FSDP2 module; DeepSpeed's
        ``GatheredParameters(params, modifier_rank=0)``.
        """
        units = [unit for module in self.modules() if (unit := unit_of(module)) is not None]
        whole = [(flat, flat.summon()) for unit in units for flat in unit.flats]
        try:
            yield
        finally:
            for flat, memory in whole:
                flat.dismiss(memory)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale all gradients down together so that their joint norm, over the shards of all ranks, is at most
        ``max_norm``; returns the norm before. ``norm_type`` may be ``inf``.

        Raises:
            DtlibError: for parameters that tensor parallelism has cut, as their other shards are not here.
        """
        refuse_shards(self.parameters(), f"clip_grad_norm_({max_norm})")
        gradients = [parameter.grad for parameter in self.parameters()]
        return clip_by_norm(gradients, max_norm, self._unit.comm, norm_type=norm_type)

    def held(self) -> dict[str, list]:
        """Memory of this unit, by what it is for (measure/held.py)."""
        unit, flats = self._unit, self._unit.flats
        return {
            "parameters": [piece for flat in flats for piece in flat.pieces],
            "communication": [flat.whole.flat for flat in flats],
            "communicators": [unit.comm] + ([unit.plan.comm] if unit.plan else []),
        }


def units_of(model: nn.Module) -> list[nn.Module]:
    """Modules that make good units: the repeated layers of a model, each an element of a ``ModuleList`` or
    ``Sequential``, as far as they share no parameter with the rest."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    names = {module: name for name, module in model.named_modules()}
    found: list[nn.Module] = []
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            for module in container:
                inside, prefix = list(module.parameters()), f"{names[module]}."
                alone = all(name.startswith(prefix) for parameter in inside for name in owners[parameter])
                if inside and alone and not any(prefix.startswith(f"{names[other]}.") for other in found):
                    found.append(module)
    return found
