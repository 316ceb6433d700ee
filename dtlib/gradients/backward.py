"""Functions with a hand-written backward rule."""

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
    """Return ``forward(x)``; ``backward`` maps the gradient of the result to the gradient of ``x``."""
    return _WithGradient.apply(x, forward, backward)
