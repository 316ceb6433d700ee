"""Lesson 13: an outer step, judged by where rounds begin on every rank."""

from dtlib.lab.checks.exercise import Exercise, Wrong
from dtlib.lessons.l13.judge_slow import COUNT, STEPS, close, gradient_of, is_like

RATE, MOMENTUM = 0.5, 0.8


def outer_played(ranks: int, mistake: str = "", rank: int = 0) -> list:
    """Where each round begins, on a rank, in one process; ``mistake`` as planted."""
    import torch

    start, pace = torch.zeros(COUNT).double(), torch.zeros(COUNT).double()
    own_pace, starts = [torch.zeros(COUNT).double() for _ in range(ranks)], []
    for step in range(STEPS):
        ways = [gradient_of(rank, step) for rank in range(ranks)]  # start - parameters
        way = sum(ways) / ranks
        if mistake == "own-pace":
            own_pace = [MOMENTUM * p + w for p, w in zip(own_pace, ways, strict=True)]
            way, pace = ways[0], own_pace[0]
        elif mistake == "sum":
            way = way * ranks
            pace = MOMENTUM * pace + way
        else:
            pace = MOMENTUM * pace + way
        looked_ahead = pace if mistake == "heavy-ball" else way if mistake == "no-momentum" else way + MOMENTUM * pace
        start = start + RATE * looked_ahead if mistake == "wrong-way" else start - RATE * looked_ahead
        start = start - gradient_of(rank, step) if mistake == "own-parameters" else start
        pace = MOMENTUM * pace if mistake == "momentum-twice" else pace
        starts.append(start.tolist())
    return starts


def observe_outer(outer_step, comm):
    import torch

    start, pace, starts = torch.zeros(COUNT).double(), torch.zeros(COUNT).double(), []
    for step in range(STEPS):
        parameters = start - gradient_of(comm.rank, step)
        came = outer_step(comm, start.clone(), parameters, pace.clone(), RATE, MOMENTUM)
        if not (isinstance(came, tuple) and len(came) == 2 and all(is_like(each) for each in came)):
            return {"error": f"{came!r:.60}"}
        start, pace = (each.detach().clone() for each in came)
        starts.append(start.tolist())
    return {"starts": starts}


def judge_outer(observations) -> None:
    for rank, seen in enumerate(observations):
        if "error" in seen:
            raise Wrong(
                "type", rank, f"two tensors of {COUNT} numbers: the new start, and the pace", seen["error"],
                "Return both: return start, pace",
            )  # fmt: skip
    ranks, what = len(observations), f"Nesterov's step along the mean way, the same on all ranks, in {STEPS} rounds"
    right = outer_played(ranks)
    if ranks > 1 and all(
        close(s["starts"], outer_played(ranks, "own-parameters", r)) for r, s in enumerate(observations)
    ):
        raise Wrong(
            "own-parameters", 0, what, "ranks begin the next round in different places",
            "From where does the step go: from where the round began, or from where this rank came to?",
            "start - rate * (way + momentum * pace)",
        )  # fmt: skip
    if len(observations) > 1 and any(not close(seen["starts"], observations[0]["starts"]) for seen in observations):
        raise Wrong(
            "ranks-differ", 1, what, "ranks begin the next round in different places",
            "Which of the numbers are this rank's own: is the pace made of them, or of their mean?",
            "way = comm.all_reduce(start - parameters, op='mean') comes first; then pace = momentum * pace + way.",
        )  # fmt: skip
    hints = {
        "sum": ("The way is the mean over ranks: who divides?", "op='mean'"),
        "heavy-ball": ("That is momentum without Nesterov's look ahead.", "start - rate * (way + momentum * pace)"),
        "no-momentum": ("The pace is computed: where is it used?", "start - rate * (way + momentum * pace)"),
        "momentum-twice": (
            "The next call multiplies the pace by momentum: what is returned now?",
            "return ..., pace, as it was computed",
        ),
        "wrong-way": ("The way is start - parameters: a gradient points uphill.", "start - rate * (...)"),
    }
    for rank, seen in enumerate(observations):
        if close(seen["starts"], right):
            continue
        for mistake, said in hints.items():
            if close(seen["starts"], outer_played(ranks, mistake)):
                raise Wrong(mistake, rank, what, "another step", *said)
        raise Wrong(
            "other-step", rank, what, "another step",
            "Three lines: the mean way, the pace, the start.",
            "pace = momentum * pace + way; start = start - rate * (way + momentum * pace)",
        )  # fmt: skip


EXERCISES = {"outer-fix": Exercise("outer_step", observe_outer, judge_outer, any_size=True)}
