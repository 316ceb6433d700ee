"""Lesson 00: check of the sum over all ranks, on every rank."""

from weakref import WeakKeyDictionary

from dtlib.lab.checks.exercise import Exercise, Wrong, rows

# Communicator -> the value at its last check, and its numbers of collectives before that value and at the check.
_checked: WeakKeyDictionary = WeakKeyDictionary()


def observe_total(total, comm):
    """Return ``total``, an integer or else a text, and ``collectives_for`` it on the world's communicator."""
    from dtlib.world import init

    return _value_of(total), collectives_for(_value_of(total), init().comm)


def collectives_for(value, comm) -> int | None:
    """Return the number of collectives of ``comm`` since the last check of another value; None if it does not count.

    With 0 a learner may have typed the right sum, because ranks have not communicated for it.
    """
    checked, before, at_check = _checked.get(comm, (value, 0, 0))
    _checked[comm] = value, before if value == checked else at_check, getattr(comm, "collective_count", None)
    return _checked[comm][2] and _checked[comm][2] - _checked[comm][1]


def _value_of(total):
    try:
        value = total.item() if hasattr(total, "item") else total
        if not isinstance(value, str) and int(value) == value:
            return int(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    return f"{total!r:.80}"


def judge_total(observations) -> None:
    """Check that ``total`` is the sum of all ranks on every rank, and that the ranks have communicated."""
    size, expected = len(observations), sum(range(len(observations)))
    _judge_operation([got for got, _ in observations], expected)
    for rank, (got, _) in enumerate(observations):
        if got == expected:
            continue
        wrong = rows(rank)
        wrong("type", isinstance(got, str), f"a whole number, or a tensor of one: {expected}", got,
              "total is not one number. What did the last line that assigns total put into it?",
              "Begin with total = torch.tensor(world.rank), then world.comm.all_reduce(total).")
        wrong("not-reduced", got == rank, f"{expected} on every rank", f"{got}",
              "This rank still has its own number: who adds them?",
              "Call world.comm.all_reduce(total): it changes total on every rank.")
        what = f"{expected}, the sum of the ranks 0 to {size - 1}"
        if got in (expected * size, expected * size**2):
            wrong("summed-twice", True, what, f"{got}, {got // expected} times as much",
                  "all_reduce works in place: a second call adds the sums. Did you run the line twice?",
                  "Run the whole cell again, from total = torch.tensor(world.rank) on, with one all_reduce.")
        wrong("other-sum", True, what, f"{got}",
              "Is the number on each rank world.rank? Is the operation a sum, which is all_reduce's default op?",
              "total = torch.tensor(world.rank), then one world.comm.all_reduce(total), both on every rank.")
    for rank, (got, collectives) in enumerate(observations):
        if collectives == 0 and size > 1:
            raise Wrong("nothing-sent", rank, "a sum that the ranks compute together", f"{got}, and nothing was sent",
                        "The number is right. But how does this rank know the numbers of the other ranks?",
                        "total = torch.tensor(world.rank), then world.comm.all_reduce(total).")


def _judge_operation(got: list, expected: int) -> None:
    """Recognise an operation other than a sum for all from the values of all ranks."""
    size = len(got)
    if size == 1 or got == list(range(size)) or expected in got[1:]:
        return
    if got[0] == expected and got[1:] == list(range(1, size)):
        raise Wrong("only-root", 1, f"{expected} on every rank", f"{got[1]}; only rank 0 has the sum",
                    "The numbers are added, but only rank 0 gets the sum. Which other ranks need it?",
                    "reduce gives the result only to its root, all_reduce gives it to every rank.")
    wrong = rows(0)
    wrong("not-added", len(set(got)) == 1 and got[0] in (0, size - 1),
          f"{expected}, the sum of the ranks 0 to {size - 1}", f"{got[0]} on every rank",
          f"Every rank has the number of rank {got[0]}. Which operation adds instead of copying?",
          'all_reduce adds. broadcast copies one number; op="min", "max" and "prod" compute other values.')
    wrong("mean", len(set(got)) == 1 and got[0] == expected // size,
          f"{expected}, the sum of the ranks 0 to {size - 1}", f"{got[0]}, the mean",
          f"This is {expected} divided by {size}. Which op divides?",
          "world.comm.all_reduce(total), without op: the default is a sum.")


EXERCISES = {"first-sum": Exercise("total", observe_total, judge_total)}
