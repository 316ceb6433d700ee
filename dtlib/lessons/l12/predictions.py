"""Lesson 12: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction


def _over(zigzag, contiguous) -> float:
    from dtlib.lessons.l12.work import path

    return path(zigzag) / path(contiguous)


def _counted(order: str, ranks: int):
    from dtlib.lessons.l12.work import quarter_blocks

    return quarter_blocks(order, ranks)


PREDICTIONS = {
    "who-waits": Prediction(
        got=lambda contiguous: [rank for rank, steps in enumerate(contiguous) if not steps[2]],
        kind=list,
        hint="In step 2 rank r has the keys of rank r - 2. Which ranks' keys are later than all of its queries?",
    ),
    "zigzag-over-contiguous": Prediction(
        got=lambda zigzag: _over(zigzag, _counted("contiguous", len(zigzag))),
        tolerance=0.02,
        hint="Four steps in which all ranks have 2 quarter blocks; with contiguous slices, a step is as long as its "
        "longest: 2 + 4 + 4 + 4.",
    ),
    "messages-backward": Prediction(
        got=lambda backward_sent: backward_sent[0][0],
        hint="Keys and values go round once more, in N - 1 hops. Their gradients follow, and how many hops bring them "
        "home?",
    ),
    "fewest-bytes": Prediction(
        got=lambda sent: min(sent[0], key=lambda way: sent[0][way][1] + sent[0][way][3]),
        choices=("ring", "Ulysses", "gather"),
        hint="The ring sends keys and values N - 1 times, and again. What does an exchange send of a tensor?",
    ),
    # The exercises
    "steps-with-work": Prediction(
        got=lambda: sum(work > 0 for work in _counted("contiguous", 8)[3]),
        hint="Whose keys are not later than rank 3's queries?",
    ),
    "zigzag-on-eight": Prediction(
        got=lambda: _over(_counted("zigzag", 8), _counted("contiguous", 8)),
        tolerance=0.02,
        hint="In quarter blocks: 2 in the first step and 4 in each of the others, against 2 in every step.",
    ),
}
