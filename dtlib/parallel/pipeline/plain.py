"""A pipeline, to be read from top to bottom: who does what when, what travels between neighbours, and a step of both.

Rank r has stage r of the model. A batch is cut into micro-batches, so that rank 1 works on one of them while rank 0
works on the next. F is a forward pass, B a backward pass, which takes twice as long, the number a micro-batch:

    gpipe    rank 0   F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 --      all forward passes, then all backward passes
             rank 1   .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. ..

    1f1b     rank 0   F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --      one forward, one backward: fewer at a time
             rank 1   .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. ..      are kept for their backward pass
"""

from collections.abc import Callable, Iterator

import torch
from torch import distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed import ProcessGroup, Work
from torch.profiler import record_function

SCHEDULES = "gpipe", "1f1b"
DTYPES, HEADER = (torch.float32, torch.float64), 8  # a header's numbers: dtype, dimensions, and the length of each


def order(schedule: str, rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """What a rank does: some forward passes ahead, then a forward and a backward pass in turn, then what is left."""
    ahead = {"gpipe": microbatches, "1f1b": min(ranks - 1 - rank, microbatches)}[schedule]
    forward, backward = [("F", m) for m in range(microbatches)], [("B", m) for m in range(microbatches)]
    in_turn = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return forward[:ahead] + in_turn + backward[microbatches - ahead :]


def announce(group: ProcessGroup, dest: int, tensor: torch.Tensor) -> Work | None:
    """Tell the next rank what all tensors that it will get look like."""
    numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    header = torch.tensor(numbers + [0] * (HEADER - len(numbers)), device=tensor.device)
    return dist.isend(header, group_dst=dest, group=group)


def announced(group: ProcessGroup, source: int, device: torch.device) -> torch.Tensor:
    """One number that looks like each of the tensors that will arrive."""
    dist.recv(header := torch.zeros(HEADER, dtype=torch.int64, device=device), group_src=source, group=group)
    dtype, dimensions, *shape = header.tolist()
    return torch.empty((), dtype=DTYPES[dtype], device=device).expand(shape[:dimensions])


def arriving(group: ProcessGroup, source: int, like: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """So many tensors from a neighbour, in their order. The next is asked for before this one is worked on."""

    def ask() -> tuple:
        tensor = like.new_empty(like.shape)
        return tensor, dist.irecv(tensor, group_src=source, group=group)

    asked_for = [ask()]
    for left in reversed(range(count)):
        asked_for += [ask()] if left else []
        asked_for[0][1].wait()
        yield asked_for.pop(0)[0]  # from here on only the caller keeps it


def step(group: ProcessGroup | None, stage: torch.nn.Module, inputs: torch.Tensor | None, targets: torch.Tensor | None,
         loss_fn: Callable, microbatches: int, schedule: str = "1f1b",
         backward_group: ProcessGroup | None = None) -> torch.Tensor | None:  # fmt: skip
    """Forward and backward of a whole batch. Gradients are those of the mean loss, which the last rank returns.

    Contract: rank 0 has ``inputs`` and the last rank ``targets``, None elsewhere, of as many samples, a multiple of
    ``microbatches``. Every ``stage(x)`` has parameters that are trained, takes and gives one tensor, alike for all
    micro-batches. ``loss_fn`` gives the mean over samples: a sum would be divided by ``microbatches``. No layer mixes
    samples, as batch norm does, or is tied to one of another stage. On NCCL, messages of one group wait for each other:
    there ``backward_group`` is another one of the same ranks.
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
    kept, sending, losses = {}, [], []  # kept until the backward pass: an input, and its output's place in the graph
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
                        raise ValueError(f"A stage gave {y.shape} after {of_y.shape}: all have one shape.")
                    sending.append(dist.isend(y.detach().contiguous(), group_dst=after, group=group))
                kept[m] = x, get_gradient_edge(y)
            else:
                x, y = kept.pop(m)
                torch.autograd.backward(y, None if is_last else next(gradients))
                if not is_first:
                    sending.append(dist.isend(x.grad.contiguous(), group_dst=before, group=back))
        del x, y  # so they are freed now, as are the tensors of messages that have left
        sending = [work for work in sending if not work.is_completed()]
    for work in sending:
        work.wait()
    return sum(losses) if is_last else None


# The full classes add micro-batches of any size and kind, several tensors a stage (edges.py), interleaved schedules and
# zero-bubble ones (interpreter.py, linear.py), recomputation (stage.py), and lists of layers, also tied (layers.py).
# contract.py refuses what lies outside of the contract above, where dtlib is installed: this file needs torch alone.
