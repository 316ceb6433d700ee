"""Observation of one pipeline step: order of micro-batches on a stage, messages, and memory of autograd."""

import gc
import weakref
from typing import NamedTuple

from dtlib.lessons.l03.observe_ring import let_messages_leave

SMALL = 3  # samples of a micro-batch
LONG = 2000  # samples of a message so long that MPI sends it only after the receive is posted


def width(edge: int) -> int:
    """Return the number of features between stages ``edge - 1`` and ``edge``, which differs from edge to edge."""
    return 6 + edge % 4


def sizes_of(kind: str, ranks: int) -> list[int]:
    """Return the number of samples of each micro-batch.

    Cases: equal sizes, a short last one, fewer micro-batches than ranks, and long ones.
    """
    return {
        "even": [SMALL] * (ranks + 2),
        "uneven": [SMALL] * (ranks + 1) + [1],
        "few": [SMALL] * max(1, ranks - 2),
        "long": [LONG] * 4,
        "split": [3, 3, 2, 2],  # as tensor_split(4) cuts ten samples
    }[kind]


def make_stage(index: int):
    """Return stage ``index`` of the model."""
    return stage_of(index, width(index), width(index + 1))


def stage_of(index: int, inputs: int, outputs: int):
    """Return a stage with these numbers of features; the same index gives the same parameters."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh()).double()


def make_batch(kind: str, ranks: int):
    """Return inputs and targets, one tensor per micro-batch."""
    import torch

    generator = torch.Generator().manual_seed(len(kind))
    return [
        [torch.randn(size, features, dtype=torch.float64, generator=generator) for size in sizes_of(kind, ranks)]
        for features in (width(0), width(ranks))
    ]


def mean_square(output, target):
    """Return the mean squared error."""
    return (output - target).square().mean()


class Reference(NamedTuple):
    """Results of one process.

    ``inputs[stage][m]`` are inputs, ``gradients[m][stage]`` flat gradients of the mean loss of micro-batch m,
    ``losses[m]`` its loss, and ``weights[m]`` its part of the batch's samples.
    """

    inputs: list
    gradients: list
    losses: list
    weights: list


def reference(kind: str, ranks: int) -> Reference:
    """Run the model in one process."""
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
    """An entry in the record of operations.

    ``kind`` is the start of a forward pass (F), of its recomputation for the backward pass (R) or of a backward pass
    (B), or a loss (L).
    """

    kind: str
    microbatch: int | str | None  # "all": the whole batch; None: unknown input


class _Kept:
    """A wrapper that autograd stores instead of a tensor, so that its lifetime can be observed."""

    def __init__(self, tensor):
        self.tensor = tensor


def _copies(outputs: list, values: set, before: dict) -> int:
    """Return the number of tensors that equal some output, but are neither among ``outputs`` nor from ``before``.

    An earlier answer may have left equal tensors behind, for example in a wait that was interrupted.
    """
    import torch

    own, like = {output.untyped_storage().data_ptr() for output in outputs}, outputs[-1]
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and before.get(id(t), list)() is not t]
    tensors = [tensor for tensor in tensors if (tensor.shape, tensor.dtype) == (like.shape, like.dtype)]
    others = {t.untyped_storage().data_ptr() for t in tensors if t.detach().numpy().tobytes() in values}
    return len(others - own)


def watched(inner, expected: list, events: list, last: bool = False):
    """Return a module like ``inner`` that appends to ``events`` when a micro-batch passes.

    ``expected`` are the inputs of the micro-batches. ``peak`` of the module is the largest number of micro-batches for
    which autograd stored tensors. ``outputs`` is the largest number of live outputs; on the last stage, which sends
    none, copies count as well.
    """
    import torch
    from torch import nn
    from torch.autograd.graph import saved_tensors_hooks

    before = {id(thing): weakref.ref(thing) for thing in gc.get_objects() if type(thing) is torch.Tensor}

    def which(x):
        if len(x) == sum(map(len, expected)) != len(expected[0]):
            return "all"
        same = (m for m, y in enumerate(expected) if x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=1e-9))
        return next(same, None)

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.peak, self._kept = inner, 0, []
            # Peak number of live outputs; all outputs; their values, as bytes.
            self.outputs, self._made, self._values = 0, [], set()
            self._without_graph = set()  # micro-batches that passed without a graph

        def forward(self, x):
            microbatch, kept = which(x.detach()), weakref.WeakSet()
            # With checkpointing, a micro-batch passes first without a graph, and later again with one.
            again = torch.is_grad_enabled() and microbatch in self._without_graph
            events.append(Acted("R" if again else "F", microbatch))
            if again:
                self._without_graph.discard(microbatch)
            elif not torch.is_grad_enabled():
                self._without_graph.add(microbatch)

            # autograd stores these wrappers, and frees them with the graph, so ``kept`` shows how long it lives.
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
            copies = _copies(alive, self._values, before) if last and len(self._made) == len(expected) else 0
            self.outputs = max(self.outputs, len(alive) + copies)
            return output

    return Watched()


# Observation


def observe_microbatches(step, comm):
    """Observe ``step(comm, stage, inputs, targets, loss_fn)``, which returns the loss of the batch."""
    return _observe(step, comm, ("even", "uneven", "few", "long"), _as_microbatches)


def observe_batch(step, comm):
    """Observe ``step(comm, stage, x, target)``, which splits the batch itself."""
    return _observe(step, comm, ("split",), _as_a_batch)


def _as_microbatches(kind, comm, events):
    """Return the arguments: inputs on rank 0, on other ranks receive buffers full of NaN."""
    import torch

    inputs, targets = make_batch(kind, comm.size)
    if comm.rank > 0:
        inputs = [torch.full((len(x), width(comm.rank)), float("nan"), dtype=torch.float64) for x in inputs]

    def loss_fn(output, target):
        events.append(Acted("L", None))
        return mean_square(output, target)

    return inputs, targets, loss_fn


def _as_a_batch(kind, comm, events):
    """Return the arguments with the whole batch."""
    import torch

    x, target = (torch.cat(batches) for batches in make_batch(kind, comm.size))
    return x if comm.rank == 0 else None, target if comm.rank == comm.size - 1 else None


def _observe(step, comm, kinds, arguments_for) -> list[dict]:
    """Return for each kind of batch this rank's operations in order, and the result; stop after an error."""
    from mpi4py import MPI

    from dtlib.comm.watch.recorder import recording
    from dtlib.errors import WaitTimeout
    from dtlib.lab.checks.pending_handles import count_unfinished, watched_handles

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
                case["sends"] = count_unfinished(handles)
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
            break  # after an error the communicator cannot be used again
    return cases


def _get_ready(comm, load_factor: int = 4) -> None:
    """Run a first backward pass, which imports much of torch, so that no rank times out while waiting for it."""
    import torch

    x = torch.ones(1, requires_grad=True)
    (2 * x).backward(torch.ones(1))
    limit = comm.time_limit
    comm.time_limit = load_factor * limit
    comm.barrier()
    comm.time_limit = limit


def _entry(event):
    """Return (F, R, B or L, micro-batch), or (operation, destination, bytes); None for other events."""
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
