"""Lesson 01: the questions that learners predict, and the sources of the answers."""

import math

from dtlib.lab.checks.exercise import Prediction
from dtlib.lessons.l01 import claims
from dtlib.theory.zero import zero_bytes


def _gpus() -> int:
    return math.ceil(sum(zero_bytes(175_000_000_000, 1, 0).values()) / 80e9)


def _years() -> float:
    return 6 * 175e9 * 300e9 / (0.45 * 312e12) / (365.25 * 86400)


def _zeros() -> float:
    """Return the powers of ten between Llama 3.1 and a doubling every 3.5 months since AlexNet."""
    log2_nodes = (2024.6 - 2012.75) * 12 / 3.5
    return math.log10(5.0e17 * 2**log2_nodes / 3.8e25)


PREDICTIONS = {
    "gpus-for-the-states": Prediction(
        got=_gpus, tolerance=0.05, hint="Adam in mixed precision: 16 bytes a parameter, as lesson 06 counts them."
    ),
    "years-on-one-gpu": Prediction(
        got=_years, tolerance=0.1, hint="6 x parameters x tokens, over 45 % of 312 TFLOP/s; a year has 3.2e7 seconds."
    ),
    "operations-of-a-step": Prediction(
        got=lambda counted: counted[3][0] * counted[3][2] * 64 / 1e6,
        tolerance=0.02,
        hint="6 x parameters x samples: four layers of 512 x 512 weights, 64 samples.",
    ),
    "zeros-too-many": Prediction(
        got=_zeros, within=0.5, hint="Twelve years are 41 doublings of 3.5 months, a factor of 10 to the 12.2."
    ),
    "from-29-hours-to-72-seconds": Prediction(
        got=lambda: {"processors": 2048 / 8, "speed": 29 * 3600 / 72},
        tolerance=0.02,
        hint={"processors": "8 in the first row, 2,048 in the last.", "speed": "29 hours over 1.2 minutes."},
    ),
    "days-on-1536": Prediction(
        got=lambda: {"PTD": 23, "ZeRO-3": 74},
        tolerance=0.15,
        hint={
            "PTD": "Nearly four times as fast on four times as many.",
            "ZeRO-3": "With so few samples a GPU, fetching parameters takes longer than computing with them.",
        },
    ),
    "weights-on-rank-0": Prediction(
        got=lambda held: held[0], hint="Only one of the four keeps the whole model on each rank."
    ),
    "verdicts": Prediction(
        got=lambda: {claim: verdict for claim, verdict, _ in claims.CLAIMS},
        choices=claims.VERDICTS,
        hint={claim: how for claim, _, how in claims.CLAIMS},
    ),
}
