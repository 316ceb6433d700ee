"""One step of a pipeline, watched: which micro-batch passes a stage when, what is sent, and what autograd keeps."""

import gc
import weakref
from typing import NamedTuple

from dtlib.lessons.l03.observe_ring import let_messages_leave

SMALL = 3  # samples of a micro-batch
LONG = 2000  # so many that a message waits for its receive (MPI sends short ones ahead)


def width(edge: int) -> int:
    """Features between stage ``edge - 1`` and stage ``edge``: other ones on each side of a stage."""
    return 6 + edge % 4


def sizes_of(kind: str, ranks: int) -> list[int]:
    """Samples of each micro-batch: as many everywhere; fewer in the last; fewer micro-batches than ranks; long ones."""
    return {
        "even": [SMALL] * (ranks + 2),
        "uneven": [SMALL] * (ranks + 1) + [1],
        "few": [SMALL] * max(1, ranks - 2),
        "long": [LONG] * 4,
        "split": [3, 3, 2, 2],  # as tensor_split(4) cuts ten samples
    }[kind]


def make_stage(index: int):
    return stage_of(index, width(index), width(index + 1))


def stage_of(index: int, inputs: int, outputs: int):
    """Stage ``index`` of the model, the same wherever it is made."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh()).double()


def make_batch(kind: str, ranks: int):
    """Inputs and targets, a tensor for each micro-batch."""
    import torch

    generator = torch.Generator().manual_seed(len(kind))
    return [
        [torch.randn(size, features, dtype=torch.float64, generator=generator) for size in sizes_of(kind, ranks)]
        for features in (width(0), width(ranks))
    ]


def mean_square(output, target):
    return (output - target).square().mean()


class Reference(NamedTuple):
    """The model in one piece: ``inputs[stage][m]``; ``gradients[m][stage]`` of the mean over micro-batch m, flat;
    ``losses[m]``; and ``weights[m]``, of its samples in the batch."""

    inputs: list
    gradients: list
    losses: list
    weights: list


def reference(kind: str, ranks: int) -> Reference:
    import torch

    stages = [make_stage(index) for index in range(ranks)]
    inputs, gradients, losses = [[] for _ in stages], [], []
    for x, target in zip(*make_batch(kind, ranks), strict=True):
        value = x
        for index, stage in enumerate(stages):
            inputs[index].append(value.detach())
            value = stage(value)
        loss = mean_square(value, target)
        each = [torch.autograd.grad(loss, list(stage.parameters()), retain_graph=True) for stage in stages]
        gradients.append([torch.cat([gradient.flatten() for gradient in one]) for one in each])
        losses.append(loss.item())
    sizes = sizes_of(kind, ranks)
    return Reference(inputs, gradients, losses, [size / sum(sizes) for size in sizes])


class Acted(NamedTuple):
    """An entry among the operations of a record: a forward pass begins (F), or begins once more, so that it can go
    backward (R, recomputation); a backward pass begins (B); a loss (L)."""

    kind: str
    microbatch: int | str | None  # "all": the whole batch at once; None: values that no micro-batch has here


class _Kept:
    """What autograd holds on to instead of a tensor, so that one can see how long it does."""

    def __init__(self, tensor):
        self.tensor = tensor


def _copies(outputs: list, values: set) -> int:
    """How many tensors have values of outputs, and are none of these ``outputs``."""
    import torch

    own, like = {output.untyped_storage().data_ptr() for output in outputs}, outputs[-1]
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    tensors = [tensor for tensor in tensors if (tensor.shape, tensor.dtype) == (like.shape, like.dtype)]
    others = {t.untyped_storage().data_ptr() for t in tensors if t.detach().numpy().tobytes() in values}
    return len(others - own)


def watched(inner, expected: list, events: list, last: bool = False):
    """A module like ``inner``, that writes into ``events`` when a micro-batch passes; ``expected`` are the inputs that
    belong to each. Its ``peak`` is the largest number of micro-batches for which autograd kept tensors at a time, and
    ``outputs`` that of outputs which somebody had; in the last stage, which sends none, copies count as well."""
    import torch
    from torch import nn
    from torch.autograd.graph import saved_tensors_hooks

    def which(x):
        if len(x) == sum(map(len, expected)) != len(expected[0]):
            return "all"
        same = (m for m, y in enumerate(expected) if x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=1e-9))
        return next(same, None)

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.peak, self._kept = inner, 0, []
            self.outputs, self._made = 0, []  # outputs that somebody has, most at a time
            self._values = set()  # of all outputs
            self._without_graph = set()  # micro-batches that have passed, and of which nothing was kept

        def forward(self, x):
            microbatch, kept = which(x.detach()), weakref.WeakSet()
            again = torch.is_grad_enabled() and microbatch in self._without_graph
            events.append(Acted("R" if again else "F", microbatch))
            if again:
                self._without_graph.discard(microbatch)
            elif not torch.is_grad_enabled():
                self._without_graph.add(microbatch)

            def keep(tensor):
                one = _Kept(tensor)
                kept.add(one)
                return one

            with saved_tensors_hooks(keep, lambda one: one.tensor):
                output = inner(x)
            if output.requires_grad:
                output.register_hook(lambda gradient: events.append(Acted("B", microbatch)))
            self._kept.append(kept)
            self.peak = max(self.peak, sum(len(one) > 0 for one in self._kept))
            self._made.append(weakref.ref(output))
            alive = [one() for one in self._made if one() is not None]
            self._values.add(output.detach().numpy().tobytes())
            copies = _copies(alive, self._values) if last and len(self._made) == len(expected) else 0
            self.outputs = max(self.outputs, len(alive) + copies)
            return output

    return Watched()


# What is observed


def observe_microbatches(step, comm):
    """``step(comm, stage, inputs, targets, loss_fn)`` gets a list of micro-batches, and gives the loss of the batch."""
    return _observe(step, comm, ("even", "uneven", "few", "long"), _as_microbatches)


def observe_batch(step, comm):
    """``step(comm, stage, x, target)`` gets the whole batch, and cuts it itself."""
    return _observe(step, comm, ("split",), _as_a_batch)


def _as_microbatches(kind, comm, events):
    """Inputs on rank 0, elsewhere room for what will arrive: with values that nobody can take for others."""
    import torch

    inputs, targets = make_batch(kind, comm.size)
    if comm.rank > 0:
        inputs = [torch.full((len(x), width(comm.rank)), float("nan"), dtype=torch.float64) for x in inputs]

    def loss_fn(output, target):
        events.append(Acted("L", None))
        return mean_square(output, target)

    return inputs, targets, loss_fn


def _as_a_batch(kind, comm, events):
    import torch

    x, target = (torch.cat(batches) for batches in make_batch(kind, comm.size))
    return x if comm.rank == 0 else None, target if comm.rank == comm.size - 1 else None


def _observe(step, comm, kinds, arguments_for) -> list[dict]:
    """For each kind of batch what this rank did, in order, and the outcome; no more after an error."""
    from mpi4py import MPI

    from dtlib.comm.watch.recorder import recording
    from dtlib.errors import WaitTimeout
    from dtlib.lab.checks.sends import not_waited_for, watched_handles

    cases, inner = [], make_stage(comm.rank)
    _get_ready(comm)
    for kind in kinds:
        inner.zero_grad()
        case = {"kind": kind, "M": len(sizes_of(kind, comm.size))}
        with recording() as events, watched_handles(comm) as handles:
            expected = reference(kind, comm.size).inputs[comm.rank]
            stage = watched(inner, expected, events, last=comm.rank == comm.size - 1)
            try:
                got = step(comm, stage, *arguments_for(kind, comm, events))
                case["sends"] = not_waited_for(handles)
                let_messages_leave(event for event in events if not isinstance(event, Acted))
                case["loss"] = _as_number(got)
            except (WaitTimeout, MPI.Exception) as error:
                case.update(error=str(error), waited=True)
            except Exception as error:
                case.update(error=f"{type(error).__name__}: {error}", waited=False)
        case["log"] = [entry for entry in map(_entry, events) if entry]
        case["peak"], case["outputs"] = stage.peak, stage.outputs
        case["gradient"] = [None if p.grad is None else p.grad.flatten().tolist() for p in inner.parameters()]
        cases.append(case)
        if "error" in case:
            break  # this communicator is of no use any more
    return cases


def _get_ready(comm, patience: int = 4) -> None:
    """The first backward pass from a given gradient imports much of torch: let it be no part of a wait."""
    import torch

    x = torch.ones(1, requires_grad=True)
    (2 * x).backward(torch.ones(1))
    limit = comm.time_limit
    comm.time_limit = patience * limit
    comm.barrier()
    comm.time_limit = limit


def _entry(event):
    """(F, R, B or L, micro-batch), or (operation, destination, bytes); None for what does not count."""
    if isinstance(event, Acted):
        return tuple(event)
    if event.kind != "operation":
        return None
    return event.name, event.peer if event.name == "send" else None, event.bytes


def _as_number(got):
    try:
        return float(got.detach() if hasattr(got, "detach") else got)
    except (TypeError, ValueError, RuntimeError):
        return None
