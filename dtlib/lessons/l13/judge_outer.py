"""Lesson 13: check of an outer step by the parameters at the start of each round, on every rank."""

from dtlib.lab.checks.equality import as_tensor, factors
from dtlib.lab.checks.exercise import Exercise, Wrong, rows
from dtlib.lessons.l13.judge_slow import close
from dtlib.lessons.l13.observe_slow import COUNT, STEPS, gradient_of, is_like

RATES, MOMENTUM = (0.5, 0.4, 0.3, 0.5), 0.8  # one rate per round, as from a schedule


def outer_played(ranks: int, mistake: str = "", rank: int = 0) -> list:
    """Return the start of each round on a rank, computed in one process; a ``mistake`` can be planted."""
    import torch

    start, velocity = torch.zeros(COUNT).double(), torch.zeros(COUNT).double()
    own_velocity, starts = [torch.zeros(COUNT).double() for _ in range(ranks)], []
    for step in range(STEPS):
        gradients = [gradient_of(rank, step) for rank in range(ranks)]  # start - parameters
        gradient = sum(gradients) / ranks
        if mistake == "own-velocity":
            own_velocity = [MOMENTUM * p + w for p, w in zip(own_velocity, gradients, strict=True)]
            gradient, velocity = gradients[0], own_velocity[0]
        else:
            gradient = gradient * {"sum": ranks, "divided-twice": 1 / ranks}.get(mistake, 1)
            velocity = MOMENTUM * velocity + gradient
        rate = RATES[step]
        looked_ahead = {"heavy-ball": velocity, "no-momentum": gradient}.get(mistake, gradient + MOMENTUM * velocity)
        start = start + rate * looked_ahead if mistake == "wrong-way" else start - rate * looked_ahead
        start = start - gradient_of(rank, step) if mistake == "own-parameters" else start
        velocity = MOMENTUM * velocity if mistake == "momentum-twice" else velocity
        starts.append(start.tolist())
    return starts


_FIRST = "First dist.all_reduce(gradient, op=dist.ReduceOp.AVG, group=comm.group); compute velocity from the result."


def observe_outer(outer_step, comm):
    """Return the start of each round and the velocity, or an error."""
    import torch

    start, velocity, starts = torch.zeros(COUNT).double(), torch.zeros(COUNT).double(), []
    for step in range(STEPS):
        parameters = start - gradient_of(comm.rank, step)
        got = outer_step(comm, start.clone(), parameters, velocity.clone(), RATES[step], MOMENTUM)
        if not (isinstance(got, tuple) and len(got) == 2 and all(is_like(each) for each in got)):
            return {"error": f"{got!r:.60}"}
        start, velocity = (each.detach().clone() for each in got)
        starts.append(start.tolist())
    return {"starts": starts, "velocity": velocity.tolist()}


def judge_outer(observations) -> None:
    """Check the starts of all rounds on every rank."""
    for rank, seen in enumerate(observations):
        if "error" in seen:
            raise Wrong("type", rank, f"two tensors of {COUNT} numbers: the new start, and the velocity", seen["error"],
                        "Return both: return start, velocity")
    ranks, what = len(observations), f"Nesterov's step with the outer gradient, equal on all ranks, in {STEPS} rounds"
    right = outer_played(ranks)
    if ranks > 1 and all(
        close(s["starts"], outer_played(ranks, "own-parameters", r)) for r, s in enumerate(observations)
    ):
        raise Wrong("own-parameters", 0, what, "ranks start the next round at different points",
                    "Where do you step from: the start of the round, or the current parameters of this rank?",
                    "start - rate * (gradient + momentum * velocity)")
    if len(observations) > 1 and any(not close(seen["starts"], observations[0]["starts"]) for seen in observations):
        raise Wrong("ranks-differ", 1, what, "ranks start the next round at different points",
                    "Which values differ between ranks? Do you compute the velocity from them, or from their mean?",
                    _FIRST)
    step = "start - rate * (gradient + momentum * velocity)"
    hints = {
        "sum": ("The gradient must be the mean over ranks. Which line divides?", "op=dist.ReduceOp.AVG"),
        "divided-twice": ("The gradient is the mean already. Which line divides again?",
                          "op=dist.ReduceOp.AVG"),
        "heavy-ball": ("This is momentum without Nesterov's look-ahead. Which term is missing?",
            f"First velocity = momentum * velocity + gradient; then {step}, with the new velocity"),
        "no-momentum": ("You compute the velocity. Where do you use it?", step),
        "momentum-twice": ("The next call multiplies the velocity by momentum. Which velocity do you return?",
            "return ..., velocity, without further factors"),
        "wrong-way": ("The gradient is start - parameters: it points uphill.",
                      "start - rate * (...)"),
    }
    for rank, seen in enumerate(observations):
        if close(seen["starts"], right):
            continue
        wrong = rows(rank)
        for mistake, said in hints.items():
            wrong(mistake, close(seen["starts"], outer_played(ranks, mistake)), what, "another step", *said)
        got, wanted = _in_gradients(seen["starts"], ranks), _in_gradients(right, ranks)
        first = [round(number, 4) for number in got[0]]
        of_one = [r for r in range(ranks) if not first and factors(as_tensor(seen["starts"][0]), gradient_of(r, 0))]
        hint = "In round 1 velocity and gradient are equal. How often do you use the rate and the momentum?"
        if of_one:
            hint = f"Round 1 uses only the gradient of rank {of_one[0]}. Which ranks must the mean include?"
        elif first == [round(number, 4) for number in wanted[0]]:
            hint = "The first round is right. Which velocity does the second round receive, and what do you do with it?"
        elif first == [round(RATES[0] * (1 + MOMENTUM) - 1, 4)]:
            hint = "Is `start` still the start of the round? Operations in place, such as all_reduce, change it."
        elif first == [round(RATES[0] * (1 + MOMENTUM) + 1, 4)]:
            hint = "You subtract the gradient once too often. Do you begin at `start`, or at a mean of parameters?"
        wrong("other-step", True, f"{what}: {_told(wanted)}", _told(got) if got[0] + got[1] else "another step",
              hint, f"velocity = momentum * velocity + gradient; start = {step}")
    differ = [r for r, seen in enumerate(observations) if not close([seen["velocity"]], [observations[0]["velocity"]])]
    if differ:
        raise Wrong("own-velocity", differ[0], "the same velocity on all ranks", "a different velocity than rank 0",
                    "The starts are right, because you average them. Which velocity is in rank 0's checkpoint?",
                    _FIRST)


def _in_gradients(starts, ranks: int) -> tuple[list, list]:
    """Return the first two steps as multiples of the mean gradients of the current and the previous round."""
    import torch

    at = torch.tensor([[0.0] * COUNT, *starts[:2]], dtype=torch.float64)
    gradients = [sum(gradient_of(rank, step) for rank in range(ranks)) / ranks for step in (0, 1)]
    return factors(at[0] - at[1], gradients[0]) or [], factors(at[1] - at[2], gradients[1], gradients[0]) or []


def _told(numbers) -> str:
    one, two = ([f"{round(number, 9) + 0:.3g}" for number in each] for each in numbers)
    second = f"; round 2 {two[0]} times its gradient and {two[1]} times the gradient of round 1" if two else ""
    return f"round 1 subtracts {one[0]} times the gradient{second}" if one else "no gradient of all ranks"


EXERCISES = {"outer-fix": Exercise("outer_step", observe_outer, judge_outer, any_size=True)}
