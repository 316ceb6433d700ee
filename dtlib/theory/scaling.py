"""Formulas of the lecture on scaling: speed-up and efficiency on N ranks (pure Python).

    speed-up    strong scaling (the same work on N ranks): seconds on 1 rank / seconds on N ranks
                weak scaling (the same work per rank): N times that
    efficiency  speed-up / N

Amdahl's law (G. M. Amdahl, AFIPS 1967) is for strong scaling. A fraction s of the work is serial, and the rest is
divided evenly: the speed-up is 1 / (s + (1 - s) / N), and never more than 1 / s.
"""

from dtlib.theory import collectives


def amdahl(serial: float, ranks: int) -> float:
    """Return the speed-up on ``ranks`` ranks, if the fraction ``serial`` of the work is not divided."""
    return 1 / (serial + (1 - serial) / ranks)


def serial_fraction(efficiency: float, ranks: int) -> float:
    """Return the serial fraction for which Amdahl's law gives this efficiency on ``ranks`` ranks."""
    return (1 / efficiency - 1) / (ranks - 1)


def fastest_all_reduce(ranks: int, count: float, latency: float, bandwidth: float) -> tuple[float, str]:
    """Return seconds and name of the fastest all-reduce of ``count`` bytes; 0 seconds on one rank."""
    if ranks == 1:
        return 0.0, "none"
    names = ("ring", "recursive_doubling", "rabenseifner")
    return min((collectives.cost("all_reduce", name, ranks, count, latency, bandwidth), name) for name in names)


def step(ranks: int, compute: float, count: float, latency: float, bandwidth: float, hidden: float = 0.0) -> float:
    """Return the seconds of a step of data parallelism.

    Args:
        compute: seconds that a rank computes.
        count: bytes of the gradients.
        latency: seconds per message.
        bandwidth: bytes per second.
        hidden: seconds of communication that overlap with computation, at most.
    """
    return compute + max(0.0, fastest_all_reduce(ranks, count, latency, bandwidth)[0] - hidden)
