"""Lesson 07: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction
from dtlib.schedule import gpipe, one_f_one_b, simulate


def _simulated() -> dict:
    """Return simulations with three stages and six micro-batches."""
    return {"GPipe": simulate(gpipe(3, 6)), "1F1B": simulate(one_f_one_b(3, 6))}


_ORDERS = {
    "GPipe": "The bubble is (p-1) / (m+p-1) of the step. When does the first B start?",
    "1F1B": "Another order, an equal bubble. B starts early: at most min(m, p - rank) activations.",
}
_NAMES = ("GPipe", "1F1B", "interleaved 1F1B", "ZB-H1")

PREDICTIONS = {
    "percentage-of-two": Prediction(
        got=lambda two: 100 * (1 - two.bubble), tolerance=0.15, hint="When does rank 1 begin?"
    ),
    "percentage-lost": Prediction(
        got=lambda: {m: 100 * simulate(gpipe(4, m)).bubble for m in (1, 8, 32)}, tolerance=0.01, hint=_ORDERS["GPipe"]
    ),
    "which-hangs": Prediction(
        got=lambda hangs: hangs,
        choices=("A", "B"),
        hint="What does rank 0 need for 0B0, and when does rank 1 compute it?",
    ),
    "held-with-1f1b": Prediction(
        got=lambda on_eight: {f"rank {r}": on_eight.peak_activations[r] for r in (0, 7)}, hint=_ORDERS["1F1B"]
    ),
    "growth-of-live-bytes": Prediction(
        got=lambda alive: {name: alive[name, 16].peaks[1] / alive[name, 8].peaks[1] for name in ("GPipe", "1F1B")},
        within=0.3,
        hint="How many micro-batches does rank 1 hold, of 8 and of 16?",
    ),
    "of-four-schedules": Prediction(
        got=lambda weights, four: {
            "smallest bubble": min(four, key=lambda name: four[name].bubble),
            "most held": max(weights, key=weights.get),
        },
        choices=_NAMES,
        hint="See the second table.",
    ),
    # The appendix
    "milliseconds-of-branches": Prediction(
        got=lambda timeline: 1e3 * timeline.end,
        tolerance=0.15,
        hint="Which two of the three blocks are computed at the same time, forward and backward?",
    ),
    "makespan-with-a-slow-stage": Prediction(
        got=lambda uneven: uneven, tolerance=0.1, hint="Stage 1 alone takes 8 x (2 + 4). When can it begin?"
    ),
    "throughput-of-eight-stages": Prediction(
        got=lambda: 8 * simulate(gpipe(2, 1)).makespan / 2 * 32 / simulate(gpipe(8, 32)).makespan,
        tolerance=0.02,
        hint="A step takes M + K - 1 turns, and a turn computes 1/(K M) of the batch: 39 turns of 1/256, and 2 of 1/2.",
    ),
    "fastest-with-messages": Prediction(
        got=lambda series: {
            says: min(series, key=lambda name: series[name][message])
            for says, message in (("no time", 0), ("two forward passes", 2))
        },
        choices=_NAMES,
        hint={
            "no time": "The smallest bubble in lesson 07.",
            "two forward passes": "Which of the four waits for messages most?",
        },
    ),
    "above-the-simulated": Prediction(
        got=lambda last: bool(last[3] > 1.1 * last[2]),
        choices=(True, False),
        hint="Rank 0 has its 8 outputs at time 8. How long does its link need for 8 messages of 2?",
    ),
    # The exercises
    "idle-of-three-stages": Prediction(
        got=lambda: {name: step.bubble for name, step in _simulated().items()}, tolerance=0.02, hint=_ORDERS
    ),
    "activations-of-three-stages": Prediction(
        got=lambda: {name: step.peak_activations for name, step in _simulated().items()}, kind=list, hint=_ORDERS
    ),
    "holders-of-memory": Prediction(
        got=lambda: {"output": "means and sending", "x.grad": "sending"},
        choices=("kept", "losses", "means", "sending", "means and sending", "kept and losses"),
        hint={
            "output": "Which objects refer to it, or to a tensor with its memory?",
            "x.grad": "kept.pop(m) removes x. What still refers to x.grad?",
        },
    ),
    "makespan-of-two-stages": Prediction(
        got=lambda: simulate(gpipe(2, 3)).makespan, hint="Rank 0 waits for B0 of rank 1."
    ),
    "activations-of-two-stages": Prediction(
        got=lambda: simulate(gpipe(2, 3)).peak_activations[0], hint="B0 comes after F2."
    ),
}
