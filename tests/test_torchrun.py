import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import start_python

pytestmark = pytest.mark.timeout(600)

TELL = """
import sys
import torch
from torch import distributed as dist
if "mine" in sys.argv:
    dist.init_process_group("gloo")
import dtlib
world = dtlib.init()
assert dtlib.init() is world and dist.is_initialized()
assert (world.node, world.nodes, world.local_rank) == (0, 1, world.rank), world
assert type(world.comm).__name__ == "ProcessGroupCommunicator"
assert "mpi4py.MPI" not in sys.modules
total = world.comm.all_reduce(torch.tensor([world.rank + 1.0])).item()
before = world.comm
assert dtlib.reset() is world and world.comm is not before
assert world.comm.all_reduce(torch.ones(1), "mean").item() == 1
assert world.mesh(data=-1)["data"].all_gather_object(world.rank) == list(range(world.size))
dist.all_reduce(torch.ones(1), group=world.comm.group)  # torch's own functions know the group
with dtlib.trace() as trace:
    world.comm.all_reduce(torch.ones(10))
assert trace.sent() == (0, 40)
text = f"rank {world.rank} of {world.size} on {world.device}: {total:.0f}"
texts = world.comm.all_gather_object(text)
if world.rank == 0:
    print("\\n".join(texts))
"""

FAIL = """
import sys
import dtlib, torch
from torch import distributed as dist
if "mine" in sys.argv:
    dist.init_process_group("gloo")
world = dtlib.init()
if world.rank == world.size - 1:
    world.comm.all_reduce(3)
world.comm.barrier()
"""


def torchrun(script, *arguments, ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["ours", "mine"])
def test_a_world_under_torchrun(tmp_path, group):
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    ran = torchrun(script, group)
    assert ran.returncode == 0, ran.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 on" in ran.stdout
    assert ran.stdout.count(": 3") == 2
    assert "Traceback" not in ran.stderr and "destroy_process_group" not in ran.stderr


LAUNCHERS = {  # how each says the ranks of a node, and the node
    "torchrun": {"LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0},
    "deepspeed": {"LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_world_by_the_variables_of_a_launcher(tmp_path, launcher):
    """They are set here, without the launcher."""
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "DTLIB_RANKS": 2, **LAUNCHERS[launcher]}
    ranks = []
    for rank in range(2):
        env = {name: str(value) for name, value in {**told, "RANK": rank, "LOCAL_RANK": rank}.items()}
        ranks.append(start_python(script, env=env))
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[0][0].count(": 3") == 2


NIGHTLY = [(1, "ours"), (2, "ours"), (3, "mine")]


@pytest.mark.parametrize(
    "ranks,group",
    [
        pytest.param(2, "mine", marks=pytest.mark.slow),
        pytest.param(4, "ours", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY),
    ],
)
def test_an_error_on_one_rank_under_torchrun_ends_all(tmp_path, group, ranks):
    script = tmp_path / "fail.py"
    script.write_text(FAIL)
    ran = torchrun(script, group, ranks=ranks)
    assert ran.returncode != 0
    assert "Traceback (most recent call last)" in ran.stderr
    assert "CommunicationError: all_reduce carries a torch tensor" in ran.stderr
