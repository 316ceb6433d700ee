"""A linear layer whose backward pass comes in two halves: the gradient of its input now, that of its weight later.

    B      gradient arrives --> gradient of the input --> to the stage before
                            \\-> gradients of weight and bias
    I      gradient arrives --> gradient of the input --> to the stage before; (input, gradient) are kept
    W      kept --> gradients of weight and bias

The stage before waits for the first half only, so a schedule may put the second half where it would be idle: P. Qi et
al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.
"""

from contextlib import contextmanager

import torch
from torch import nn

_later = []  # the lists that second halves are put into at the moment; the innermost counts


@contextmanager
def weights_later():
    """Backward passes in this context keep the second halves of ``Linear`` in the list that this yields: functions
    without arguments, which add the gradients of weight and bias."""
    halves = []
    _later.append(halves)
    try:
        yield halves
    finally:
        _later.remove(halves)


def defer(half) -> bool:
    """Keep a second half for later where a schedule splits backward passes, else do it now; for layers of one's own."""
    if not _later:
        half()
        return False
    _later[-1].append(half)
    return True


class Linear(nn.Linear):
    """``nn.Linear`` that a zero-bubble schedule can split; like it elsewhere."""

    def forward(self, x):
        return _Linear.apply(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.bias = bias
        ctx.weight = weight
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        rows, columns = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])

        def of_weight():
            return rows.T @ columns if ctx.needs_input_grad[1] else None

        def of_bias():
            return rows.sum(0) if ctx.bias is not None and ctx.needs_input_grad[2] else None

        if not _later:
            return of_input, of_weight(), of_bias()
        parameter, bias = ctx.weight, ctx.bias
        defer(lambda: (_add(parameter, of_weight()), _add(bias, of_bias())))
        return of_input, None, None


def _add(parameter, gradient) -> None:
    if gradient is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
