"""What goes wrong in a classroom ends in a sentence: never in a hang, never in nonsense."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import dtlib
from dtlib.comm import waiting
from dtlib.comm.call import Call
from dtlib.comm.watch import board, missing_ranks
from dtlib.errors import CommunicationError, WaitTimeout
from dtlib.world.launch import mpiexec_command, start_ranks
from dtlib.world.processes import Process, end_processes, with_descendants
from tests.cases import for_each, refuses
from tests.conftest import wait_until
from tests.ranks import on_ranks


def verifying(world):
    """The world's communicator as a notebook has it: fresh, with arguments compared and a limit."""
    dtlib.reset()
    world.comm.barrier()
    world.comm.verify, world.comm.time_limit = True, 50
    return world.comm


def that_gives_up(comm):
    """The same communicator, whose next wait is to end soon: what ranks did before has had all the time it wants."""
    comm.time_limit = 1
    return comm


def all_here():
    """Wait for all ranks without dtlib, so that no rank joins an operation for which others wait in vain."""
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD.Ibarrier()
    while not everyone.Test():
        time.sleep(0.01)


ELSEWHERE = r"{}.*: rank {} is in `test_safety.py:\d+: .*`; its last operation was {}"


def once_seen(rank, operation, state="elsewhere"):
    """Wait until the board shows that a rank's last operation is over, or that the rank waits in it."""

    def shows_it():
        seen = board.current.seen().get(rank)
        return seen is not None and (seen.state, seen.operation) == (state, operation)

    wait_until(shows_it)


def back_to_work(world):
    """What a learner does next."""
    world.comm.time_limit = None  # others may still be waiting
    dtlib.reset()
    world.comm.verify = False
    assert world.comm.all_reduce(torch.ones(1)).item() == world.size


@pytest.mark.parametrize("how", range(2), ids=["failed", "finished"])
def test_the_last_message_of_a_rank_that_is_over_is_received(monkeypatch, how):
    """It may arrive, and its rank end, after the receiver has looked for it and before that looks at the board."""
    come = []

    def over(*arguments):
        come.append(True)
        return ([1], [])[:: 1 - 2 * how]

    monkeypatch.setattr(board, "current", SimpleNamespace(rank=0, seen=dict, publish=lambda *place: None))
    monkeypatch.setattr(board, "cell", board.PROGRAM)
    monkeypatch.setattr(missing_ranks, "ended_ranks", over)
    monkeypatch.setattr(waiting.deadlock, "ENDED_SECONDS", 0)
    link = SimpleNamespace(all_done=lambda requests: bool(come), give_up=lambda requests: None, messages=0, bytes=0)
    comm = SimpleNamespace(
        _queue=waiting.Queue(), time_limit=None, on_board=True, verify=False, wire=None, simulated=False
    )
    operation = waiting.Operation(Call("recv", None, None, 0, (1,)), link, iter([[None]]), lambda: "arrived")
    assert operation.start(comm) == "arrived" and len(come) == 1


DISAGREEMENTS = {
    "collective": lambda comm, odd: comm.all_reduce(torch.ones(4), "max" if odd else "sum"),
    "shape": lambda comm, odd: comm.all_reduce(torch.ones(5 if odd else 4)),
    "dtype": lambda comm, odd: comm.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32)),
    "root": lambda comm, odd: comm.broadcast(torch.ones(4), root=1 if odd else 0),
    "name": lambda comm, odd: comm.barrier() if odd else comm.all_reduce(torch.ones(4)),
    "algorithm": lambda comm, odd: comm.all_reduce(torch.ones(4), algorithm="tree" if odd else "ring"),
    "async": lambda comm, odd: comm.all_reduce(torch.ones(4 + odd), async_op=True).wait(),
    "polled": lambda comm, odd: until_done(comm.all_reduce(torch.ones(4 + odd), async_op=True)),
}


def until_done(handle):
    while not handle.done():
        time.sleep(0.001)


@on_ranks(2, 3, 4)
@for_each(what=DISAGREEMENTS)
def test_ranks_that_disagree_are_told_both_sides_and_their_lines(world, what):
    comm = verifying(world)
    comm.barrier()
    odd = world.rank == world.size - 1
    with pytest.raises(CommunicationError, match=r"The calls of the ranks differ: .*; rank \d calls") as raised:
        DISAGREEMENTS[what](comm, odd)
    assert "test_safety.py:" in str(raised.value)
    said = str(raised.value)
    refuses(r"Run %px dtlib.reset\(\)", comm.barrier, error=CommunicationError)
    back_to_work(world)
    assert len(set(world.comm.all_gather_object(said))) == 1


@on_ranks(2, 3)
@pytest.mark.parametrize("sent,received,dtype", [
    ((4,), (2, 2), "float32"), ((2,), (4,), "float32"), ((4,), (2,), "float32"), ((4,), (4,), "int32"),
])  # fmt: skip
def test_a_message_that_its_receiver_did_not_expect_is_refused_with_both_lines(world, sent, received, dtype):
    comm = verifying(world)
    if world.rank == 0:
        comm.send(torch.ones(sent), 1)
    if world.rank == 1:
        words = rf"Rank 0 sends \(.*float32.*test_safety.py.* rank 1 receives \(.*{dtype}.*test_safe"
        with pytest.raises(CommunicationError, match=words):
            comm.recv(torch.ones(received, dtype=getattr(torch, dtype)), 0)
    back_to_work(world)


@on_ranks(3, 4, slow=(4,))
@for_each(verify=[True, False])
def test_a_rank_that_never_comes_is_named_with_its_last_line(world, verify):
    comm = verifying(world)
    comm.verify = verify
    comm.barrier()
    if world.rank != 1:
        once_seen(1, "barrier")
        with pytest.raises(WaitTimeout, match=ELSEWHERE.format("Waited 1 s in all_reduce", 1, "barrier")):
            that_gives_up(comm).all_reduce(torch.ones(3))
    all_here()
    back_to_work(world)


@on_ranks(2)
def test_a_short_time_limit_names_the_missing_rank_too(world):
    comm = verifying(world)
    comm.barrier()
    if world.rank == 0:
        once_seen(1, "barrier")
        comm.time_limit = 0.1
        with pytest.raises(WaitTimeout, match=ELSEWHERE.format("Waited 0.1 s in all_reduce", 1, "barrier")):
            comm.all_reduce(torch.ones(3))
        assert board.last.operation == "all_reduce"
    all_here()
    back_to_work(world)


@on_ranks(2)
def test_ranks_that_never_wait_long_are_on_the_board_too(world):
    """A rank that is stopped from outside, or holds Python's lock, can no longer write what it did last."""

    def shows_others():
        seen = board.current.seen()
        return len(seen) == world.size and {entry.operation for entry in seen.values()} == {"all_reduce"}

    wait_until(lambda: world.comm.all_reduce(torch.tensor(int(shows_others())), "min").item() == 1)


@on_ranks(3)
def test_a_rank_whose_program_raised_is_named_with_what_it_did_last(world):
    comm = verifying(world)
    comm.broadcast(torch.ones(1), root=1)
    if world.rank == 2:
        refuses("no op 'median'", lambda: comm.all_reduce(torch.ones(3), "median"), error=CommunicationError)
    else:
        once_seen(2, "broadcast")
        with pytest.raises(WaitTimeout, match=ELSEWHERE.format("all_reduce", 2, r"broadcast\(from rank 1\)")):
            that_gives_up(comm).all_reduce(torch.ones(3))
    all_here()
    back_to_work(world)


@on_ranks(3)
def test_another_operation_without_comparison_ends_in_a_sentence_too(world):
    comm = verifying(world)
    comm.verify = False
    with pytest.raises(WaitTimeout, match=r"they wait for one another: .*recv.*rank|rank . (has|is in|raised|waited)"):
        if world.rank == 0:
            that_gives_up(comm).recv(torch.ones(1), 1)
        else:
            that_gives_up(comm).barrier()
    back_to_work(world)


@on_ranks(3)
def test_two_receives_that_face_each_other_are_called_a_circle(world):
    comm = verifying(world)
    processes = comm.all_gather_object(os.getpid())
    if world.rank == 0:
        once_seen(1, "recv", state="waits")
        with pytest.raises(WaitTimeout, match=r"they wait for one another: rank 0 in recv.*, rank 1 in recv"):
            that_gives_up(comm).recv(torch.ones(1), 1)
        os.kill(processes[1], signal.SIGINT)
    elif world.rank == 1:
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            comm.recv(torch.ones(1), 0)
        signal.signal(signal.SIGINT, previous)
    back_to_work(world)


@on_ranks(2)
def test_an_interrupt_ends_a_wait(world):
    comm, waits = verifying(world), []
    if world.rank == 0:
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: waits and os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        with pytest.raises(KeyboardInterrupt):  # and not WaitTimeout, much later
            waits.append(True)
            comm.all_reduce(torch.ones(10**6))
        waits.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, previous)
    all_here()
    back_to_work(world)


@on_ranks(4)
def test_ranks_that_wait_leave_the_cores_to_others(world):
    """What a nap costs depends on the machine, so naps are counted; `python -m benchmarks waiting` measures."""
    comm = verifying(world)
    comm.time_limit = None
    naps = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: (naps.append(seconds), time.sleep(seconds)))
    with patch.object(waiting, "time", clock):
        began = time.monotonic()
        if world.rank == 0:
            time.sleep(2)
        comm.barrier()
        waited = time.monotonic() - began
    if world.rank != 0:
        # The integral of 1 / (0.1 w^2) from 0.02 s, where naps grow, to where one is 0.05 s, and 20 a second after it.
        # Before 0.02 s a rank that got its core back late takes the shortest ones.
        assert 0 < len(naps) <= 486 + 26 + 20 * (waited - 1) + 0.02 / waiting.SHORTEST_SLEEP
        assert max(naps) == waiting.LONGEST_SLEEP
    back_to_work(world)


PROGRAM = """
import os, signal, sys, time, torch, dtlib
world = dtlib.init()
world.comm.barrier()
if world.rank == 1:
    {what}
world.comm.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("what,said", [
    ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 with PID"),
    ("raise ValueError('no data')", "ValueError: no data"),
])  # fmt: skip
def test_a_program_whose_rank_is_killed_or_raises_ends_and_leaves_nothing(tmp_path, what, said):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(what=what))
    started = start_ranks([str(script)], 3, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    family = set()
    while started.poll() is None:
        family.update(with_descendants(Process.of(started.pid)))
        time.sleep(0.05)
    output = started.stdout.read()
    assert started.returncode != 0
    assert said in output, output
    assert not [process for process in family if process.find()]


ENDS_FIRST = """
import time, torch, dtlib
world = dtlib.init()
ones = torch.ones(4)
if world.rank == 2:
    time.sleep(2)
world.comm.reduce(ones, root=0)  # rank 1 leaves it at once
if world.rank == 1:
    world.comm.send(torch.ones(1), 2)
elif world.rank == 2:
    world.comm.recv(torch.ones(1), 1)
else:
    print(ones)
"""


@pytest.mark.slow
def test_a_rank_may_end_while_others_are_in_a_collective_that_it_has_left(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(ENDS_FIRST)
    ranks = start_ranks([str(script)], 3, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = ranks.communicate(timeout=60)[0]
    assert ranks.returncode == 0 and "tensor([3., 3., 3., 3.])" in output, output


RAISES = """
import os, sys
import dtlib
from torch import distributed as dist
rank, size = (int(os.environ["OMPI_COMM_WORLD_" + name]) for name in ("RANK", "SIZE"))
for step in sys.argv[1].split(","):
    if step == "dtlib":
        world = dtlib.init()
    else:
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/store", rank=rank, world_size=size)
print("output before")
if rank == size - 1:
    raise ValueError("no data")
world.comm.barrier()
"""


SLOW = [
    (1, "dtlib,torch", True), (2, "dtlib,torch", True), (2, "torch,dtlib", True), (3, "torch,dtlib", False),
    (4, "dtlib,torch", False), (4, "torch,dtlib", True),
]  # fmt: skip


@pytest.mark.parametrize(
    "size,order,terminal", [(2, "dtlib,torch", False), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_an_error_in_a_program_with_a_process_group_of_torch_is_shown(tmp_path, order, size, terminal):
    script = tmp_path / "program.py"
    script.write_text(RAISES)
    mine, theirs = os.openpty() if terminal else os.pipe()
    started = start_ranks([str(script), order, str(tmp_path)], size, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    with suppress(OSError), open(mine, "rb", buffering=0) as reader:  # a terminal ends with an error
        while some := reader.read(4096):
            output += some
    assert started.wait(timeout=60) != 0
    said = output.decode()
    assert said.count("ValueError: no data") == 1 and "Traceback (most recent call last)" in said, said
    assert "output before" in said, said


def test_what_a_killed_mpiexec_leaves_behind_keeps_no_other_one_from_starting(tmp_path, monkeypatch):
    """A folder with its process id in the name: with that id, another one would not start."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ranks = start_ranks(["-c", "input()"], 1, stdin=subprocess.PIPE, env={"TMPDIR": str(tmp_path)})
    left = tmp_path / f"ompi.{ranks.pid}"
    wait_until(lambda: list(left.glob("pmix.*.tool.*")))
    everyone = with_descendants(Process.of(ranks.pid))
    mpiexec_command()
    assert left.exists(), "it is alive"
    os.kill(ranks.pid, signal.SIGKILL)
    ranks.wait()
    end_processes(everyone)
    assert left.exists()
    mpiexec_command()
    assert not left.exists()
