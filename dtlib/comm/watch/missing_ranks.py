"""Error messages about ranks that wait: which rank is missing, and which ranks call what (pure Python)."""

from dtlib.comm.watch.board import BoardEntry
from dtlib.errors import RESET

WAITS = ("waits", "timed out")  # states of a rank that waits; one that timed out has just stopped waiting


def describe(me: int, seen: dict[int, BoardEntry]) -> str:
    """Return, as text, which rank is missing in the end while rank ``me`` waits.

    It follows the chain of waits: rank 0 waits for rank 1, which waits for rank 2, which does not wait. So all of them
    wait for rank 2. If the chain is closed, the ranks wait for one another.
    """
    waiting, culprits = _followed(me, seen)
    if culprits:
        return "; ".join(f"rank {rank} {last_seen(seen.get(rank))}" for rank in sorted(culprits))
    if len(waiting) == 1:
        return "all ranks have arrived, and messages are in flight"
    return "they wait for one another: " + ", ".join(f"rank {rank} in {_place(seen[rank])}" for rank in sorted(waiting))


def ended_ranks(me: int, seen: dict[int, BoardEntry], cell: str) -> tuple[list[int], list[int]]:
    """Return the ranks that have ended this ``cell`` of the notebook and will not arrive: failed ones, finished ones.

    Only ranks that rank ``me`` waits for are returned, directly or through other ranks. A receive from any rank does
    not count as long as one possible sender is left. A finished rank counts only if its last operation used the
    communicator of a rank that waits. On another communicator it may have sent a message that has already arrived.
    """

    def is_over(rank):
        return rank in seen and bool(cell) and seen[rank].over == cell

    def needs_them(rank):
        mine = seen.get(rank)
        return mine is None or not _receives_from_any(mine) or all(is_over(peer) for peer in mine.peers if peer != rank)

    waiting, culprits = _followed(me, seen, needs_them)
    ended = [rank for rank in {*waiting, *culprits} - {me} if is_over(rank)]
    # A rank that was waiting when its cell ended was stopped there by an error.
    failed = [rank for rank in ended if _waits(seen[rank]) or seen[rank].state.startswith("raised")]
    groups = {seen[rank].group for rank in waiting if rank in seen} | {""}
    return sorted(failed), sorted(rank for rank in set(ended) - set(failed) if seen[rank].group in groups)


def _followed(me: int, seen: dict[int, BoardEntry], needs_them=lambda rank: True) -> tuple[list[int], list[int]]:
    """Follow the chain of waits from ``me``: return the ranks that wait, and the ranks at its ends, which do not.

    ``needs_them(rank)`` is False if a waiting rank does not depend on the ranks that are missing.
    """
    waiting, culprits, to_visit = [], [], [me]
    while to_visit:
        rank = to_visit.pop(0)
        if rank in waiting or rank in culprits:
            continue
        if rank == me or _waits(seen.get(rank)):
            waiting.append(rank)
            to_visit += missing(rank, seen) if needs_them(rank) else []
        else:
            culprits.append(rank)
    return waiting, culprits


def missing(rank: int, seen: dict[int, BoardEntry]) -> list[int]:
    """Return the ranks that have not reached the operation in which ``rank`` waits."""
    mine = seen.get(rank)
    if mine is None:
        return []
    return [peer for peer in mine.peers or seen if peer != rank and not _has_called(mine, seen.get(peer), rank)]


def _has_called(mine: BoardEntry, other: BoardEntry | None, rank: int) -> bool:
    if other is None:
        return False
    if mine.number:  # a collective; numbers count the collectives of one communicator
        if other.group != mine.group or max(other.number, other.called) < mine.number:
            return False
        if not other.number:  # its last operation was a message
            return True
        # Shapes and sizes may differ between ranks, as in a gather of objects.
        same = other.operation if other.state == "elsewhere" else other.what
        return other.number > mine.number or same in (mine.operation, mine.what)
    # A message: the other rank must be waiting in the matching send or recv, which names this rank.
    return (
        _waits(other)
        and not other.number
        and other.group == mine.group
        and other.peers == (rank,)
        and other.operation != mine.operation
    )


def _receives_from_any(entry: BoardEntry) -> bool:
    """Return True for a receive from any rank: no collective, and more than one peer."""
    return not entry.number and len(entry.peers) > 1


def _waits(entry: BoardEntry | None) -> bool:
    return entry is not None and entry.state in WAITS


def _place(entry: BoardEntry) -> str:
    return f"{entry.what} (`{entry.where}`)" if entry.where else entry.what


def last_seen(entry: BoardEntry | None) -> str:
    """Return a clause about what a rank did last, to follow "rank 2"."""
    if entry is None or entry.state == "finished":
        return f"has not arrived; it last finished {_place(entry)}" if entry and entry.what else "has not arrived"
    if entry.state == "elsewhere":
        before = f"its last operation was {entry.what}" if entry.what else "has called no operation yet"
        return f"is in `{entry.where}`; {before}"
    if entry.state == "started":
        return f"has started {_place(entry)} and computes" if entry.what else "has called no operation yet"
    last = f"; its last operation was {_place(entry)}" if entry.what else ""
    return f"{entry.state}{last}"


def disagreement(said: dict[int, tuple[str, str]]) -> str:
    """Return the error message for ranks that call different operations; ``said`` maps ranks to (call, line)."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(said):
        groups.setdefault(said[rank], []).append(rank)
    sides = []
    for (what, where), ranks in groups.items():
        who = f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"
        sides.append(f"{who} {what}" + (f" in `{where}`" if where else ""))
    return f"The calls of the ranks differ: {'; '.join(sides)}. All ranks must make the same call. {RESET}"


def mismatch(source: int, sent: str, there: str, dest: int, expected: str, here: str) -> str:
    """Return the error message for a send and a receive with different shapes or dtypes."""
    return (
        f"Rank {source} sends {sent} in `{there}`, and rank {dest} receives {expected} in `{here}`: both need the same "
        f"shape and dtype. {RESET}"
    )
