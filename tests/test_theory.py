"""The formulas against what ranks really send."""

import numpy as np
import pytest

import dtlib
from dtlib.comm.selection import IMPLEMENTATIONS
from dtlib.theory import collectives as theory
from dtlib.theory import scaling
from dtlib.theory.zero import GB, GIB, SCHEMES, fewest_ranks, zero_bytes, zero_wire_elements
from tests.cases import for_each, refuses
from tests.ranks import on_ranks
from tests.zero_peak import zero_peak_bytes
from tools.planner_fit import published

CASES = [(operation, algorithm) for operation, names in theory.ALGORITHMS.items() for algorithm in names]
COUNTS = (24, 0, 13, 2)  # elements of the whole; those that do not divide by the ranks only where they may


def test_every_algorithm_of_the_library_has_a_formula():
    library = {(operation, name) for operation, names in IMPLEMENTATIONS.items() for name in names}
    assert {*CASES, ("reduce_scatter", "ring_over_input")} == library  # which sends what the ring does


def run(comm, operation, algorithm, count, root):
    """One collective on arrays of ``count`` elements of 8 bytes in all."""
    whole, chunk = np.ones(count), np.ones(count // comm.size)
    named = {"algorithm": algorithm} if len(theory.ALGORITHMS[operation]) > 1 else {}
    match operation:
        case "all_reduce":
            comm.all_reduce(whole, **named)
        case "broadcast" | "reduce":
            getattr(comm, operation)(whole, root=root)
        case "scatter":
            comm.scatter(chunk, whole, root=root)
        case "gather":
            comm.gather(whole, chunk, root=root)
        case "reduce_scatter":
            comm.reduce_scatter(chunk, whole)
        case "all_gather":
            comm.all_gather(whole, chunk)
        case "all_to_all":
            comm.all_to_all(whole, np.ones(count))
        case "barrier":
            comm.barrier()


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("operation,algorithm", CASES)
def test_ranks_send_what_the_formulas_say(world, operation, algorithm):
    comm, size = world.comm, world.size
    whole_arrays = operation in ("broadcast", "reduce", "all_reduce")
    for count in COUNTS:
        if count % size and not whole_arrays:
            continue
        for root in range(size):
            with dtlib.trace() as trace:
                run(comm, operation, algorithm, count, root)
            sent = trace.sent(operation)
            everybody = comm.all_gather_object(sent)
            arguments = operation, algorithm, size, world.rank
            assert sent[0] == theory.messages_of_rank(*arguments, root), (count, root)
            assert sent[1] == 8 * theory.elements_sent(*arguments, count, root), (count, root)
            assert sum(messages for messages, _ in everybody) == theory.messages(operation, algorithm, size)
            busiest = theory.elements_sent_by_the_busiest(operation, algorithm, size, count, root)
            assert max(bytes_ for _, bytes_ in everybody) == 8 * busiest


@pytest.mark.parametrize("operation,algorithm", CASES)
def test_the_ranks_of_any_world_add_up(operation, algorithm):
    for ranks in range(1, 40):
        each = [theory.messages_of_rank(operation, algorithm, ranks, rank) for rank in range(ranks)]
        assert sum(each) == theory.messages(operation, algorithm, ranks), ranks
        assert theory.rounds(operation, algorithm, ranks) <= theory.messages(operation, algorithm, ranks)
        if ranks == 1:
            assert theory.cost(operation, algorithm, 1, 100, 1.0, 1.0, 1.0) == 0


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


@for_each(ranks=[2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17])
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
    assert costs["rabenseifner"] == pytest.approx(4 * alpha + 2 * 3 / 4 * n * beta + 3 / 4 * n * gamma)
    assert costs["naive"] == pytest.approx(6 * (alpha + n * beta) + 3 * n * gamma)
    # Five ranks: four of them, and one more exchange for the fifth.
    assert theory.cost("all_reduce", "recursive_doubling", 5, n, alpha, 1 / beta, gamma) == pytest.approx(
        4 * (alpha + n * beta) + 3 * n * gamma
    )
    assert theory.cost("all_reduce", "rabenseifner", 5, n, alpha, 1 / beta, gamma) == pytest.approx(
        6 * alpha + 2 * (3 / 4 + 1) * n * beta + (3 / 4 + 1) * n * gamma
    )
    # 1,024 ranks, 4 MB, 5 us, 25 GB/s: where the ring's rounds cost 25 times as much.
    large = {name: theory.cost("all_reduce", name, 1024, 4e6, 5e-6, 25e9) for name in ("ring", "rabenseifner")}
    assert large == {"ring": pytest.approx(10.55e-3, rel=1e-3), "rabenseifner": pytest.approx(0.42e-3, rel=1e-2)}
    assert theory.cost("barrier", "dissemination", 5, 0, alpha, 1 / beta) == pytest.approx(3 * alpha)
    assert theory.cost("reduce_scatter", "ring", 3, n, alpha, 1 / beta, gamma) == pytest.approx(
        2 * (alpha + n / 3 * (beta + gamma))
    )


def test_what_has_no_formula_is_refused_with_what_has():
    with pytest.raises(ValueError, match="no formula for broadcast ring; there is one for broadcast tree"):
        theory.messages("broadcast", "ring", 4)


# ZeRO


def gigabytes(*arguments):
    return sum(zero_bytes(*arguments).values()) / GB


def test_figure_1_of_the_paper():
    figures = [float(row["GB"]) for row in published("zero_figure1_7p5B_Nd64")]
    assert figures == [120, 31.4, 16.6, 1.9]
    for stage, figure in enumerate(figures):
        assert round(gigabytes(7_500_000_000, 64, stage, "mixed_adam"), 1) == figure


def test_what_stages_send_as_in_section_7_of_the_paper():
    volumes = {row["scheme"]: float(row["volume_in_units_of_P"]) for row in published("zero_comm_volume")}
    names = ("DP all-reduce", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    parameters, ranks = 64 * 1000, 64
    for stage, name in enumerate(names):
        assert zero_wire_elements(parameters, ranks, stage) == volumes[name] * parameters * (ranks - 1) / ranks
    once = parameters * (ranks - 1) // ranks
    assert [zero_wire_elements(parameters, ranks, stage, 4) // once for stage in range(4)] == [2, 2, 5, 12]
    assert zero_wire_elements(parameters, ranks, 3, 4, reshard_after_forward=False) == 8 * once
    assert [zero_wire_elements(parameters, 1, stage) for stage in range(4)] == [0, 0, 0, 0]
    assert zero_wire_elements(10, 3, 1) == 2 * 2 * 4  # four elements a rank: two are padding
    assert [zero_wire_elements(10, 3, 0, rank=rank) for rank in range(3)] == [14, 13, 13]


def test_bytes_a_parameter_of_the_schemes():
    assert {name: scheme.total for name, scheme in SCHEMES.items()} == {
        "sgd": 8, "sgd_momentum": 12, "adam": 16, "mixed_adam": 16, "mixed_adam_float32_gradients": 18,
        "mixed_adam_two_gradients": 20,
    }  # fmt: skip
    assert (GB, GIB) == (1_000_000_000, 1_073_741_824)


@for_each(stage=range(4), ranks=[1, 2, 3, 64])
def test_shards_of_all_ranks_are_the_whole_and_the_padding(stage, ranks):
    sizes, frozen = (1001, 5, 64), (7,)
    each = [zero_bytes(sizes, ranks, stage, "mixed_adam", rank, frozen) for rank in range(ranks)]
    whole, copies = sum(sizes), [ranks if stage < shared_from else 1 for shared_from in (3, 2, 1)]
    totals = {name: sum(one[name] for one in each) for name in each[0]}
    assert totals["parameters"] == 2 * (whole + 7) * copies[0]
    assert totals["gradients"] == 2 * whole * copies[1]
    assert totals["master_weights"] == 4 * whole * copies[2]
    assert totals["optimizer_states"] == 8 * whole * copies[2]
    missing = sum(-(-size // ranks) * ranks - size for size in sizes)
    of_frozen = -(-7 // ranks) * ranks - 7
    padding = [0, 4 * missing * ranks, 2 * missing * ranks + 2 * missing, 4 * missing + 2 * of_frozen]
    assert totals["padding"] == padding[stage]
    assert all(sum(one.values()) <= sum(each[0].values()) for one in each)


def test_the_fewest_ranks_that_fit():
    # 7.5 billion parameters in 33 GB: parameters and gradients of stage 1 take 30 of them; 90 GB / N are the rest.
    seven = 7_500_000_000
    assert [fewest_ranks(seven, 33 * GB, stage, "mixed_adam") for stage in range(4)] == [None, 30, 6, 4]
    assert fewest_ranks(seven, 120 * GB, 0, "mixed_adam") == 1
    for stage in (1, 2, 3):
        ranks = fewest_ranks(seven, 33 * GB, stage, "mixed_adam")
        assert gigabytes(seven, ranks, stage, "mixed_adam") <= 33 < gigabytes(seven, ranks - 1, stage, "mixed_adam")
    assert fewest_ranks(10, 15, 3, "adam") is None  # one element takes 16 bytes, and no rank has less than that
    assert fewest_ranks(10, 16, 3, "adam") == 10


def test_what_is_alive_when():
    # 1,200 parameters of 16-bit Adam on 4 ranks, in two layers: 800 whose gradient travels first, and 400.
    def total(buckets, stage, scheme="mixed_adam"):
        return [sum(terms.values()) for terms in zero_peak_bytes(buckets, 4, stage, scheme).values()]

    layers = [[800], [400]]
    # States are 14, 2 + 2 + 3, 2 + 3 and 3.5 bytes a parameter.
    assert total(layers, 0) == [16_800, 16_800 + 2 * 400 + 2 * 1220 + 2 * 810, 16_800 + 4 * 1200 + 2 * 810]
    assert total(layers, 1) == [8_400, 8_400 + 2 * 800, 8_400 + 4 * 300]
    # The first gradient is in flight, and its average arrives, while the second is computed.
    assert total(layers, 2) == [6_000, 6_000 + 2 * (800 + 400) + 2 * 200, 6_000 + 2 * 300 + 4 * 300]
    assert total(layers, 3) == [4_200 + 2 * 800, 4_200 + 2 * (800 + 400) + 2 * 200 + 2 * 400, 4_200 + 2 * 200 + 4 * 300]
    # Of two ranks that do not divide it, and of two gradients in one bucket, there is a copy.
    assert zero_peak_bytes([[801]], 4, 2)["backward"]["bucket"] == 2 * 804
    assert zero_peak_bytes([[400, 400]], 4, 2)["backward"]["bucket"] == 2 * 800
    # Gradients that are in float32 already are not copied for the masters.
    assert "float32" not in zero_peak_bytes(layers, 4, 1, "mixed_adam_float32_gradients")["step"]


def test_what_is_no_stage_or_scheme_is_refused():
    refuses("stage 4 on 2 ranks", zero_bytes, 10, 2, 4, error=ValueError)
    refuses("no scheme 'lion'; there are sgd, ", zero_bytes, 10, 2, 1, "lion", error=ValueError)


def test_scaling():
    """By hand, and what the two laws must have in common."""
    assert scaling.amdahl(0.1, 4) == pytest.approx(1 / (0.1 + 0.9 / 4)) and scaling.amdahl(0.1, 10**9) < 10
    for serial in (0.0, 0.3, 1.0):
        assert scaling.amdahl(serial, 1) == 1
    fraction = scaling.serial_fraction(0.9, 512)
    assert scaling.amdahl(fraction, 512) == pytest.approx(0.9 * 512)
    # 1,024 ranks, 4 MB, 5 us, 25 GB/s: 20 latencies, and twice the bytes.
    seconds, name = scaling.fastest_all_reduce(1024, 4e6, 5e-6, 25e9)
    assert name == "rabenseifner" and seconds == pytest.approx(20 * 5e-6 + 2 * 4e6 * 1023 / 1024 / 25e9)
    assert scaling.step(1024, 1.0, 4e6, 5e-6, 25e9, hidden=1.0) == 1.0 == scaling.step(1, 1.0, 4e6, 5e-6, 25e9)
    assert scaling.step(1024, 1.0, 4e6, 5e-6, 25e9, hidden=seconds / 2) == pytest.approx(1 + seconds / 2)


def test_the_fewest_ranks_of_models_beyond_32_bits():
    """A web page's integers in ranges and bisect have 32 bits: nothing here may need more of them."""
    parameters = 2**45
    ranks = fewest_ranks(parameters, 80 * GB, 3)
    assert fewest_ranks(parameters, 16 * parameters / ranks, 3) == ranks
    assert ranks == -(-16 * parameters // (80 * GB))
    assert fewest_ranks(parameters, 15, 3) is None
