"""Lesson 00: the sum of all ranks, on every rank."""

from dtlib.lab.checks import Wrong


def observe_total(total, comm):
    """``total`` as an integer, or as text where it is none."""
    try:
        value = total.item() if hasattr(total, "item") else total
        if not isinstance(value, str) and int(value) == value:
            return int(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    return f"{total!r:.80}"


def judge_total(totals) -> None:
    """``total`` is the sum of the numbers of all ranks, on every rank."""
    expected = sum(range(len(totals)))
    for rank, came in enumerate(totals):
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
        raise Wrong(
            "other-sum", rank, f"{expected}, the sum of the ranks 0 to {len(totals) - 1}", f"{came}",
            "Run the whole cell again: all_reduce works in place, and adding sums once more gives too much."
            if came > expected
            else "Is it the sum of world.rank? all_reduce adds unless op= says otherwise.",
        )  # fmt: skip
