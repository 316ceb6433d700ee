import time

import pytest
import torch

import dtlib
from dtlib.comm.watch import recorder
from dtlib.comm.watch.recorder import Event
from dtlib.measure.trace import Timeline, Trace, clock_offset
from dtlib.schedule import Action
from tests.cases import for_each
from tests.ranks import on_ranks


@on_ranks(1, 2, 3, 4)
def test_a_trace_counts_the_messages_and_payload_bytes_of_the_ring(world):
    tensor = torch.ones(120)
    with dtlib.trace() as trace:
        world.comm.all_reduce(tensor, algorithm="ring")
        world.comm.barrier()
    # Reduce-scatter and all-gather: N-1 messages each, of a chunk of the array.
    steps = world.size - 1
    assert trace.sent("all_reduce") == (2 * steps, 2 * tensor.nbytes * steps // world.size)
    assert trace.sent("barrier")[1] == 0
    world.comm.all_reduce(tensor)  # not recorded
    assert len(trace.events) == 2
    reduced = trace.events[0]
    assert reduced.what == "all_reduce(sum, ring) of (120,) float32"
    assert (reduced.op, reduced.algorithm, reduced.shape, reduced.dtype) == ("sum", "ring", (120,), "float32")
    assert (reduced.peer, reduced.tag, reduced.action) == (None, None, None)
    assert 'world.comm.all_reduce(tensor, algorithm="ring")' in reduced.where and "test_timeline.py" in reduced.where
    assert reduced.start <= reduced.end and reduced.lane == "main"


@on_ranks(2)
def test_an_asynchronous_operation_and_the_wait_for_it_have_lanes_of_their_own(world):
    with dtlib.trace() as trace:
        handle = world.comm.all_reduce(torch.ones(10), async_op=True)
        with dtlib.phase("compute"):
            time.sleep(0.01)
        handle.wait()
    assert [(event.kind, event.name, event.lane) for event in trace.events] == [
        ("operation", "all_reduce", "background"),
        ("phase", "compute", "main"),
        ("wait", "all_reduce", "main"),
    ]
    assert all(event.end is not None for event in trace.events)


@on_ranks(2, 3)
def test_a_timeline_has_all_ranks(world):
    with dtlib.trace() as trace:
        world.comm.all_reduce(torch.ones(8))
    timeline = trace.gather()
    assert timeline.ranks == list(range(world.size))
    assert sorted(event.rank for event in timeline.events) == timeline.ranks
    assert min(event.start for event in timeline.events) == 0
    # They took part in the same exchange, so on one clock they overlap.
    assert max(event.start for event in timeline.events) <= min(event.end for event in timeline.events)


@on_ranks(2, 3)
def test_events_have_their_facts_as_fields(world):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    half = world.comm.split(0, key=-world.rank)  # which counts its ranks the other way round
    last = half.size - 1
    with recorder.recording() as events:
        with recorder.phase(Action(world.rank, "F", 3), world.rank):
            sending = world.comm.send(torch.ones(2, 3), right, tag=5, async_op=True)
        world.comm.recv(torch.ones(2, 3), left, tag=5)
        sending.wait()
        half.reduce(torch.ones(4, dtype=torch.float64), root=last, op="max")
        world.comm.barrier()
    nothing = (None, "", None, None)
    assert [(e.kind, e.name, e.peer, e.op, e.shape, e.tag) for e in events] == [
        ("phase", f"{world.rank}F3", *nothing),
        ("operation", "send", right, "", (2, 3), 5),
        ("operation", "recv", left, "", (2, 3), 5),
        ("wait", "send", right, "", (2, 3), 5),
        ("operation", "reduce", last, "max", (4,), None),
        ("operation", "barrier", *nothing),
    ]
    assert [event.action for event in events] == [Action(world.rank, "F", 3)] + 5 * [None]
    assert [event.what for event in events] == [
        f"{world.rank}F3", f"send(to rank {right}) of (2, 3) float32", f"recv(from rank {left}) of (2, 3) float32",
        f"send(to rank {right}) of (2, 3) float32", f"reduce(max to rank {last}) of (4,) float64", "barrier",
    ]  # fmt: skip


@on_ranks(2, 3)
@for_each(ahead=[0.0, 12.5])
def test_clocks_of_different_machines_are_compared(world, ahead):
    def clock():
        return time.monotonic() + ahead * world.rank

    # The bound is half a round trip on a busy machine, far below the shift that must be found.
    assert clock_offset(world.comm, clock) == pytest.approx(-ahead * world.rank, abs=0.5)


def test_the_shortest_round_trip_is_believed_and_its_middle_is_when_rank_0_looked():
    """Rank 1's half of it, on a clock that stands still but for messages: rank 0's is 7 s ahead."""

    class Messages:
        rank, size, now = 1, 2, 100.0
        lengths = iter([(3.0, 1.0), (0.5, 0.5), *[(1.0, 4.0)] * 18])  # there and back

        def send(self, reading, to):
            self.there, self.back = next(self.lengths)
            self.now += self.there

        def recv(self, reading, source):
            reading[0] = self.now + 7
            self.now += self.back

    comm = Messages()
    assert clock_offset(comm, lambda: comm.now) == 7


def test_what_never_ended_stays_open():
    traces = [
        Trace(0, 0.0, [Event(0, "operation", "barrier", 5.0)]),
        Trace(1, 1.0, [Event(1, "operation", "send", 4.0, 4.5)]),
    ]
    timeline = Timeline(traces)
    assert [(event.rank, event.start, event.end) for event in timeline.events] == [(0, 0.0, None), (1, 0.0, 0.5)]
    assert timeline.end == 0.5


@on_ranks(2)
def test_an_emulated_network_is_labelled(world):
    slow = world.comm.emulate_network(latency=0.001, bandwidth=1e9)
    with dtlib.trace() as trace:
        slow.all_reduce(torch.ones(1))
    assert trace.gather().emulated
    with dtlib.trace() as trace:
        slow.split(0).all_reduce(torch.ones(1))
    assert trace.gather().emulated, "a part of a slow network is slow, too"


@on_ranks(2)
def test_an_operation_ends_when_it_ends(world):
    with dtlib.trace() as trace:
        if world.rank == 0:
            world.comm.send(torch.ones(1), 1)
            received = None
        else:
            world.comm.recv(torch.ones(1), 0)
            received = time.monotonic()
        world.comm.barrier()  # looks after whatever is under way
    if received is not None:
        assert next(event for event in trace.events if event.name == "recv").end <= received
