"""Lesson 08: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction


def _incomplete(complete: dict[str, bool]) -> str:
    return next(name for name, right in complete.items() if not right)


def _groups_with(rank: int, **shape: int) -> dict[str, list[int]]:
    from dtlib.lessons.l08.figures import groups_of

    return {axis: next(group for group in groups_of(axis, shape) if rank in group) for axis in shape}


def _sent(where: str, got) -> Prediction:
    """Return the prediction of a collective and its bytes, compared with the trace on each rank."""
    return Prediction(
        got=got,
        kind=object,
        hint={
            where: "Who has only a summand, and who a slice?",
            "bytes": "2 B (N-1)/N for an all_reduce, B being the bytes of x.",
        },
    )


def _of_rank_0(where: str, seen: list) -> dict:
    return dict(zip((where, "bytes"), seen[0], strict=True))


_CUTS = ("columns", "rows")

PREDICTIONS = {
    "needs-all-reduce": Prediction(
        got=lambda complete: _incomplete(complete[0]),
        choices=_CUTS,
        hint="Which of the products is only one summand of Y?",
    ),
    "needs-it-backward": Prediction(
        got=lambda complete_backward: _incomplete(complete_backward[0]),
        choices=_CUTS,
        hint="X went to all ranks: each of them has a summand of its gradient.",
    ),
    "all-reduces-of-a-pair": Prediction(
        got=lambda calls: len(calls), hint="g in the forward pass, f in the backward pass."
    ),
    "wrong-without-f": Prediction(
        got=lambda wrong: " and ".join(wrong[0]),
        choices=("Z", "A", "B", "X"),
        hint="Which operation adds up what the ranks computed from X?",
    ),
    "percent-held": Prediction(got=lambda percent: percent[0], tolerance=0.1, hint="A quarter, and what nobody cuts."),
    "numbers-a-token": Prediction(
        got=lambda given, tokens: (given[0] - 4) // tokens[0],
        hint="The largest logit; the sum of exponentials; the logit of the target.",
    ),
    "sent-with-sequence": Prediction(
        got=lambda kept_and_sent: kept_and_sent[0]["tensor and sequence"][1],
        tolerance=0.02,
        hint="Each of the two sends half of what the all_reduce sends.",
    ),
    "averages-with-3": Prediction(
        got=lambda groups: groups[3]["data"], kind=list, hint="Whoever has the same shard of the model."
    ),
    "busiest-axis": Prediction(
        got=lambda in_a_step: max(in_a_step, key=in_a_step.get),
        choices=("data", "pipe", "tensor"),
        hint="Four all_reduces a layer and micro-batch; one a step; two messages a micro-batch.",
    ),
    "times-stage-1": Prediction(
        got=lambda reduced: reduced[2] / reduced[1],
        hint="Stage 2 keeps no whole gradients to add up: it reduces after every micro-batch.",
    ),
    "all-reduces-in-the-graph": Prediction(
        got=lambda exchanges: sum(text.startswith("all_reduce") for text in exchanges),
        hint="One a mark, however many replicas.",
    ),
    "hits-belong-to": Prediction(
        got=lambda hits_before, hits: "before" if hits_before == hits[0] else "after",
        choices=("before", "after"),
        hint="From which scores are they counted, and when were these computed?",
    ),
    # The exercises
    "column-forward": _sent("column, forward", lambda column_forward: _of_rank_0("column, forward", column_forward)),
    "column-backward": _sent(
        "column, backward", lambda column_backward: _of_rank_0("column, backward", column_backward)
    ),
    "row-forward": _sent("row, forward", lambda row_forward: _of_rank_0("row, forward", row_forward)),
    "row-backward": _sent("row, backward", lambda row_backward: _of_rank_0("row, backward", row_backward)),
    "groups-of-7": Prediction(
        got=lambda: _groups_with(7, data=2, pipe=2, tensor=3),
        kind=list,
        hint="rank = 6 data + 3 pipe + tensor, and rank 7 is 6 + 0 + 1.",
    ),
}
