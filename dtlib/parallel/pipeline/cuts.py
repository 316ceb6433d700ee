"""Where a list of layers is cut into stages: by what each layer costs."""

import copy
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Where to cut a list so that the most expensive stage is as cheap as can be; every stage has an element.

    best[s][i]: the cheapest most expensive stage if the first i elements are cut into s stages.
    """
    count = len(costs)
    sums: list[float] = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0
    for s in range(1, stages + 1):
        for i in range(s, count + 1):
            for j in range(s - 1, i):
                worst = max(best[s - 1][j], sums[i] - sums[j])
                if worst < best[s][i]:
                    best[s][i], cut[s][i] = worst, j
    cuts = [count]
    for s in range(stages, 0, -1):
        cuts.append(cut[s][cuts[-1]])
    return cuts[::-1]


def parameters_of(spec: object) -> int:
    """Trainable elements of a layer, counted without memory for them."""
    if not isinstance(spec, nn.Module):
        if not hasattr(spec, "build"):
            return 0  # a function
        with torch.device("meta"):
            spec = spec.build()
    return sum(parameter.numel() for parameter in spec.parameters() if parameter.requires_grad)


def times_of(specs: Sequence, build: Callable, sample: object) -> list[float] | str:
    """Seconds of forward and backward of each layer, the quicker of two; or a sentence why not. Nothing is left of
    it: layers are copies, and random numbers go on as if nothing had been drawn. ``build(specs, i)`` makes layer i."""
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
    """A copy of ``tensor``, which layers may change, as the layer before would give it."""
    copied = tensor.detach()
    return (copied.requires_grad_() if copied.is_floating_point() else copied).clone()
