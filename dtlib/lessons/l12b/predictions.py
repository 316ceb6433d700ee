"""Lesson 12b: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction

_SOME = ("data", "ZeRO 3", "tensor", "context, ring")

PREDICTIONS = {
    "factor-of-an-expert": Prediction(
        got=lambda factor: factor[0],
        tolerance=0.001,
        hint="Gradients of N losses arrive at an expert as a sum. What is wanted is the gradient of their mean.",
    ),
    "silent-forward": Prediction(
        got=lambda table: next(axis for axis in _SOME if not table[0][axis]["forward"]),
        choices=_SOME,
        hint="Which of them has whole layers and whole samples on every rank?",
    ),
    # The exercises
    "rows-that-leave": Prediction(
        got=lambda: 1000 * 2 * 7 // 8, hint="Each token has two choices, and one in eight of these is at home."
    ),
    "capacity-of-an-expert": Prediction(
        got=lambda: 1.25 * 4096 * 2 / 64, hint="Choices over experts is an even share. Capacity is a factor of it."
    ),
}
