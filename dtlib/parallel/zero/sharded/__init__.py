"""ZeRO stage 3: every rank keeps an equal shard of everything; parameters are whole only while they are used.

    at rest     rank 0: shard 0    rank 1: shard 1 ...    parameters, gradients, optimizer states
    forward     all_gather, compute, free                 unit by unit
    backward    all_gather, compute, reduce_scatter, free

A *unit* is a module whose parameters are gathered and freed together. The unit at the top of a model contains all
parameters that are in no other unit. A rank holds only its shards and the units that compute at the moment. Parameters
are sent twice and gradients once: 3 P (N-1)/N elements per step. Data parallelism sends 2 P (N-1)/N.

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020, section 5.3; Y.
Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 16(12), 2023.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import nn

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.precision import clip_by_norm, refuse_shards
from dtlib.parallel.zero.sharded.unit import Unit, plan_of, unit_of
from dtlib.world import init


def fully_shard(module: nn.Module, comm: AnyCommunicator | None = None, reshard_after_forward: bool = True,
                prefetch: bool | None = None, progress: str | None = None) -> nn.Module:  # fmt: skip
    """Make ``module`` a unit of stage 3, in place, and return it. Parameters of earlier units are left out.

    Call it on the blocks of a model first, then on the model. Between steps, the model's parameters are this rank's
    shards: one-dimensional and possibly empty. All values are rank 0's. Construct the optimizer afterwards. An
    optimizer that was constructed before has the whole parameters and trains nothing, without an error. Learning rates
    must be equal on all ranks, which nothing checks.

        for layer in model.layers:
            fully_shard(layer, comm)
        fully_shard(model, comm)
        optimizer = torch.optim.AdamW(model.parameters())     # only element-wise optimizers

    Args:
        module: the module, whose class is changed to a subclass of ``FullySharded``.
        comm: a dtlib communicator, an mpi4py communicator or a torch ``ProcessGroup``. Default: the communicator of
            ``dtlib.init()``.
        reshard_after_forward: free parameters after the forward pass and gather them again for the backward pass. If
            False, they stay whole in between, as in stage 2.
        prefetch: gather the next unit while this one computes, in the order of the last forward pass. Default: True if
            cores are idle while computing (an accelerator, or an emulated network).
        progress: how pending messages progress, as for ``DataParallel``.

    The module gets ``no_sync()``, ``clip_grad_norm_(max_norm)`` and ``summon_full_params()``. All ranks must run the
    units in the same order. A rank without samples runs an empty batch, and all ranks compute the loss
    with ``mean_over_tokens`` (gradients/tokens.py).

    Counterparts: ``torch.distributed.fsdp.fully_shard``; DeepSpeed's ZeRO stage 3.

    Raises:
        DtlibError: for a parameter that modules of two units share, that cannot be averaged, or that is on the meta
            device. The message names the parameter.
    """
    if unit_of(module) is not None:
        raise DtlibError(f"This {type(module).__name__} is already a unit: call fully_shard once for each module.")
    comm = as_communicator(init().comm if comm is None else comm)
    module.__dict__["_unit"] = Unit(module, comm, reshard_after_forward, prefetch, progress)
    # A subclass of the module's own class, so that isinstance checks of users still work.
    module.__class__ = type(f"Sharded{type(module).__name__}", (FullySharded, type(module)), {})
    return module


class FullySharded(nn.Module):
    """Methods that ``fully_shard`` adds to a module. Call them on the whole model."""

    _unit: Unit

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise DtlibError(
            "A model of fully_shard cannot be copied, because all ranks would have to do it together: build another "
            "one, and load the state_dict() that you read within summon_full_params()."
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on each rank in this context; the first backward pass after it averages the sums.

        ``zero_grad(set_to_none=True)`` drops the accumulated gradients.
        """
        plan = plan_of(self._unit)
        before, plan.synchronising = plan.synchronising, False
        try:
            yield
        finally:
            plan.synchronising = before

    @contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """Gather all parameters on every rank in this context, to read, save or change them in place.

        Afterwards, rank 0's values are kept. All ranks enter the context between passes. The model cannot compute
        inside it.

        Counterparts: ``FullyShardedDataParallel.summon_full_params``; ``unshard()`` of each FSDP2 module; DeepSpeed's
        ``GatheredParameters(params, modifier_rank=0)``.
        """
        units = [unit for module in self.modules() if (unit := unit_of(module)) is not None]
        whole = [(flat, flat.gather_full()) for unit in units for flat in unit.flats]
        try:
            yield
        finally:
            for flat, memory in whole:
                flat.scatter_full(memory)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their joint 2-norm over the shards of all ranks is at most ``max_norm``.

        Returns the norm before scaling.

        Raises:
            DtlibError: for shards of tensor-parallel layers, because the other shards are on other ranks.
        """
        refuse_shards(self.parameters(), f"clip_grad_norm_({max_norm})")
        gradients = [parameter.grad for parameter in self.parameters()]
        return clip_by_norm(gradients, max_norm, self._unit.comm)

    def tensors_by_kind(self) -> dict[str, list]:
        """Return the buffers of this unit by purpose (measure/buffers.py)."""
        unit, flats = self._unit, self._unit.flats
        return {
            "parameters": [piece for flat in flats for piece in flat.pieces],
            "communication": [flat.whole.flat for flat in flats],
            "communicators": [unit.comm] + ([unit.plan.comm] if unit.plan else []),
        }


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return modules that make good units: the repeated layers of a model.

    These are the elements of each ``ModuleList`` or ``Sequential`` that share no parameter with the rest of the model.
    """
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
