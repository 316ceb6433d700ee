"""Closed formulas of the papers for idle time and activations of the four schedules.

There are p ranks, m micro-batches and v stages per rank. F and B are the times of a rank's forward and backward pass of
one micro-batch, over all stages of the rank.

    order             idle time of a rank    idle / makespan      idle / ideal    activations that rank r holds
    gpipe             (p-1) (F+B)            (p-1) / (m+p-1)      (p-1) / m       m
    one_f_one_b       (p-1) (F+B)            (p-1) / (m+p-1)      (p-1) / m       min(m, p-r)
    interleaved       (p-1) (F+B) / v        (p-1) / (v m+p-1)    (p-1) / (v m)   min(v m, 2 (p-r-1) + (v-1) p + 1)
                                                                                  of 1/v the size each
    zero_bubble_h1    (p-1) (F+I-W)          (p-1) / (3 m+p-1)    (p-1) / (3 m)   min(m, p)

The ideal is m (F+B). The first three rows hold for any F and B. The row of ZB-H1 is for m >= p: its idle time holds if
W takes no longer than F and no longer than I. Its fractions, and the functions below, assume F = I = W. With m < p
there is too little work to fill the idle time: a rank is then idle for (p-1) + (p-m), in units of F.

The first rank holds most activations. With interleaved stages it holds 1 + (p-1) / (p v) times as much as with 1F1B.

GPipe: Y. Huang et al., NeurIPS 2019, section 2.3. 1F1B and interleaved: D. Narayanan et al., SC 2021, section 2.2; the
memory of interleaved: V. Korthikanti et al., "Reducing activation recomputation in large transformer models",
arXiv:2205.05198, section 4.2.3. ZB-H1: P. Qi et al., ICLR 2024, section 2, and the README beside their code,
github.com/sail-sg/zero-bubble-pipeline-parallelism, which has the column over the ideal: (p-1)/m and (p-1)/3m.
"""

from dtlib.schedule.actions import ScheduleError

ORDERS = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1")


def idle_over_ideal(order: str, p: int, m: int, v: int = 1) -> float:
    """Return the idle time of a rank, divided by the time that it computes."""
    return {
        "gpipe": (p - 1) / m,
        "one_f_one_b": (p - 1) / m,
        "interleaved": (p - 1) / (v * m),
        "zero_bubble_h1": (p - 1 + max(0, p - m)) / (3 * m),
    }[_known(order)]


def bubble(order: str, p: int, m: int, v: int = 1) -> float:
    """Return the idle time of a rank, divided by the makespan."""
    idle = idle_over_ideal(order, p, m, v)
    return idle / (1 + idle)


def makespan(order: str, p: int, m: int, v: int = 1, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return the time of a step; ``forward`` and ``backward`` are a rank's times over all its stages."""
    return m * (forward + backward) * (1 + idle_over_ideal(order, p, m, v))


def peak_activations(order: str, p: int, m: int, v: int = 1, rank: int = 0) -> int:
    """Return the peak number of stored activations on a rank; with v stages per rank each has 1/v of the size."""
    return {
        "gpipe": m,
        "one_f_one_b": min(m, p - rank),
        "interleaved": min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1) if v > 1 else min(m, p - rank),
        "zero_bubble_h1": min(m, p),
    }[_known(order)]


def _known(order: str) -> str:
    if order not in ORDERS:
        raise ScheduleError(f"There are no formulas for {order!r}; there are for {', '.join(ORDERS)}.")
    return order
