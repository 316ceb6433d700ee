"""Cross-entropy of logits that are sharded by words, without gathering the logits.

loss = log(sum over words of exp(logit - highest)) - (logit of the target - highest)

    rank r   highest of its logits                  --- all_reduce max --->   highest
    rank r   sum of exp, and the target's logit     --- all_reduce sum --->   the two summands of the loss
             if the rank has that word (else 0)

An all_gather would send V numbers per token for a vocabulary of V words; this sends three. The gradient, softmax - 1 at
the target, needs no communication. M. Shoeybi et al., arXiv:1909.08053, section 3.
"""

import torch
from torch.autograd.function import once_differentiable

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.parallel.tensor.functions import with_operations

REDUCTIONS = ("none", "mean", "sum")


def vocab_parallel_cross_entropy(logits_slice: torch.Tensor, targets: torch.Tensor, comm: Communicator,
                                 reduction: str = "none", ignore_index: int = -100) -> torch.Tensor:  # fmt: skip
    """``torch.nn.functional.cross_entropy`` of sharded logits.

    Args:
        logits_slice: this rank's logits, ``(..., local words)``; ranks have consecutive words, in rank order.
        targets: word indices, int64, of shape ``(...)``, equal on all ranks.
        comm: a dtlib communicator.
        reduction: ``"none"`` returns the loss of each sample, with the shape of ``targets``; ``"mean"`` and ``"sum"``
            return one number. The mean is over targets that are not ignored.
        ignore_index: target value that is ignored.

    The loss is equal on all ranks. For 16-bit logits, it is computed and returned in float32. Counterpart:
    Megatron-LM's ``vocab_parallel_cross_entropy``.

    Raises:
        DtlibError: for shapes that do not fit, a target that is no valid word, and an unknown reduction.
    """
    if reduction not in REDUCTIONS:
        raise DtlibError(
            f"vocab_parallel_cross_entropy(reduction={reduction!r}): choose one of {', '.join(REDUCTIONS)}."
        )
    if logits_slice.shape[:-1] != targets.shape:
        raise DtlibError(
            "vocab_parallel_cross_entropy needs logits (..., words) and targets (...), and got "
            f"{tuple(logits_slice.shape)} and {tuple(targets.shape)}."
        )
    counts = targets != ignore_index
    losses = _CrossEntropy.apply(logits_slice, targets, with_operations(comm), counts).masked_fill(~counts, 0)
    if reduction == "mean":
        return losses.sum() / counts.sum()
    return losses.sum() if reduction == "sum" else losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, comm, counts):
        ctx.dtype = logits.dtype
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        highest, first, words = _highest_and_place(logits, comm)
        if targets[counts].numel() and not 0 <= targets[counts].min() <= targets[counts].max() < words:
            raise DtlibError(
                f"Targets must be words 0 to {words - 1}, but they are {int(targets[counts].min())} to "
                f"{int(targets[counts].max())}."
            )
        shifted = logits - highest.unsqueeze(-1)  # so that exp cannot overflow
        exponentials = shifted.exp()
        is_here = (targets >= first) & (targets < first + logits.shape[-1])
        index = (targets - first).masked_fill(~is_here, 0).unsqueeze(-1)
        of_target = shifted.gather(-1, index).squeeze(-1).masked_fill(~is_here, 0)
        # One message for both sums.
        total, of_target = comm.all_reduce(torch.stack([exponentials.sum(-1), of_target]))
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, is_here)
        return total.log() - of_target

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        # d loss / d logit is softmax - 1 at the target and softmax elsewhere; both are local to this rank's words.
        softmax, index, is_here = ctx.saved_tensors
        by_logit = softmax.scatter_add(-1, index, -is_here.to(softmax.dtype).unsqueeze(-1))
        return (by_logit * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


def _highest_and_place(logits, comm):
    """Return the highest logit over all ranks, this rank's first word, and the number of words.

    The same max all-reduce also gathers the number of words per rank: rank r contributes its number at index r and
    zeros elsewhere.
    """
    widths = logits.new_zeros(comm.size)
    widths[comm.rank] = logits.shape[-1]
    maxima = comm.all_reduce(torch.cat([logits.amax(-1).flatten(), widths]), op="max")
    widths = [int(width) for width in maxima[-comm.size :].tolist()]
    highest = maxima[: -comm.size].view(logits.shape[:-1])
    return highest, sum(widths[: comm.rank]), sum(widths)
