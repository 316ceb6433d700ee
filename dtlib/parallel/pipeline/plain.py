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
from torch.autograd.graph import get_gradient_edge

from dtlib.comm import Communicator
from dtlib.comm.waiting import Handle
from dtlib.comm.watch import recorder
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline.contract import about_stage, check_stages
from dtlib.schedule import Action

SCHEDULES = "gpipe", "1f1b"
DTYPES, HEADER = (torch.float32, torch.float64), 8  # a header's numbers: dtype, dimensions, and the length of each


def order(schedule: str, rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """What a rank does: some forward passes ahead, then a forward and a backward pass in turn, then what is left."""
    ahead = {"gpipe": microbatches, "1f1b": min(ranks - 1 - rank, microbatches)}[schedule]
    forward, backward = [("F", m) for m in range(microbatches)], [("B", m) for m in range(microbatches)]
    in_turn = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return forward[:ahead] + in_turn + backward[microbatches - ahead :]


def announce(comm: Communicator, dest: int, tensor: torch.Tensor) -> Handle:
    """Tell the next rank what all tensors that it will get look like."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES or tensor.dim() > HEADER - 2:
        raise DtlibError(f"A stage gives one tensor of {DTYPES}, of at most {HEADER - 2} dimensions: this is {tensor}.")
    numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return comm.send(torch.tensor(numbers + [0] * (HEADER - len(numbers))), dest, async_op=True)


def announced(comm: Communicator, source: int, device: torch.device) -> torch.Tensor:
    """One number that looks like each of the tensors that will arrive."""
    dtype, dimensions, *shape = comm.recv(torch.zeros(HEADER, dtype=torch.int64), source).tolist()
    return torch.empty((), dtype=DTYPES[dtype], device=device).expand(shape[:dimensions])


def arriving(comm: Communicator, source: int, like: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """So many tensors from a neighbour, in their order. The next is asked for before this one is worked on."""
    asked_for = [comm.recv(like.new_empty(like.shape), source, async_op=True)]
    for left in reversed(range(count)):
        asked_for += [comm.recv(like.new_empty(like.shape), source, async_op=True)] if left else []
        yield asked_for.pop(0).wait()  # from here on only the caller keeps it


def step(comm: Communicator, stage: torch.nn.Module, inputs: torch.Tensor | None, targets: torch.Tensor | None,
         loss_fn: Callable, microbatches: int, schedule: str = "1f1b") -> torch.Tensor | None:  # fmt: skip
    """Forward and backward of a whole batch. Gradients are those of the mean loss, which the last rank returns.

    Contract: rank 0 has ``inputs`` and the last rank ``targets``, None elsewhere, of as many samples, a multiple of
    ``microbatches``. Every ``stage(x)`` has parameters that are trained, takes and gives one tensor, alike for all
    micro-batches. ``loss_fn`` gives the mean over samples: a sum would be divided by ``microbatches``. No layer mixes
    samples, as batch norm does, or is tied to one of another stage. ``comm`` is a communicator of dtlib.
    """
    check(comm, [inputs, targets], about_stage(stage, loss_fn), microbatches, schedule)
    before, after, is_first, is_last = comm.rank - 1, comm.rank + 1, comm.rank == 0, comm.rank == comm.size - 1
    if is_first:
        activations = iter(torch.chunk(inputs, microbatches))
    else:
        like = announced(comm, before, next(stage.parameters()).device)
        activations = map(torch.Tensor.requires_grad_, arriving(comm, before, like, microbatches))
    wanted = torch.chunk(targets, microbatches) if is_last else ()
    kept, sending, losses = {}, [], []  # kept until the backward pass: an input, and its output's place in the graph
    for kind, m in order(schedule, comm.rank, comm.size, microbatches):
        with recorder.phase(Action(comm.rank, kind, m), comm.world_rank):
            if kind == "F":
                x = next(activations)
                y = stage(x)
                if is_last:
                    y = loss_fn(y, wanted[m]) / microbatches
                    losses.append(y.detach())
                else:
                    if m == 0:
                        sending.append(announce(comm, after, y))
                        of_y = y.new_empty(()).expand(y.shape)
                        gradients = arriving(comm, after, of_y, microbatches)
                    if y.shape != of_y.shape:
                        raise DtlibError(f"A stage gave {y.shape} after {of_y.shape}: all have one shape.")
                    sending.append(comm.send(y.detach(), after, async_op=True))
                kept[m] = x, get_gradient_edge(y)
            else:
                x, y = kept.pop(m)
                torch.autograd.backward(y, None if is_last else next(gradients))
                if not is_first:
                    sending.append(comm.send(x.grad, before, async_op=True))
        del x, y  # so they are freed now, as are the tensors of messages that have left
        sending = [handle for handle in sending if not handle.done()]
    for handle in sending:
        handle.wait()
    return sum(losses) if is_last else None


def check(comm: Communicator, batches: list, about: tuple, microbatches: int, schedule: str) -> None:
    """Refuse, on every rank, what lies outside of the contract."""
    samples = [None if batch is None else len(batch) for batch in batches]
    notes = comm.all_gather_object((samples, microbatches, schedule, about))
    count, wanted = notes[0][0][0], notes[-1][0][1]
    if count != wanted or not count:
        raise DtlibError(f"Rank 0 needs inputs, the last rank as many targets: they have {count} and {wanted}.")
    if any(note[1:3] != notes[0][1:3] for note in notes) or notes[0][2] not in SCHEDULES:
        raise DtlibError(f"All name one of {SCHEDULES}, with as many micro-batches: here {schedule!r}, {microbatches}.")
    if not all(isinstance(note[1], int) for note in notes) or microbatches < 1 or count % microbatches:
        raise DtlibError(f"{count} samples make no {microbatches} equal micro-batches: see Schedule1F1B for others.")
    check_stages([note[3] for note in notes], microbatches)


# The full classes add micro-batches of any size and kind, several tensors a stage (edges.py), interleaved schedules and
# zero-bubble ones (interpreter.py, linear.py), recomputation (stage.py), and lists of layers, also tied (layers.py).
