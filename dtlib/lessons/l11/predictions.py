"""Lesson 11: the questions that learners predict, and the sources of the answers."""

from statistics import median

from dtlib.lab.checks.exercise import Prediction
from dtlib.theory import collectives, scaling
from dtlib.world.machine import usable_cores


def _rounds() -> dict:
    return {name: collectives.rounds("all_reduce", name, 1024) for name in ("ring", "rabenseifner")}


def _falls(strong: dict, weak: dict, cores: int) -> str:
    """Return which efficiency is lower on all ranks than on one rank per core: strong, weak, both or none."""
    most = max(strong)
    fall = {
        "strong": median(strong[1]) / most / median(strong[most]) < 0.9,
        "weak": median(weak[1]) / median(weak[most]) < 0.9,
    }
    return (
        "none" if cores >= most or not any(fall.values()) else "both" if all(fall.values()) else max(fall, key=fall.get)
    )


PREDICTIONS = {
    "beyond-the-cores": Prediction(
        got=lambda strong, weak: _falls(strong[0], weak[0], usable_cores()),
        choices=("strong", "weak", "both", "none"),
        of_this_computer=True,
        hint="Ranks share cores there. Can the same work be done sooner? Can more work be done in the same time?",
    ),
    "amdahl": Prediction(
        got=lambda: {"4 ranks": scaling.amdahl(0.1, 4), "any number": 10.0},
        tolerance=0.05,
        hint={
            "4 ranks": "A tenth stays, nine tenths are divided by four.",
            "any number": "With endless ranks only the serial tenth is left.",
        },
    ),
    "times-of-512": Prediction(
        got=lambda times: times, tolerance=0.01, hint="Efficiency is speed-up over the number of GPUs."
    ),
    "rounds-of-1024": Prediction(
        got=_rounds,
        hint={"ring": "2 (N - 1): all the way round, twice.", "rabenseifner": "It halves log2 N times, and doubles."},
    ),
    "fastest-by-the-model": Prediction(
        got=lambda modelled: min(modelled, key=modelled.get),
        choices=("ring", "recursive_doubling"),
        hint="6 (5 + 50) ms for the ring. Two arrays of 4 MB share a link of 20 MB/s: how long do they take?",
    ),
    # The exercises
    "limit-of-amdahl": Prediction(
        got=lambda: 1 / 0.05, tolerance=0.01, hint="However many ranks share the rest: 5 % of the time stays."
    ),
    "minutes-of-an-hour": Prediction(
        got=lambda: 0.9 * 60, tolerance=0.01, hint="Efficiency is the fraction of the time that counts."
    ),
}
