import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dtlib
from dtlib.comm import selection, slow_link, waiting
from dtlib.errors import CommunicationError, DtlibError, WaitTimeout
from dtlib.theory.collectives import chosen_all_reduce
from tests.cases import for_each, refuses
from tests.conftest import wait_until
from tests.ranks import on_ranks

SIZES = (1, 2, 3, 4)
REFERENCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def values_of(rank, count, dtype):
    """What rank holds in these tests; every rank can compute what the others hold."""
    return (torch.arange(count) * 3 + rank + 1).to(dtype)


@on_ranks(*SIZES)
@for_each(op=REFERENCE, dtype=["float32", "float64", "int16", "int64", "uint8"], count=[0, 1, 7, 1000])
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
@for_each(dtype=["bfloat16", "float16", "bool", "float32", "int64"])
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


@on_ranks(1, 2, 3, 4)
@for_each(algorithm=["ring", "recursive_doubling", "rabenseifner", "tree", "naive"], count=[0, 1, 2, 5, 1003])
def test_every_algorithm_gives_the_same_all_reduce(world, algorithm, count):
    mine = values_of(world.rank, count, torch.float64)
    world.comm.all_reduce(mine, algorithm=algorithm)
    expected = sum(values_of(rank, count, torch.float64) for rank in range(world.size))
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=0)
    # All ranks round alike: a model that is trained from these sums must stay the same everywhere.
    assert len({tuple(values) for values in world.comm.all_gather_object(mine.tolist())}) == 1


@on_ranks(2, 3, 4)
@for_each(dtype=["bfloat16", "float16"], algorithm=["ring", "recursive_doubling", "rabenseifner"])
def test_half_precision_is_added_in_float32_and_rounded_at_each_hop(world, dtype, algorithm):
    dtype = getattr(torch, dtype)
    torch.manual_seed(0)
    everyone = torch.randn(world.size, 100).to(dtype)
    mine = everyone[world.rank].clone()
    world.comm.all_reduce(mine, algorithm=algorithm)
    exact = everyone.double().sum(0)
    # Each of the size - 1 additions rounds by half a unit in the last place of a partial sum of at most this size.
    bound = (world.size - 1) * torch.finfo(dtype).eps / 2 * everyone.double().abs().sum(0)
    assert ((mine.double() - exact).abs() <= bound).all()
    assert world.comm.all_reduce(everyone[world.rank].clone(), "mean").dtype == dtype


@pytest.mark.parametrize(
    "ranks,most,then",
    [(2, 2**18, "ring"), (3, 2**19, "ring"), (4, 2**19, "ring"), (5, 2**18, "ring"), (8, 2**18, "rabenseifner")],
)
def test_few_bytes_are_doubled_and_many_go_round_the_ring(ranks, most, then):
    known = selection.IMPLEMENTATIONS["all_reduce"]
    assert selection.choose("all_reduce", most, ranks) is known["recursive_doubling"]
    assert selection.choose("all_reduce", most + 1, ranks) is known[then]
    assert selection.choose("all_reduce", 2**24 + 1, ranks) is known["ring"]
    for count in (0, most, most + 1, 2**24, 2**24 + 1):
        assert selection.choose("all_reduce", count, ranks) is known[chosen_all_reduce(ranks, count)]
    assert selection.choose("all_reduce", most + 1, ranks, "tree") is known["tree"]


@on_ranks(*SIZES)
@for_each(op=REFERENCE, count=[0, 1, 50_000])  # the last one does not fit where MPI keeps what is under way
def test_reduce_scatter_gives_each_rank_its_chunk_and_keeps_the_input(world, op, count):
    comm = world.comm
    mine = values_of(comm.rank, count * comm.size, torch.float64)
    before = mine.clone()
    out = torch.full((count,), -1.0, dtype=torch.float64)
    assert comm.reduce_scatter(out, mine, op) is out
    everyone = np.stack([values_of(rank, count * comm.size, torch.float64).numpy() for rank in range(comm.size)])
    expected = torch.from_numpy(REFERENCE[op](everyone, axis=0)).reshape(comm.size, count)[comm.rank]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=0)
    assert torch.equal(mine, before)


@on_ranks(*SIZES)
@for_each(dtype=["bfloat16", "bool", "int64"])
def test_scatter_gather_and_all_to_all_are_each_others_mirror(world, dtype):
    comm, dtype = world.comm, getattr(torch, dtype)
    root = comm.size - 1
    whole = values_of(7, 3 * comm.size, dtype)
    chunk = torch.zeros(3, dtype=dtype)
    comm.scatter(chunk, whole if comm.rank == root else None, root)
    assert torch.equal(chunk, whole.reshape(comm.size, 3)[comm.rank])
    back = torch.zeros(3 * comm.size, dtype=dtype) if comm.rank == root else None
    comm.gather(back, chunk, root)
    assert comm.rank != root or torch.equal(back, whole)

    mine = (torch.arange(2 * comm.size) + 100 * comm.rank).to(dtype)
    out = torch.zeros(2 * comm.size, dtype=dtype)
    comm.all_to_all(out, mine)
    expected = [(torch.arange(2) + 2 * comm.rank + 100 * other).to(dtype) for other in range(comm.size)]
    assert torch.equal(out, torch.cat(expected))


@on_ranks(2, 3)
def test_collectives_under_way_keep_their_order_and_do_not_mix(world):
    comm = world.comm
    tensors = [torch.full((1000 + 7 * i,), float(world.rank + i)) for i in range(8)]
    handles = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    blocking = comm.all_reduce(torch.tensor([1.0]))  # drives the others too
    assert blocking.item() == world.size
    for i, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
        assert handle.wait() is tensor and handle.done()
        assert (tensor == sum(rank + i for rank in range(world.size))).all()


@on_ranks(2)
def test_large_messages_in_both_directions_do_not_deadlock(world):
    other = 1 - world.rank
    outgoing, incoming = torch.full((2**21,), float(world.rank)), torch.zeros(2**21)
    sending = world.comm.send(outgoing, other, async_op=True)
    receiving = world.comm.recv(incoming, other, async_op=True)
    world.comm.barrier()  # a collective in between waits for neither
    assert (receiving.wait() == other).all() and sending.wait() is outgoing


@on_ranks(2, 3)
def test_messages_that_are_cut_arrive_as_one(world):
    """A piece has 64 bytes: below, at and above multiples of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "LARGEST", 64)
        cut_messages(world)


def cut_messages(world):
    comm, size = world.comm, world.size
    right, left = (world.rank + 1) % size, (world.rank - 1) % size
    for each in (comm, comm.emulate_network(0.0, 1e9)):
        for count in (63, 64, 65, 128, 200, 1001):
            incoming = torch.zeros(2, count, dtype=torch.uint8)
            sending = [each.send(torch.full((count,), 2 * world.rank + i).byte(), right, async_op=True) for i in (0, 1)]
            for i in (0, 1):
                assert (each.recv(incoming[i], left) == 2 * left + i).all()
            for handle in sending:
                handle.wait()
            x = torch.arange(count, dtype=torch.float64) + world.rank
            assert torch.equal(each.broadcast(x.clone(), root=size - 1), torch.arange(count) + size - 1.0)
            for algorithm in ("ring", "recursive_doubling", "rabenseifner", "tree"):
                summed = each.all_reduce(x.clone(), algorithm=algorithm)
                assert torch.equal(summed, size * torch.arange(count) + size * (size - 1) / 2.0)
        assert each.broadcast_object("x" * 999, root=1) == "x" * 999
    for sent, received in ((128, 192), (192, 128), (192, 10), (10, 192), (128, 127)):
        group = comm.split(0)
        if world.rank == 0:
            group.send(torch.ones(sent).byte(), 1)
        elif world.rank == 1:
            with pytest.raises(
                CommunicationError, match=f"this tensor has {received} bytes, but (more|{sent} bytes) arrived"
            ):
                group.recv(torch.zeros(received).byte(), 0)
    dtlib.reset()


@pytest.mark.nightly
@on_ranks(2, time_limit=500)
def test_one_message_of_more_than_two_gibibytes(world):
    """It needs 12 GiB of memory."""
    count, comm = 2**31 + 5, world.comm

    def ends(array):
        return [int(array[at]) for at in (0, 2**30 - 1, 2**30, 2**31 - 1, 2**31, count - 1)]

    array = np.full(count, 3 * (1 - world.rank), dtype=np.uint8)
    comm.send(array, 1) if world.rank == 0 else comm.recv(array, 0)
    assert ends(array) == 6 * [3]
    array[:] = world.rank
    assert ends(comm.broadcast(array, root=1)) == 6 * [1]
    assert ends(comm.all_reduce(array, algorithm="recursive_doubling")) == 6 * [2]
    assert ends(comm.all_reduce(array)) == 6 * [4]
    state = array.tobytes() if world.rank == 0 else None
    del array
    got = comm.broadcast_object(state)
    assert len(got) == count and got[:1] == got[-1:] == bytes([4])


@on_ranks(2)
@pytest.mark.parametrize("sent,received", [(2, 4), (4, 2)])
def test_a_message_of_another_length_is_refused(world, sent, received):
    if world.rank == 0:
        world.comm.send(torch.ones(sent), 1)
    else:
        with pytest.raises(
            CommunicationError, match=r"recv\(from rank 0\) of .*: .* bytes, but .* arrived; .*same shape and dtype"
        ):
            world.comm.recv(torch.zeros(received), 0)
    dtlib.reset()


@on_ranks(2)
def test_an_interrupted_reset_is_finished_by_the_next(world):
    from mpi4py import MPI

    if world.rank == 0:
        world.comm.time_limit = 0.2
        refuses(r"Waited 0.2 s in dtlib.reset\(\)", dtlib.reset, error=WaitTimeout)
        world.comm.time_limit = None
        MPI.COMM_WORLD.send("waited", 1)
    else:
        MPI.COMM_WORLD.recv(source=0)  # does not arrive while rank 0 waits
    dtlib.reset()
    assert world.comm.all_gather_object(world.rank) == [0, 1]


@on_ranks(2)
def test_a_handle_that_is_thrown_away_does_no_harm(world):
    other = 1 - world.rank
    for i in range(20):
        world.comm.send(torch.full((1000,), float(i)), other, async_op=True)
        world.comm.all_reduce(torch.ones(1000), async_op=True)
    for i in range(20):
        assert (world.comm.recv(torch.zeros(1000), other) == i).all()
    world.comm.barrier()


@on_ranks(3, 4)
def test_split_makes_communicators_of_their_own(world):
    halves_of(world.comm)


def halves_of(comm):
    """Ranks of even and of odd number, in the other order: among themselves, and nobody else."""
    half = comm.split(comm.rank % 2, key=-comm.rank)
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
    assert (half.size, half.rank) == (len(members), members.index(comm.rank))
    assert half.all_reduce(torch.tensor(comm.rank)).item() == sum(members)
    assert half.all_gather_object({"rank": comm.rank})[0] == {"rank": members[0]}
    assert (comm.split(0 if comm.rank else None) is None) == (comm.rank == 0)
    return half


def test_messages_leave_a_slow_wire_in_their_order_whichever_is_asked_for_first():
    """A rank that had no core while both became due asks for any of them; MPI keeps the order in which they leave."""
    left = []

    class Sent:
        def Test(self):
            return True

    def isend(array, dest, tag):
        left.append(array[0])
        return Sent()

    wire = slow_link.Wire(latency=0.0, bandwidth=1e4)  # 0.8 ms a message
    mpi = SimpleNamespace(Isend=isend)
    sent = [slow_link.SlowLink(mpi, 0, 2, 1, {}, wire).send(np.array([float(n)]), 1) for n in range(4)]
    dropped = slow_link.SlowLink(mpi, 0, 2, 1, {}, wire)
    dropped.give_up([dropped.send(np.array([4.0]), 1)])
    time.sleep(0.01)
    assert sent[2].Test() and sent[0].Test() and sent[3].Test() and sent[1].Test()
    assert left == [0.0, 1.0, 2.0, 3.0]


@on_ranks(2)
def test_a_delayed_message_that_was_given_up_is_released(world):
    before = set(waiting._abandoned)
    slow = world.comm.emulate_network(latency=1000, bandwidth=1e9)
    slow.time_limit = 0.1
    handle = slow.send(torch.ones(10), 1 - world.rank, async_op=True)
    refuses("Waited 0.1 s in recv", slow.recv, torch.ones(10), 1 - world.rank, error=WaitTimeout)
    assert handle.complete
    wait_until(lambda: waiting.drop_abandoned() or set(waiting._abandoned) <= before)
    world.comm.barrier()


@on_ranks(2)
def test_an_emulated_network_takes_its_time(world):
    slow = world.comm.emulate_network(latency=0.05, bandwidth=1e6)
    began = time.monotonic()
    assert slow.all_reduce(torch.ones(10_000), algorithm="ring")[0] == 2
    # The ring on two ranks: two messages one after the other, each 50 ms and 20 kB at 1 MB/s. Never less.
    assert time.monotonic() - began >= 2 * (0.05 + 0.02)


@on_ranks(2, 3)
def test_a_tensor_that_is_not_contiguous_is_changed_in_place(world):
    change_in_place(world.comm)


def change_in_place(comm):
    table = torch.zeros(4, 6)
    table[:, 2] = comm.rank + 1
    comm.all_reduce(table[:, 2])
    expected = torch.zeros(4, 6)
    expected[:, 2] = sum(range(1, comm.size + 1))
    assert torch.equal(table, expected)
    every_other = np.zeros(8)[::2]
    every_other += comm.rank
    assert comm.broadcast(every_other, root=1).tolist() == [1, 1, 1, 1]


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


def refuse_what_nobody_carries(comm):
    ints = torch.ones(2, dtype=torch.int64)
    for call, words in {
        (lambda: comm.all_reduce(ints, "average")): "no op 'average'",
        (lambda: comm.all_reduce(ints, "mean")): "would round",
        (lambda: comm.all_reduce(torch.ones(2, dtype=torch.bool))): "does not take bool; types that it takes",
        (lambda: comm.broadcast(torch.ones(2, dtype=torch.complex64))): "does not support complex64",
        (lambda: comm.all_reduce(3)): "torch.tensor",
        (lambda: comm.all_reduce(np.frombuffer(b"12345678", dtype=np.int64))): "read-only",
        (lambda: comm.broadcast(ints, root=2)): "0 to 1",
        (lambda: comm.send(ints, dest=-1)): "dest=-1",
        (lambda: comm.all_gather(torch.zeros(3), torch.zeros(2))): "2 times as many elements",
        (lambda: comm.all_to_all(torch.zeros(3), torch.zeros(3))): "2 equal chunks",
    }.items():
        refuses(words, call, error=CommunicationError)


@on_ranks(2)
def test_what_cannot_be_carried_is_refused_before_anything_is_sent(world):
    comm = world.comm
    refuse_what_nobody_carries(comm)
    ints = torch.ones(2, dtype=torch.int64)
    for call, words in {
        (lambda: comm.all_reduce(torch.ones(2), algorithm="bus")): "no algorithm 'bus': choose one of ring",
        (
            lambda: comm.all_to_all(torch.zeros(3), torch.zeros(3), [1, 1], [1, 2])
        ): r"output_split_sizes=\[1, 1\] .* sum 3",
        (lambda: comm.all_to_all(ints, ints.clone(), [2], [1, 1])): r"output_split_sizes=\[2\] must be 2 numbers",
        (lambda: comm.all_to_all(ints, ints.clone(), [1, 1], [3, -1])): r"input_split_sizes=\[3, -1\]",
        (lambda: comm.all_to_all(ints, ints.clone(), [2, 0], [0, 2])): "differ: both",
        (lambda: comm.all_to_all(torch.zeros(2, 3), torch.zeros(3, 2), [1, 1], [1, 2])): "needs rows of the same shape",
        (lambda: comm.all_to_all(torch.tensor(1.0), torch.zeros(()), [1, 1], [1, 1])): "needs rows of the same shape",
        (
            lambda: comm.all_to_all(torch.zeros(2), torch.zeros(2, dtype=torch.int64), [1, 1], [1, 1])
        ): "needs equal dtypes",
        (lambda: comm.send(ints, dest=0, tag=2**20)): "tags are whole numbers",
    }.items():
        refuses(words, call, error=CommunicationError)
    comm.barrier()


@on_ranks(1, 3)
def test_init_gives_the_same_world_again(world):
    assert dtlib.init() is world
    assert (world.comm.rank, world.comm.size) == (world.rank, world.size)
    assert (world.node, world.local_rank) == (0, world.rank)  # these tests run on one machine
    assert world.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_dtlib_errors_are_shown_without_a_traceback():
    assert DtlibError("One sentence.")._render_traceback_() == ["DtlibError: One sentence."]


@on_ranks(2, 3)
def test_a_progress_thread_finishes_what_nobody_waits_for(world):

    from dtlib.comm import progress_thread

    slow = world.comm.emulate_network(latency=0.02, bandwidth=1e8)
    with progress_thread():
        tensor = torch.ones(1000)
        handle = slow.all_reduce(tensor, async_op=True, algorithm="ring")
        wait_until(lambda: handle.complete)  # looked at, not driven
        assert (tensor == world.size).all()
        for _ in range(50):  # the thread and the caller drive the same things
            assert world.comm.all_reduce(torch.ones(100), async_op=True).wait()[0] == world.size
    assert world.comm.all_reduce(torch.ones(1)).item() == world.size


@on_ranks(2, 3)
def test_results_may_lie_in_the_memory_of_what_they_come_from(world):
    size, rank = world.size, world.rank
    whole = torch.arange(2.0 * size) + rank
    expected = sum(torch.arange(2.0 * size) + other for other in range(size))[2 * rank : 2 * rank + 2]
    assert torch.equal(world.comm.reduce_scatter(whole[2 * rank : 2 * rank + 2], whole), expected)
    mine = torch.arange(size) + 10 * rank
    assert world.comm.all_to_all(mine, mine).tolist() == [rank + 10 * other for other in range(size)]


@on_ranks(2, 3)
def test_views_that_are_shifted_against_one_another_give_right_values(world):
    comm, size, rank = world.comm, world.size, world.rank
    room = torch.arange(2.0 * size + 2) + 100 * rank
    expected = [float(place + 100 * other) for other in range(size) for place in (1 + 2 * other, 2 + 2 * other)]
    assert comm.all_gather(room[: 2 * size], room[1 + 2 * rank : 3 + 2 * rank]).tolist() == expected
    whole = torch.arange(2.0 * size)
    for root in range(size):  # out is where another rank's chunk lies
        whole = torch.arange(2.0 * size)
        other = (root + 1) % size
        out = whole[2 * other : 2 * other + 2] if rank == root else torch.zeros(2)
        assert comm.scatter(out, whole if rank == root else None, root).tolist() == [2.0 * rank, 2.0 * rank + 1]
        whole = torch.arange(2.0 * size) + 100 * rank
        own = [2 * other, 2 * other + 1]
        gathered = comm.gather(whole if rank == root else None, whole[2 * other : 2 * other + 2], root)
        assert rank != root or gathered.tolist() == [value + 100.0 * r for r in range(size) for value in own]
    whole = torch.arange(2.0 * size + 1)
    assert comm.reduce_scatter(whole[:2], whole[1:]).tolist() == [size * (2.0 * rank + 1), size * (2.0 * rank + 2)]
    room = torch.arange(size + 1.0) + 10 * rank
    assert comm.all_to_all(room[:size], room[1:]).tolist() == [1.0 + rank + 10 * other for other in range(size)]


@on_ranks(3)
def test_counts_that_do_not_fit_are_refused_on_every_rank(world):
    table = [[2, 2, 2], [2, 1, 3], [2, 3, 1]]  # rank 0's are equal, the others' are not
    sent, come = table[world.rank], [row[world.rank] for row in table]
    for verify in (False, True):
        comm = world.comm.split(0)
        comm.verify = verify
        mine = torch.arange(6.0) + 10 * world.rank
        out = comm.all_to_all(torch.zeros(6), mine, come, sent)
        assert sorted(out.tolist()) == sorted(
            float(10 * r + i)
            for r in range(3)
            for i in range(sum(table[r][: world.rank]), sum(table[r][: world.rank + 1]))
        )
        chosen = () if world.rank == 0 else (come, sent)
        if verify:
            with pytest.raises(
                CommunicationError, match=r"calls of the ranks differ: rank 0 calls all_to_all of .6,. float32"
            ):
                comm.all_to_all(torch.zeros(6), mine, *chosen)
        else:
            assert torch.equal(comm.all_to_all(torch.zeros(6), mine, *chosen), out)
    for rows, dtype, words in (
        ([2, 2, 2 - (world.rank == 1)], torch.float32, "rank 2 sends 2 rows to rank 1, which expects 1"),
        ([2, 2, 2], torch.float64 if world.rank == 1 else torch.float32, r"rows of \(3,\) float64"),
    ):
        comm = world.comm.split(0)
        comm.verify = True
        with pytest.raises(CommunicationError, match=words):
            comm.all_to_all(torch.zeros(sum(rows), 3, dtype=dtype), torch.zeros(6, 3, dtype=dtype), rows, [2, 2, 2])
        refuses("out of step", comm.barrier, error=CommunicationError)


@on_ranks(2)
def test_an_operation_behind_one_that_failed_ends_too(world):
    comm = world.comm.split(0)
    comm.verify = True
    handles = [comm.all_reduce(torch.ones(2 + world.rank), async_op=True)]
    try:
        handles.append(comm.barrier(async_op=True))
    except CommunicationError as told:  # the note of the other rank was there already
        assert "failed in all_reduce" in str(told)
    refuses("calls of the ranks differ", handles[0].wait, error=CommunicationError)
    for handle in 2 * handles[1:]:
        refuses("was cancelled", handle.wait, error=CommunicationError)
    dtlib.reset()


@on_ranks(2)
def test_an_interrupt_in_somebody_elses_task_does_not_finish_it(world):
    first, second = world.comm.split(0), world.comm.split(0)

    def stop(*_):
        raise KeyboardInterrupt

    if world.rank == 0:
        interrupted = second.broadcast(torch.zeros(3), root=1, async_op=True)
        interrupted._steps = (stop() for _ in range(1))
    world.comm._mpi.Barrier()  # which drives none of our tasks
    if world.rank == 1:
        second.broadcast(torch.ones(3), root=1)
    else:
        other = first.barrier(async_op=True)
        with pytest.raises(KeyboardInterrupt):
            while True:
                other.done()
        refuses("was interrupted", interrupted.wait, error=CommunicationError)
    dtlib.reset()


@on_ranks(2)
def test_a_split_that_cannot_be_is_refused_before_anybody_waits(world):
    for color, key in ((-1, 0), ("left", 0), (0, None)):
        refuses("pass a color from 0 on, or None", world.comm.split, color, key, error=CommunicationError)


@on_ranks(2)
def test_an_asynchronous_collective_sends_at_once_what_it_can(world):
    comm = world.comm.split(0)
    if world.rank == 0:
        handle = comm.broadcast(torch.ones(4), root=0, async_op=True)
        assert handle.rounds > 0  # it has begun
        world.comm.mpi.Barrier()  # nobody drives it
        world.comm.mpi.Barrier()
        handle.wait()
    else:
        world.comm.mpi.Barrier()
        assert (comm.broadcast(torch.zeros(4), root=0) == 1).all()
        world.comm.mpi.Barrier()


def test_who_gets_its_core_back_late_naps_for_a_while_and_then_yields_again(monkeypatch):
    now, takes, done = [100.0], [0.0], []

    def passes(what, seconds):
        done.append(what)
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: passes("nap", seconds))
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "os", SimpleNamespace(sched_yield=lambda: passes("yield", takes[0])))
    monkeypatch.setattr(waiting, "_sleeps_until", 0.0)
    for takes[0] in (0.0, waiting.LONG_YIELD_SECONDS / 2, 2 * waiting.LONG_YIELD_SECONDS, 0.0, 0.0):
        waiting.yield_core()
    assert done == ["yield"] * 3 + ["nap"] * 2
    now[0] += waiting.NO_YIELD_SECONDS
    waiting.yield_core()
    assert done[-1] == "yield"


def test_a_hook_looks_several_times_and_no_more_once_all_is_done(monkeypatch):
    looks, enough = [], [3]
    monkeypatch.setattr(waiting, "advance_all", lambda: looks.append(1))
    monkeypatch.setattr(waiting, "idle", lambda: len(looks) >= enough[0])
    waiting.poll_pending()
    assert len(looks) == 3
    looks.clear()
    enough[0] = 1000
    waiting.poll_pending()
    assert len(looks) == waiting.POLLS_PER_CALL > 1


def test_an_interrupted_wait_takes_its_task_away_only_under_the_lock():
    import threading

    from dtlib.comm import solo, waiting
    from dtlib.comm.call import Call

    queue, link = waiting.Queue(), solo(0, 1)._side_link(0)
    link.all_done, link.give_up = lambda requests: False, lambda requests: None
    one = waiting.Operation(Call("recv", None, None, 0), link, iter([["a request"]]), lambda: None)
    one._queue = queue
    queue.post(one)
    with waiting._lock:
        other = threading.Thread(target=one._give_up)
        other.start()
        other.join(0.1)
        assert one in waiting._posted and not one.complete
    other.join()
    assert one not in waiting._posted and one.complete
    waiting._abandoned.remove(one)


@on_ranks(2)
def test_memory_stays_its_owners(world):
    """torch lets nobody resize a storage on which numpy() was called; FSDP2 frees what it has gathered that way."""
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        several = [torch.ones(8, dtype=dtype), torch.ones(4, 4, dtype=dtype).t(), torch.ones(6, dtype=dtype)[::2]]
        for tensor in (*several, torch.ones(2, dtype=dtype, requires_grad=dtype is torch.float32)):
            world.comm.all_reduce(tensor.detach(), "max")
            world.comm.broadcast(tensor.detach(), async_op=True).wait()
            assert (tensor == 1).all()
            tensor.untyped_storage().resize_(0)


@on_ranks(2)
def test_what_would_come_out_wrong_without_a_word_is_refused(world):
    comm = world.comm
    negative = torch.tensor([1 + 1j]).conj().imag
    for call, words in {
        (lambda: comm.broadcast(torch.zeros(1).expand(3), root=1 - world.rank)): "share memory, as after expand",
        (lambda: comm.recv(torch.zeros(6).as_strided((3, 2), (1, 1)), 0)): "share memory",
        (lambda: comm.all_gather(torch.zeros(2).unfold(0, 1, 1).expand(2, 2), torch.zeros(2))): "share memory",
        (lambda: comm.all_reduce(np.ma.array([1.0, 2.0], mask=[0, 1]))): "does not support masks",
        (lambda: comm.all_reduce(negative)): "resolve_neg",
        (lambda: comm.split(0, key=2**40)): "Both are whole numbers of 32 bits",
        (lambda: comm.emulate_network(0.0, 0)): "bytes per second above 0",
        (lambda: comm.emulate_network(-1.0, 1e6)): "seconds from 0 on",
    }.items():
        refuses(words, call, error=CommunicationError)
    # What only looks like it is taken.
    if world.rank == 0:
        comm.send(torch.ones(1).expand(3), 1)
    else:
        assert comm.recv(torch.zeros(3, 2).T[1], 0).tolist() == [1, 1, 1]
    matrix = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    assert comm.all_reduce(matrix, algorithm="ring") is matrix and matrix.tolist() == [[2, 4], [6, 8]]
    assert comm.all_reduce(np.ones((4, 3))[::-2, ::-1]).tolist() == [[2] * 3] * 2


@on_ranks(2)
def test_an_object_that_does_not_pickle_on_one_rank_is_refused_on_all(world):
    for root in range(2):
        thing = (lambda: 0) if world.rank == root else "fine"
        with pytest.raises(CommunicationError, match=rf"Rank {root}'s <function .* does not pickle \("):
            world.comm.all_gather_object(thing)
        with pytest.raises(CommunicationError, match=rf"Rank {root}'s <function .* does not pickle \("):
            world.comm.broadcast_object(thing, root)
    assert world.comm.all_gather_object(world.rank) == [0, 1]


@on_ranks(2)
def test_an_operation_that_changes_what_a_backward_pass_needs_is_noticed_by_it(world):
    weight = torch.ones(2, requires_grad=True)
    squashed, x = torch.sigmoid(weight), torch.ones(2)
    product = weight * x
    world.comm.all_reduce(squashed)
    world.comm.all_gather(x, torch.full((1,), float(world.rank)), async_op=True).wait()
    for output in (squashed, product):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    before = weight * 3
    world.comm.broadcast(weight)  # which nobody needs
    before.sum().backward()
    with torch.inference_mode():
        assert world.comm.all_reduce(torch.ones(1)).item() == 2
