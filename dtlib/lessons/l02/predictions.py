"""Lesson 02: the questions that learners predict, and the sources of the answers."""

from dtlib import pi
from dtlib.lab.checks.exercise import Prediction


def _standard_error(points: int) -> float:
    return pi.Estimate(points, pi.count_numpy(0, points)).standard_error


_SQUARE_ROOT = "The number of points stands under a square root."

PREDICTIONS = {
    "times-smaller": Prediction(
        got=lambda more, estimate: estimate.standard_error / more.standard_error,
        tolerance=0.02,
        hint="Look at n under the square root.",
    ),
    "points-apart": Prediction(got=lambda counts: max(counts) - min(counts), hint="Integers are not rounded."),
    "speed-up-of-four": Prediction(
        got=lambda seconds: seconds[1] / seconds[4],
        tolerance=0.25,
        hint="At most as many as there are cores; fewer where something else uses one.",
        of_this_computer=True,
    ),
    "brings-more": Prediction(
        got=lambda times: max(times, key=times.get),
        choices=("compiling", "four ranks"),
        hint="Four ranks are at most four times as fast. Look at the loop's points per second, before and after.",
    ),
    # The exercises
    "error-of-a-million": Prediction(got=lambda: _standard_error(10**6), tolerance=0.1, hint=_SQUARE_ROOT),
    "points-for-0.004": Prediction(
        got=lambda: 10**4 * (_standard_error(10**4) / 0.004) ** 2, tolerance=0.1, hint=_SQUARE_ROOT
    ),
}
