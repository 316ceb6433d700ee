"""A pipeline, to be read from top to bottom: the order of work, the messages between neighbours, and a training step.

Rank r has stage r of the model. A batch is divided into micro-batches, so that rank 1 works on one micro-batch while
rank 0 works on the next. F is a forward pass, B a backward pass (twice as long), and the number is the micro-batch:

    gpipe    rank 0   F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 --      all forward passes, then all backward passes
             rank 1   .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. ..

    1f1b     rank 0   F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --      one forward, one backward: activations of
             rank 1   .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. ..      fewer micro-batches are kept
"""

from collections.abc import Callable, Iterator

import torch
from torch import distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup, Work
from torch.profiler import record_function

SCHEDULES = "gpipe", "1f1b"
DTYPES, HEADER = (torch.float32, torch.float64), 8  # a header: dtype, number of dimensions, each length, zeros


def order(schedule: str, rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """Return a rank's actions: first some forward passes, then F and B in turn, then the remaining backward passes."""
    ahead = {"gpipe": microbatches, "1f1b": min(ranks - 1 - rank, microbatches)}[schedule]
    forward, backward = [("F", m) for m in range(microbatches)], [("B", m) for m in range(microbatches)]
    in_turn = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return forward[:ahead] + in_turn + backward[microbatches - ahead :]


def announce(group: ProcessGroup, dest: int, tensor: torch.Tensor) -> Work | None:
    """Send the next rank the dtype and shape of all tensors that it will receive."""
    numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    header = torch.tensor(numbers + [0] * (HEADER - len(numbers)), device=tensor.device)
    return dist.isend(header, group_dst=dest, group=group)


def announced(group: ProcessGroup, source: int, device: torch.device) -> torch.Tensor:
    """Receive dtype and shape; return a tensor with them, which needs the memory of only one number."""
    dist.recv(header := torch.zeros(HEADER, dtype=torch.int64, device=device), group_src=source, group=group)
    dtype, dimensions, *shape = header.tolist()
    return torch.empty((), dtype=DTYPES[dtype], device=device).expand(shape[:dimensions])


def arriving(group: ProcessGroup, source: int, like: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Yield ``count`` tensors of a neighbour in order. Each receive is started before the previous tensor is used."""

    def ask() -> tuple:
        tensor = like.new_empty(like.shape)
        return tensor, dist.irecv(tensor, group_src=source, group=group)

    asked_for = [ask()]
    for left in reversed(range(count)):
        asked_for += [ask()] if left else []
        asked_for[0][1].wait()
        yield asked_for.pop(0)[0]  # keep no reference, so that the caller can free it


def step(group: ProcessGroup | None, stage: torch.nn.Module, inputs: torch.Tensor | None, targets: torch.Tensor | None,
         loss_fn: Callable, microbatches: int, schedule: str = "1f1b",
         backward_group: ProcessGroup | None = None) -> torch.Tensor | None:  # fmt: skip
    """Run forward and backward of a whole batch. Gradients are those of the mean loss, which the last rank returns.

    Contract: rank 0 has ``inputs`` and the last rank ``targets``, with the same number of samples, a multiple of
    ``microbatches``; other ranks pass None. Every ``stage(x)`` has trained parameters, and takes and returns one tensor
    of the same shape for all micro-batches. ``loss_fn`` returns the mean over samples. No layer mixes samples (as
    batch norm does), and none is tied to a layer of another stage. With NCCL, messages of one group wait for each
    other, so pass a ``backward_group`` with the same ranks.
    """
    group = group or dist.group.WORLD
    back, rank, ranks = backward_group or group, group.rank(), group.size()
    before, after, is_first, is_last = rank - 1, rank + 1, rank == 0, rank == ranks - 1
    if is_first:
        activations = iter(torch.chunk(inputs, microbatches))
    else:
        like = announced(group, before, next(stage.parameters()).device)
        activations = map(torch.Tensor.requires_grad_, arriving(group, before, like, microbatches))
    wanted = torch.chunk(targets, microbatches) if is_last else ()
    # ``kept`` maps each micro-batch, until its backward pass, to its input and to the place in autograd's graph that
    # computed its output.
    kept, sending, losses = {}, [], []
    for kind, m in order(schedule, rank, ranks, microbatches):
        with record_function(f"{kind}{m}"):
            if kind == "F":
                x = next(activations)
                y = stage(x)
                if is_last:
                    y = loss_fn(y, wanted[m]) / microbatches
                    losses.append(y.detach())
                else:
                    if m == 0:
                        sending.append(announce(group, after, y))
                        of_y = y.new_empty(()).expand(y.shape)
                        gradients = arriving(back, after, of_y, microbatches)
                    if y.shape != of_y.shape:
                        raise ValueError(f"stage() returned shape {y.shape} after {of_y.shape}: all must be equal.")
                    sending.append(dist.isend(y.detach().contiguous(), group_dst=after, group=group))
                kept[m] = x, get_gradient_edge(y)
            else:
                x, y = kept.pop(m)
                torch.autograd.backward(y, None if is_last else next(gradients))
                if not is_first:
                    sending.append(dist.isend(x.grad.contiguous(), group_dst=before, group=back))
        del x, y  # free them now, and the tensors of finished messages
        sending = [work for work in sending if not work.is_completed()]
    for work in sending:
        work.wait()
    return sum(losses) if is_last else None


# The full classes add: micro-batches of any size and dtype, several tensors per stage (edges.py), interleaved and
# zero-bubble schedules (interpreter.py, linear.py), recomputation (stage.py), and models as lists of layers with tied
# layers (layers.py). Where dtlib is installed, checks.py checks the contract above. This file imports only torch.
