"""Programs on ranks of their own, started from a notebook as one starts them in a terminal."""

import subprocess
from pathlib import Path

from dtlib.world.launch import start_ranks


def mpiexec(script: str | Path, ranks: int) -> None:
    """``mpiexec -n ranks python script``, with the mpiexec of this environment; prints what the ranks print."""
    with start_ranks([str(script)], ranks, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        print(running.communicate(timeout=60)[0].strip())
