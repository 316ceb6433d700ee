"""A hang of a script, in whichever API and under whichever launcher: one sentence on stderr says who is missing."""

import os
import re
import subprocess
import sys

import psutil
import pytest

from dtlib.world.launch import start_ranks

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import distributed as dist
import dtlib
from dtlib.parallel.data import DataParallel

folder = Path(sys.argv[1])
world = dtlib.init()
if "torchs" in sys.argv:
    import dtlib.backend
    dist.init_process_group("dtlib", init_method="dtlib://")
world.comm.barrier()

def stay_away(phase):
    while not (folder / phase).exists():
        time.sleep(0.05)  # the last rank is in this line

def all_reduce():
    world.comm.all_reduce(torch.ones(4))

def recv():
    world.comm.recv(torch.ones(3), world.size - 1)

def mpi4py():
    world.comm.mpi.Barrier()

def request():
    if world.rank == 0:
        request = world.comm.mpi.irecv(source=world.size - 1)
        request.wait()
    elif world.rank == world.size - 1:
        world.comm.mpi.send(1, 0)

def torchs():
    dist.broadcast(torch.ones(5), world.size - 1)

def caught():
    model = DataParallel(torch.nn.Linear(2, 2), world.comm)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()

last = world.rank == world.size - 1
for phase in sys.argv[2:]:
    if phase == "ended":
        if last:
            break
        world.comm.barrier()
    if phase == "caught" and last:
        model = DataParallel(torch.nn.Linear(2, 2), world.comm)
        try:
            raise ValueError
        except ValueError:
            stay_away(phase)
        model(torch.ones(1, 2)).sum().backward()
        continue
    if last:
        stay_away(phase)
    if phase == "recv":
        if last:
            world.comm.send(torch.ones(3), 0)
        elif world.rank == 0:
            recv()
    else:
        globals()[phase]()
print("done", flush=True)
"""
HERE = r"rank {last} is in `hang.py:\d+: (time.sleep|while not)[^`]*`; its last operation was {operation}"
EXPECTED = {  # in which operation rank 0 waits, and what the last rank called before
    "all_reduce": (r"all_reduce\(sum\) of \(4,\) float32", "barrier"),
    "recv": (r"recv\(from rank {last}\) of \(3,\) float32", "[a-z]+"),
    "mpi4py": (r"barrier\(mpi4py\)", "[a-z]+"),
    "request": (r"recv\(from rank {last}\)", "[a-z]+"),
    "torchs": (r"broadcast\(from rank {last}\) of \(5,\) float32", "[a-z_]+"),
    "caught": (r"all_reduce\(sum\) of \(\d+,\) float32", r"broadcast\(from rank 0\)"),
}


def explained(process, folder, phases, last: int) -> str:
    """Let each phase of the script go on as soon as its hang has been explained; returns what else stood on stderr."""
    rest = []
    for phase in phases:
        operation, before = (text.format(last=last) for text in EXPECTED[phase])
        wanted = f"rank 0 has waited \\d+ s in {operation}: .*{HERE.format(last=last, operation=before)}"
        for line in process.stderr:
            if line.startswith("dtlib: rank"):
                assert re.search(wanted, line), (phase, line)
                break
            rest.append(line)
        else:
            raise AssertionError(f"{phase}: nothing was said. {''.join(rest)}")
        (folder / phase).touch()
    said, errors = process.communicate()
    assert process.returncode == 0 and said.count("done") == last + 1, errors
    return errors


def write_script(folder) -> str:
    (folder / "hang.py").write_text(SCRIPT)
    return str(folder / "hang.py")


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.parametrize(
    ("ranks", "phases"),
    [
        (2, ("all_reduce", "mpi4py")),
        pytest.param(2, ("recv", "request", "torchs", "caught"), marks=pytest.mark.slow),
        pytest.param(3, ("all_reduce", "mpi4py", "torchs", "caught"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_who_is_missing_is_said_once_under_mpiexec(tmp_path, ranks, phases):
    process = start_ranks([write_script(tmp_path), str(tmp_path), *phases], ranks, **PIPES)
    assert "dtlib:" not in explained(process, tmp_path, phases, ranks - 1)


@pytest.mark.slow
def test_who_is_missing_is_said_once_under_torchrun(tmp_path):
    phases = ("all_reduce", "recv", "caught")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    process = subprocess.Popen(
        [*command, write_script(tmp_path), str(tmp_path), *phases], env={**os.environ, "OMP_NUM_THREADS": "1"}, **PIPES
    )
    assert "dtlib:" not in explained(process, tmp_path, phases, 1)


def test_ranks_end_with_an_mpiexec_that_is_killed(tmp_path, monkeypatch):
    """Also those that no zygote has forked, and that are in no operation."""
    monkeypatch.setenv("DTLIB_ZYGOTE", "off")
    (tmp_path / "sleeps.py").write_text("import dtlib, os, time; dtlib.init(); print(os.getpid()); time.sleep(1000)")
    process = start_ranks(["-u", str(tmp_path / "sleeps.py")], 2, stdout=subprocess.PIPE, text=True)
    ranks = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    process.kill()
    _, living = psutil.wait_procs(ranks, 20)
    for rank in living:
        rank.kill()
    assert not living


def test_who_waits_for_a_rank_that_has_ended_is_told(tmp_path):
    """And is not left waiting for a rank that is in MPI_Finalize."""
    process = start_ranks([write_script(tmp_path), str(tmp_path), "ended"], 2, **PIPES)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert re.search(r"PeerFailed: barrier \(.*\) cannot end: rank 1 has ended its program; its last operation", errors)
    assert "reset()" not in errors and "has waited" not in errors
