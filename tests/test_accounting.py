"""Bytes that ranks hold against the closed formulas, and against counts by hand."""

import gc
import itertools
import mmap
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import dtlib
from dtlib.comm import solo
from dtlib.comm.waiting import SCRATCH_BYTES
from dtlib.gradients import reducer
from dtlib.gradients.reducer import GradientShard
from dtlib.lab import digits
from dtlib.measure.buffers import tensors_by_kind
from dtlib.measure.live import Live
from dtlib.measure.storages import Storages
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from dtlib.parallel.zero.sharded import fully_shard
from dtlib.theory.zero import SCHEMES, Scheme, zero_bytes
from tests.cases import all_cases
from tests.ranks import on_ranks
from tests.zero_peak import zero_peak_bytes

SIZES = (1001, 300, 707, 503)  # elements: some divide by 2, 3 or 4 ranks, their sum by none of these
SMALL_BUCKET = 300  # elements: less than two of these parameters, so that each has a bucket of its own
STATES = ("parameters", "gradients", "master_weights", "optimizer_states", "padding")


class Weight(nn.Module):
    """A parameter that is added up: autograd keeps nothing for it, so that only gradients take memory."""

    def __init__(self, size, trained=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), trained)

    def forward(self, x):
        return x + self.weight.sum()


def weights(sizes=SIZES, frozen=()):
    return nn.Sequential(*map(Weight, sizes), *(Weight(size, False) for size in frozen))


def prepare(stage, model, comm=None, scheme="adam", runtime="dtlib"):
    kind, settings = ("SGD", {"lr": 0.1, "momentum": 0.9}) if "sgd" in scheme else ("Adam", {"lr": 0.1})
    config = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": kind, "params": settings},
        "bf16": {"enabled": scheme.startswith("mixed")},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": SMALL_BUCKET, "overlap_comm": False},
    }  # fmt: skip
    engine, *_ = dtlib.initialize(model=model, config=config, runtime=runtime, comm=comm)
    return engine


def loss_of(engine):
    return engine(torch.ones(1, dtype=next(engine.module.parameters()).dtype)).sum()


def count_two_steps(engine):
    with dtlib.memory(engine) as m:
        for _ in range(2):
            engine.backward(loss_of(engine))
            engine.step()
    return m


def flat_sizes(stage, sizes=SIZES):
    return [sum(sizes)] if stage < 2 else sizes


def check(m, stage, scheme, rank, ranks, frozen=()):
    expected = zero_bytes(flat_sizes(stage), ranks, stage, scheme, rank, frozen)
    assert {name: m.lines[name] for name in STATES} == expected, m.with_formula(scheme=scheme).table()
    # One number of 4 bytes for each parameter of which this rank updates a shard, empty ones too, as torch has it.
    assert m.step_counters == 4 * len(SIZES)
    assert m.buffers == 0
    assert m.with_formula(scheme=scheme)._formula == expected


@on_ranks(2, 3, 4, slow=(4,))
def test_every_rank_holds_what_the_formula_says(world):
    with all_cases() as case:
        for stage, scheme in itertools.product(range(4), ("adam", "mixed_adam")):
            m = count_two_steps(prepare(stage, weights(frozen=(77,)), scheme=scheme))
            with case(stage, scheme):
                check(m, stage, scheme, world.rank, world.size, frozen=(77,))
                assert (m.rank, m.ranks, m.simulated) == (world.rank, world.size, False)
                assert m.total == sum(m.lines.values()) - m.activations - m.peak


def test_one_rank_of_many_that_do_not_exist():
    with all_cases() as case:
        for stage, (rank, ranks) in itertools.product((1, 2, 3), ((0, 64), (63, 64), (0, 1024), (900, 1024))):
            m = count_two_steps(prepare(stage, weights(), solo(rank, ranks)))
            with case(stage, rank, ranks):
                check(m, stage, "adam", rank, ranks)
                assert m.simulated and f"rank {rank} of {ranks}, simulated" in m.table()


# What a rank holds at the largest moment of each phase, against the formula's terms: by the line that allocates it.

LINES = {  # a line's text: the formula's terms that it allocates
    "": (  # before the block
        *("parameters", "gradients", "master_weights", "optimizer_states", "padding", "gathered"),
        *("flags", "sent before"),
    ),
    "scaled.backward()": ("travels",),
    "self.flat = (torch.zeros if": ("travels",),
    "own = whole.new_empty(": ("shards",),
    "torch.empty(size": ("scratch", "page"),
    "master.grad = ": ("float32",),
    "result = func(": ("float32",),  # of a gradient that is a shard
}
TRAVELS = ("new gradients", "bucket", "in flight")  # one from the memory of another
NUMBERS = 64  # bytes: losses, flags of parameters, and messages about them have a line each, and no more than this


def nothing_arrives_early(patch):
    """Between waits no message moves, and what is sent stays until it is waited for: the most that can be alive. (An
    all-reduce begins at once, and is over if its messages are there: that of stage 0 needs a slow network.)"""
    patch.setattr(reducer, "poll_pending", lambda: None)
    take = GradientShard.take

    def kept(kind):
        gradients = kind.flat_gradients

        def flat_gradients(bucket):
            bucket.kept = gradients(bucket)
            return bucket.kept

        return flat_gradients

    def dropped(bucket, *arguments):
        bucket.__dict__.pop("kept", None)
        take(bucket, *arguments)

    patch.setattr(GradientShard, "flat_gradients", kept(GradientShard))
    patch.setattr(GradientShard, "take", dropped)


def check_terms(live, expected):
    rows = [row for row in live.by_line(at_peak=True) if row[0] > NUMBERS]
    found = dict.fromkeys(LINES, 0)
    for count, place, text in rows:
        line = next((line for line in LINES if line and line in text), "" if place == "before:0" else None)
        assert line is not None, (count, place, text)
        found[line] += count
    by_term = Counter()
    for line, count in found.items():
        by_term[LINES[line]] += count
    travels = sum(expected.get(term, 0) for term in TRAVELS)
    wanted = {terms: sum(expected.get(term, 0) for term in terms) for terms in LINES.values()} | {("travels",): travels}
    of_sums = by_term["travels",] - travels  # each Weight has a sum, a number with a gradient of its own
    assert 0 <= of_sums <= 4 * 4, (live.by_line(at_peak=True), expected)
    by_term["travels",] -= of_sums
    assert by_term == Counter(wanted), (live.by_line(at_peak=True), expected)


@on_ranks(2, 3, slow=(3,))
def test_peak_of_each_phase(world):
    with all_cases() as case, pytest.MonkeyPatch.context() as patch:
        nothing_arrives_early(patch)
        for stage, scheme in itertools.product(range(4), ("sgd_momentum", "mixed_sgd_momentum")):
            with case(stage, scheme):
                comm = world.comm.split(0)
                peak_of_each_phase(comm if stage else comm.emulate_network(0.2, 1e9), stage, scheme)


def peak_of_each_phase(comm, stage, scheme):
    sizes = (40_001, 50_004, 30_000)  # 30,000 divides among 2 and 3 ranks, and 50,004 as well
    engine = prepare(stage, weights(sizes), comm, scheme)
    counts = {}
    for _ in range(2):  # the first step makes states
        with dtlib.memory(engine) as counts["forward"]:
            loss = loss_of(engine)
        comm.barrier()
        with dtlib.memory(engine) as counts["backward"]:
            engine.backward(loss)
        with dtlib.memory(engine) as counts["step"]:
            engine.step()
    bytes_ = SCHEMES["sgd_momentum"] if scheme == "sgd_momentum" else Scheme(2, 2, 4, 4)
    buckets = [[size] for size in reversed(sizes)]
    expected = zero_peak_bytes(buckets, comm.size, stage, bytes_, comm.rank)
    comms = tensors_by_kind(engine)["communicators"]
    flags = Storages().claim(tensor for one in comms for tensor in one.tensors_by_kind()["communication"])
    for phase, m in counts.items():
        terms = expected[phase] | {"flags": flags}
        if phase == "step" and stage != 1:  # which sends its gradients in the step
            terms["sent before"] = terms.pop("bucket", 0) + terms.pop("shards", 0)
        if terms.get("scratch", 0):
            terms["page"] = mmap.PAGESIZE - 1  # to begin on one
        check_terms(m.live, terms)


@on_ranks(2)
def test_classes_hold_as_much_without_an_engine(world):
    for stage in (0, 1, 2):
        model = weights()
        if stage == 0:
            model = DataParallel(model, world.comm)
            optimizer = torch.optim.Adam(model.parameters())
        else:
            cap = {"bucket_cap_mb": SMALL_BUCKET * 4 / 2**20}
            optimizer = ZeroOptimizer(model.parameters(), torch.optim.Adam, world.comm, stage, **cap)
        with dtlib.memory(model, optimizer) as m:
            model(torch.ones(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        check(m, stage, "adam", world.rank, 2)


@on_ranks(2)
def test_torch_holds_as_much_where_it_shares_out_alike(world):
    for stage in (1, 2, 3):
        m = count_two_steps(prepare(stage, weights((1000, 600, 600, 1000)), runtime="torch"))
        # torch's stages 2 and 3 cut each parameter, stage 1 gives each to one rank; the sums are the same here.
        elements = 3200 if stage == 1 else 1600
        assert (m.parameters, m.gradients, m.optimizer_states) == (4 * elements, 4 * elements, 8 * 1600), m.table()


@on_ranks(2)
def test_flags_of_data_parallelism_are_communication(world):
    def communication(stage):
        m = count_two_steps(prepare(stage, weights()))
        scratch = sum(tensor.nbytes for tensor in world.comm.tensors_by_kind()["communication"])
        assert scratch > 0
        return m.communication - scratch

    assert communication(0) == 4 * 10 * len(
        SIZES
    )  # in each bucket a flag of its parameter, and nine that compare ranks
    assert communication(2) == 0  # what travels is gone when it has arrived


@on_ranks(2)
def test_strategies_say_what_they_hold_on_this_rank(world):
    whole = sum(SIZES)
    for stage in range(4):
        engine = prepare(stage, weights(), scheme="mixed_adam")
        count_two_steps(engine)
        own = zero_bytes(flat_sizes(stage), 2, stage, "mixed_adam", world.rank)["master_weights"] // 4
        found = engine.tensors_by_kind()
        elements = {kind: sum(t.numel() for t in found[kind]) for kind in ("parameters", "gradients", "masters")}
        assert elements == {
            "parameters": (0, whole, whole, own)[stage],  # at stage 0 they lie in no flat memory
            "gradients": (0, whole, 0, 0)[stage],  # between steps
            "masters": own,
        }
        assert world.comm in found["communicators"]
        flags, sent = (Storages().claim(one["communication"]) for one in (world.comm.tensors_by_kind(), found))
        assert 0 < flags <= sent
    model = fully_shard(weights((1001,)), world.comm, reshard_after_forward=False)
    with dtlib.memory(model, torch.optim.Adam(model.parameters())) as m:
        loss = model(torch.ones(1)).sum()  # parameters are whole until the backward pass
    comms = tensors_by_kind(model)["communicators"]
    scratch = sum(tensor.nbytes for comm in comms for tensor in comm.tensors_by_kind()["communication"])
    assert (m.parameters, m.padding) == ((4 * 501, 0), (4 * 500, 4))[world.rank]
    assert (m.master_weights, m.communication - scratch) == (0, 4 * 1002)
    loss.backward()


# Without ranks


def perceptron():
    return nn.Sequential(nn.Linear(50, 70), nn.ReLU(), nn.BatchNorm1d(70), nn.Linear(70, 3))


def test_activations_of_a_small_net():
    # Autograd keeps the input, the ReLU's output (for itself and for the next layer: once), the norm's mean and
    # deviation, and the norm's output; weights, running statistics and views of these are no activations.
    # Batch normalisation has 2 statistics of 70 and a counter of 8 bytes.
    model = perceptron()
    model(torch.randn(8, 50)).sum().backward()  # momentum of the norm and the like are there
    model.zero_grad()
    with dtlib.memory(model) as m:
        model(torch.randn(8, 50)).sum().backward()
        assert m._kept.now == 0
        m.sample()
        model.zero_grad()
        with torch.no_grad():
            model(torch.randn(1000, 50))
    weights_and_biases = 50 * 70 + 70 + 2 * 70 + 70 * 3 + 3
    assert m.activations == 4 * (8 * 50 + 8 * 70 + 2 * 70 + 8 * 70)
    assert m.parameters == m.gradients == 4 * weights_and_biases
    assert m.buffers == 4 * 2 * 70 + 8
    assert m.optimizer_states == m.master_weights == m.padding == m.communication == 0
    assert m.peak >= m.parameters + 4 * 1000 * (50 + 70 + 70)


def test_two_graphs_are_kept_together_and_released():
    model = nn.Linear(10, 10, bias=False)
    with dtlib.memory(model) as m:
        first, second = model(torch.randn(4, 10)), model(torch.randn(6, 10))
        assert m._kept.now == 4 * 10 * 10
        del first
        gc.collect()
        assert m._kept.now == 4 * 6 * 10
        second.sum().backward()
    assert m.activations == 4 * 10 * 10


def test_peak_counts_old_and_new_memory_of_what_grows():
    model = nn.Linear(100, 10, bias=False)
    with dtlib.memory(model) as m:
        a = torch.zeros(1000)
        b = torch.zeros(3000)
        del b
        a.untyped_storage().resize_(0)
        c = torch.zeros(2500)
        c.untyped_storage().resize_(4 * 3500)  # old and new at a time: 6000 elements
        del c
    assert m.peak == 4 * (1000 + 6000)


def test_a_tied_weight_and_a_view_count_once():
    model = nn.Module()
    shared = torch.zeros(10)
    model.first, model.second = nn.Parameter(shared[:4]), nn.Parameter(shared[2:8])
    model.third, model.inside = model.first, nn.Parameter(shared[3:5])
    with dtlib.memory(model) as m:
        pass
    assert (m.parameters, m.padding) == (4 * 8, 4 * 2)
    model.after = nn.Parameter(shared[7:9])  # of which one element is new
    with dtlib.memory(model) as m:
        pass
    assert (m.parameters, m.padding) == (4 * 9, 4 * 1)


def test_sampled_by_hand_and_states_of_one_element():
    model = nn.Linear(5, 1)  # its bias has one element, and so has that bias's momentum
    optimizer = torch.optim.NAdam(model.parameters())
    with dtlib.memory(model, optimizer) as m:
        model(torch.ones(1, 5)).sum().backward()
        m.sample()
        model.zero_grad()
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert m.gradients == 4 * 6
    assert m.optimizer_states == 2 * 4 * 6
    assert m.step_counters == 2 * 2 * 4  # NAdam has a product beside the count of steps


def test_only_memory_that_is_there_counts():
    """Interleaved views share a storage without padding; a sparse gradient is indices and values; meta is nothing."""
    model, both, columns = nn.Module(), torch.zeros(1000), torch.zeros(10, 10)
    model.even, model.odd = nn.Parameter(both[::2]), nn.Parameter(both[1::2])
    model.left, model.right = nn.Parameter(columns[:, :5]), nn.Parameter(columns.t()[5:])
    model.spread = nn.Parameter(torch.zeros(3).expand(4, 3))
    model.nothing = nn.Parameter(torch.zeros(7, device="meta"))
    with dtlib.memory(model) as m:
        pass
    assert (m.parameters, m.padding) == (4 * (1000 + 100 + 3), 0)
    embedding = nn.Embedding(100, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters())
    with dtlib.memory(embedding, optimizer) as m:
        embedding(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert m.gradients == 2 * 8 + 2 * 4 * 4


def test_nothing_is_left_behind():
    model, optimizer = nn.Linear(5, 1), None
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ZeroDivisionError), dtlib.memory(model, optimizer):
        raise ZeroDivisionError
    refused = dtlib.memory(model, optimizer)
    refused._counted = lambda storages: {}["parameters"]
    with pytest.raises(KeyError), refused:
        pass
    assert type((torch.ones(1, requires_grad=True) ** 2).grad_fn._saved_self) is torch.Tensor
    assert not refused._kept.now
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    with dtlib.memory(model), pytest.raises(dtlib.DtlibError, match="is active"), dtlib.memory(model):
        pass
    assert not model._forward_pre_hooks


def test_table_has_the_formula_beside_the_count():
    m = count_two_steps(prepare(2, weights(), solo(1, 3)))
    rows = [line.split() for line in m.with_formula().table().splitlines()]
    assert "stage 2, 3 ranks, adam" in m.table()
    total = sum(SIZES)
    expected = f"{zero_bytes(SIZES, 3, 2, 'adam', 1)['gradients']:,}"
    gradients = next(row for row in rows if row[0] == "gradients")
    assert gradients == ["gradients", expected, f"{m.gradients / total:.3f}", expected]


# The plain cores, of which Live counts everything from before they are made


def moments_of_plain(stage, sizes, ranks):
    """In elements, beside what is there between steps: by what it is for, at each moment that may be the largest."""
    padded, shards = [-(-n // ranks) * ranks for n in sizes], [-(-n // ranks) for n in sizes]
    order = list(range(len(sizes))) if stage == 1 else list(reversed(range(len(sizes))))  # units, or the backward pass
    for at, i in enumerate(order):
        others = sum(sizes[j] for j in order[at + 1 :]) if stage == 1 else 0
        always = {
            "gradients that wait": others,
            "gathered": padded[i] if stage == 3 else 0,
            "shards of gradients": sum(shards[j] for j in order[:at]),
            "a copy that travels": padded[i],
        }
        yield {**always, "gradients of the unit": sizes[i]}
        yield {**always, "shard that arrives": shards[i], "two rooms of a ring": 2 * shards[i]}


@on_ranks(2, 3, slow=(3,))
def test_plain_zero_holds_what_is_whole_or_comes_at_a_time(world):
    sizes = (40_001, 50_004, 30_000)
    pages = 2 * (mmap.PAGESIZE - 1)  # on which the rooms of a ring begin
    with all_cases() as case:
        for stage, kind in enumerate((Stage1, Stage2, Stage3), 1):
            with Live() as live:
                model = weights(sizes)
                zero = kind(world.comm.split(0), model, torch.optim.SGD, list(model), lr=0.1, momentum=0.9)
                for _ in range(2):
                    live.peak = live.now
                    model(torch.ones(4)).sum().backward()
                    zero.step()
            padded, shards = [-(-n // world.size) * world.size for n in sizes], [-(-n // world.size) for n in sizes]
            between = 4 * (sum(padded) * (stage < 3) + sum(shards) * (stage == 3) + sum(shards))  # and the momentum
            most = max(4 * sum(terms.values()) + pages * ("shard that arrives" in terms)
                       for terms in moments_of_plain(stage, sizes, world.size))  # fmt: skip
            with case(kind.__name__):
                comms = zero.contract.whole, zero.contract.comm
                notes = sum(tensor.nbytes for comm in comms for tensor in comm.tensors_by_kind()["communication"])
                assert 0 <= live.now - between <= notes + numbers(live), live.by_line()
                assert 0 <= live.peak - between - most <= notes + numbers(live, True), live.by_line(at_peak=True)


def numbers(live, at_peak=False):
    """Bytes in lines of few: losses, flags, what ranks compare; and the sums of the Weights and their gradients."""
    return sum(count for count, *_ in live.by_line(at_peak) if count <= 4 * NUMBERS) + 4 * 4


@on_ranks(2, 3, slow=(3,))
def test_data_parallelism_holds_gradients_once_and_the_last_bucket_twice(world):
    sizes = (40_001, 50_004, 30_000)  # each is a bucket; that of the first layer fills when all others are there
    kinds = {
        "naive": (DataParallelNaive, 0, 0),
        "hooks": (DataParallelHooks, 0, 0),
        "plain buckets": (partial(DataParallelBuckets, bucket_cap_mb=0.2), 4 * sizes[0], 0),
        "full": (partial(DataParallel, bucket_cap_mb=0.2, progress="inline"), 4 * sizes[0], 3 * 11 * 4),
    }
    with all_cases() as case:
        for name, (kind, copy, flags) in kinds.items():
            comm = world.comm.split(0)
            if name != "naive":  # whose messages are sent and waited for one by one, after the backward pass
                comm = comm.emulate_network(0.2, 1e9)  # so that nothing arrives early
            with Live() as live:
                model = kind(weights(sizes), comm)
                for _ in range(2):
                    model.zero_grad()
                    live.peak = between = live.now
                    comm.barrier()
                    model(torch.ones(4)).sum().backward()
            rows = live.by_line(at_peak=True)
            scratch = sum(count for count, _, text in rows if "torch.empty(size" in text)  # of an all_reduce
            parameters = gradients = 4 * sum(sizes)
            with case(name):
                assert 0 <= between - parameters <= numbers(live)
                more = live.peak - scratch - parameters - gradients - copy - flags
                assert 0 <= more <= numbers(live, True), rows
                assert scratch <= 4 * (max(sizes) + 2) + mmap.PAGESIZE + SCRATCH_BYTES


@on_ranks(2, 4, slow=(4,))
def test_the_peak_falls_from_stage_to_stage_and_is_not_above_torchs(world):
    with all_cases() as case:
        for name, build in (("128", partial(perceptron_of, 128)), ("1024", partial(perceptron_of, 1024))):
            peaks = {}
            for runtime, stage in itertools.product(("dtlib", "torch"), range(4)):
                peaks[runtime, stage] = max(
                    world.comm.all_gather_object(peak_of_a_step(world, *build(), stage, runtime))
                )
            ours, theirs = ([peaks[runtime, stage] for stage in range(4)] for runtime in ("dtlib", "torch"))
            with case(name):
                assert ours == sorted(ours, reverse=True) and len(set(ours)) == 4, ours
                assert all(mine <= peer for mine, peer in zip(ours, theirs, strict=True)), (ours, theirs)


def perceptron_of(width):
    torch.manual_seed(0)
    return digits.net(width, layers=2), torch.randn(24, 64).bfloat16(), torch.zeros(24, dtype=torch.long)


def peak_of_a_step(world, model, x, y, stage, runtime):
    """Of the second, on this rank: all that has been allocated since before the engine was made."""
    config = {
        "train_micro_batch_size_per_gpu": len(x), "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
    }  # fmt: skip
    with Live(*model.parameters()) as live:
        comm = world.comm.split(0) if runtime == "dtlib" else world.comm
        engine, *_ = dtlib.initialize(model=model, config=config, comm=comm, runtime=runtime)
        engine.train_batch(iter([(x, y)]))
        live.peak = live.now
        engine.train_batch(iter([(x, y)]))
    return live.peak
