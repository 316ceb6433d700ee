"""An EMULATED accelerator for lessons about overlap: layers whose backward pass leaves the core idle for a while.

On a laptop, computation keeps all cores busy, so there is nothing to hide communication behind. A GPU computes without
the core that feeds it; a sleeping layer leaves its core free in the same way.
"""

import time

import torch
from torch import nn

from dtlib.measure.trace import phase


class SleepingLayer(torch.autograd.Function):
    """An identity that sleeps in its backward pass, as if an accelerator computed; gradients are one."""

    @staticmethod
    def forward(ctx, x, weight, seconds, name):
        """Return a copy of ``x``."""
        ctx.weight, ctx.seconds, ctx.name = weight, seconds, name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """Sleep; return the gradient of ``x``, and ones for the weight."""
        with phase(ctx.name):
            time.sleep(ctx.seconds)
        return grad, torch.ones_like(ctx.weight), None, None


class EmulatedAccelerator(nn.Module):
    """``layers`` layers of ``count`` float32 parameters, each with a backward pass of ``seconds``."""

    def __init__(self, layers: int, count: int, seconds: float):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(count) for _ in range(layers))
        self.seconds = seconds

    def forward(self, x):
        """Apply all layers to ``x``."""
        for number, weight in enumerate(self.weights):
            x = SleepingLayer.apply(x, weight, self.seconds, f"layer {number}")
        return x
