"""Ranks that submit in different orders: what they agree on, and what goes wrong."""

import itertools

import numpy as np
import pytest
import torch

import dtlib
import dtlib.horovod as hvd
from dtlib.errors import WaitTimeout
from dtlib.horovod import basics
from tests.cases import refuses
from tests.ranks import on_ranks


@on_ranks(2, 3, 4)
def test_every_order_of_submitting_and_of_synchronising(world):
    hvd.init()
    orders = list(itertools.permutations("abc"))
    for turn in range(2 * len(orders)):
        submitting, waiting = orders[(turn * (world.rank + 1)) % 6], orders[(turn + 2 * world.rank) % 6]
        handles = {}
        for letter in submitting:
            handles[letter] = hvd.allreduce_async(torch.full((4,), float(ord(letter))), name=letter, op=hvd.Sum)
            if turn % 3 == world.rank:
                hvd.poll(handles[letter])
        for letter in waiting:
            assert hvd.synchronize(handles[letter]).tolist() == [ord(letter) * world.size] * 4


@on_ranks(2, 3, 4)
def test_a_random_program_in_a_different_order_on_each_rank(world):
    """All ranks submit the same tensors, each in an order of its own, and wait for them in another."""
    hvd.init()
    common, own = np.random.default_rng(5), np.random.default_rng(world.rank)
    for turn in range(15):
        kinds = common.choice(["allreduce", "broadcast", "allgather"], size=8)
        handles = {}
        for number in own.permutation(8):
            name, value = f"{turn}.{number}", torch.full((2,), float(world.rank + number))
            if kinds[number] == "allreduce":
                handles[number] = hvd.allreduce_async(value, name=name, op=hvd.Sum)
            elif kinds[number] == "broadcast":
                handles[number] = hvd.broadcast_async(value, 1, name=name)
            else:
                handles[number] = hvd.allgather_async(value[:1], name=name)
            if own.random() < 0.3:
                hvd.poll(handles[number])
            if own.random() < 0.1:
                basics.negotiator().advance()
        for number in own.permutation(8):
            output = hvd.synchronize(handles[number]).tolist()
            each = [float(rank + number) for rank in range(world.size)]
            expected = {"allreduce": [sum(each)] * 2, "broadcast": [each[1]] * 2, "allgather": each}
            assert output == expected[kinds[number]], (turn, number, kinds[number])
        if own.random() < 0.5:
            assert hvd.poll(handles[0])  # who has nothing left to do opens no round
    everyones = world.comm.all_gather_object(basics.negotiator().rounds)
    assert len(set(everyones)) == 1, f"ranks have taken part in different numbers of rounds: {everyones}"


@on_ranks(2, 3)
def test_who_is_done_is_not_needed_by_others(world):
    """Rank 0 has its results and goes on to something else, for which the others must come out of theirs."""
    hvd.init()
    mine = torch.ones(2)
    if world.rank == 0:
        hvd.synchronize(hvd.allreduce_async(mine, name="late"))
    else:
        early = hvd.allreduce_async(mine, name="early")
        late = hvd.allreduce_async(mine, name="late")
        assert hvd.synchronize(late).tolist() == [1, 1]
    world.comm.barrier()
    if world.rank == 0:
        early = hvd.allreduce_async(mine, name="early")
    assert hvd.synchronize(early).tolist() == [1, 1]
    assert hvd.synchronize(early).tolist() == [1, 1]
    world.comm.barrier()


@on_ranks(2)
def test_poll_does_not_wait(world):
    hvd.init()
    if world.rank == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="polled")
        assert not any(hvd.poll(handle) for _ in range(20))
        world.comm.barrier()
    else:
        world.comm.barrier()
        handle = hvd.allreduce_async(torch.ones(3), name="polled")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [1, 1, 1]


@on_ranks(2, 3)
def test_many_small_tensors_travel_in_one_buffer(world):
    def sent(threshold):
        basics.negotiator().cap = threshold
        with dtlib.trace() as trace:
            handles = [hvd.allreduce_async(torch.ones(25), name=f"small.{i}") for i in range(12)]
            for handle in handles:
                hvd.synchronize(handle)
        return sum(event.name == "all_reduce" and event.kind == "operation" for event in trace.events)

    hvd.init()
    kept = basics.negotiator().cap
    try:
        assert sent(2**20) == 1
        assert sent(400) == 3
        assert sent(0) == 12
    finally:
        basics.negotiator().cap = kept


# What goes wrong


@on_ranks(2, 3)
def test_what_differs_between_ranks_is_told_on_all_and_harms_nothing_else(world):
    hvd.init()
    last = world.size - 1
    others = "rank 0" if last == 1 else "ranks 0, 1"
    healthy = hvd.allreduce_async(torch.ones(2), name="healthy", op=hvd.Sum)
    shape = (2, 4) if world.rank == last else (2, 3)
    with pytest.raises(hvd.HorovodInternalError) as told:
        hvd.allreduce_(torch.ones(shape), name="w")
    assert str(told.value) == (
        f"allreduce 'w' differs between ranks: {others} submitted (2, 3) float32, average; rank {last} submitted "
        "(2, 4) float32, average. Submit the same on all ranks."
    )
    cases = {
        r"float32, sum; .*float64, sum": lambda odd: hvd.allreduce(
            torch.ones(2, dtype=torch.float64 if odd else torch.float32), name="w", op=hvd.Sum
        ),
        r"float32, average; .*float32, max": lambda odd: hvd.allreduce(
            torch.ones(2), name="w", op=hvd.Max if odd else hvd.Average
        ),
        r"average; .*average, prescale_factor=2": lambda odd: hvd.allreduce(
            torch.ones(2), name="w", prescale_factor=1 + odd
        ),
        r"root_rank=0; .*root_rank=1": lambda odd: hvd.broadcast(torch.ones(2), int(odd), name="w"),
        r"\(1, 2\) float32; .*\(1, 3\) float32": lambda odd: hvd.allgather(torch.ones(1, 2 + odd), name="w"),
    }
    for words, call in cases.items():
        refuses(words, call, world.rank == last, error=RuntimeError)
    assert hvd.synchronize(healthy).tolist() == [world.size] * 2
    assert hvd.allreduce(torch.ones(2), name="w", op=hvd.Sum).tolist() == [world.size] * 2


@on_ranks(2, 3)
def test_ranks_that_wait_for_each_other_are_told_at_once(world):
    hvd.init()
    name = "x" if world.rank == 0 else "y"
    others = "rank 1" if world.size == 2 else "ranks 1, 2"
    with pytest.raises(hvd.HorovodInternalError) as told:
        hvd.allreduce(torch.ones(1), name=name)
    told = str(told.value)
    assert f"allreduce.x was submitted by rank 0 and not by {others}" in told
    assert f"allreduce.y was submitted by {others} and not by rank 0" in told
    assert len(set(world.comm.all_gather_object(told))) == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world.size


@on_ranks(2, 3)
def test_a_name_that_a_rank_never_submits_ends_after_the_time_limit(world):
    basics._state = None
    hvd.init()
    basics.negotiator().comm.time_limit = 0.5
    last = world.size - 1
    try:
        if world.rank != last:
            with pytest.raises(
                WaitTimeout,
                match=rf"allreduce 'alone' was not submitted by rank {last} within 0.5 s.*call hvd.init\(\)",
            ):
                hvd.allreduce(torch.ones(1), name="alone")
        world.comm.barrier()
    finally:
        basics._state = None
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world.size


@on_ranks(2)
def test_after_a_reset_init_has_to_be_called_again(world):
    hvd.init()
    dtlib.reset()
    refuses(r"call hvd.init\(\) again on all ranks", hvd.allreduce, torch.ones(1))
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@on_ranks(2, 3)
def test_a_name_is_free_again_once_it_is_under_way(world):
    hvd.init()
    first = hvd.allreduce_async(torch.ones(1), name="again")
    hvd.allreduce(torch.ones(1), name="other")
    second = hvd.allreduce_async(torch.full((1,), 5.0), name="again")
    assert (hvd.synchronize(second).item(), hvd.synchronize(first).item()) == (5, 1)
    changed = torch.ones(2)
    handle = hvd.allreduce_async(changed, name="again")
    changed.mul_(2)
    with pytest.raises(hvd.HorovodInternalError, match="allreduce 'again': its tensor was changed between"):
        hvd.synchronize(handle)


@on_ranks(2, 3)
def test_what_has_no_name_is_counted_anew_after_a_join(world):
    """Until then ranks may have submitted different numbers of tensors."""
    hvd.init()
    for _ in range(world.rank):
        hvd.allreduce(torch.ones(1))
    hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world.size
    assert hvd.broadcast_object({"rank": world.rank} if world.rank == 1 else None, 1) == {"rank": 1}
    assert hvd.allgather_object(world.rank) == list(range(world.size))
    with pytest.raises(hvd.HorovodInternalError, match="wait for each other"):
        hvd.allreduce(torch.ones(1), name="named" if world.rank == 0 else None)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world.size


@on_ranks(2, 3)
def test_join_stands_in_with_zeros(world):
    hvd.init()
    size = world.size
    for step in range(world.rank + 1):  # rank r has r + 1 batches
        still = size - step
        expected = [still] * 3
        assert hvd.allreduce(torch.ones(3), name=f"gradient {step}", op=hvd.Sum).tolist() == expected
        average = hvd.allreduce(torch.ones(3, dtype=torch.float64), name=f"loss {step}").tolist()
        assert average == pytest.approx([still / size] * 3)
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    if world.rank == 0:
        hvd.join()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="allgather 'w' needs all ranks, and rank 0 called join"):
            hvd.allgather(torch.ones(1), name="w")
        hvd.join()
