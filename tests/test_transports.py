import os
import signal

import numpy as np
import pytest
import torch
from torch import distributed as dist

from dtlib.comm import Communicator, as_communicator
from dtlib.comm.watch.recorder import recording
from dtlib.errors import CommunicationError, WaitTimeout
from tests.cases import refuses
from tests.conftest import wait_until
from tests.ranks import on_ranks
from tests.test_comm import SIZES, change_in_place, halves_of, refuse_what_nobody_carries, values_of

_group = None


def on_gloo(world):
    """A communicator on a gloo group of all ranks, without a fixed port; one for all tests of a world."""
    global _group
    if _group is None:
        from dtlib.comm.torch.communicator_on_group import ProcessGroupCommunicator, make_group

        store = None
        if world.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port = world.comm.broadcast_object(store.port if store else None)
        store = store or dist.TCPStore("127.0.0.1", port, None, False)
        _group = ProcessGroupCommunicator(make_group({"cpu": "gloo"}, store, world.rank, world.size))
    return _group


@on_ranks(*SIZES, slow=(1, 4))
def test_a_process_group_reduces_every_type_as_the_table_says(world):
    from dtlib.comm.types import ALLOWED

    comm, root = on_gloo(world), world.size - 1
    for name, op, count in ((name, op, count) for name, ops in ALLOWED.items() for op in ops for count in (0, 1, 4)):
        dtype = getattr(torch, name)
        own = values_of(comm.rank, count * comm.size, dtype)
        # MPI's operations are the reference: they are tested against numpy.
        expected = world.comm.all_reduce(own.clone(), op)
        close = {"rtol": 2e-2 if "float16" in name else 1e-6, "atol": 0}
        mine = own.clone()
        assert comm.all_reduce(mine, op) is mine
        torch.testing.assert_close(mine, expected, **close)
        comm.reduce(mine := own.clone(), root, op)
        torch.testing.assert_close(mine, expected if comm.rank == root else own, **close)
        mine, out = own.clone(), torch.zeros(count, dtype=dtype)
        assert comm.reduce_scatter(out, mine, op) is out
        torch.testing.assert_close(out, expected[comm.rank * count : (comm.rank + 1) * count], **close)
        assert torch.equal(mine, own)


@on_ranks(2, 3)
def test_integers_at_their_limits_compare_and_wrap_around(world):
    comm = on_gloo(world)
    for dtype in map(np.dtype, ("uint64", "uint32", "uint16", "int16", "int8")):
        limits = np.iinfo(dtype)
        mine = np.array([limits.max if world.rank == 0 else 1, limits.min if world.rank == 0 else 1], dtype=dtype)
        for op in ("max", "min", "sum", "prod"):
            np.testing.assert_array_equal(comm.all_reduce(mine.copy(), op), world.comm.all_reduce(mine.copy(), op))


@on_ranks(*SIZES)
def test_a_process_group_moves_every_type(world):
    for dtype in ("bfloat16", "bool", "int64", "uint16"):
        for count in (0, 3):
            moves(world, dtype, count)


def moves(world, dtype, count):
    comm, dtype = on_gloo(world), getattr(torch, dtype)
    root = comm.size - 1
    mine = values_of(comm.rank, count, dtype)
    assert torch.equal(comm.broadcast(mine.clone(), root), values_of(root, count, dtype))
    out = torch.zeros(comm.size, count, dtype=dtype)
    assert comm.all_gather(out, mine) is out
    assert torch.equal(out, torch.stack([values_of(rank, count, dtype) for rank in range(comm.size)]))
    whole, chunk = values_of(7, count * comm.size, dtype), torch.zeros(count, dtype=dtype)
    comm.scatter(chunk, whole if comm.rank == root else None, root)
    assert torch.equal(chunk, whole.reshape(comm.size, count)[comm.rank])
    back = torch.zeros_like(whole) if comm.rank == root else None
    assert comm.gather(back, chunk, root) is back
    assert comm.rank != root or torch.equal(back, whole)
    mine, out = values_of(comm.rank, count * comm.size, dtype), torch.zeros(count * comm.size, dtype=dtype)
    comm.all_to_all(out, mine)
    table = [[1 + (r * s) % 2 for s in range(comm.size)] for r in range(comm.size)]  # rank 0's are equal: it gives none
    sent, come = table[comm.rank], [row[comm.rank] for row in table]
    rows = torch.zeros(sum(come), count, dtype=dtype)
    counts = (come, sent) if comm.rank else ()
    comm.all_to_all(rows, values_of(comm.rank, count, dtype).expand(sum(sent), count), *counts)
    expected = [values_of(rank, count, dtype) for rank in range(comm.size) for _ in range(come[rank])]
    assert torch.equal(rows, torch.stack(expected))
    here = slice(count * comm.rank, count * (comm.rank + 1))
    assert torch.equal(out, torch.cat([values_of(r, count * comm.size, dtype)[here] for r in range(comm.size)]))
    if comm.size > 1:
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        mine = values_of(comm.rank, count, dtype)
        sending = comm.send(mine, right, tag=3, async_op=True)
        assert torch.equal(comm.recv(torch.zeros(count, dtype=dtype), left, tag=3), values_of(left, count, dtype))
        assert sending.wait() is mine and sending.done()


@on_ranks(2, 3)
def test_what_is_not_contiguous_is_changed_in_place_on_a_process_group(world):
    comm = on_gloo(world)
    change_in_place(comm)
    table = torch.zeros(world.size, 2, 2).transpose(0, 2)
    comm.all_gather(table, torch.full((4,), float(world.rank)))
    assert table.flatten().tolist() == [float(rank) for rank in range(world.size) for _ in range(4)]
    parameter = torch.nn.Parameter(torch.full((3,), float(world.rank)))
    assert comm.all_reduce(parameter, "mean") is parameter
    assert parameter.tolist() == [(world.size - 1) / 2] * 3


@on_ranks(2, 3)
def test_a_process_group_gives_right_values_for_views_that_overlap_and_keeps_nan(world):
    comm, size, rank = on_gloo(world), world.size, world.rank
    mine = torch.arange(size) + 10 * rank
    assert comm.all_to_all(mine, mine).tolist() == [rank + 10 * other for other in range(size)]
    room = torch.arange(size + 1.0) + 10 * rank
    assert comm.all_to_all(room[:size], room[1:]).tolist() == [1.0 + rank + 10 * other for other in range(size)]
    whole = torch.arange(2.0 * size)
    out = whole[2:4] if rank == 0 else torch.zeros(2)
    assert comm.scatter(out, whole if rank == 0 else None).tolist() == [2.0 * rank, 2.0 * rank + 1]
    refuses("share memory, as after expand", comm.all_reduce, torch.ones(1).expand(3))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for op in ("max", "min"):
            for bad in range(size):
                nan = torch.tensor([-float("nan") if rank == bad else 1.0, -2.5 * rank, 3.5 - rank, -0.0], dtype=dtype)
                expected = world.comm.all_reduce(nan.clone(), op)
                torch.testing.assert_close(comm.all_reduce(nan, op), expected, rtol=0, atol=0, equal_nan=True)
                assert nan[0].isnan()


@on_ranks(2, 3)
def test_asynchronous_operations_on_a_process_group(world):
    comm = on_gloo(world)
    tensors = [torch.full((100,), float(world.rank + i)) for i in range(8)]
    handles = [comm.all_reduce(tensor, "mean", async_op=True) for tensor in tensors]
    wait_until(handles[-1].done)
    for i, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
        assert handle.wait() is tensor and handle.wait() is tensor and handle.done()
        torch.testing.assert_close(tensor, torch.full((100,), (world.size - 1) / 2 + i))
    comm.barrier(async_op=True).wait()


@on_ranks(3, 4)
def test_a_process_group_splits_and_carries_objects(world):
    comm = on_gloo(world)
    half = halves_of(comm)
    assert comm.broadcast_object("x" * 1000 * world.rank, root=2) == "x" * 2000
    for _ in range(5):
        comm.split(0)  # thrown away by some while others still connect
    again = half.split(0)  # a split of a split, and the same colors once more
    assert again.all_reduce(torch.ones(1)).item() == half.size
    from dtlib.world.mesh import Mesh

    assert Mesh(comm, {"data": -1})["data"].all_gather_object(world.rank) == list(range(world.size))


@on_ranks(1, 2, 3, 4)
def test_a_process_group_records_the_bytes_of_the_ring(world):
    def operations(comm):
        whole, chunk = torch.ones(12 * comm.size), torch.ones(12)
        comm.all_reduce(whole, algorithm=None if comm is not world.comm else "ring")
        comm.reduce_scatter(chunk, whole)
        comm.all_gather(whole, chunk)
        comm.all_to_all(torch.ones(12 * comm.size), whole)
        comm.scatter(chunk, whole, 0)
        comm.gather(whole, chunk, 0)
        comm.barrier()

    comm = on_gloo(world)
    with recording() as ours:
        operations(world.comm)
    with recording() as events:
        operations(comm)
    facts = ("name", "op", "peer", "shape", "dtype", "bytes")  # and no algorithm: torch chooses
    assert [[getattr(event, fact) for fact in facts] for event in events] == [
        [getattr(event, fact) for fact in facts] for event in ours
    ]
    assert all(event.messages == 0 and event.end is not None for event in events)
    assert "comm.all_reduce(whole" in events[0].where


@on_ranks(2)
def test_what_a_process_group_cannot_carry_is_refused_before_anything_is_sent(world):
    comm = on_gloo(world)
    refuse_what_nobody_carries(comm)
    for words, given in {"chooses its algorithm": {"algorithm": "ring"}, "meta": {}}.items():
        one = torch.ones(2, device="cpu" if given else "meta")
        refuses(words, comm.all_reduce, one, error=CommunicationError, **given)
    comm.barrier()


@on_ranks(2)
def test_a_wait_on_a_process_group_ends_with_its_limit(world):
    comm = on_gloo(world).split(0)
    if world.rank == 0:
        comm.time_limit = 0.2
        with pytest.raises(WaitTimeout, match=r"Waited 0.2 s in all_reduce\(sum\) of \(4,\) float32: another rank"):
            comm.all_reduce(torch.ones(4))
        refuses("was interrupted in all_reduce", comm.barrier, error=CommunicationError)
    world.comm.barrier()
    on_gloo(world).barrier()


@on_ranks(2)
def test_ctrl_c_ends_a_wait_on_gloo(world):
    from dtlib.comm.torch import group_work

    comm = on_gloo(world).split(0)
    if world.rank == 0:
        # Ctrl-C while it waits: the group itself would wait for 30 minutes, which is longer than a test may take.
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(group_work.time, "sleep", lambda nap: os.kill(os.getpid(), signal.SIGINT))
            comm.all_reduce(torch.ones(4))
        with pytest.raises(CommunicationError, match=r"was interrupted in all_reduce.*Run %px dtlib.reset"):
            comm.all_reduce(torch.ones(4))
    world.comm.barrier()
    on_gloo(world).barrier()


@on_ranks(2)
def test_any_communicator_is_taken(world):
    from mpi4py import MPI

    assert as_communicator(world.comm) is world.comm
    assert as_communicator(on_gloo(world)) is on_gloo(world)
    wrapped = as_communicator(MPI.COMM_WORLD)
    assert isinstance(wrapped, Communicator) and wrapped.all_reduce(torch.ones(1)).item() == 2
    wrapped = as_communicator(on_gloo(world).group)
    assert wrapped.all_reduce(torch.ones(1)).item() == 2
    assert wrapped.split(0, key=-world.rank).rank == 1 - world.rank
    for wrong in (None, "world", 3, MPI.COMM_NULL):
        refuses("is not a communicator: pass", as_communicator, wrong)


class Elsewhere(torch.Tensor):
    """A tensor on the CPU that says it is not, to take the way of those that are not."""

    is_cpu = property(lambda self: False)


@on_ranks(2, 3)
def test_a_tensor_elsewhere_travels_through_host_memory(world):
    for dtype in ("float32", "bfloat16", "bool"):
        travels_through_host_memory(world, dtype)


def travels_through_host_memory(world, dtype):
    from dtlib.comm import types

    def elsewhere(tensor):
        return tensor.to(getattr(torch, dtype)).as_subclass(Elsewhere)

    comm, size, rank = world.comm, world.size, world.rank
    mine = elsewhere(torch.full((4,), float(rank)))
    with pytest.raises(CommunicationError, match="carries tensors on the CPU or a CUDA device and this one is on"):
        comm.broadcast(mine)
    before, types.STAGED = types.STAGED, ("cpu",)
    try:
        handle = comm.all_reduce(mine, "max", async_op=True)
        assert handle.wait() is mine and mine.tolist() == [min(size - 1, 1) if dtype == "bool" else size - 1] * 4
        table = elsewhere(torch.zeros(3, 2)).T  # not contiguous
        assert comm.broadcast(table if rank else table.fill_(1)).tolist() == [[1] * 3] * 2
        out = elsewhere(torch.zeros(size, 2))
        comm.all_gather(out, elsewhere(torch.full((2,), float(rank == 1))))
        assert out.tolist() == [[float(other == 1)] * 2 for other in range(size)]
        chunk = elsewhere(torch.zeros(2))
        comm.reduce_scatter(chunk, out, "max")
        assert chunk.tolist() == [float(rank == 1)] * 2
        comm.scatter(chunk, elsewhere(torch.eye(size)[:, :1].repeat(1, 2)) if rank == 0 else None)
        assert chunk.tolist() == [float(rank == 0)] * 2
        back = comm.gather(elsewhere(torch.zeros(size, 2)) if rank == 0 else None, chunk)
        assert rank or back[:, 0].tolist() == [1.0] + [0.0] * (size - 1)
        kept = elsewhere(torch.full((2,), float(rank == 1)))
        comm.reduce(kept, 0, "max")
        assert kept.tolist() == [float(rank < 2)] * 2
        exchanged = comm.all_to_all(elsewhere(torch.zeros(size)), elsewhere(torch.full((size,), float(rank == 1))))
        assert exchanged.tolist() == [float(other == 1) for other in range(size)]
        sending = comm.send(kept, (rank + 1) % size, async_op=True)
        received = comm.recv(elsewhere(torch.zeros(2)), (rank - 1) % size)
        assert received.tolist() == [float((rank - 1) % size < 2)] * 2 and sending.wait() is kept
    finally:
        types.STAGED = before


def test_nccl_needs_a_gpu_for_each_rank_or_leave_to_share():
    from dtlib.comm.torch.nccl import why_not

    assert not why_not([("a", "0:1:0", False), ("a", "0:2:0", False), ("b", "0:1:0", False)])
    assert "share a GPU: NCCL 2.30 or newer" in why_not([("a", "0:1:0", False), ("a", "0:1:0", True)])
    assert not why_not([("a", "0:1:0", True), ("a", "0:1:0", True)])
    assert why_not([("a", "0:1:0", True), None]) == "torch has no NCCL here"


@on_ranks(2, 3)
def test_a_store_without_a_fixed_port(world):
    from dtlib.comm.torch.store import shared_store

    store = shared_store(world.comm)
    store.set(f"rank {world.rank}", b"here")
    store.wait([f"rank {rank}" for rank in range(world.size)])
    world.comm.barrier()  # rank 0 holds the store


@pytest.mark.gpu
@on_ranks(1, 2)
def test_cuda_tensors_travel(world):
    from dtlib.comm.torch.nccl import gpu_of, why_not

    comm, size, device = world.comm, world.size, world.device
    mine = torch.full((1000,), float(world.rank), device=device)
    for algorithm in (None, "ring"):  # NCCL where each rank has its own GPU; host memory
        summed = comm.all_reduce(mine.clone(), algorithm=algorithm)
        assert summed.device == device and (summed == sum(range(size))).all()
    gathered = comm.all_gather(torch.zeros(size, 1000, device=device), mine)
    assert gathered[:, 0].tolist() == list(range(size))
    assert (comm._nccl is not False) == (not why_not(comm.all_gather_object(gpu_of(device))))
    handle = comm.all_reduce(mine, "mean", async_op=True)
    assert handle.wait() is mine and mine[0].item() == (size - 1) / 2
    chunk = comm.reduce_scatter(torch.zeros(2, device=device), torch.ones(2 * size, device=device))
    assert chunk.tolist() == [size] * 2
    column = torch.zeros(4, 6, device=device)[:, 2]
    assert comm.broadcast(column.fill_(world.rank), root=size - 1).tolist() == [size - 1] * 4
    if size > 1:
        sending = comm.send(mine, 1 - world.rank, async_op=True)
        assert comm.recv(torch.zeros(1000, device=device), 1 - world.rank)[0].item() == (size - 1) / 2
        sending.wait()
