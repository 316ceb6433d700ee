"""How much faster more ranks are: the formulas of the lecture on scaling (pure Python).

    speed-up    seconds on 1 rank / seconds on N, of the same work (strong scaling); or, where every rank has as much
                work as one had alone (weak scaling), N times that
    efficiency  speed-up / N

A fraction s of the work is serial, the rest is divided evenly. G. M. Amdahl (AFIPS 1967) keeps the work as it is: the
speed-up is 1 / (s + (1 - s) / N), and never more than 1 / s.
"""

from dtlib.theory import collectives


def amdahl(serial: float, ranks: int) -> float:
    """Speed-up of the same work on ``ranks`` ranks, of which the fraction ``serial`` is not divided."""
    return 1 / (serial + (1 - serial) / ranks)


def serial_fraction(efficiency: float, ranks: int) -> float:
    """The serial fraction that leaves this efficiency on ``ranks`` ranks, by Amdahl."""
    return (1 / efficiency - 1) / (ranks - 1)


def fastest_all_reduce(ranks: int, count: float, latency: float, bandwidth: float) -> tuple[float, str]:
    """Seconds and name of the cheapest algorithm that divides its work, for ``count`` bytes; 0 on one rank."""
    if ranks == 1:
        return 0.0, "none"
    names = ("ring", "recursive_doubling", "rabenseifner")
    return min((collectives.cost("all_reduce", name, ranks, count, latency, bandwidth), name) for name in names)


def step(ranks: int, compute: float, count: float, latency: float, bandwidth: float, hidden: float = 0.0) -> float:
    """Seconds of a step of data parallelism.

    Args:
        compute: seconds that a rank computes.
        count: bytes of the gradients.
        latency, bandwidth: of a message, in seconds and bytes a second.
        hidden: seconds of communication that go on while ranks compute, at most.
    """
    return compute + max(0.0, fastest_all_reduce(ranks, count, latency, bandwidth)[0] - hidden)
