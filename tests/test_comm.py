import numpy as np
import pytest
import torch

from dtlib.errors import CommunicationError, DtlibError, WaitTimeout
from tests.ranks import on_ranks

SIZES = (1, 2, 3, 4)
REFERENCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def values_of(rank, count, dtype):
    """What rank holds in these tests; every rank can compute what the others hold."""
    return (torch.arange(count) * 3 + rank + 1).to(dtype)


@on_ranks(*SIZES)
@pytest.mark.parametrize("op", REFERENCE)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_all_reduce_and_reduce_combine_every_element(world, op, dtype, count):
    dtype = getattr(torch, dtype)
    if op == "mean" and not dtype.is_floating_point:
        return
    if op == "prod":
        count = min(count, 7)  # no overflow
    comm = world.comm
    everyone = np.stack([values_of(rank, count, dtype).numpy() for rank in range(comm.size)])
    expected = torch.from_numpy(REFERENCE[op](everyone, axis=0).astype(everyone.dtype))
    mine = values_of(comm.rank, count, dtype)
    assert comm.all_reduce(mine, op) is mine
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0)

    root = comm.size - 1
    mine = values_of(comm.rank, count, dtype)
    comm.reduce(mine, root, op)
    kept = values_of(comm.rank, count, dtype)
    torch.testing.assert_close(mine, expected if comm.rank == root else kept, rtol=1e-6, atol=0)


@on_ranks(*SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bool", "float32", "int64"])
def test_broadcast_gather_and_a_ring_of_sends_carry_every_type(world, dtype):
    comm, dtype = world.comm, getattr(torch, dtype)
    mine = values_of(comm.rank, 5, dtype)
    torch.testing.assert_close(comm.broadcast(mine.clone(), comm.size - 1), values_of(comm.size - 1, 5, dtype))
    out = torch.zeros(comm.size, 5, dtype=dtype)
    comm.all_gather(out, mine)
    torch.testing.assert_close(out, torch.stack([values_of(rank, 5, dtype) for rank in range(comm.size)]))
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sending = comm.send(mine, right, async_op=True)
    received = comm.recv(torch.zeros(5, dtype=dtype), left)
    assert sending.wait() is mine
    torch.testing.assert_close(received, values_of(left, 5, dtype))


@on_ranks(2, 3)
def test_a_tensor_that_is_not_contiguous_is_changed_in_place(world):
    table = torch.zeros(4, 6)
    column = table[:, 2]
    column += world.rank + 1
    world.comm.all_reduce(column)
    expected = torch.zeros(4, 6)
    expected[:, 2] = sum(range(1, world.size + 1))
    torch.testing.assert_close(table, expected)
    every_other = np.zeros(8)[::2]
    every_other += world.rank
    assert world.comm.broadcast(every_other, root=1).tolist() == [1, 1, 1, 1]


@on_ranks(2)
def test_a_parameter_that_requires_grad_and_numpy_arrays_travel(world):
    parameter = torch.nn.Parameter(torch.full((3,), float(world.rank)))
    world.comm.broadcast(parameter, root=1)
    assert parameter.tolist() == [1, 1, 1]
    assert world.comm.all_reduce(np.array([world.rank + 1])).tolist() == [3]


@on_ranks(*SIZES)
def test_objects(world):
    things = world.comm.all_gather_object({"rank": world.rank, "text": "x" * 1000 * world.rank})
    assert [thing["rank"] for thing in things] == list(range(world.size))
    assert [len(thing["text"]) for thing in things] == [1000 * rank for rank in range(world.size)]
    last = world.size - 1
    assert world.comm.broadcast_object(f"from {world.rank}", root=last) == f"from {last}"


@on_ranks(2)
def test_what_cannot_be_carried_is_refused_before_anything_is_sent(world):
    comm = world.comm
    ints = torch.ones(2, dtype=torch.int64)
    read_only = np.frombuffer(b"12345678", dtype=np.int64)
    for call, words in {
        (lambda: comm.all_reduce(ints, "average")): "no op 'average'",
        (lambda: comm.all_reduce(ints, "mean")): "would round",
        (lambda: comm.all_reduce(torch.ones(2, dtype=torch.bfloat16))): "bfloat16",
        (lambda: comm.all_reduce(3)): "torch.tensor",
        (lambda: comm.all_reduce(read_only)): "read-only",
        (lambda: comm.broadcast(ints, root=2)): "0 to 1",
        (lambda: comm.send(ints, dest=-1)): "dest=-1",
        (lambda: comm.all_gather(torch.zeros(3), torch.zeros(2))): "2 times the elements",
    }.items():
        with pytest.raises(CommunicationError, match=words):
            call()
    comm.barrier()


@on_ranks(3)
def test_a_wait_that_takes_too_long_ends_and_reset_brings_everybody_back(world):
    import dtlib

    comm = world.comm
    if world.rank > 0:
        comm.time_limit = 0.3
        with pytest.raises(WaitTimeout, match=f"Rank {world.rank}: all_reduce.* waited 0.3 s"):
            comm.all_reduce(torch.ones(4))
        comm.time_limit = None
    dtlib.reset()
    assert world.comm is dtlib.init().comm is not comm
    assert world.comm.all_reduce(torch.ones(1)).item() == 3


@on_ranks(1, 3)
def test_init_gives_the_same_world_again(world):
    import dtlib

    assert dtlib.init() is world
    assert (world.comm.rank, world.comm.size) == (world.rank, world.size)
    assert (world.node, world.local_rank) == (0, world.rank)  # these tests run on one machine
    assert world.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_dtlib_errors_are_shown_without_a_traceback():
    assert DtlibError("One sentence.")._render_traceback_() == ["DtlibError: One sentence."]
