"""An EMULATED accelerator for lessons about overlap: layers whose backward pass leaves the core alone for a while.

On a laptop computing keeps the cores busy, and there is nothing to hide communication behind. A GPU computes beside
the core that feeds it, and so does a core that sleeps.
"""

import time

import torch
from torch import nn

from dtlib.measure.trace import phase


class SleepingLayer(torch.autograd.Function):
    """Passes its input on. The backward pass takes a while, as on an accelerator, and gives gradients of one."""

    @staticmethod
    def forward(ctx, x, weight, seconds, name):
        ctx.weight, ctx.seconds, ctx.name = weight, seconds, name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
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
        for number, weight in enumerate(self.weights):
            x = SleepingLayer.apply(x, weight, self.seconds, f"layer {number}")
        return x
