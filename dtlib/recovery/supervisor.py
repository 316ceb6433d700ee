"""Start a training program, and restart it from its checkpoint until it completes: a scheduler in forty lines."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.recovery.run import Run
from dtlib.world.launch import forked_ranks


@forked_ranks()  # forked ranks start faster, because most of a start is imports
def supervise(
    program: list[str], ranks: int, folder: str | PathLike[str], replace: bool = True,
    say: Callable[[str], object] = print, watch: Callable[[Run], object] | None = None,
) -> list[Run]:  # fmt: skip
    """Run ``program`` on ranks, and restart it after failures until it succeeds; return all runs.

    Args:
        program: the arguments of Python. The program gets ``folder`` as its last argument and writes a journal there
            (journal.py). It saves checkpoints, and continues from the last one when it is restarted. Any strategy that
            dtlib.checkpoint supports is possible. Without a journal there is no known progress, so the program is
            started at most three times.
        ranks: the number of ranks of the first run.
        folder: for the journal.
        replace: whether to restart with the same number of ranks. If false, the next run has only as many ranks as are
            left.
        say: is called with each report: an event, the reason why a run ended, and the restart.
        watch: is called with each ``Run`` after its start.

    Raises:
        DtlibError: if three runs in a row have made no progress, or if no rank is left.
    """
    runs: list[Run] = []
    furthest, no_further = -1, 0
    while True:
        run = Run(program, ranks, Path(folder), say=say).start()
        runs.append(run)
        if watch:
            watch(run)
        if run.wait() == 0:
            return runs
        why, reached = run.reports[-1], max((e["step"] for e in run.events if e["what"] == "step"), default=-1)
        no_further, furthest = (no_further + 1, furthest) if reached <= furthest else (0, reached)
        if no_further == 3:
            raise DtlibError(
                f"{why} Three times training did not get beyond step {furthest}, so another restart will not help."
            )
        if not replace:
            ranks -= len(run.lost)
        if not ranks:
            raise DtlibError(f"{why} No rank is left.")
        say(f"It starts again on {ranks} ranks, from the last checkpoint.")
