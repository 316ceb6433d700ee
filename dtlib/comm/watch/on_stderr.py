"""Report hangs of a script on stderr, as a notebook does: after three seconds, and then once a minute.

A thread of each rank publishes on the board the line that the rank runs and its last operation, even if that operation
was short. Only the lowest of the waiting ranks prints, so that one message appears and not one per rank.
"""

import re
import sys
import threading
import time

from dtlib.comm.call import line_outside
from dtlib.comm.watch import board, missing_ranks

CHECK_SECONDS = 0.4
REPEAT_SECONDS = 60.0
# Lines that may wait for other ranks without dtlib's operations: in mpi4py, or in a process group of torch.
OPERATIONS = re.compile(
    r"\b(\w*comm\w*|mpi|dist|distributed|group)\.i?(all_?(reduce|gather|to_?all)|barrier|bcast|broadcast|reduce|gather|"
    r"scatter|m?probe|s?send|recv|sendrecv)\w*\(|\b\w*(req|request|work|handle)s?\.wait(all|any|some)?\(",
    re.IGNORECASE,
)
STANDARD_LIBRARY = threading.__file__.rpartition("/")[0]


def start() -> None:
    """Start the thread that observes this process's main thread until it ends."""
    threading.Thread(target=_follow, args=(board.current,), name="dtlib watch", daemon=True).start()


def _follow(mine: board.Board) -> None:
    main = threading.main_thread().ident or 0
    # The rank has been in the line or operation `where` since the time `since`; the next message is due at `again`.
    where, last, since, again = "", None, 0.0, 0.0
    while True:
        time.sleep(CHECK_SECONDS)
        if board.current is not mine:
            return
        # `last` is a new call for each operation. A rank that starts operations is not stuck, so leave its frames
        # alone: a frame that this thread holds keeps its tensors alive.
        if board.last is not last:
            where, last, since = "", board.last, time.monotonic()
            if board.waits is None:
                mine.publish("finished")
            continue
        frame = sys._current_frames().get(main)
        if frame is None:
            return
        place, call = line_outside(_of_the_program(frame)), board.waits
        del frame
        if call is not None:
            call.where = call.where or place
            mine.publish("waits", call)
        else:
            mine.publish("elsewhere", where=place)
        before, where, stuck = where, str(call or f"`{place}`"), call is not None or OPERATIONS.search(place)
        del call
        now = time.monotonic()
        if where != before:
            since = now if before else since
            again = since + board.NOTICE_SECONDS
        if stuck and now >= again:
            again = now + REPEAT_SECONDS
            _print_report(mine, f"{now - since:.0f} s in {where}")


def _of_the_program(frame):
    """Return the innermost frame outside Python's standard library."""
    inside = frame
    while inside is not None and inside.f_code.co_filename.startswith(STANDARD_LIBRARY):
        if "site-packages" in inside.f_code.co_filename:
            break
        inside = inside.f_back
    return inside or frame


def _print_report(mine, what: str) -> None:
    seen = mine.seen()
    me = seen.get(mine.rank, board.BoardEntry(""))
    # Another rank with a lower number waits in the same line: leave the message to it.
    if any(rank < mine.rank and (one.state, one.where) == (me.state, me.where) for rank, one in seen.items()):
        return
    if me.state == "waits":
        whom = missing_ranks.describe(mine.rank, seen)
    # The main thread waits outside dtlib's operations, so only its line is known: show the ranks in other lines.
    else:
        whom = "; ".join(f"rank {i} {missing_ranks.last_seen(one)}" for i, one in seen.items() if one.where != me.where)
    if whom:
        print(f"dtlib: rank {mine.rank} has waited {what}: {whom}.", file=sys.__stderr__, flush=True)
