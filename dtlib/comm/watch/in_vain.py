"""Waits that cannot end: seen on the board while a rank waits, and said in one sentence."""

from dtlib.comm.call import Call
from dtlib.comm.watch import blame, board
from dtlib.errors import RESET, PeerFailed, WaitTimeout

FINISHED_SECONDS = 10.0  # for ranks that have finished their cell: long enough to read whom everybody waits for
ENDED_SECONDS = 0.5  # for those that have ended their program: longer than their last messages are under way


def look(call: Call, waited: float) -> bool:
    """True if a rank that this one waits for is at the end of its cell or program: it will not arrive.

    ``waited`` are seconds since this was first seen, negative before: then nothing is raised, as the last messages of
    that rank may have arrived and not been received yet. Raises ``PeerFailed`` where an error ended the cell, and where
    the program is over; ``WaitTimeout`` where the cell finished well, and only after ten seconds.
    """
    if board.current is None or not board.cell:
        return False
    failed, finished = blame.over(board.current.rank, board.current.seen(), board.cell)
    in_program = board.cell == board.PROGRAM
    if (failed and waited > 0) or (finished and in_program and waited > ENDED_SECONDS):
        raise PeerFailed(f"{call}{_place(call)} cannot end: {whom()}." + ("" if in_program else f" {RESET}"))
    if finished and waited > FINISHED_SECONDS:
        raise WaitTimeout(sentence(call, FINISHED_SECONDS))
    return bool(failed or finished)


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
