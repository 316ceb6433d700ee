"""A function with a backward rule of its own."""

from collections.abc import Callable

import torch


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.rule = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.rule(gradient), None, None


def with_gradient(x: torch.Tensor, forward: Callable, backward: Callable) -> torch.Tensor:
    """``forward(x)``, whose gradient ``backward`` turns into that of x."""
    return _WithGradient.apply(x, forward, backward)
