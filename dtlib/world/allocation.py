"""What a scheduler has given this process to run on, read from the environment of the job."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Allocation:
    """A job: ``nodes`` machines and room for ``ranks`` ranks on all of them together."""

    scheduler: str
    job: str
    nodes: int
    ranks: int
    on_a_node: bool  # whether this process runs on one of them, and not where the job was asked for

    @property
    def ranks_a_node(self) -> int:
        return max(1, self.ranks // self.nodes)

    @property
    def is_here(self) -> bool:
        """True where this machine is all of it."""
        return self.nodes == 1 and self.on_a_node


def allocation() -> Allocation | None:
    """The job that this process runs in; None outside of one."""
    if job := os.environ.get("SLURM_JOB_ID"):
        nodes = _number("SLURM_JOB_NUM_NODES") or 1
        ranks = _number("SLURM_NTASKS") or nodes * (_number("SLURM_NTASKS_PER_NODE") or _slurm_cpus(nodes))
        return Allocation("Slurm", job, nodes, ranks, "SLURMD_NODENAME" in os.environ)
    if (job := os.environ.get("PBS_JOBID")) and (file := os.environ.get("PBS_NODEFILE")):
        try:
            places = Path(file).read_text().split()  # a line for each of the `mpiprocs` of a node
        except OSError:
            return None
        return Allocation("PBS", job, len(set(places)) or 1, len(places) or 1, True)
    return None


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None


def _slurm_cpus(nodes: int) -> int:
    """Processors of the first node: ``4(x2),2`` means four on each of two nodes, then two."""
    first = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "").partition(",")[0].partition("(")[0]
    return int(first) if first.isdigit() else 1
