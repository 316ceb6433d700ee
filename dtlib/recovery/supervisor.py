"""Start a training, and start it again from its checkpoint as often as it takes: a scheduler in forty lines."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.recovery.run import Run
from dtlib.world.launch import forked_ranks


@forked_ranks()  # most of a start is imports
def supervise(
    program: list[str], ranks: int, folder: str | PathLike[str], replace: bool = True,
    say: Callable[[str], object] = print, watch: Callable[[Run], object] | None = None,
) -> list[Run]:  # fmt: skip
    """Run ``program`` (a Python program's arguments) on ranks until it ends well; returns its runs.

    Args:
        program: it is given ``folder`` as its last argument, keeps a journal there (journal.py), saves checkpoints and
            goes on from the last one when it is started again: any strategy that dtlib.checkpoint can load will do.
            Without a journal its progress is not known, and it is started three times at most.
        ranks: how many ranks it begins with.
        replace: whether a rank that has died gets a successor, as on a machine that is whole; otherwise it goes on with
            the ranks that are left.
        say: told, in sentences, what happens to a run, why it has ended and how it goes on.
        watch: told of each run that has begun.

    Raises:
        DtlibError: where three runs in a row have come no further: then it is no accident.
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
        why, reached = run.said[-1], max((e["step"] for e in run.events if e["what"] == "step"), default=-1)
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
