"""Hosts on one machine: each with a name, an address, a network and a /dev/shm of its own. Needs root.

    h1  10.77.0.1 ----- wire: veth, or where it has a latency two tun devices; bandwidth by tbf ----- 10.77.0.2  h2

A host is a process that sleeps in namespaces of its own; whoever is to run there enters them. Files are the machine's,
as on a cluster whose nodes share a file system. Nothing outside can be reached, nor reaches in.
"""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from dtlib.world.launch import ends_with_this_process, find_mpiexec, rank_environment
from dtlib.world.processes import Process, end_processes
from tests.conftest import ROOT

NETWORK, MTU = "10.77.0", 9000
HOLD = 'mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && hostname "$0" && echo ready && exec sleep inf'
SECONDS = 300  # that anything may take on a busy machine
# A window that is wide from the first packet on, and stays so: a model of latency and bandwidth has no slow start.
SET_UP = """
ip address add {network}.{number}/24 dev wire
ip link set wire up mtu {mtu}
ip route replace {network}.0/24 dev wire src {network}.{number} initcwnd 1000 initrwnd 1000
sysctl -qw net.ipv4.tcp_slow_start_after_idle=0
"""


@cache
def missing() -> str:
    """Why there can be no hosts here, or ''."""
    if sys.platform != "linux" or os.geteuid():
        return "hosts of network namespaces need Linux and root"
    for program in ("unshare", "nsenter", "ip", "tc"):
        if not shutil.which(program):
            return f"{program} is missing: install util-linux and iproute2"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@cache
def kernel_has_netem() -> bool:
    try_it = "ip link add a type veth peer name b && tc qdisc add dev a root netem delay 1ms"
    return not subprocess.run(["unshare", "--net", "sh", "-c", try_it], capture_output=True).returncode


class Hosts:
    """``with Hosts(folder, latency=0.01) as hosts: hosts.start("h1", command)``.

    Args:
        folder: an empty one, for small files.
        latency: seconds that a packet is under way.
        bandwidth: bytes a second.
        netem: whether the kernel makes the latency, else tests/slow_wire.py does.
    """

    def __init__(self, folder: Path, latency: float = 0.0, bandwidth: float | None = None, netem: bool | None = None):
        self.folder, self.latency, self.bandwidth = Path(folder), latency, bandwidth
        self.netem = kernel_has_netem() if netem is None else netem
        self.names, self._started = ("h1", "h2"), []

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        names = self.folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(
            f"{NETWORK}.{number} {name}\n" for number, name in enumerate(self.names, 1)
        ))  # fmt: skip
        try:
            hold = ["unshare", "--net", "--uts", "--mount", "sh", "-c", HOLD]
            self._holders = [self._begin([*hold, name, str(names)]) for name in self.names]
            self.pids = {name: holder.pid for name, holder in zip(self.names, self._holders, strict=True)}
            self._networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in self.pids.values()}
            self._connect()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *error):
        self.end()

    def _begin(self, command: list[str]) -> subprocess.Popen:
        started = subprocess.Popen(ends_with_this_process(command), stdout=subprocess.PIPE, text=True)
        self._started.append(started)
        if started.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(command)} did not start")
        return started

    def _connect(self) -> None:
        first, second = self.pids.values()
        if self.latency and not self.netem:
            wire = [sys.executable, str(ROOT / "tests" / "slow_wire.py"), str(first), str(second), str(self.latency)]
            self._begin(wire)
        else:
            self.run("h1", f"ip link add wire type veth peer name wire netns {second}".split())
        shaped = []
        if self.latency and self.netem:
            shaped.append(f"netem delay {self.latency * 1e6:.0f}us limit 100000")
        if self.bandwidth:
            shaped.append(f"tbf rate {8 * self.bandwidth:.0f}bit burst {2 * MTU} latency 1s")
        for number, name in enumerate(self.names, 1):
            lines = SET_UP.format(network=NETWORK, number=number, mtu=MTU).strip().splitlines()
            place = "root handle 1:"
            for discipline in shaped:  # each inside of the one before
                lines.append(f"tc qdisc add dev wire {place} {discipline}")
                place = "parent 1:1 handle 10:"
            for line in ["ip link set lo up", *lines]:
                self.run(name, line.split())

    def command(self, host: str, command: list[str]) -> list[str]:
        """``command`` as it is run on this host."""
        enter = ["nsenter", "--target", str(self.pids[host]), "--net", "--uts", "--mount", f"--wd={ROOT}"]
        return [*enter, "--", *command]

    def run(self, host: str, command: list[str], timeout: float = SECONDS, **popen) -> str:
        """Run a command on this host to its end; returns what it printed."""
        ran = subprocess.run(self.command(host, command), capture_output=True, text=True, timeout=timeout, **popen)
        if ran.returncode:
            raise RuntimeError(f"{' '.join(command)} on {host}: status {ran.returncode}\n{ran.stdout}{ran.stderr}")
        return ran.stdout

    def start(self, host: str, command: list[str], **popen) -> subprocess.Popen:
        """Start a command on this host; it ends with the hosts."""
        started = subprocess.Popen(ends_with_this_process(self.command(host, command)), **popen)
        self._started.append(started)
        return started

    def agent(self) -> Path:
        """A program that is called as ssh is, with a host and a command line, and runs that there."""
        path = self.folder / "agent"
        enter = "".join(f"{name}) pid={pid};; " for name, pid in self.pids.items())
        path.write_text(
            f'#!/bin/sh\ncase "$1" in {enter}*) echo "no host $1" >&2; exit 1;; esac\nshift\n'
            f'exec nsenter --target $pid --net --uts --mount --wd={ROOT} -- sh -c "$*"\n'
        )
        path.chmod(0o755)
        return path

    def run_ranks(self, command: list[str], a_host: int = 1, timeout: float = SECONDS, **settings) -> str:
        """Run a Python program on ranks of both hosts, which mpiexec reaches by an rsh agent; returns what they print.

        ``settings`` are environment variables for mpiexec and for the ranks.
        """
        ranks = 2 * a_host
        told = {
            **rank_environment(ranks), "PYTHONPATH": str(ROOT), "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_btl_tcp_if_include": f"{NETWORK}.0/24", **settings,
        }  # fmt: skip
        hosts = ",".join(f"{name}:{a_host}" for name in self.names)
        mpiexec = [
            find_mpiexec(),
            "--prtemca",
            "plm_ssh_agent",
            str(self.agent()),
            "--host",
            hosts,
            "--bind-to",
            "none",
        ]
        exported = [word for name in told for word in ("-x", name)]
        whole = [*mpiexec, *exported, "-n", str(ranks), sys.executable, *command]
        return self.run("h1", whole, timeout, env={**os.environ, **told})

    def inside(self) -> list[Process]:
        """All processes that run on the hosts, whoever has started them."""
        found = []
        for pid in psutil.pids():
            with suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{pid}/ns/net") in self._networks:
                    found.append(Process.of(pid))
        return found

    def end(self) -> None:
        """End all that runs there; networks and devices end with the last process in them."""
        left = self.inside() if hasattr(self, "_networks") else []
        end_processes([*left, *(Process.of(each.pid) for each in self._started if each.poll() is None)])
        for each in self._started:
            each.wait()
            if each.stdout:
                each.stdout.close()
