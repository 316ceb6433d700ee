"""Lesson 05: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction
from dtlib.training.rates import linear_rule, square_root_rule

_POWERS = ("k^0.5", "k^0.75", "k")
_RULES = ("no scaling", "square root", "linear")


def _by_rule(rate: float, batch: int, base_batch: int) -> dict[str, float]:
    return {"linear": linear_rule(rate, batch, base_batch), "square root": square_root_rule(rate, batch, base_batch)}


def _lowest(errors: dict) -> dict[int, str]:
    """Return for each batch the rule with the lowest mean test error; all rules have equally many seeds."""
    return {batch: min(_RULES, key=lambda rule: sum(errors[batch, rule])) for batch in (256, 512)}


PREDICTIONS = {
    "steps-of-an-epoch": Prediction(
        got=lambda: {ranks: 1280 / (16 * ranks) for ranks in (1, 32)}, within=0.5, hint="Images over 16 per rank."
    ),
    "rates-at-256": Prediction(got=lambda: _by_rule(0.02, 256, 16), tolerance=1e-9, hint="k is 256 / 16."),
    "lowest-error": Prediction(got=_lowest, choices=_RULES, hint="Look at the figure again."),
    "failed-at-512": Prediction(
        got=lambda counts: counts[512, "linear"][0], within=5, hint="Count the dots above 20 %."
    ),
    # The exercises
    "rates-on-128-ranks": Prediction(
        got=lambda: _by_rule(0.1, 128 * 32, 8 * 32),
        tolerance=1e-9,
        hint="k is the new batch over the old one, each over all ranks.",
    ),
    "best-of-three-rules": Prediction(
        got=lambda errors: {batch: min(_POWERS, key=lambda rule: sum(errors[batch, rule])) for batch in (256, 512)},
        choices=_POWERS,
        hint="Where is the linear rule's elbow, in the lecture?",
    ),
    "warm-up-steps": Prediction(got=lambda: 5 * 1_228_800 // (128 * 32), hint="A step takes the batch of all ranks."),
}
