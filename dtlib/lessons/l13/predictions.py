"""Lesson 13: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction

_ONE = ("data parallelism with a larger rate", "data parallelism with Nesterov momentum", "training alone")
_FASTER = ("8 bits", "all_reduce")
_CANCEL = ("they cancel", "they stay")

PREDICTIONS = {
    "kilobytes-of-an-epoch": Prediction(
        got=lambda epoch: sum(epoch[0]) / 1000,
        tolerance=0.02,
        hint="20 steps. In each, a rank sends 2 (N - 1) / N times 8,970 numbers of 4 bytes, with N = 4.",
    ),
    "one-step-a-round": Prediction(
        got=lambda: _ONE[1],
        choices=_ONE,
        hint="With H = 1 the outer gradient is the rate times the gradient. What does outer do?",
    ),
    "errors-of-8-bits": Prediction(
        got=lambda: {"top-k with feedback": _CANCEL[0], "8 bits": _CANCEL[1]},
        choices=_CANCEL,
        hint="Who keeps what a rounding has left out? 8 bits are rounded a second time, when all have been added up.",
    ),
    "which-is-faster": Prediction(
        got=lambda: {"9,000 numbers": _FASTER[1], "1,000,000 numbers": _FASTER[0]},
        choices=_FASTER,
        hint="Count messages, one after the other, and then bytes: which of the two costs more here?",
    ),
    # The exercises
    "top-1-percent-sends": Prediction(
        got=lambda: 3 * 10_000 * 8, hint="N - 1 ranks, 1 % of the numbers, and for each a place of 4 bytes and a value."
    ),
    "steps-of-an-hour": Prediction(
        got=lambda: {"DDP": 3600, "H = 100": 3600 / 10.9 * 100},
        tolerance=0.02,
        hint="A step of DDP takes c + m, and a round of H steps takes H c + m.",
    ),
}
