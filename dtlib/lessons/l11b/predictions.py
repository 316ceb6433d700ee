"""Lesson 11b: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction

_LOST = ("nothing", "optimizer states", "parameters and optimizer states")


def _done_twice(of_checkpoint: list) -> int:
    steps = [event["step"] for event in of_checkpoint if event["what"] == "step"]
    return len(steps) - len(set(steps))


def _ranks_left(of_shrink: list) -> int:
    return [event["ranks"] for event in of_shrink if event["what"] == "step"][-1]


PREDICTIONS = {
    "steps-done-twice": Prediction(
        got=_done_twice, hint="It was at step 25, and the last checkpoint was at a multiple of 10."
    ),
    "twice-after-a-commit": Prediction(
        got=lambda of_memory: _done_twice(of_memory), hint="The last commit was after a multiple of 5 steps."
    ),
    "ranks-left": Prediction(got=_ranks_left, hint="Nobody takes the place of the one that died."),
    "lost-with-a-rank": Prediction(
        got=lambda: {
            "data parallelism": _LOST[0],
            "ZeRO stage 1": _LOST[1],
            "ZeRO stage 3": _LOST[2],
            "pipeline": _LOST[2],
        },
        choices=_LOST,
        hint="Of which of them do the other ranks have a copy?",
    ),
    # The exercises
    "done-once-more": Prediction(
        got=lambda: {"shrink": 0, "a commit every 5 steps": 2, "a checkpoint every 10 steps": 7},
        hint="What each of them goes on with is a state after some step: which one, when 17 are done?",
    ),
    "slices-of-three": Prediction(
        got=lambda: {rank: 50 * (rank + 1) // 3 - 50 * rank // 3 for rank in range(3)},
        hint="50 samples in a step, whatever the number of ranks: where does each part end?",
    ),
}
