"""A workload: a model, its data, its loss, and its evaluation."""

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
    """A training task.

    Args:
        name: ``"vision"``, ``"summarization"`` or ``"decoder"``.
        model: ``model(inputs)`` returns outputs; ``inputs`` is a tensor or a tuple of tensors, as from ``collate``.
        layers: the same model as LayerSpecs for ``PipelineModule(layers, ..., base_seed=seed)``, with the same
            parameters under the same names.
        seed: of the initial parameters.
        train: a map-style data set for training.
        test: a map-style data set for the test.
        collate: converts a list of samples to ``(inputs, targets)``; None means torch's default.
        loss_fn: ``loss_fn(outputs, targets)`` returns the mean over samples, with equal weights. So the mean over
            micro-batches of equal size, or over ranks, is the loss of the whole batch.
        evaluate: all ranks call ``evaluate(model, comm)`` with a complete model, and each evaluates a part of the test
            data. It returns a dict of metrics, the same on all ranks.
        experts: the number of experts in each layer; 0 means a single perceptron.
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
    """A sequence of layers on one rank, with the same parameters as in a ``PipelineModule``.

    Layer i is initialised with seed ``seed + i``, and tied layers share the weight of the first one. A layer with
    several inputs or outputs takes or returns them as one tuple.
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
    """Return ``config`` with defaults for missing keys.

    Raises:
        DtlibError: for an unknown key, or a value of another type than its default.
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
    """Return the preset of name ``model``.

    Raises:
        DtlibError: if there is no such preset; ``name`` is the name of the workload.
    """
    if model not in presets:
        raise DtlibError(f"model of the {name} workload is {model!r}: choose one of {', '.join(presets)}.")
    return presets[model]


def shared_mean(values: list[float], comm: Communicator) -> float:
    """Return the mean over the values of all ranks, computed in float64; a rank may have no values."""
    sums = torch.tensor([sum(values), len(values)], dtype=torch.float64)
    total, count = comm.all_reduce(sums).tolist()
    return total / count
