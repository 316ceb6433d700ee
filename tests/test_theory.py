"""The formulas against what ranks really send."""

import numpy as np
import pytest

import dtlib
from dtlib import theory
from dtlib.comm.selection import KNOWN
from tests.ranks import on_ranks

CASES = [(verb, algorithm) for verb, names in theory.ALGORITHMS.items() for algorithm in names]
COUNTS = (24, 0, 13, 2)  # elements of the whole; those that do not divide by the ranks only where they may


def test_every_algorithm_of_the_library_has_a_formula():
    library = {(verb, name) for verb, names in KNOWN.items() for name in names if name != "mpi"}
    assert set(CASES) == library


def run(comm, verb, algorithm, count, root):
    """One collective on arrays of ``count`` elements of 8 bytes in all."""
    whole, part = np.ones(count), np.ones(count // comm.size)
    named = {"algorithm": algorithm} if len(theory.ALGORITHMS[verb]) > 1 else {}
    match verb:
        case "all_reduce":
            comm.all_reduce(whole, **named)
        case "broadcast" | "reduce":
            getattr(comm, verb)(whole, root=root)
        case "scatter":
            comm.scatter(part, whole, root=root)
        case "gather":
            comm.gather(whole, part, root=root)
        case "reduce_scatter":
            comm.reduce_scatter(part, whole)
        case "all_gather":
            comm.all_gather(whole, part)
        case "all_to_all":
            comm.all_to_all(whole, np.ones(count))
        case "barrier":
            comm.barrier()


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("verb,algorithm", CASES)
def test_ranks_send_what_the_formulas_say(world, verb, algorithm):
    comm, size = world.comm, world.size
    whole_arrays = verb in ("broadcast", "reduce", "all_reduce")
    for count in COUNTS:
        if count % size and not whole_arrays:
            continue
        for root in range(size):
            with dtlib.trace() as trace:
                run(comm, verb, algorithm, count, root)
            sent = trace.sent(verb)
            everybody = comm.all_gather_object(sent)
            arguments = verb, algorithm, size, world.rank
            assert sent[0] == theory.messages_of_rank(*arguments, root), (count, root)
            assert sent[1] == 8 * theory.elements_sent(*arguments, count, root), (count, root)
            assert sum(messages for messages, _ in everybody) == theory.messages(verb, algorithm, size)
            busiest = theory.elements_sent_by_the_busiest(verb, algorithm, size, count, root)
            assert max(bytes_ for _, bytes_ in everybody) == 8 * busiest


@pytest.mark.parametrize("verb,algorithm", CASES)
def test_the_ranks_of_any_world_add_up(verb, algorithm):
    for ranks in range(1, 40):
        each = [theory.messages_of_rank(verb, algorithm, ranks, rank) for rank in range(ranks)]
        assert sum(each) == theory.messages(verb, algorithm, ranks), ranks
        assert theory.rounds(verb, algorithm, ranks) <= theory.messages(verb, algorithm, ranks)
        if ranks == 1:
            assert theory.cost(verb, algorithm, 1, 100, 1.0, 1.0, 1.0) == 0


def rounds_until_done(ranks, senders):
    """Rounds of a broadcast in which each rank that has the values sends one message a round, in its own order."""
    have, sent, count = {0}, dict.fromkeys(range(ranks), 0), 0
    while len(have) < ranks:
        count += 1
        for rank in sorted(have):
            if sent[rank] < len(senders[rank]):
                have = have | {senders[rank][sent[rank]]}
                sent[rank] += 1
    return count


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17])
def test_the_rounds_of_the_tree_are_those_of_the_algorithm(ranks):
    from dtlib.comm.algorithms import tree_broadcast

    class Link:
        def __init__(self, rank):
            self.rank, self.size, self.to = rank, ranks, []

        def recv(self, array, source):
            return None

        def send(self, array, dest):
            self.to.append(dest)

    links = [Link(rank) for rank in range(ranks)]
    for link in links:
        list(tree_broadcast(link, None, 0))
    assert rounds_until_done(ranks, [link.to for link in links]) == theory.rounds("broadcast", "tree", ranks)


def test_costs_as_the_paper_has_them():
    alpha, beta, gamma, n = 1e-3, 1e-6, 1e-7, 6000
    costs = {
        algorithm: theory.cost("all_reduce", algorithm, 4, n, alpha, 1 / beta, gamma)
        for algorithm in theory.ALGORITHMS["all_reduce"]
    }
    assert costs["ring"] == pytest.approx(2 * 3 * alpha + 2 * 3 / 4 * n * beta + 3 / 4 * n * gamma)
    assert costs["recursive_doubling"] == pytest.approx(2 * (alpha + n * beta + n * gamma))
    assert costs["tree"] == pytest.approx(4 * (alpha + n * beta) + 2 * n * gamma)
    assert costs["naive"] == pytest.approx(6 * (alpha + n * beta) + 3 * n * gamma)
    # Five ranks: four of them, and one more exchange for the fifth.
    assert theory.cost("all_reduce", "recursive_doubling", 5, n, alpha, 1 / beta, gamma) == pytest.approx(
        4 * (alpha + n * beta) + 3 * n * gamma
    )
    assert theory.cost("barrier", "dissemination", 5, 0, alpha, 1 / beta) == pytest.approx(3 * alpha)
    assert theory.cost("reduce_scatter", "ring", 3, n, alpha, 1 / beta, gamma) == pytest.approx(
        2 * (alpha + n / 3 * (beta + gamma))
    )


def test_what_has_no_formula_is_refused_with_what_has():
    with pytest.raises(ValueError, match="no formula for broadcast ring; there is one for broadcast tree"):
        theory.messages("broadcast", "ring", 4)
