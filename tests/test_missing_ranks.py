import os

import pytest

from dtlib.comm.call import Call
from dtlib.comm.torch.store import shared_store
from dtlib.comm.watch import board
from dtlib.comm.watch.board import Board, BoardEntry, ClusterBoard
from dtlib.comm.watch.call_counts import differing
from dtlib.comm.watch.missing_ranks import describe, ended_ranks
from tests.cases import for_each
from tests.conftest import wait_until
from tests.ranks import on_ranks

ALL = (0, 1, 2)


def collective(number, state="waits", operation="barrier", group="world"):
    return BoardEntry(state, operation, operation, f"line {number}", group, number, ALL)


def message(operation, rank, state="waits", over="", called=0):
    return BoardEntry(state, operation, f"{operation} rank {rank}", "line 9", "world", 0, (rank,), over, called)


@pytest.mark.parametrize("seen,said", [
    # Ranks 0 and 1 have reached the second collective, rank 2 has left the first.
    ([collective(2), collective(2), collective(1, "finished")],
     "rank 2 has not arrived; it last finished barrier (`line 1`)"),
    # Rank 0 waits for 1, and 1 for 2: 2 is to blame.
    ([message("recv", 1), message("recv", 2), collective(1, "finished")],
     "rank 2 has not arrived; it last finished barrier (`line 1`)"),
    ([collective(1), collective(1), None], "rank 2 has not arrived"),
    ([collective(1), None, collective(0, "raised ValueError: no")],
     "rank 1 has not arrived; rank 2 raised ValueError: no; its last operation was barrier (`line 0`)"),
    # A rank that started the operation and computes is named as such only where a message needs it.
    ([collective(2), collective(2, "started"), collective(1, "finished")],
     "rank 2 has not arrived; it last finished barrier (`line 1`)"),
    # Two ranks that face each other, one more that waits for them.
    ([message("recv", 1), message("recv", 0), collective(1)],
     "they wait for one another: rank 0 in recv rank 1 (`line 9`), rank 1 in recv rank 0 (`line 9`)"),
    # The same number of calls, but not the same operation.
    ([collective(1), collective(1), collective(1, operation="broadcast")],
     "they wait for one another: rank 0 in barrier (`line 1`), rank 1 in barrier (`line 1`), "
     "rank 2 in broadcast (`line 1`)"),
    ([collective(3), collective(3), collective(4)], "all ranks have arrived, and messages are in flight"),
    # A sub-group waits for a rank that is elsewhere.
    ([collective(1, group="half"), collective(1, group="half"), collective(7, "finished")],
     "rank 2 has not arrived; it last finished barrier (`line 7`)"),
])  # fmt: skip
def test_whom_rank_0_waits_for(seen, said):
    assert describe(0, {rank: entry for rank, entry in enumerate(seen) if entry}) == said


def test_a_board_shows_what_others_published():
    file = Board.make_file(2)
    first, second = Board(file, 0, range(2)), Board(file, 1, range(2))
    assert second.seen() == {}
    call = Call("barrier", None, None, 0, (0, 1), "world", 3)
    call.where = "line 1: " + "x" * 1000
    first.publish("waits", call)
    entry = second.seen()[0]
    assert (entry.state, entry.what, entry.number) == ("waits", "barrier", 3)
    assert entry.where.startswith("line 1: xxx")
    first.publish("finished")
    assert second.seen()[0].state == "finished"
    # The longest entry fits into its slot, and more peers are left out.
    words = "\N{GRINNING FACE}" * 1000
    for peers in (range(10**6, 10**6 + 256), range(257)):
        first.publish(words, Call(words, None, None, 0, peers, words, 2**62, where=words), over=words[:80])
        entry = second.seen()[0]
        assert (entry.state, entry.number) == (words[: len(entry.state)], 2**62)
        assert entry.peers == (tuple(peers) if len(peers) == 256 else ())
    os.unlink(file)


def ended(state, cell, number=1):
    return BoardEntry(state, "barrier", "barrier", f"line {number}", "world", number, ALL, cell)


@pytest.mark.parametrize("others,failed,finished", [
    ([collective(2), collective(1, "finished")], [], []),  # rank 2 computes: it may come
    ([collective(2), ended("raised ValueError: no", "7.1")], [2], []),
    ([collective(2), ended("has finished its cell", "7.1")], [], [2]),
    # It has not begun this cell yet: how the last one ended says nothing.
    ([collective(2), ended("raised ValueError: no", "6.0")], [], []),
    # Rank 1 gave up as rank 2 does not arrive: where it had arrived, that is no matter; else both are over.
    ([ended("timed out", "7.1", 2), ended("raised ValueError: no", "7.1")], [2], []),
    ([ended("timed out", "7.1", 1), ended("raised ValueError: no", "7.1")], [1, 2], []),
    ([message("recv", 2), ended("raised ValueError: no", "7.1")], [2], []),
    # Rank 1 sent a message after the collective in which rank 0 waits, or before it.
    ([message("send", 2, "has finished its cell", "7.1", called=2), collective(1, "finished")], [], []),
    ([message("send", 2, "has finished its cell", "7.1", called=1), collective(1, "finished")], [], [1]),
])  # fmt: skip
def test_who_does_not_come_any_more_in_this_cell(others, failed, finished):
    seen = dict(enumerate([collective(2), *others]))
    assert ended_ranks(0, seen, "7.1") == (failed, finished)
    assert ended_ranks(0, seen, "") == ([], []), "outside a notebook nobody knows of cells"


def test_a_receive_from_any_rank_waits_as_long_as_one_can_come():
    mine = BoardEntry("waits", "recv from any rank", "recv from any rank", "line 1", "world", 0, ALL)
    computes, done = collective(1, "finished"), ended("has finished its cell", "7.1", 0)
    assert ended_ranks(0, {0: mine, 1: computes, 2: ended("raised ValueError: no", "7.1", 0)}, "7.1") == ([], [])
    assert ended_ranks(0, {0: mine, 1: done, 2: done}, "7.1") == ([], [1, 2])
    # What rank 2 did on another communicator hides whether it has arrived: it may have.
    elsewhere = BoardEntry("has finished its cell", "send", "send", "line 2", "rows", 0, (1,), "7.1")
    assert ended_ranks(0, {0: collective(2), 1: collective(2), 2: elsewhere}, "7.1") == ([], [])


def test_the_end_of_a_cell_stands_on_the_board_until_the_next_begins(monkeypatch):
    file = Board.make_file(1)
    monkeypatch.setattr(board, "current", Board(file, 0, [0]))
    monkeypatch.setattr(board, "cell", "7.1")
    board.end_cell("raised ValueError: " + "x" * 1000)
    assert (board.current.seen()[0].over, board.cell) == ("7.1", "")
    board.publish("elsewhere")  # of a thread that is late
    assert (board.current.seen()[0].over, board.current.seen()[0].state[:6]) == ("7.1", "raised")
    board.begin_cell("7.2")
    assert (board.current.seen()[0].over, board.cell) == ("", "7.2")
    os.unlink(file)


@pytest.mark.parametrize("of_ranks,out_of_step", [
    ([{"world": (3, 0, False)}, {"world": (3, 0, False)}], []),
    ([{"world": (3, 0, False)}, {"world": (2, 0, False)}], ["world"]),
    ([{"world": (3, 1, False)}, {"world": (3, -1, False)}], []),  # sent, and received
    ([{"world": (3, 1, False)}, {"world": (3, 0, False)}], ["world"]),
    ([{"world": (3, 0, True)}, {"world": (3, 0, False)}], ["world"]),
    ([{"world": (3, 0, True)}, {"world": (2, 0, True)}], []),  # refused everywhere already
    ([{"world": (1, 0, False), "rows": (1, 0, False)}, {"world": (1, 0, False), "rows": (2, 0, False)}, {}], ["rows"]),
])  # fmt: skip
def test_communicators_that_ranks_have_not_used_alike_are_named(of_ranks, out_of_step):
    assert differing(of_ranks) == out_of_step


@for_each(letter=["x", "ü", "🦀", '"', "\0", "\udc80"], ranks=[2, 300])
def test_a_board_shows_what_is_long_or_not_ascii(letter, ranks):
    file = Board.make_file(2)
    first, second = Board(file, 0, range(2)), Board(file, 1, range(2))
    for length in (60, 1000):
        call = Call(letter * length, None, None, 0, range(ranks), letter * length, 3)
        call.where = "line 1: " + letter * length
        first.publish(f"raised ValueError: {letter * length}", call)
        entry = second.seen()[0]
        assert entry.state.startswith("raised ValueError: ") and entry.number == 3
        # A rank whose peers did not fit waits for all others, and not for none.
        waiting = {0: entry, 1: BoardEntry("finished", "barrier", "barrier")}
        assert describe(0, waiting) == "rank 1 has not arrived; it last finished barrier"
    os.unlink(file)


@on_ranks(4)
def test_a_board_of_several_nodes_shows_all_ranks(world):
    """Two nodes, as it were: ranks 0 and 1, and ranks 2 and 3."""
    node = world.rank // 2
    members = [2 * node, 2 * node + 1]
    files = world.comm.all_gather_object(Board.make_file(2) if world.rank % 2 == 0 else None)
    store = shared_store(world.comm)
    mine = ClusterBoard(files[2 * node], world.rank, members, node, 2, store)
    mine.publish("waits", Call("barrier", None, None, world.rank, range(4), "world", 1 + world.rank))
    wait_until(lambda: len(mine.seen()) == 4)
    assert {rank: entry.number for rank, entry in mine.seen().items()} == {rank: 1 + rank for rank in range(4)}
    world.comm.barrier()
    if world.rank % 2 == 0:
        os.unlink(files[world.rank])


def test_a_board_without_its_store_shows_its_own_node():
    """Rank 0 ended with the store: who waits is told by this node's entries, and not by an error of torch."""

    class Ended:
        def check(self, *_):
            raise RuntimeError("Broken pipe")

        set = get = check

    file = Board.make_file(2)
    mine, other = (ClusterBoard(file, rank, [2, 3], 1, 2, Ended()) for rank in (2, 3))
    other.publish("finished", Call("barrier", None, None, 3, range(4), "world", 1))
    assert mine.seen()[3].state == "finished"
    os.unlink(file)
