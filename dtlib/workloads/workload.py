"""What there is to train: a model, its data, its loss, and the measure by which it is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dtlib.errors import DtlibError
from dtlib.parallel.pipeline.layers import LayerSpec, TiedLayerSpec

if TYPE_CHECKING:
    from dtlib.comm import Communicator

V = TypeVar("V")


@dataclass
class Workload:
    """A task of the workshop.

    Args:
        name: ``"vision"``, ``"summarization"`` or ``"decoder"``.
        model: ``model(inputs)`` gives outputs; ``inputs`` is a tensor or a tuple of tensors, as ``collate`` gives it.
        layers: LayerSpecs, for ``PipelineModule(layers, ..., base_seed=seed)``: the same function, the same parameters,
            under the same names.
        seed: what ``model`` was built from.
        train, test: map-style data sets.
        collate: a list of samples to ``(inputs, targets)``; None for torch's own.
        loss_fn: outputs and targets to a mean over samples, in which each counts alike: so the mean over micro-batches
            of equal size, or over ranks, is that of the whole batch.
        evaluate: ``evaluate(model, comm)``, called on all ranks, which share the test data out: a dict of figures,
            the same on each. ``model`` is whole on every rank: one like ``model``, with gathered parameters.
        experts: how many its layers have in place of a perceptron; 0 for none.
    """

    name: str
    model: nn.Module
    layers: list
    seed: int
    train: Dataset
    test: Dataset
    collate: Callable | None
    loss_fn: Callable
    evaluate: Callable
    experts: int = 0


class Chain(nn.Module):
    """Layers one after the other on one rank, with the parameters that a ``PipelineModule`` would give them.

    Layer i is built with the seed ``seed + i``; tied ones share the weight of the first. A layer that takes or
    gives several tensors does so as one tuple.
    """

    def __init__(self, specs: Iterable[LayerSpec], seed: int):
        super().__init__()
        self.layers = nn.ModuleDict()
        tied: dict = {}
        self._functions = []
        with torch.random.fork_rng(devices=[]):
            for i, spec in enumerate(specs):
                torch.manual_seed(seed + i)
                layer = spec.build()
                self.layers[str(i)] = layer
                self._functions.append(getattr(spec, "forward_fn", None))
                if isinstance(spec, TiedLayerSpec):
                    first = tied.setdefault(spec.key, getattr(layer, spec.tied_weight_attr))
                    setattr(layer, spec.tied_weight_attr, first)

    def forward(self, *inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        for layer, function in zip(self.layers.values(), self._functions, strict=True):
            value = function(layer, value) if function else layer(value)
        return value


def settings(config: dict, defaults: dict, name: str) -> dict:
    """The config over its defaults.

    Raises:
        DtlibError: for a key that the workload does not know, or a value of another type than its default.
    """
    for key, value in config.items():
        if key not in defaults:
            near = get_close_matches(str(key), defaults, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(defaults)}."
            raise DtlibError(f"The {name} workload does not know the key {key!r}: {hint}")
        default = defaults[key]
        kind = str if default is None else type(default)
        if type(value) is not kind and not (default is None and value is None):
            raise DtlibError(f"{key} of the {name} workload is {value!r}: give {_KINDS[kind]}.")
    return {**defaults, **config}


_KINDS = {str: "a text", int: "a whole number", float: "a decimal number", bool: "true or false"}


def chosen(presets: dict[str, V], model: str, name: str) -> V:
    """The preset of that name.

    Raises:
        DtlibError: for one that there is not.
    """
    if model not in presets:
        raise DtlibError(f"model of the {name} workload is {model!r}: choose one of {', '.join(presets)}.")
    return presets[model]


def shared_mean(values: list[float], comm: Communicator) -> float:
    """The mean over the values of all ranks, in float64; a rank may have none."""
    sums = torch.tensor([sum(values), len(values)], dtype=torch.float64)
    total, count = comm.all_reduce(sums).tolist()
    return total / count
