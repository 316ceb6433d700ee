"""Waits that cannot end: seen on the board while a rank waits, and said in one sentence."""

from dtlib.comm.call import Call
from dtlib.comm.watch import blame, board
from dtlib.errors import RESET, PeerFailed, WaitTimeout

FINISHED_SECONDS = 10.0  # for ranks that have finished their cell: long enough to read whom everybody waits for
ENDED_SECONDS = 0.5  # for those that have ended their program: longer than their last messages are under way


def look(call: Call, waited: float) -> None:
    """Raise if a rank that this one waits for has come to the end of its cell or program: it will not arrive.

    ``PeerFailed`` where an error ended the cell, and where the program is over; ``WaitTimeout`` where the cell finished
    well, and only after ten seconds. ``waited`` are seconds since something has arrived.
    """
    if board.current is None or not board.cell:
        return
    failed, finished = blame.over(board.current.rank, board.current.seen(), board.cell)
    if failed or (finished and board.cell == board.PROGRAM and waited > ENDED_SECONDS):
        go_on = "" if board.cell == board.PROGRAM else f" {RESET}"
        raise PeerFailed(f"{call}{_place(call)} cannot end: {whom()}.{go_on}")
    if finished and waited > FINISHED_SECONDS:
        raise WaitTimeout(sentence(call, FINISHED_SECONDS))


def sentence(call: Call, limit: float) -> str:
    """What a rank says that has waited for so many seconds."""
    return f"Waited {limit:g} s in {call}{_place(call)}: {whom()}. {RESET}"


def whom() -> str:
    """Whom this rank waits for in the end."""
    if board.current is None:
        return "another rank has not called it, or raised an error"
    return blame.whom(board.current.rank, board.current.seen())


def _place(call) -> str:
    return f" (`{call.where}`)" if call.where else ""
