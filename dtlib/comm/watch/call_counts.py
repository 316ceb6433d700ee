"""Check whether all ranks made the same calls; a notebook does so after a cell has raised an error on some rank.

Each rank returns the numbers of its calls (``counts``). The notebook compares them (``differing``). All ranks then
refuse the communicators on which the numbers differ (``refuse``), until ``dtlib.reset()`` creates new ones.
"""

from weakref import WeakSet

living: WeakSet = WeakSet()  # the communicators of this rank


def counts() -> dict[str, tuple[int, int, bool]]:
    """Return, for each communicator's name: collectives, messages sent minus received, and whether it is broken."""
    return {comm.name: (comm.collective_count, comm._messages, bool(comm._queue.broken)) for comm in _real()}


def differing(of_ranks: list[dict]) -> list[str]:
    """Return the names of communicators on which ranks are out of step, from the ``counts`` of all ranks."""
    names = sorted({name for found in of_ranks for name in found})
    return [name for name in names if not _in_step([found[name] for found in of_ranks if name in found])]


def _in_step(found: list[tuple[int, int, bool]]) -> bool:
    collectives, messages, broken = zip(*found, strict=True)
    # A communicator that is broken on all ranks is refused on all of them already.
    if all(broken):
        return True
    return len(set(collectives)) == 1 and sum(messages) == 0 and not any(broken)


def refuse(names: list[str], why: str) -> None:
    """Refuse all further calls on the communicators with these names."""
    for comm in _real():
        if comm.name in names:
            comm._queue.abandon(why)


def _real() -> list:
    return [comm for comm in list(living) if comm.on_board and not comm.simulated]
