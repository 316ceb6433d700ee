"""Whom does everybody wait for, and who calls what? One sentence each (pure Python)."""

from dtlib.comm.watch.board import Sighting
from dtlib.errors import RESET

WAITS = ("waits", "timed out")  # the second has just given up, as we are about to


def whom(me: int, seen: dict[int, Sighting]) -> str:
    """Whom rank ``me``, which waits, waits for in the end: a sentence.

    It follows the waiting: rank 0 waits for 1, and 1 itself waits for 2, which does not wait: everybody waits for 2.
    Where the chain closes, ranks wait for one another.
    """
    waiting, culprits = _followed(me, seen)
    if culprits:
        return "; ".join(f"rank {rank} {last_seen(seen.get(rank))}" for rank in sorted(culprits))
    if len(waiting) == 1:
        return "all ranks have arrived, and the messages are under way"
    return "they wait for one another: " + ", ".join(f"rank {rank} in {_place(seen[rank])}" for rank in sorted(waiting))


def over(me: int, seen: dict[int, Sighting], cell: str) -> tuple[list[int], list[int]]:
    """Of the ranks that rank ``me`` waits for, itself or through others, those that this ``cell`` of the notebook ended
    on with an error, and those that have finished it. Neither come any more.

    A rank that any of several may serve waits for none of them as long as one can come. What a rank has left behind on
    another communicator before it finished is not known: it may have arrived.
    """

    def is_over(rank):
        return rank in seen and bool(cell) and seen[rank].over == cell

    def needs_them(rank):
        mine = seen.get(rank)
        return mine is None or not _any_will_do(mine) or all(is_over(peer) for peer in mine.peers if peer != rank)

    waiting, culprits = _followed(me, seen, needs_them)
    ended = [rank for rank in {*waiting, *culprits} - {me} if is_over(rank)]
    failed = [rank for rank in ended if _waits(seen[rank]) or seen[rank].state.startswith("raised")]
    groups = {seen[rank].group for rank in waiting if rank in seen} | {""}
    return sorted(failed), sorted(rank for rank in set(ended) - set(failed) if seen[rank].group in groups)


def _followed(me: int, seen: dict[int, Sighting], needs_them=lambda rank: True) -> tuple[list[int], list[int]]:
    """The ranks that wait, from ``me`` on, and those at the ends of the chains, which do not; ``needs_them(rank)`` says
    whether a rank that waits cannot go on without those that have not arrived."""
    waiting, culprits, to_look_at = [], [], [me]
    while to_look_at:
        rank = to_look_at.pop(0)
        if rank in waiting or rank in culprits:
            continue
        if rank == me or _waits(seen.get(rank)):
            waiting.append(rank)
            to_look_at += missing(rank, seen) if needs_them(rank) else []
        else:
            culprits.append(rank)
    return waiting, culprits


def missing(rank: int, seen: dict[int, Sighting]) -> list[int]:
    """The ranks that have not reached the operation in which ``rank`` waits."""
    mine = seen.get(rank)
    if mine is None:
        return []
    return [peer for peer in mine.peers or seen if peer != rank and not _has_come(mine, seen.get(peer), rank)]


def _has_come(mine: Sighting, other: Sighting | None, rank: int) -> bool:
    if other is None:
        return False
    if mine.number:  # a collective: numbers count those of one communicator
        if other.group != mine.group or other.number < mine.number:
            return False
        same = other.operation if other.state == "elsewhere" else other.what  # there it has no shape
        return other.number > mine.number or same in (mine.operation, mine.what)
    # A message: its other end is a send or a recv that names this rank.
    return (
        _waits(other)
        and not other.number
        and other.group == mine.group
        and other.peers == (rank,)
        and other.operation != mine.operation
    )


def _any_will_do(sighting: Sighting) -> bool:
    """A receive from any rank: no collective, and more than one peer."""
    return not sighting.number and len(sighting.peers) > 1


def _waits(sighting: Sighting | None) -> bool:
    return sighting is not None and sighting.state in WAITS


def _place(sighting: Sighting) -> str:
    return f"{sighting.what} (`{sighting.where}`)" if sighting.where else sighting.what


def last_seen(sighting: Sighting | None) -> str:
    if sighting is None:
        return "has called no operation yet"
    if sighting.state == "elsewhere":
        before = f"its last operation was {sighting.what}" if sighting.what else "has called no operation yet"
        return f"is in `{sighting.where}`; {before}"
    if sighting.state == "finished":
        return f"has not arrived; it last finished {_place(sighting)}" if sighting.what else "has not arrived"
    if sighting.state == "started":
        return f"has started {_place(sighting)} and computes" if sighting.what else "has called no operation yet"
    last = f"; its last operation was {_place(sighting)}" if sighting.what else ""
    return f"{sighting.state}{last}"


def disagreement(said: dict[int, tuple[str, str]]) -> str:
    """Who calls what, and where: ``said`` maps ranks to (call, line)."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(said):
        groups.setdefault(said[rank], []).append(rank)
    sides = []
    for (what, where), ranks in groups.items():
        who = f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"
        sides.append(f"{who} {what}" + (f" in `{where}`" if where else ""))
    return f"The ranks do not call the same: {'; '.join(sides)}. All ranks call the same operation alike. {RESET}"


def mismatch(source: int, sent: str, there: str, dest: int, expected: str, here: str) -> str:
    """Both ends of a message that do not mean the same: a shape and a type, and a line, of each."""
    return (
        f"Rank {source} sends {sent} in `{there}`, and rank {dest} receives {expected} in `{here}`: both need the same "
        f"shape and dtype. {RESET}"
    )
