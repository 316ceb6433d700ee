"""The scheduler's job that this process belongs to, read from environment variables."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Allocation:
    """A job: ``nodes`` machines, with room for ``ranks`` ranks on all of these machines together."""

    scheduler: str
    job: str
    nodes: int
    ranks: int
    on_a_node: bool  # True on a machine of the job, False on the login node

    @property
    def ranks_a_node(self) -> int:
        """Ranks for which each node has room."""
        return max(1, self.ranks // self.nodes)

    @property
    def is_here(self) -> bool:
        """True if this machine is the whole job."""
        return self.nodes == 1 and self.on_a_node


def allocation() -> Allocation | None:
    """Return the job that this process belongs to; None outside of a job."""
    if job := os.environ.get("SLURM_JOB_ID"):
        nodes = _number("SLURM_JOB_NUM_NODES") or 1
        ranks = _number("SLURM_NTASKS") or nodes * (_number("SLURM_NTASKS_PER_NODE") or _slurm_cpus(nodes))
        return Allocation("Slurm", job, nodes, ranks, "SLURMD_NODENAME" in os.environ)
    if (job := os.environ.get("PBS_JOBID")) and (file := os.environ.get("PBS_NODEFILE")):
        try:
            places = Path(file).read_text().split()  # one line for each of a node's `mpiprocs`
        except OSError:
            return None
        return Allocation("PBS", job, len(set(places)) or 1, len(places) or 1, True)
    return None


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None


def _slurm_cpus(nodes: int) -> int:
    """Return the processors of the first node: ``4(x2),2`` means four on each of two nodes, then two."""
    first = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "").partition(",")[0].partition("(")[0]
    return int(first) if first.isdigit() else 1
