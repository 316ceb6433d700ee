"""Have all ranks called the same so far? Asked by a notebook once a cell has raised an error on some rank.

Each rank tells in numbers what it has called (``counts``), the notebook compares those of all ranks (``differing``),
and communicators on which they differ are refused on all ranks (``refuse``) until ``dtlib.reset()`` gives new ones.
"""

from weakref import WeakSet

living: WeakSet = WeakSet()  # the communicators of this rank


def counts() -> dict[str, tuple[int, int, bool]]:
    """By name of communicator: collectives so far, messages sent less those received, and whether it is broken."""
    return {comm.name: (comm.collective_count, comm._messages, bool(comm._queue.broken)) for comm in _real()}


def differing(of_ranks: list[dict]) -> list[str]:
    """The communicators on which ranks are out of step, from the ``counts`` of all ranks."""
    names = sorted({name for found in of_ranks for name in found})
    return [name for name in names if not _in_step([found[name] for found in of_ranks if name in found])]


def _in_step(found: list[tuple[int, int, bool]]) -> bool:
    collectives, messages, broken = zip(*found, strict=True)
    if all(broken):  # so it is refused everywhere
        return True
    return len(set(collectives)) == 1 and sum(messages) == 0 and not any(broken)


def refuse(names: list[str], why: str) -> None:
    """Have the communicators of these names refuse all that is called from here on."""
    for comm in _real():
        if comm.name in names:
            comm._queue.abandon(why)


def _real() -> list:
    return [comm for comm in list(living) if comm.on_board and not comm.simulated]
