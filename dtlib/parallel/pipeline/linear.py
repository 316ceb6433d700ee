"""A linear layer whose backward pass comes in two halves: the gradient of its input now, that of its weight later.

    B      gradient arrives --> gradient of the input --> to the stage before
                            \\-> gradients of weight and bias
    I      gradient arrives --> gradient of the input --> to the stage before; (input, gradient) are kept
    W      kept --> gradients of weight and bias

The stage before waits for the first half only, so a schedule may put the second half where it would be idle: P. Qi et
al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.

In a pipeline the second half adds to the weight's gradient while it multiplies. Autograd would write the gradient of
each micro-batch first and add it then, which for wide layers and small micro-batches costs as much as multiplying.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

# Functions that second halves are given to at the moment, or None; the innermost counts.
_takers: list[Callable | None] = []


@contextmanager
def weights_later() -> Iterator[list[Callable]]:
    """Backward passes in this context keep the second halves of ``Linear`` in the list that this yields: functions
    without arguments, which add the gradients of weight and bias."""
    halves: list[Callable] = []
    with _given_to(halves.append):
        yield halves


def weights_at_once() -> AbstractContextManager:
    """A context in which ``Linear`` does both halves one after the other."""
    return _given_to(lambda half: half())


def weights_by_autograd() -> AbstractContextManager:
    """A context in which ``Linear`` is like ``nn.Linear``, within one of the two above: there a backward pass of
    somebody else's may run, of which the gradients of weights are not asked for."""
    return _given_to(None)


@contextmanager
def _given_to(taker):
    _takers.append(taker)
    try:
        yield
    finally:
        _takers.remove(taker)


def defer(half: Callable) -> None:
    """Keep a second half for later where a schedule splits backward passes, else do it now; for layers of one's own."""
    (_taker() or (lambda half: half()))(half)


def _taker():
    return _takers[-1] if _takers else None


class Linear(nn.Linear):
    """``nn.Linear`` that a zero-bubble schedule can split, and that adds up gradients of micro-batches in place; like
    it elsewhere: under ``create_graph`` and autocast, and where others watch its parameters
    (``register_post_accumulate_grad_hook``)."""

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
        if torch.is_grad_enabled() or _taker() is None or _watched(ctx.weight) or _watched(ctx.bias):
            rows = _matrix(gradient)
            return of_input, rows.T @ _matrix(x) if weights else None, rows.sum(0) if biases else None
        weight, bias = ctx.weight if weights else None, ctx.bias if biases else None
        x = x.detach()  # later halves run outside of autograd
        # The gradient itself is kept: autograd hands on, and adds to, the memory of one that nobody holds.
        defer(lambda: _add(weight, bias, _matrix(gradient), _matrix(x)))
        return of_input, None, None


def _watched(parameter) -> bool:
    """True if autograd itself has to add this gradient, as somebody waits for that or it goes on from here."""
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
