"""Choose where to cut a list of layers into stages, from the cost of each layer."""

import copy
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dtlib.errors import DtlibError


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return cuts that make the most expensive stage as cheap as possible; every stage has at least one element.

    best(s, i): the lowest possible cost of the most expensive stage when the first i elements form s stages, and their
    cuts.
    """
    if len(costs) < stages:
        raise DtlibError(f"{len(costs)} layers cannot be cut into {stages} stages: use fewer stages.")
    sums = [0, *accumulate(costs)]

    @cache
    def best(s: int, i: int) -> tuple[float, list[int]]:
        if s == 0:
            return (float("inf") if i else 0), [i]
        worst, last = min((max(best(s - 1, j)[0], sums[i] - sums[j]), j) for j in range(s - 1, i))
        return worst, [*best(s - 1, last)[1], i]

    return best(stages, len(costs))[1]


def parameters_of(spec: object) -> int:
    """Count the trained elements of a layer, without allocating them."""
    if not isinstance(spec, nn.Module):
        if not hasattr(spec, "build"):
            return 0  # a function
        with torch.device("meta"):
            spec = spec.build()
    return sum(parameter.numel() for parameter in spec.parameters() if parameter.requires_grad)


def times_of(specs: Sequence, build: Callable, sample: object) -> list[float] | str:
    """Return the seconds of forward plus backward for each layer (best of two runs), or an error message.

    Layers are copied and the random state is restored, so measuring has no side effects. ``build(specs, i)`` builds
    layer i.
    """
    times, value = [], sample
    devices = {tensor.device for tensor in tree_leaves(sample) if isinstance(tensor, torch.Tensor) and tensor.is_cuda}
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        for i, spec in enumerate(specs):
            try:
                module, forward = copy.deepcopy(build(specs, i)), getattr(spec, "forward_fn", None)
                seconds = []
                for _ in range(2):
                    given = tree_map_only(torch.Tensor, _as_input, value)
                    began = time.perf_counter()
                    output = forward(module, given) if forward else module(given)
                    tensors = [
                        one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad
                    ]
                    if tensors:
                        torch.autograd.backward([tensor.sum() for tensor in tensors])
                    seconds.append(time.perf_counter() - began)
            except Exception as error:
                return (
                    f"partition_method='time' could not measure layer {i} with the sample: {type(error).__name__}: "
                    f"{error}."
                )
            times.append(min(seconds))
            value = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
    return times


def _as_input(tensor):
    """Return a copy of ``tensor`` that a layer may change in place, with gradients as after a previous layer."""
    copied = tensor.detach()
    return (copied.requires_grad_() if copied.is_floating_point() else copied).clone()
