"""Lesson 14: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction
from dtlib.lessons.l14 import brief
from dtlib.planner import CALIBRATIONS, save_interval

_FITS = ("fits", "too large")
_ASKED = ("data 4", "data 4, ZeRO-1", "data 4, ZeRO-2", "data 4, ZeRO-3", "data 2, pipe 2, ZeRO-1")


def _what_fits() -> dict:
    return {name: _FITS[brief.held(brief.MESHES[name]) > brief.LIMIT] for name in _ASKED}


def _sends_least() -> str:
    fitting = [name for name, plan in brief.MESHES.items() if brief.held(plan) <= brief.LIMIT]
    return min(fitting, key=lambda name: sum(brief.sent(brief.MESHES[name]).values()))


def _keeps_more(activations: list) -> str:
    whole, stages = activations[0].values()
    return "about the same" if 0.8 < stages / whole < 1.2 else max(activations[0], key=activations[0].get)


def _widest() -> str:
    """Return the axis on which the fitted runs have only the size 1, so that its band is widest."""
    seen = CALIBRATIONS["h100-cluster"].seen
    return next(axis for axis in ("pipe", "data", "tensor") if seen[axis] == (1, 1))


PREDICTIONS = {
    "what-fits": Prediction(
        got=_what_fits,
        choices=_FITS,
        hint="866,816 parameters: 16 bytes each on one rank. ZeRO-1 on N ranks: 4 + 4 + 8/N; ZeRO-2: 4 + 12/N.",
    ),
    "sends-least": Prediction(
        got=_sends_least,
        choices=tuple(brief.MESHES),
        hint="Parameters, gradients or activations: which of the three is smallest here, with 16 samples a step?",
    ),
    "keeps-more": Prediction(
        got=_keeps_more,
        choices=("data 4, ZeRO-3", "pipe 4", "about the same"),
        hint="Layers times micro-batches under way, for each of the two.",
    ),
    "ratio-without-bubble": Prediction(got=lambda: 1, hint="What is measured would be what is predicted."),
    "seconds-between-saves": Prediction(got=lambda: save_interval(0.5, 25), hint="The root of 2 x 0.5 x 25."),
    "done-twice": Prediction(got=lambda: 12 % 5, hint="The last checkpoint before step 12 is that of step 10."),
    "widest-band": Prediction(
        got=_widest,
        choices=("data", "tensor", "pipe"),
        hint="Of which axis has the fit seen one value alone?",
    ),
    # The exercises
    "bytes-a-parameter": Prediction(
        got=lambda: {"ZeRO-1 on 64 ranks": 4 + 4 + 8 / 64, "ZeRO-3 on 64 ranks": 16 / 64},
        tolerance=0.02,
        hint="In float32 with Adam 4 + 4 + 8 bytes, of which stage 1 divides the 8, stage 3 all.",
    ),
    "turns-of-a-pipeline": Prediction(got=lambda: 8 + 4 - 1, hint="m + p - 1: the last stage waits for p - 1 turns."),
    "more-micro-batches": Prediction(
        got=lambda: {"ZeRO-1": 1, "ZeRO-3": 4},
        hint="Which of the two sends something in each micro-batch, and which once a step?",
    ),
}
