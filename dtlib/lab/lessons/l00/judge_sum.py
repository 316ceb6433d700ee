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
    for rank, (came, _) in enumerate(observations):
        if came == expected:
            continue
        if isinstance(came, str):
            hint = "Begin with total = torch.tensor(world.rank)."
            raise Wrong("type", rank, f"a whole number, or a tensor of one: {expected}", came, hint)
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
                "Run the whole cell again: all_reduce works in place, and adding sums once more gives too much.",
            )  # fmt: skip
        raise Wrong(
            "other-sum", rank, what, f"{came}",
            "Is it world.rank that is summed, of these ranks? And all_reduce adds unless op= says otherwise.",
        )  # fmt: skip
    for rank, (came, collectives) in enumerate(observations):
        if collectives == 0 and size > 1:
            raise Wrong(
                "nothing-sent", rank, "a sum that the ranks have computed together", f"{came}, and nothing was sent",
                "The number is right. But how does this rank know the numbers of the others?",
                "total = torch.tensor(world.rank), then world.comm.all_reduce(total).",
            )  # fmt: skip


EXERCISES = {"first-sum": Exercise("total", observe_total, judge_total)}
