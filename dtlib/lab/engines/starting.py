"""Choose a number of ranks, warn about too many, and show the progress of a start."""

import time
from pathlib import Path

import psutil
from IPython import get_ipython
from IPython.display import DisplayHandle

from dtlib.lab.engines.live_view import shown_in
from dtlib.world.allocation import allocation
from dtlib.world.launch import mpiexec_error
from dtlib.world.machine import gpu_names, usable_cores

BYTES_A_RANK = 0.7e9  # an engine with torch and a lesson's arrays
BYTES_OF_TORCH = 0.44e9  # an engine with torch only
SLOW_RANKS_PER_CORE = 4  # ranks per core; more are too slow for a lesson
EVERY_SECONDS = 0.5


class StartingLine:
    """The line ``Starting 4 ranks ...``, updated in place; the table of ranks replaces it at the end."""

    def __init__(self, ranks: int):
        self.handle: DisplayHandle | None = None
        self._ranks = ranks
        self._began = time.monotonic()
        self._drawn = 0.0
        self.say("mpiexec starts them")

    def say(self, how_far: str) -> None:
        """Show the progress; frequent calls are skipped."""
        now = time.monotonic()
        if get_ipython() is None or now - self._drawn < EVERY_SECONDS:
            return
        self._drawn = now
        ranks = f"{self._ranks} rank{'s' * (self._ranks > 1)}"
        content = {"text/plain": f"Starting {ranks} ... {now - self._began:.0f} s: {how_far}"}
        self.handle = shown_in(self.handle, content, raw=True)


def suitable_number() -> int:
    """Return the number of ranks that suits this machine.

    In a job on other machines it is the job's number. Otherwise it is one rank per GPU or, without GPUs, one per core
    (at least two, at most four); fewer if memory is short.
    """
    if (job := allocation()) and not job.is_here:
        return job.ranks
    wanted = len(gpu_names()) or min(4, max(2, usable_cores()))
    return max(1, min(wanted, int(psutil.virtual_memory().available / BYTES_A_RANK)))


def warning(ranks: int) -> str | None:
    """Return a warning if this machine has too few cores or too little memory for ``ranks``."""
    cores, free = usable_cores(), psutil.virtual_memory().available
    if (job := allocation()) and not job.is_here:  # the ranks run on other machines
        return None
    if ranks <= SLOW_RANKS_PER_CORE * cores and ranks * BYTES_OF_TORCH < free:
        return None
    shared = f"{ranks / cores:.0f} share a core, and " if ranks > SLOW_RANKS_PER_CORE * cores else ""
    needed, suits = ranks * BYTES_OF_TORCH / 1e9, suitable_number()
    return (
        f"{ranks} ranks on {cores} core{'s' * (cores > 1)} will be slow: {shared}with torch they need about "
        f"{needed:.1f} GB of memory, and {free / 1e9:.1f} GB are free. Stop ends the start; lab.engines({suits}) suits "
        "this machine."
    )


def why_new(note: dict, ranks: int | None, restart: bool) -> str:
    """Return why running ranks are replaced; ``note`` is their record, ``ranks`` the wanted number."""
    had = note.get("ranks")  # None after an interrupted start
    if restart and had:
        return f"the {had} that ran have been ended, as restart=True asks."
    if had and ranks not in (None, had):
        return f"before, there were {had}."
    return "the old ranks do not answer, because they hang, or because this machine is very busy."


def too_few(got: int, ranks: int, seconds: float | None, log: Path) -> str:
    """Return why a start failed, after ``seconds`` or because the ranks ended (None), and what to do."""
    if seconds is None:
        logs = sorted(log.glob("ipengine-*.log"), key=lambda path: path.stat().st_mtime)
        said = mpiexec_error(logs[-1].read_text(errors="replace")) if logs else f"{log} says why."
        return f"The ranks ended during the start, after {got} of {ranks} had started; {said}"
    return (
        f"Only {got} of {ranks} ranks have started in {seconds:.0f} s, because this machine is very busy: start fewer, "
        f"such as lab.engines({max(1, min(suitable_number(), ranks - 1))}), or try again when fewer programs run."
    )
