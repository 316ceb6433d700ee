"""A hang of a script, explained as a notebook explains it: on stderr, after three seconds and then each minute.

A thread of each rank writes on the board in which line the rank is and which operation it called last, however quickly
that ended. Of the ranks that wait, the lowest one tells, so that there is one sentence and not one a rank.
"""

import re
import sys
import threading
import time

from dtlib.comm.call import line_outside
from dtlib.comm.watch import blame, board

LOOK_SECONDS = 0.4
NOTICE_SECONDS = 3.0
AGAIN_SECONDS = 60.0
# Lines that may wait for other ranks outside dtlib's operations: in mpi4py, or in a process group of torch.
OPERATIONS = re.compile(
    r"\b(\w*comm\w*|mpi|dist|distributed|group)\.i?(all_?(reduce|gather|to_?all)|barrier|bcast|broadcast|reduce|gather|"
    r"scatter|m?probe|s?send|recv|sendrecv)\w*\(|\b\w*(req|request|work|handle)s?\.wait(all|any|some)?\(",
    re.IGNORECASE,
)
STANDARD_LIBRARY = threading.__file__.rpartition("/")[0]


def start() -> None:
    """Follow this process's main thread to its end."""
    threading.Thread(target=_follow, args=(board.current,), name="dtlib watch", daemon=True).start()


def _follow(mine: board.Board) -> None:
    main = threading.main_thread().ident or 0
    where, last, since, again = "", None, 0.0, 0.0
    while True:
        time.sleep(LOOK_SECONDS)
        frame = sys._current_frames().get(main)
        if frame is None or board.current is not mine:
            return
        place, call = line_outside(_of_the_program(frame)), board.waits
        del frame  # it would keep its tensors
        if call is not None:
            call.where = call.where or place
            mine.publish("waits", call)
        elif not board.last[-1]:
            mine.publish_place("elsewhere", place)
        before, where, stuck = (where, last), str(call or f"`{place}`"), call is not None or OPERATIONS.search(place)
        last, now = board.last, time.monotonic()
        del call
        if where != before[0] or last is not before[1]:
            since, again = now, now + NOTICE_SECONDS
        if stuck and now >= again:
            again = now + AGAIN_SECONDS
            _tell(mine, f"{now - since:.0f} s in {where}")


def _of_the_program(frame):
    """The innermost frame that is not Python's own."""
    inside = frame
    while inside is not None and inside.f_code.co_filename.startswith(STANDARD_LIBRARY):
        if "site-packages" in inside.f_code.co_filename:
            break
        inside = inside.f_back
    return inside or frame


def _tell(mine, what: str) -> None:
    seen = mine.seen()
    me = seen.get(mine.rank, board.Sighting(""))
    if any(rank < mine.rank and (one.state, one.where) == (me.state, me.where) for rank, one in seen.items()):
        return
    if me.state == "waits":
        whom = blame.whom(mine.rank, seen)
    else:  # an operation of which only the line is known
        whom = "; ".join(f"rank {rank} {blame.last_seen(one)}" for rank, one in seen.items() if one.where != me.where)
    if whom:
        print(f"dtlib: rank {mine.rank} has waited {what}: {whom}.", file=sys.__stderr__, flush=True)
