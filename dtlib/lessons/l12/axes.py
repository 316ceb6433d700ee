"""One step of a small transformer, parallelised along each axis in turn: memory and communication of a rank.

Each row of AXES creates a model, its optimizer and a forward pass on the ranks of a communicator. ``measured`` trains
it for one step, and measures the next: bytes by ``dtlib.memory()``, operations by ``dtlib.trace()``. No number is
computed by a formula.
"""

from collections import Counter
from functools import partial

import torch
from torch import nn
from torch.nn.functional import mse_loss

import dtlib
from dtlib.parallel.context import ContextParallel
from dtlib.parallel.data import DataParallel
from dtlib.parallel.expert import MixtureOfExperts
from dtlib.parallel.pipeline.plain import step as pipeline_step
from dtlib.parallel.tensor import ParallelAttention, ParallelMLP, sum_over_ranks
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.sharded import fully_shard

BATCH, TOKENS, WIDTH, HEADS, HIDDEN, BLOCKS, EXPERTS = 8, 32, 16, 4, 64, 4, 4
ADAM = {"lr": 0.01, "eps": 1e-4}


class Block(nn.Module):
    """Attention and a perceptron, both split over ``comm``; with sequence parallelism, tokens too."""

    def __init__(self, comm, sequence_parallel=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = ParallelAttention(WIDTH, HEADS, comm, causal=True, sequence_parallel=sequence_parallel)
        self.mlp = ParallelMLP(WIDTH, HIDDEN, comm, sequence_parallel=sequence_parallel)
        if sequence_parallel:
            sum_over_ranks(self.norm1, comm), sum_over_ranks(self.norm2, comm)

    def forward(self, x):
        """Apply attention and perceptron with residual connections."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def transformer(comm, sequence_parallel=False) -> nn.Sequential:
    """Return the transformer, split over ``comm``; on one rank it is whole."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(comm, sequence_parallel) for _ in range(BLOCKS))).double()


def with_experts(comm, alone) -> nn.Sequential:
    """Return a transformer whose perceptrons are experts, divided among the ranks of ``comm``."""
    model, mine = transformer(alone), EXPERTS // comm.size
    for number, block in enumerate(model):
        experts = []
        for expert in range(comm.rank * mine, (comm.rank + 1) * mine):
            torch.manual_seed(10 * number + expert + 1)
            experts.append(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)))
        torch.manual_seed(number)
        block.mlp = MixtureOfExperts(WIDTH, experts, comm).double()
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch of inputs and targets."""
    chance = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, BATCH, TOKENS, WIDTH, generator=chance, dtype=torch.float64))


def adam(model):
    """Return the optimizer of a model."""
    return torch.optim.AdamW(model.parameters(), **ADAM)


def _whole(comm, alone, x, y):
    model = transformer(alone)
    return model, adam(model), lambda: mse_loss(model(x), y)


def _data(comm, alone, x, y):
    model = DataParallel(transformer(alone), comm)
    return model, adam(model), _of_samples(model, comm, x, y)


def _of_samples(model, comm, x, y):
    mine = [tensor.chunk(comm.size)[comm.rank] for tensor in (x, y)]
    return lambda: mse_loss(model(mine[0]), mine[1])


def _zero(comm, alone, x, y, stage):
    model = transformer(alone)
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, comm, stage=stage, **ADAM)
    return model, optimizer, _of_samples(model, comm, x, y)


def _zero_3(comm, alone, x, y):
    model = transformer(alone)
    for block in model:
        fully_shard(block, comm)
    fully_shard(model, comm)
    return model, adam(model), _of_samples(model, comm, x, y)


def _tensor(comm, alone, x, y):
    return _whole(comm, comm, x, y)


def _sequence(comm, alone, x, y):
    model = transformer(comm, sequence_parallel=True)
    mine = [tensor.chunk(comm.size, 1)[comm.rank] for tensor in (x, y)]
    return model, adam(model), lambda: mse_loss(model(mine[0]), mine[1]) / comm.size


def _pipeline(comm, alone, x, y):
    blocks = BLOCKS // comm.size
    stage = transformer(alone)[comm.rank * blocks : (comm.rank + 1) * blocks]
    inputs, targets = x if comm.rank == 0 else None, y if comm.rank == comm.size - 1 else None
    return stage, adam(stage), lambda: pipeline_step(comm, stage, inputs, targets, mse_loss, 4)


def _context(comm, alone, x, y, method):
    model = DataParallel(ContextParallel(transformer(alone), comm, method=method), comm)
    mine = [model.module.split(tensor) for tensor in (x, y)]
    return model, adam(model), lambda: mse_loss(model(mine[0]), mine[1])


def _expert(comm, alone, x, y):
    experts = with_experts(comm, alone)
    model = DataParallel(experts, comm)
    loss = _of_samples(model, comm, x, y)
    return model, adam(model), lambda: loss() + _balance_of(experts)


def _experts_alone(comm, alone, x, y):
    model = with_experts(alone, alone)
    return model, adam(model), lambda: mse_loss(model(x), y) + _balance_of(model)


def _balance_of(model):
    """Return the balance losses, and remove them from the layers, which would keep the graph alive."""
    return sum(0.01 * vars(block.mlp).pop("balance") + 0.001 * vars(block.mlp).pop("z_loss") for block in model)


# Axis -> (function that creates the model, how ranks' losses are combined: mean, sum, or the last rank's).
AXES = {
    "one process": (_whole, "mean"),
    "data": (_data, "mean"),
    "ZeRO 2": (partial(_zero, stage=2), "mean"),
    "ZeRO 3": (_zero_3, "mean"),
    "tensor": (_tensor, "mean"),
    "sequence": (_sequence, "sum"),
    "pipeline": (_pipeline, "last"),
    "context, ring": (partial(_context, method="ring"), "mean"),
    "context, Ulysses": (partial(_context, method="ulysses"), "mean"),
    "one process, experts": (_experts_alone, "mean"),
    "expert": (_expert, "mean"),
}
HELD = ("parameters", "gradients", "optimizer_states", "activations")
WHEN = ("forward", "backward", "step")


def measured(axis: str, comm) -> dict:
    """Return memory, calls and bytes sent of the busiest rank of ``comm``, and the loss.

    Bytes have the keys HELD, and calls are counted by name for each part of a step (WHEN). Only operations on float64
    count, not those on metadata. All ranks call this function.
    """
    make, losses = AXES[axis]
    model, optimizer, forward = make(comm, comm.split(comm.rank), *batch())
    for _ in range(2):  # the first step allocates states; the second is measured
        with dtlib.memory(model, optimizer) as memory:
            optimizer.zero_grad()
            with dtlib.trace() as of_forward:
                loss = forward()
            with dtlib.trace() as of_backward:
                if axis != "pipeline":
                    loss.backward()
            with dtlib.trace() as of_step:
                optimizer.step()
    traces = dict(zip(WHEN, (of_forward, of_backward, of_step), strict=True))
    calls = {when: Counter(event.name for event in _of_numbers(trace)) for when, trace in traces.items()}
    # A pipeline interleaves both passes, so they are separated by direction: activations go up, gradients down.
    if axis == "pipeline":
        sends = Counter(e.peer > comm.rank for e in _of_numbers(of_forward) if e.name == "send")
        calls |= {"forward": Counter(send=sends[True]), "backward": Counter(send=sends[False])}
    held = {name: getattr(memory, name) for name in HELD}
    sent = sum(event.bytes for trace in traces.values() for event in _of_numbers(trace))
    everyone = comm.all_gather_object((held, calls, sent, None if loss is None else loss.item()))
    helds, calls, sent, of_ranks = zip(*everyone, strict=True)
    combined = {"mean": lambda: sum(of_ranks) / comm.size, "sum": lambda: sum(of_ranks), "last": lambda: of_ranks[-1]}
    return {
        **{name: max(each[name] for each in helds) for name in HELD},
        **{when: _most(each[when] for each in calls) for when in WHEN},
        "sent": max(sent),
        "loss": combined[losses](),
    }


def _of_numbers(trace) -> list:
    """Return operations on float64 that sent messages; on a communicator of one rank there are none."""
    return [e for e in trace.events if e.kind == "operation" and e.dtype == "float64" and e.messages]


def _most(counters) -> dict[str, int]:
    most = Counter()
    for counter in counters:
        most |= counter
    return dict(most)
