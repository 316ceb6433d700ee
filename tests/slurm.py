"""A Slurm cluster of two nodes on one machine: munged, slurmctld and a slurmd a host, all of them Debian's own.

They run on the hosts of tests/hosts.py, so their ports can be reached from nowhere else, and out of a folder of their
own: the system's configuration is neither read nor written.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests import hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc")
PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CPUS = 4  # that each node says it has

CONFIGURATION = """
ClusterName=dtlib
SlurmctldHost=h1({network}.1)
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=h1 NodeAddr={network}.1 CPUs={cpus} State=UNKNOWN
NodeName=h2 NodeAddr={network}.2 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Why there can be no Slurm here, or ''."""
    if absent := [program for program in PROGRAMS if not shutil.which(program, path=PLACES)]:
        return f"{', '.join(absent)} not found: apt-get install munge slurmctld slurmd slurm-client"
    return hosts.missing()


class Slurm(hosts.Hosts):
    """``with Slurm(folder) as cluster: cluster.run("h1", ["srun", "-N2", "hostname"])``"""

    def __enter__(self):
        super().__enter__()
        try:
            self._start_daemons()
        except BaseException:
            self.end()
            raise
        return self

    def command(self, host: str, command: list[str]) -> list[str]:
        """``command`` as it is run on this host: it finds this cluster, and no other."""
        settings = [f"SLURM_CONF={self.folder / 'slurm.conf'}", f"PATH={PLACES}"]
        outer = [word for name in os.environ if name.startswith(("SLURM_", "SBATCH_")) for word in ("-u", name)]
        return super().command(host, ["env", *outer, *settings, *command])

    def jobs_end(self, seconds: float = hosts.SECONDS) -> bool:
        """Wait until no job is left; whether that was so in time. (``sbatch --wait`` looks ever more seldom.)"""
        deadline = time.monotonic() + seconds
        while left := self.run("h1", ["squeue", "--noheader"]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.3)
        return not left

    def _start_daemons(self) -> None:
        folder = self.folder
        folder.chmod(0o755)  # munged refuses a key that others could have written; users ask it and read slurm.conf
        for name in ("state", "spool-h1", "spool-h2"):
            (folder / name).mkdir()
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(os.urandom(1024))
        text = CONFIGURATION.format(folder=folder, network=hosts.NETWORK, cpus=CPUS)
        (folder / "slurm.conf").write_text(text.lstrip())
        files = {"socket": "munge.socket", "key-file": "key", "pid-file": "munge.pid", "log-file": "munge.log"}
        munged = ["munged", "--foreground", "--force", f"--seed-file={folder / 'seed'}"]
        self._daemon("h1", [*munged, *(f"--{option}={folder / name}" for option, name in files.items())])
        self._wait_for((folder / "munge.socket").exists, "munged made no socket")
        self._daemon("h1", ["slurmctld", "-D"])
        for name in self.names:
            self._daemon(name, ["slurmd", "-D", "-N", name])
        self._wait_for(self._nodes_are_idle, "the nodes did not come up")

    def _daemon(self, host: str, command: list[str]) -> None:
        with open(self.folder / f"{command[0]}-{host}.log", "w") as log:
            self.start(host, command, stdout=log, stderr=log)

    def _nodes_are_idle(self) -> bool:
        ran = subprocess.run(
            self.command("h1", ["sinfo", "--noheader", "--format=%D %t"]), capture_output=True, text=True
        )
        return ran.stdout.split() == ["2", "idle"]

    def _wait_for(self, condition, problem: str) -> None:
        deadline = time.monotonic() + hosts.SECONDS
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in Path(self.folder).glob("*.log"))
                raise RuntimeError(f"{problem} within {hosts.SECONDS} s\n{logs}")
            time.sleep(0.1)
