"""A model as a list of layers; each rank builds the layers of its own stages.

    layers       embed | block block block | block block head         cuts [0, 1, 4, 7]
    stage        0     | 1                 | 2

Names and arguments are DeepSpeed's (``deepspeed.pipe``).
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from dtlib.comm import AnyCommunicator, Communicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline.cuts import balanced_cuts, parameters_of, times_of
from dtlib.parallel.pipeline.stage import PipelineStage
from dtlib.world import init


class LayerSpec:
    """A layer that is built later, on the rank of its stage: ``LayerSpec(nn.Linear, 4, 8)``."""

    def __init__(self, typename: type[nn.Module], *module_args: object, **module_kwargs: object):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise DtlibError(f"LayerSpec needs a subclass of nn.Module and its arguments, but got {typename!r:.60}.")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        """Construct the module."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return f"LayerSpec({self.typename.__name__})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its weight with all layers of the same ``key``, on the same stage or other stages.

    ``forward_fn(module, x)`` is called instead of the module. ``tied_weight_attr`` is the name of the shared weight.
    """

    def __init__(self, key: str, typename: type[nn.Module], *module_args: object, forward_fn: Callable | None = None,
                 tied_weight_attr: str = "weight", **module_kwargs: object):  # fmt: skip
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class PipelineModule(nn.Module):
    """This rank's stages of a model that is given as a list of layers.

    Args:
        layers: LayerSpecs, TiedLayerSpecs, modules, or functions without parameters. Each takes the output of the
            previous layer.
        num_stages: number of stages. Stage s is on rank s of ``comm``, modulo its size.
        stages_per_rank: more than 1 for ``ScheduleInterleaved1F1B``; ``stages()`` returns the stages of this rank.
        loss_fn: a function of output and target, for the last stage.
        partition_method: ``"parameters"`` (similar numbers of parameters per stage), ``"uniform"`` (equal numbers of
            layers), ``"time"`` (measured with ``sample``), or a list of cuts such as ``[0, 1, 4, 7]``.
        comm: the ranks of one pipeline. By default, all ranks form as many pipelines as possible: ``world.mesh(data=-1,
            pipe=num_stages)``. Then ``data_comm`` joins the ranks with the same stages.
        base_seed: layer i is built with the seed ``base_seed + i``, so its values do not depend on the rank.
        sample: an input of the first layer, for ``"time"``.
        activation_checkpoint_interval: if above 0, ``dtlib.initialize`` makes stages recompute activations, as its
            config can.

    Counterpart: ``deepspeed.pipe.PipelineModule``.

    Raises:
        DtlibError: on every rank, if the layers cannot be divided as asked.
    """

    def __init__(self, layers: Iterable, num_stages: int, loss_fn: Callable | None = None,
                 partition_method: str | Sequence[int] = "parameters", comm: AnyCommunicator | None = None,
                 base_seed: int = 1234, sample: object = None, stages_per_rank: int = 1,
                 activation_checkpoint_interval: int = 0):  # fmt: skip
        super().__init__()
        comm = None if comm is None else as_communicator(comm)
        ranks = init().size if comm is None else comm.size
        counts = all(isinstance(number, int) and number >= 1 for number in (num_stages, stages_per_rank))
        needed = num_stages // stages_per_rank if counts and num_stages % stages_per_rank == 0 else 0
        if not needed or ranks % needed or (comm is not None and ranks != needed):
            many = f", stages_per_rank={stages_per_rank}" if stages_per_rank != 1 else ""
            why = "pass whole numbers from 1 on, and a divisor of num_stages as stages_per_rank"
            if needed:
                way = f"use a divisor of {ranks}, or pass comm" if comm is None else "pass a comm of this size"
                why = f"the stages need {needed} ranks, but there are {ranks}: {way}"
            raise DtlibError(f"PipelineModule(num_stages={num_stages}{many}): {why}.")
        if comm is None:
            mesh = init().mesh(data=-1, pipe=needed)
            self.comm, self.everyone = mesh["pipe"], init().comm
            self.data_comm: Communicator | None = mesh["data"]
        else:
            self.comm = self.everyone = comm
            self.data_comm = None
        self.loss_fn, self.num_stages, self.base_seed = loss_fn, num_stages, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        specs = list(layers)
        self.cuts = self._cuts(specs, partition_method, sample)
        self._refuse_shared(specs, needed)
        self.stage_indices = range(self.comm.rank, num_stages, needed)
        self.layers = nn.ModuleDict()
        tied: dict = {}
        # A plain list, not a ModuleList: the layers are registered in self.layers, so each parameter has one name.
        self._stage_modules = [
            _StageModule([self._layer(specs, i, tied) for i in range(self.cuts[stage], self.cuts[stage + 1])])
            for stage in self.stage_indices
        ]
        self._tied = self._share_tied(specs, tied)
        self.has_ties = any(isinstance(spec, TiedLayerSpec) for spec in specs)

    def forward(self, *inputs: object) -> object:
        if len(self._stage_modules) > 1:
            raise DtlibError(f"This rank has {len(self._stage_modules)} stages: pass stages() to a schedule.")
        return self._stage_modules[0](*inputs) if self._stage_modules else inputs[0]

    def stages(self) -> list[PipelineStage]:
        """Return this rank's stages for a schedule."""
        return [
            PipelineStage(module, index, self.num_stages, self.comm)
            for module, index in zip(self._stage_modules, self.stage_indices, strict=True)
        ]

    def reduce_tied_gradients(self) -> None:
        """Sum the gradients of each tied weight over its stages. Call this after a step of the schedule.

        Raises:
            DtlibError: on all stages of a weight, if the weight is frozen on only some of them or has a sparse
                gradient.
        """
        for comm, *where in self._tied:
            weight = getattr(*where)
            used, sparse = weight.grad is not None, weight.grad is not None and weight.grad.is_sparse
            # Agree first: a stage that has not used the weight must still take part in the all-reduce.
            facts = torch.tensor([used, sparse, weight.requires_grad], dtype=torch.int64)
            used, sparse, trained = comm.all_reduce(facts).tolist()
            if sparse:
                raise DtlibError(
                    f"A tied weight of shape {tuple(weight.shape)} has a sparse gradient: build its layers with "
                    "sparse=False."
                )
            if 0 < trained < comm.size:
                raise DtlibError(
                    f"A tied weight of shape {tuple(weight.shape)} is frozen on {comm.size - trained} of its "
                    f"{comm.size} stages, so their values would differ: set the same requires_grad on all of them."
                )
            if used:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                comm.all_reduce(weight.grad)

    def counted(self, parameter: torch.Tensor) -> bool:
        """Return whether a norm counts this parameter here: a tied weight counts only on the first of its stages."""
        return not any(getattr(*where) is parameter and comm.rank for comm, *where in self._tied)

    def _layer(self, specs, i: int, tied: dict):
        """Return layer i as a function; register its module and tie its weight to local layers of the same key."""
        spec, module = specs[i], self._build(specs, i)
        if isinstance(spec, TiedLayerSpec):
            setattr(module, spec.tied_weight_attr, getattr(*tied.setdefault(spec.key, (module, spec.tied_weight_attr))))
        if isinstance(module, nn.Module):
            self.layers[str(i)] = module
        forward = getattr(spec, "forward_fn", None)
        return partial(forward, module) if forward else module

    def _build(self, specs, i: int):
        """Build layer i with values that do not depend on the rank. A tied layer gets the weight of the first one."""
        spec = specs[i]
        if not isinstance(spec, LayerSpec):
            return spec
        key = getattr(spec, "key", None)
        first = next(j for j, s in enumerate(specs) if j == i or (key is not None and getattr(s, "key", None) == key))
        # Seed by layer index, and keep the caller's random state.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.base_seed + i)
            module = spec.build()
            if first != i and isinstance(spec, TiedLayerSpec):
                torch.manual_seed(self.base_seed + first)
                source = specs[first]
                value = getattr(source.build(), source.tied_weight_attr).detach()
                with torch.no_grad():
                    getattr(module, spec.tied_weight_attr).copy_(value)
        return module

    def _share_tied(self, specs, tied: dict) -> list:
        """Return, for each key with several stages, their communicator, a local module, and the weight's name."""
        found = []
        for key in sorted({spec.key for spec in specs if isinstance(spec, TiedLayerSpec)}):
            comm = self.comm.split(0 if key in tied else None)
            if comm is not None and comm.size > 1:
                found.append((comm, *tied[key]))
        return found

    def _refuse_shared(self, specs, ranks: int) -> None:
        """Refuse modules on different ranks that share a parameter, because each rank would train its own copy."""
        first: dict[nn.Parameter, int] = {}
        for i, spec in enumerate(specs):
            for name, parameter in spec.named_parameters() if isinstance(spec, nn.Module) else ():
                stages = [bisect(self.cuts, layer) - 1 for layer in (first.setdefault(parameter, i), i)]
                if (stages[1] - stages[0]) % ranks:
                    raise DtlibError(
                        f"Layers {first[parameter]} and {i} share the parameter {name}, but are on stages {stages[0]} "
                        f"and {stages[1]}, so each stage would train its own copy: make both layers a TiedLayerSpec "
                        "with the same key, or cut the model elsewhere."
                    )

    def _cuts(self, specs, method, sample) -> list[int]:
        if isinstance(method, (list, tuple)):
            cuts = list(method)
            fits = len(cuts) == self.num_stages + 1 and cuts[0] == 0 and cuts[-1] == len(specs)
            if not fits or any(a >= b for a, b in pairwise(cuts)):
                raise DtlibError(
                    f"partition_method={cuts} does not cut {len(specs)} layers into {self.num_stages} stages: pass "
                    f"{self.num_stages + 1} rising numbers from 0 to {len(specs)}."
                )
            return cuts
        costs: Sequence[float]
        match method:
            case "uniform":
                costs = [1] * len(specs)
            case "parameters":
                costs = [parameters_of(spec) for spec in specs]
            case "time":
                if sample is None:
                    raise DtlibError("partition_method='time' needs an input for the measurement: pass sample=x.")
                # Use rank 0's times: measurements differ between ranks and pipelines, but cuts must be equal.
                everyone = self.everyone
                measured = [times_of(specs, self._build, sample)] if everyone.rank == 0 else None
                [times] = everyone.broadcast_object(measured)
                if isinstance(times, str):
                    raise DtlibError(times)
                costs = times
            case _:
                raise DtlibError(
                    f"partition_method={method!r}: choose 'parameters', 'uniform', 'time', or a list of cuts."
                )
        return balanced_cuts(costs, self.num_stages)


class _StageModule(nn.Module):
    """The layers of one stage, applied in sequence."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        self.layers = nn.ModuleList(f for f in functions if isinstance(f, nn.Module))

    def forward(self, *inputs):
        value = inputs[0] if len(inputs) == 1 else inputs
        for function in self.functions:
            value = function(value)
        return value
