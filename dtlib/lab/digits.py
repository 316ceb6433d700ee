"""Handwritten digits from scikit-learn (Alpaydin and Kaynak, UCI, 1998): small enough to train in seconds."""

from collections.abc import Callable
from itertools import pairwise

from dtlib.lab.foreign import Communicator, Dtype, Module, Tensor

TRAINING = 1440  # images; divisible by 2, 3, 4, 5, 6 and 8 ranks


def load(dtype: "Dtype | None" = None) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return ``(x, y), (x_test, y_test)``: 1440 images for training and 357 for testing, always in the same order.

    ``x`` has shape (images, 64) and values from 0 to 1, in float32 or ``dtype``; ``y`` has the digits, as int64.
    """
    import torch

    from dtlib.workloads.digits import split

    return tuple((x.to(dtype or torch.float32), y) for x, y in split(TRAINING))


def net(hidden: int = 64, dtype: "Dtype | None" = None, layers: int = 1) -> Module:
    """Return a network of 64 pixels, ``layers`` hidden layers and ten digits, initialised by torch's generator."""
    import torch
    from torch import nn

    widths = pairwise([64, *[hidden] * layers])
    inside = [layer for sizes in widths for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*inside, nn.Linear(hidden, 10)).to(dtype or torch.float32)


def train(model: Module, comm: Communicator, *after_backward: Callable, steps: int = 10) -> Tensor:
    """Train for ``steps`` steps, and return each step's mean loss over ranks, in a tensor of shape (steps,).

    A step has 96 images; each rank takes every N-th, in the model's dtype. The functions ``after_backward``, such as an
    optimizer's ``step`` and ``zero_grad``, are called after each backward pass.
    """
    import torch
    from torch.nn.functional import cross_entropy

    (x, y), _ = load(next(model.parameters()).dtype)
    losses = []
    for at in range(0, 96 * steps, 96):
        mine = slice(at + comm.rank, at + 96, comm.size)
        losses.append(cross_entropy(model(x[mine]), y[mine]))
        losses[-1].backward()
        for do in after_backward:
            do()
    return comm.all_reduce(torch.stack(losses).detach(), op="mean")


def accuracy(model: Module, test: tuple[Tensor, Tensor]) -> float:
    """Return the fraction of ``test`` = (x, y) that the model classifies correctly."""
    import torch

    x, y = test
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()
