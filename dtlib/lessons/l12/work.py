"""Ring attention counted, not timed: the work of each rank in each step, and what is kept. SIMULATED, for any N."""

import torch

from dtlib.comm import solo
from dtlib.comm.watch.recorder import recording
from dtlib.measure.activations import Activations
from dtlib.measure.live import Live
from dtlib.parallel.context import plain
from dtlib.parallel.context.attention import Sequence, ring_attention


def quarter_blocks(order: str, ranks: int) -> list[list[float]]:
    """Quarter blocks that each rank computes in each step of the plain ring, causal: [rank][step].

    They are phases of the trace, ``chunk 5 looks at chunk 2``. A chunk that looks at itself is half masked: a half.
    """
    return [_of_rank(order, rank, ranks) for rank in range(ranks)]


def _of_rank(order: str, rank: int, ranks: int) -> list[float]:
    slice_of_zeros = torch.zeros(1, 1, 4, 2)  # as values do not count
    with recording() as events:
        plain.ring_attention(*[slice_of_zeros] * 3, solo(rank, ranks), order=order)
    looks = [event.name.split(" looks at ") for event in events if event.kind == "phase"]
    work = []
    for step in range(ranks):
        here = {f"chunk {chunk}" for chunk in plain.CHUNKS[order]((rank - step) % ranks, ranks)}
        work.append(sum(0.5 if query == key else 1.0 for query, key in looks if key in here))
    return work


def path(work: list[list[float]]) -> float:
    """Quarter blocks after one another: a step is over when the last rank has done its part."""
    return sum(map(max, zip(*work, strict=True)))


def kept(tokens: int, ranks: int, heads: int = 2, width: int = 8) -> int:
    """Bytes that autograd keeps of ring attention on rank 0, in float32. Blocks are left out: values do not count."""
    sequence = Sequence(solo(0, ranks), tokens, "zigzag", True)
    sequence.blocks = lambda owner: ()
    q, k, v = (torch.zeros(1, heads, tokens // ranks, width, requires_grad=True) for _ in "qkv")
    with Activations() as activations:
        ring_attention(q, k, v, sequence)
    return activations.now


def peak(tokens: int, ranks: int, heads: int = 2, width: int = 8) -> int:
    """The most live bytes of both passes of ring attention on rank 0, in float32, of blocks that are computed."""
    sequence = Sequence(solo(0, ranks), tokens, "zigzag", True)
    q, k, v = (torch.zeros(1, heads, tokens // ranks, width, requires_grad=True) for _ in "qkv")
    with Live(q, k, v) as live:
        ring_attention(q, k, v, sequence).sum().backward()
    return live.peak
