"""Lesson 11: what is predicted in it, and where the answers come from."""

from dtlib.lab.checks.exercise import Prediction
from dtlib.theory import collectives, scaling


def _rounds() -> dict:
    return {name: collectives.rounds("all_reduce", name, 1024) for name in ("ring", "rabenseifner")}


def _fastest(measured: dict) -> dict:
    ways = {size: measured[f"all-reduce of {size}"] for size in ("4 kB", "4 MB")}
    return {size: min(seconds, key=seconds.get) for size, seconds in ways.items()}


PREDICTIONS = {
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
    "fastest-of-two-hosts": Prediction(
        got=_fastest,
        choices=("ring", "tree", "recursive_doubling", "rabenseifner"),
        hint={
            "4 kB": "Only messages between the hosts take time here: who has the fewest of them, one after another?",
            "4 MB": "Bytes between the hosts take time, and so does each crossing: how many, one after another?",
        },
    ),
    # The exercises
    "limit-of-amdahl": Prediction(
        got=lambda: 1 / 0.05, tolerance=0.01, hint="However many ranks share the rest: 5 % of the time stays."
    ),
    "minutes-of-an-hour": Prediction(
        got=lambda: 0.9 * 60, tolerance=0.01, hint="Efficiency is the fraction of the time that counts."
    ),
}
