"""Detect waits that can never complete, from the board, and raise one error message."""

from dtlib.comm.call import Call
from dtlib.comm.watch import board, missing_ranks
from dtlib.errors import RESET, PeerFailed, WaitTimeout

# If the missing rank has finished its cell: long enough for the reader to see which rank is missing.
FINISHED_SECONDS = 10.0
# If the missing rank has ended its program: longer than its last messages take.
ENDED_SECONDS = 0.5


def check_peers(call: Call, waited: float) -> bool:
    """Return True if a rank that this rank waits for has ended its cell or program, so that it will not arrive.

    ``waited`` are the seconds since this was first noticed. At first it is negative and nothing is raised, because that
    rank's last messages may have arrived without being received yet.

    Raises:
        PeerFailed: if an error ended the other rank's cell, or if its program has ended.
        WaitTimeout: if the other rank has finished its cell without an error, after ten seconds.
    """
    if board.current is None or not board.cell:
        return False
    failed, finished = missing_ranks.ended_ranks(board.current.rank, board.current.seen(), board.cell)
    in_program = board.cell == board.PROGRAM
    if (failed and waited > 0) or (finished and in_program and waited > ENDED_SECONDS):
        raise PeerFailed(f"{call}{_place(call)} cannot end: {describe_missing()}.{'' if in_program else ' ' + RESET}")
    if finished and waited > FINISHED_SECONDS:
        raise WaitTimeout(sentence(call, FINISHED_SECONDS))
    return bool(failed or finished)


def sentence(call: Call, limit: float) -> str:
    """Return the error message of a wait that has reached its ``limit`` in seconds."""
    return f"Waited {limit:g} s in {call}{_place(call)}: {describe_missing()}. {RESET}"


def describe_missing() -> str:
    """Return, as text, which rank is missing in the end."""
    if board.current is None:
        return "another rank has not called it, or raised an error"
    return missing_ranks.describe(board.current.rank, board.current.seen())


def _place(call) -> str:
    return f" (`{call.where}`)" if call.where else ""
