"""``comm.mpi`` and ``comm.group``: mpi4py and torch.distributed over the ranks of one communicator."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import distributed as dist

import dtlib
from dtlib.comm import as_communicator, waiting
from dtlib.errors import CommunicationError, WaitTimeout
from tests.api_calls import calls, cells, sources
from tests.cases import refuses
from tests.conftest import wait_until
from tests.ranks import on_ranks


def sent(trace):
    return [(event.name, event.bytes) for event in trace.events if event.kind == "operation" and event.bytes]


@on_ranks(2, 3)
def test_torch_calls_are_those_of_the_communicator(world):
    comm, group = world.comm, world.comm.group
    with dtlib.trace() as theirs:
        tensor = torch.full((6 * comm.size,), float(comm.rank))
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, src=comm.size - 1, group=group)  # a rank of the world
        dist.broadcast(tensor, group_src=0, group=group)
        dist.send(tensor, group_dst=(comm.rank + 1) % comm.size, group=group)
        dist.recv(torch.empty_like(tensor), group_src=(comm.rank - 1) % comm.size, group=group)
    with dtlib.trace() as ours:
        expected = comm.all_reduce(torch.full((6 * comm.size,), float(comm.rank)))
        comm.broadcast(expected, comm.size - 1)
        comm.broadcast(expected)
        comm.send(expected, (comm.rank + 1) % comm.size)
        comm.recv(torch.empty_like(expected), (comm.rank - 1) % comm.size)
    assert torch.equal(tensor, expected) and sent(theirs) == sent(ours) != []
    assert group.rank() == comm.rank and dist.get_world_size(group) == comm.size
    assert as_communicator(group) is comm


@on_ranks(3)
def test_a_group_of_some_ranks_counts_as_its_communicator(world):
    comm = world.comm.split(world.rank == 0)  # ranks 1 and 2 are 0 and 1 there
    tensor = torch.tensor([float(world.rank)])
    dist.broadcast(tensor, src=comm.members[-1], group=comm.group)
    assert tensor == comm.members[-1]
    tensor = torch.tensor([float(world.rank)])
    dist.broadcast(tensor, group_src=0, group=comm.group)
    assert tensor == comm.members[0]
    slow = world.comm.emulate_network(latency=0.1, bandwidth=1e9)
    with dtlib.trace() as trace:
        dist.all_reduce(tensor, group=slow.group)
    assert all(event.emulated for event in trace.events)


@on_ranks(2)
def test_operations_that_name_the_group_anew_are_of_one_group(world):
    comm, other = world.comm, 1 - world.rank
    got = torch.zeros(3)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((3,), float(world.rank)), group=comm.group, group_peer=other),
        dist.P2POp(dist.irecv, got, group=comm.group, group_peer=other),
    ])  # fmt: skip
    for work in works:
        work.wait()
    assert got.tolist() == [float(other)] * 3


@on_ranks(2)
def test_torch_keeps_no_group_alive(world):
    comm = world.comm.split(0)
    group, alive = comm.group, weakref.ref(comm)
    dist.all_reduce(torch.ones(2), group=group)
    known = len(dist.distributed_c10d._world.pg_group_ranks)
    del comm, group
    gc.collect()
    assert alive() is None and len(dist.distributed_c10d._world.pg_group_ranks) < known


@on_ranks(2, 3)
def test_mpi4py_has_its_values_and_its_messages_are_counted(world):
    from mpi4py import MPI

    comm, mpi, size = world.comm, world.comm.mpi, world.size
    right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
    mine, total = np.full(3, comm.rank + 1.0), np.empty(3)
    mpi.Allreduce(mine, total)
    assert (total == sum(range(1, size + 1))).all()
    everyones = np.empty((size, 3))
    mpi.Allgather([mine, MPI.DOUBLE], everyones)
    assert (everyones[left] == left + 1).all()
    mpi.Reduce(mine, total if comm.rank == 0 else None, op=MPI.MAX, root=0)
    assert (total == (size if comm.rank == 0 else sum(range(1, size + 1)))).all()
    assert mpi.allreduce(comm.rank) == sum(range(size)) and mpi.allgather(comm.rank) == [*range(size)]
    assert mpi.reduce(comm.rank, op=MPI.MAX, root=1) == (size - 1 if comm.rank == 1 else None)
    assert mpi.bcast({"root": 1} if comm.rank == 1 else None, root=1) == {"root": 1}
    assert mpi.scatter([*range(size)] if comm.rank == 0 else None) == comm.rank
    with dtlib.trace() as trace:
        got, status = torch.empty(5), MPI.Status()
        leaving = mpi.Isend(torch.full((5,), float(comm.rank)), right)
        mpi.Recv(got, source=left, status=status)
        leaving.Wait()
        assert (got == left).all() and status.Get_source() == left and status.Get_count(MPI.FLOAT) == 5
        assert mpi.sendrecv("x" * comm.rank, right, source=left) == "x" * left
        arriving = mpi.irecv(source=left, tag=3)
        mpi.send(comm.rank, right, tag=3)
        assert arriving.wait() == left
        mpi.Sendrecv(mine, right, 0, total, left)
        assert (total == left + 1).all()
        MPI.Request.Waitall([mpi.Isend(mine, right), mpi.Irecv(total, left)])
        mpi.Barrier()
    messages = [count for name, count in sent(trace) if name == "send"]
    assert len(messages) == 5 and messages[0] == 20 and messages[3] == messages[4] == 24
    last = trace.events[-1]
    assert (last.name, last.algorithm, last.bytes) == ("barrier", "mpi4py", 0)


@on_ranks(2)
def test_waits_of_mpi4py_end(world):
    from mpi4py import MPI

    for call in (lambda mpi: mpi.Recv(np.empty(1), source=1), lambda mpi: mpi.recv(source=1), lambda mpi: mpi.bcast(1)):
        comm = world.comm.split(0)
        comm.time_limit = 0.5
        if comm.rank == 0:
            refuses("rank 1", call, comm.mpi, error=WaitTimeout)
        world.comm.barrier()
    comm = world.comm.split(0)
    comm.verify = True
    with pytest.raises(CommunicationError, match=r"rank 0 calls all_reduce\(sum, mpi4py\)"):
        comm.mpi.Allreduce(MPI.IN_PLACE, np.ones(1)) if comm.rank == 0 else comm.mpi.Bcast(np.ones(1))
    comm = world.comm.split(0)
    comm.verify = True
    with pytest.raises(CommunicationError, match=r"all_reduce\(sum\)"):  # MPI's and ours never meet
        comm.mpi.Allreduce(MPI.IN_PLACE, np.ones(1)) if comm.rank == 0 else comm.all_reduce(np.ones(1))


@on_ranks(2)
def test_an_interrupted_receive_of_mpi4py_is_released(world):
    before = set(waiting._abandoned)
    for call in (lambda mpi: mpi.Recv(np.empty(1), source=1 - world.rank), lambda mpi: mpi.recv(source=1 - world.rank)):
        comm = world.comm.split(0)
        comm.time_limit = 0.1
        refuses("Waited 0.1 s in recv", call, comm.mpi, error=WaitTimeout)
        wait_until(lambda: waiting.drop_abandoned() or set(waiting._abandoned) <= before)
        world.comm.barrier()


@on_ranks(2)
def test_communicators_and_ranks_of_mpi_itself_receive_objects(world):
    from mpi4py import MPI

    mpi, other, long = world.comm.mpi, 1 - world.rank, "x" * 2**17
    for made in (mpi.Dup(), mpi.Split(0)):
        status, sending = MPI.Status(), made.isend(long, other, tag=3)
        assert made.recv(source=other, tag=3, status=status) == long and status.Get_tag() == 3
        sending.wait()
        arriving, sending = made.irecv(source=other), made.isend(world.rank, other)
        assert arriving.wait() == other
        sending.wait()
        assert made.sendrecv(world.rank, other, source=other) == other
        made.Free()
    assert mpi.recv(source=MPI.PROC_NULL) is None and mpi.irecv(source=MPI.PROC_NULL).wait() is None
    assert mpi.sendrecv(1, MPI.PROC_NULL, source=MPI.PROC_NULL) is None


@on_ranks(2, 3)
def test_the_root_of_mpi4py_may_gather_and_scatter_in_place(world):
    from mpi4py import MPI

    comm = world.comm.split(0)
    comm.verify = True
    mine, everyones = np.full(3, float(comm.rank)), np.zeros((comm.size, 3))
    everyones[0] = mine
    comm.mpi.Gather(*(MPI.IN_PLACE, everyones) if comm.rank == 0 else (mine, None), root=0)
    if comm.rank == 0:
        assert everyones[:, 0].tolist() == [*range(comm.size)]
    mine[:] = 7
    comm.mpi.Scatter(*(everyones, MPI.IN_PLACE) if comm.rank == 0 else (None, mine), root=0)
    assert (mine == comm.rank if comm.rank else mine == 7).all()


BY_TORCH = "04", "05", "06", "07", "08", "09", "10", "11", "11b", "12", "12b", "13"


def test_sets_of_exercises_ask_for_the_fields_calls():
    """A set imports torch.distributed, and a solution calls it; in 02 and 03 mpi4py."""
    sets = {name.partition("_")[0]: path for name, path in sources("exercises").items() if "puzzle" not in name}
    stubs, solved = ({name: cells(path, tag) for name, path in sets.items()} for tag in ("stub", "solution"))
    for lesson in BY_TORCH:
        asked = lesson == "10" or "from torch import distributed as dist" in sets[lesson].read_text()
        assert asked, lesson  # in 10 the text asks, as its stub has no line for it
        assert calls(solved[lesson])["torch.distributed"] > 0, lesson
    assert calls(solved["02"])["mpi4py"] and calls(solved["03"])["mpi4py"] and calls(stubs["03"])["mpi4py"]
