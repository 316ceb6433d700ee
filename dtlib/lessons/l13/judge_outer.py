"""Lesson 13: an outer step, judged by where rounds begin on every rank."""

from dtlib.lab.checks.equality import factors
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l13.judge_slow import close
from dtlib.lessons.l13.observe_slow import COUNT, STEPS, gradient_of, is_like

RATES, MOMENTUM = (0.5, 0.4, 0.3, 0.5), 0.8  # a rate for each round, as a schedule would have it


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
        rate = RATES[step]
        looked_ahead = pace if mistake == "heavy-ball" else way if mistake == "no-momentum" else way + MOMENTUM * pace
        start = start + rate * looked_ahead if mistake == "wrong-way" else start - rate * looked_ahead
        start = start - gradient_of(rank, step) if mistake == "own-parameters" else start
        pace = MOMENTUM * pace if mistake == "momentum-twice" else pace
        starts.append(start.tolist())
    return starts


def observe_outer(outer_step, comm):
    import torch

    start, pace, starts = torch.zeros(COUNT).double(), torch.zeros(COUNT).double(), []
    for step in range(STEPS):
        parameters = start - gradient_of(comm.rank, step)
        got = outer_step(comm, start.clone(), parameters, pace.clone(), RATES[step], MOMENTUM)
        if not (isinstance(got, tuple) and len(got) == 2 and all(is_like(each) for each in got)):
            return {"error": f"{got!r:.60}"}
        start, pace = (each.detach().clone() for each in got)
        starts.append(start.tolist())
    return {"starts": starts}


def judge_outer(observations) -> None:
    for rank, seen in enumerate(observations):
        if "error" in seen:
            raise Wrong("type", rank, f"two tensors of {COUNT} numbers: the new start, and the pace", seen["error"],
                        "Return both: return start, pace")
    ranks, what = len(observations), f"Nesterov's step along the mean way, the same on all ranks, in {STEPS} rounds"
    right = outer_played(ranks)
    if ranks > 1 and all(
        close(s["starts"], outer_played(ranks, "own-parameters", r)) for r, s in enumerate(observations)
    ):
        raise Wrong("own-parameters", 0, what, "ranks begin the next round in different places",
                    "From where does the step go: from where the round began, or from where this rank is now?",
                    "start - rate * (way + momentum * pace)")
    if len(observations) > 1 and any(not close(seen["starts"], observations[0]["starts"]) for seen in observations):
        raise Wrong(
            "ranks-differ", 1, what, "ranks begin the next round in different places",
            "Which of the numbers are this rank's own: is the pace made of them, or of their mean?",
            "way = comm.all_reduce(start - parameters, op='mean') comes first; then pace = momentum * pace + way.")
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
        wrong = rows(rank)
        for mistake, said in hints.items():
            wrong(mistake, close(seen["starts"], outer_played(ranks, mistake)), what, "another step", *said)
        got, wanted = _in_ways(seen["starts"], ranks), _in_ways(right, ranks)
        first = [round(number, 4) for number in got[0]] == [round(number, 4) for number in wanted[0]]
        wrong("other-step", True, f"{what}: {_told(wanted)}", _told(got) if got[0] + got[1] else "another step",
              "In the first round the pace is the way: rate and momentum, how often does each count?" if not first
              else "The first round is right. What is the pace that the second one gets, and what becomes of it?",
              "pace = momentum * pace + way; start = start - rate * (way + momentum * pace)")


def _in_ways(starts, ranks: int) -> tuple[list, list]:
    """The first two steps, as multiples of the mean ways: of the first; of the second and the first."""
    import torch

    at = torch.tensor([[0.0] * COUNT, *starts[:2]], dtype=torch.float64)
    ways = [sum(gradient_of(rank, step) for rank in range(ranks)) / ranks for step in (0, 1)]
    return factors(at[0] - at[1], ways[0]) or [], factors(at[1] - at[2], ways[1], ways[0]) or []


def _told(numbers) -> str:
    one, two = ([f"{number:.3g}" for number in each] for each in numbers)
    second = f"; round 2 {two[0]} times its way and {two[1]} times that of round 1" if two else ""
    return f"round 1 goes back {one[0]} times the way{second}" if one else "no way of all ranks"


EXERCISES = {"outer-fix": Exercise("outer_step", observe_outer, judge_outer, any_size=True)}
