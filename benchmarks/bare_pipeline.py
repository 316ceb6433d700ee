"""GPipe by hand: what somebody writes on mpi4py who needs no more than one step of one model on ranks in a row.

Nothing is checked, named, timed out or drawn, and shapes are known beforehand: what a pipeline costs at least in
Python.
"""

import torch
from mpi4py import MPI
from torch import nn


def gpipe(mpi: MPI.Comm, stage: nn.Module, x: torch.Tensor | None, y: torch.Tensor | None, like: torch.Tensor,
          microbatches: int, loss_fn) -> torch.Tensor | None:  # fmt: skip
    """Forward and backward of a whole batch; the last rank returns the mean loss.

    Rank 0 has ``x`` and the last rank ``y``, None elsewhere; ``like`` is an activation, alike on all ranks.
    """
    rank, last = mpi.Get_rank(), mpi.Get_size() - 1
    given = x.chunk(microbatches) if rank == 0 else [torch.empty_like(like) for _ in range(microbatches)]
    wanted = y.chunk(microbatches) if rank == last else ()
    asked = [mpi.Irecv(each.numpy(), rank - 1, m) for m, each in enumerate(given)] if rank > 0 else []
    inputs, outputs, sent, losses = [], [], [], []
    for m, each in enumerate(given):
        if rank > 0:
            asked[m].Wait()
            each.requires_grad_()
        inputs.append(each)
        outputs.append(stage(each))
        if rank < last:
            sent.append(mpi.Isend(outputs[m].detach().numpy(), rank + 1, m))
        else:
            losses.append(loss_fn(outputs[m], wanted[m]) / microbatches)
    gradients = [torch.empty_like(like) for _ in range(microbatches)] if rank < last else []
    asked = [mpi.Irecv(each.numpy(), rank + 1, m) for m, each in enumerate(gradients)]
    for m, each in enumerate(inputs):
        if rank < last:
            asked[m].Wait()
            outputs[m].backward(gradients[m])
        else:
            losses[m].backward()
        if rank > 0:
            sent.append(mpi.Isend(each.grad.numpy(), rank - 1, m))
    MPI.Request.Waitall(sent)
    return torch.stack(losses).sum().detach() if rank == last else None
