"""A linear layer with a split backward pass: the gradient of its input now, the gradient of its weight later.

    B      gradient arrives --> gradient of the input --> to the previous stage
                            \\-> gradients of weight and bias
    I      gradient arrives --> gradient of the input --> to the previous stage; (input, gradient) are kept
    W      kept --> gradients of weight and bias

The previous stage waits only for the first half, so a schedule can place the second half where the rank would be idle:
P. Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.

In a pipeline, the second half adds to the weight's gradient while it multiplies. Autograd would first write the
gradient of each micro-batch and then add it. For wide layers and small micro-batches, that costs as much as the
multiplication.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

# A stack of functions that receive second halves, or None to let autograd compute the gradients. The last one is used.
_deferral_stack: list[Callable | None] = []


@contextmanager
def defer_weight_gradients() -> Iterator[list[Callable]]:
    """Collect the second halves of ``Linear`` in a list during backward passes in this context.

    Each element is a function without arguments that adds the gradients of weight and bias.
    """
    halves: list[Callable] = []
    with second_halves_to(halves.append):
        yield halves


def weights_at_once() -> AbstractContextManager:
    """Return a context in which ``Linear`` does both halves immediately."""
    return second_halves_to(lambda half: half())


@contextmanager
def second_halves_to(taker: Callable | None) -> Iterator[None]:
    """Pass second halves to ``taker`` in this context. With None, ``Linear`` behaves like ``nn.Linear``."""
    _deferral_stack.append(taker)
    try:
        yield
    finally:
        _deferral_stack.remove(taker)


def defer(half: Callable) -> None:
    """Keep a second half for later if a schedule splits backward passes, otherwise call it now; for custom layers."""
    (_deferral_target() or (lambda half: half()))(half)


def _deferral_target():
    return _deferral_stack[-1] if _deferral_stack else None


class Linear(nn.Linear):
    """``nn.Linear`` that a zero-bubble schedule can split, and that accumulates gradients of micro-batches in place.

    It behaves like ``nn.Linear`` under ``create_graph`` and autocast, and if its parameters have hooks
    (``register_post_accumulate_grad_hook``).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return _Linear.apply(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias = weight, bias
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        weights, biases = ctx.needs_input_grad[1:]
        # Return the gradients to autograd if it must see them, or if no schedule collects second halves.
        if torch.is_grad_enabled() or _deferral_target() is None or _watched(ctx.weight) or _watched(ctx.bias):
            rows = _matrix(gradient)
            return of_input, rows.T @ _matrix(x) if weights else None, rows.sum(0) if biases else None
        weight, bias = ctx.weight if weights else None, ctx.bias if biases else None
        x = x.detach()  # second halves run without autograd
        # Keep a reference to the gradient: autograd may reuse the memory of a gradient that nobody refers to.
        defer(lambda: _add(weight, bias, _matrix(gradient), _matrix(x)))
        return of_input, None, None


def _watched(parameter) -> bool:
    """Return whether autograd must accumulate this gradient itself, because of hooks or because it is no leaf."""
    return parameter is not None and bool(
        parameter._post_accumulate_grad_hooks or parameter._backward_hooks or not parameter.is_leaf
    )


def _matrix(tensor):
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _add(weight, bias, rows, columns) -> None:
    if weight is not None:
        if weight.grad is None:
            weight.grad = rows.T @ columns
        else:
            weight.grad.addmm_(rows.T, columns)
    if bias is not None:
        bias.grad = rows.sum(0) if bias.grad is None else bias.grad.add_(rows.sum(0))
