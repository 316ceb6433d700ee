"""Lesson 06: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction
from dtlib.theory.zero import GB, GIB, zero_bytes

_KINDS = ("parameters", "gradients", "optimizer")
_LARGE = 7_500_000_000  # parameters


def _states(ranks: int, stage: int) -> int:
    return sum(zero_bytes(_LARGE, ranks, stage).values())


def _bytes_a_parameter(held: dict, stage: int) -> float:
    """Return the counted bytes of model states per parameter in a stage."""
    parameters = held[0]["parameters"] // 2  # 16 bits each
    states = ("parameters", "gradients", "master_weights", "optimizer_states")
    return sum(held[stage][line] for line in states) / parameters


def _held_at(stage: int) -> Prediction:
    hints = {kind: f"Does stage {stage} shard {kind}? 4 bytes per number; Adam: 2 per weight." for kind in _KINDS}
    return Prediction(got=lambda held_at: dict(zip(_KINDS, held_at[0][stage], strict=True)), tolerance=1e-3, hint=hints)


PREDICTIONS = {
    "gigabytes-a-rank": Prediction(
        got=lambda: _states(64, stage=0) / GB, hint="16 bytes per parameter, and all of them on every rank."
    ),
    "bytes-of-stage-1": Prediction(
        got=lambda sent_by_stage_1, sent_by_data_parallelism: round(
            sent_by_stage_1[0] / sent_by_data_parallelism[0], 2
        ),
        hint="A ring is a reduce_scatter, then an all_gather.",
    ),
    "bytes-at-stage-2": Prediction(
        got=lambda lines_of: _bytes_a_parameter(lines_of[0], stage=2), tolerance=1e-3, hint="2 + (2 + 12) / 4."
    ),
    "units-of-stage-3": Prediction(
        got=lambda units_sent: round(float(units_sent[3][3]), 2), hint="Two gathers, one reduce."
    ),
    "units-of-four-micro-batches": Prediction(
        got=lambda units_of_four: round(float(units_of_four[2][3]), 2), hint="Four reduce_scatters, one all_gather."
    ),
    "sent-across-machines": Prediction(
        got=lambda hybrid, flat: hybrid[0][2] / (4 * flat[0][0]), tolerance=0.01, hint="A shard is half the net."
    ),
    "gathered-in-order": Prediction(got=lambda order: order, kind=str, hint="Forward, then in reverse."),
    "factor-on-states": Prediction(
        got=lambda cases: cases[0]["perceptron, mixed precision"][1] / cases[0]["perceptron, float32"][1],
        hint="2 + 2 + 4 + 8 is 16 as well.",
    ),
    "stage-that-fits": Prediction(
        got=lambda: next(stage for stage in range(4) if _states(64, stage) <= 24 * GIB),
        hint="24 GiB are 25.8 GB: look at the bars.",
    ),
    # The exercises
    **{f"held-at-stage-{stage}": _held_at(stage) for stage in range(4)},
}
