"""Work and memory of ring attention, counted instead of timed, for any number of ranks. SIMULATED."""

import torch

from dtlib.comm import solo
from dtlib.comm.watch.recorder import recording
from dtlib.measure.activations import Activations
from dtlib.measure.live import Live
from dtlib.parallel.context import plain
from dtlib.parallel.context.attention import Sequence, ring_attention


def quarter_blocks(order: str, ranks: int) -> list[list[float]]:
    """Return the quarter blocks that each rank computes in each step of the causal ring, as [rank][step].

    They are phases of the trace, ``chunk 5 looks at chunk 2``. A chunk with itself is half masked, and counts as a
    half.
    """
    return [_of_rank(order, rank, ranks) for rank in range(ranks)]


def _of_rank(order: str, rank: int, ranks: int) -> list[float]:
    slice_of_zeros = torch.zeros(1, 1, 4, 2)  # values do not matter here
    with recording() as events:
        plain.ring_attention(*[slice_of_zeros] * 3, solo(rank, ranks), order=order)
    looks = [event.name.split(" looks at ") for event in events if event.kind == "phase"]
    work = []
    for step in range(ranks):
        here = {f"chunk {chunk}" for chunk in plain.CHUNKS[order]((rank - step) % ranks, ranks)}
        work.append(sum(0.5 if query == key else 1.0 for query, key in looks if key in here))
    return work


def path(work: list[list[float]]) -> float:
    """Return the critical path in quarter blocks: each step takes as long as its slowest rank."""
    return sum(map(max, zip(*work, strict=True)))


def kept(tokens: int, ranks: int, heads: int = 2, width: int = 8) -> int:
    """Return the bytes that autograd stores for ring attention on rank 0, in float32. Blocks are not computed."""
    sequence = Sequence(solo(0, ranks), tokens, "zigzag", True)
    sequence.blocks = lambda owner: ()
    q, k, v = (torch.zeros(1, heads, tokens // ranks, width, requires_grad=True) for _ in "qkv")
    with Activations() as activations:
        ring_attention(q, k, v, sequence)
    return activations.now


def peak(tokens: int, ranks: int, heads: int = 2, width: int = 8) -> int:
    """Return the peak live bytes of both passes of ring attention on rank 0, in float32, with computed blocks."""
    sequence = Sequence(solo(0, ranks), tokens, "zigzag", True)
    q, k, v = (torch.zeros(1, heads, tokens // ranks, width, requires_grad=True) for _ in "qkv")
    with Live(q, k, v) as live:
        ring_attention(q, k, v, sequence).sum().backward()
    return live.peak
