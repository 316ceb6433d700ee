"""Lesson 00: the sum of all ranks, on every rank."""

from dtlib.lab.checks.exercise import Exercise, Wrong


def observe_total(total, comm):
    """``total`` as an integer, or as text where it is none; and how many collectives this rank has called so far on
    the world's communicator (None where nobody counts them): a sum that nobody has computed may be right, too."""
    from dtlib.world import init

    return _value_of(total), getattr(init().comm, "collective_count", None)


def _value_of(total):
    try:
        value = total.item() if hasattr(total, "item") else total
        if not isinstance(value, str) and int(value) == value:
            return int(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    return f"{total!r:.80}"


def judge_total(observations) -> None:
    """``total`` is the sum of the numbers of all ranks, on every rank, and ranks have talked to one another for it."""
    size = len(observations)
    expected = sum(range(size))
    _judge_operation([came for came, _ in observations], expected)
    for rank, (came, _) in enumerate(observations):
        if came == expected:
            continue
        if isinstance(came, str):
            raise Wrong(
                "type", rank, f"a whole number, or a tensor of one: {expected}", came,
                "total is one number: what did the last line that assigns it put there?",
                "Begin with total = torch.tensor(world.rank), then world.comm.all_reduce(total).",
            )  # fmt: skip
        if came == rank:
            raise Wrong(
                "not-reduced", rank, f"{expected} on every rank", f"{came}",
                "This rank still has its own number: who adds them?",
                "Call world.comm.all_reduce(total): it changes total on every rank.",
            )  # fmt: skip
        what = f"{expected}, the sum of the ranks 0 to {size - 1}"
        if came in (expected * size, expected * size**2):
            raise Wrong(
                "summed-twice", rank, what, f"{came}, {came // expected} times as much",
                "all_reduce works in place: a second call adds sums. Was the line run, or written, twice?",
                "Run the whole cell again, from total = torch.tensor(world.rank) on, with one all_reduce.",
            )  # fmt: skip
        raise Wrong(
            "other-sum", rank, what, f"{came}",
            "Is it world.rank that is summed, of these ranks? And all_reduce adds unless op= says otherwise.",
            "total = torch.tensor(world.rank), then world.comm.all_reduce(total), both on every rank, once.",
        )  # fmt: skip
    for rank, (came, collectives) in enumerate(observations):
        if collectives == 0 and size > 1:
            raise Wrong(
                "nothing-sent", rank, "a sum that the ranks have computed together", f"{came}, and nothing was sent",
                "The number is right. But how does this rank know the numbers of the others?",
                "total = torch.tensor(world.rank), then world.comm.all_reduce(total).",
            )  # fmt: skip


def _judge_operation(came: list, expected: int) -> None:
    """An operation that is not the sum for all: what ranks have together tells which."""
    size = len(came)
    if size == 1 or came == list(range(size)) or expected in came[1:]:
        return
    if came[0] == expected and came[1:] == list(range(1, size)):
        raise Wrong(
            "only-root", 1, f"{expected} on every rank", f"{came[1]}; rank 0 alone has the sum",
            "The numbers are added, and rank 0 gets the sum. Who else wants it?",
            "reduce gives the result to its root, all_reduce to every rank.",
        )  # fmt: skip
    if len(set(came)) == 1 and came[0] in (0, size - 1):
        raise Wrong(
            "not-added", 0, f"{expected}, the sum of the ranks 0 to {size - 1}", f"{came[0]} on every rank",
            f"All ranks agree on rank {came[0]}'s number. Is anything added?",
            'all_reduce adds. broadcast copies one number; op="min", "max" and "prod" do something else.',
        )  # fmt: skip
    if len(set(came)) == 1 and came[0] == expected // size:
        raise Wrong(
            "mean", 0, f"{expected}, the sum of the ranks 0 to {size - 1}", f"{came[0]}, which is their mean",
            f"This is {expected} divided by {size}. Who divides?",
            "world.comm.all_reduce(total), without op: it adds.",
        )  # fmt: skip


EXERCISES = {"first-sum": Exercise("total", observe_total, judge_total)}
