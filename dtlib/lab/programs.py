"""Run programs on separate ranks from a notebook, as from a terminal."""

import subprocess
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.world.launch import start_ranks
from dtlib.world.processes import Process, end_processes, with_descendants


def mpiexec(script: str | Path, ranks: int) -> None:
    """Run ``mpiexec -n ranks python script`` with this environment's mpiexec, and print the output. Stop ends it.

    ``script`` is a path, or the name of one of the course's programs, such as ``pi_mpi4py.py`` in ``notebooks``.

    Raises:
        DtlibError: if the program ends with an error.
    """
    script = script if Path(script).exists() else course.folder() / "notebooks" / script
    process = start_ranks([str(script)], ranks, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        print(process.communicate()[0].strip())
    finally:
        end_processes(with_descendants(Process.of(process.pid)) if process.poll() is None else [])
    if process.returncode:
        raise DtlibError(f"{Path(script).name} on {ranks} ranks ended with status {process.returncode}: see above.")
