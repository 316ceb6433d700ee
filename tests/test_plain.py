"""The plain cores: as short as promised, equal to the full classes in values and payload, and strict about the rest."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import dtlib
from dtlib.errors import DtlibError
from dtlib.parallel import tensor
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive
from dtlib.parallel.pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe
from dtlib.parallel.pipeline.plain import announce, step
from dtlib.parallel.tensor.plain import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from dtlib.parallel.zero.sharded import fully_shard
from tests.models import batches, build, difference, full_values, loss_of, slice_of
from tests.ranks import on_ranks

PLAIN = sorted((Path(dtlib.__file__).parent / "parallel").glob("*/plain*.py"))
STEPS = 4
ADAMW = {"lr": 0.01, "eps": 1e-4}
STAGES = {1: Stage1, 2: Stage2, 3: Stage3}


@pytest.mark.parametrize("file", PLAIN, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_plain_core_is_read_in_ten_minutes(file):
    lines = file.read_text().splitlines()
    assert len(lines) <= 130
    assert sum(bool(line.strip()) for line in lines) <= 100


def test_every_strategy_that_is_taught_has_a_plain_core():
    taught = ["compression", "context", "data", "expert", "local", "pipeline", "tensor", "zero"]
    assert [file.parent.name for file in PLAIN if file.stem == "plain"] == taught


def net():
    """Four layers of different sizes: (Linear, Tanh) four times."""
    sizes = (6, 10), (10, 7), (7, 5), (5, 3)
    return nn.Sequential(*[layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())]).double()


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def batches_of(comm):
    """Whole batches; and this rank's slice of each."""
    torch.manual_seed(1)
    whole = [(torch.randn(4 * comm.size, 6).double(), torch.randn(4 * comm.size, 3).double()) for _ in range(STEPS)]
    return whole, [[both.chunk(comm.size)[comm.rank] for both in batch] for batch in whole]


def train(model, slices, after_backward):
    for x, y in slices:
        mse_loss(model(x), y).backward()
        for do in after_backward:
            do()
    return model


def train_alone(comm):
    """One process that has the whole batches."""
    model = seeded(net)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return train(model, batches_of(comm)[0], [optimizer.step, optimizer.zero_grad])


def refused(comm, why, function, *arguments, **settings):
    """``function`` raises a DtlibError that says why, on every rank, and the ranks stay together."""
    with pytest.raises(DtlibError, match=why):
        function(*arguments, **settings)
    comm.barrier()


def refused_by(comm, why, made, act):
    """What ``made`` of a communicator of its own does in ``act`` is refused; messages may be left over on that one."""
    refused(comm, why, act, made(comm.split(0)))


def float_bytes(events, operation):
    """Elements and bytes of the calls of an operation that carry float64: notes and headers are integers or bytes."""
    calls = [event for event in events if (event.kind, event.name, event.dtype) == ("operation", operation, "float64")]
    return [(math.prod(event.shape), event.bytes) for event in calls]


# Data parallelism


CAP = 0.0005  # MiB: three buckets


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_data_parallel_has_the_values_and_the_payload_of_the_full_class(world):
    comm = world.comm
    alone, (_, slices) = train_alone(comm), batches_of(comm)
    sent = {}
    for kind in (DataParallelNaive, DataParallelHooks, DataParallelBuckets, DataParallel):
        settings = {"bucket_cap_mb": CAP} if kind in (DataParallelBuckets, DataParallel) else {}
        model = kind(seeded(net, seed=world.rank), comm, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        average = [model.average_gradients] if kind is DataParallelNaive else []
        with dtlib.trace() as trace:
            train(model, slices, [*average, optimizer.step, optimizer.zero_grad])
        assert difference(model, alone) <= 1e-12, kind
        sent[kind] = float_bytes(trace.events, "all_reduce")
    parameters = list(seeded(net).parameters())
    assert len(sent[DataParallelNaive]) == len(sent[DataParallelHooks]) == STEPS * len(parameters)
    assert 1 < len(model.buckets) < len(parameters)
    # Behind each bucket of the full class travels a flag a parameter, and one about batch_size: with as many messages a
    # number, as many bytes.
    flags = [len(bucket.parameters) + 1 for bucket in model.buckets] * STEPS
    for (plain, its_bytes), (full, all_bytes), flag in zip(
        sent[DataParallelBuckets], sent[DataParallel], flags, strict=True
    ):
        assert full == plain + flag
        assert its_bytes * full == all_bytes * plain


@on_ranks(2, 3)
def test_data_parallel_with_buffers_frozen_and_tied_parameters(world):
    for name in ("convolutional", "transformer"):
        whole = batches(name, STEPS, 4 * world.size)
        models = []
        for kind in (DataParallelNaive, DataParallelHooks, DataParallelBuckets, DataParallel):
            inner = build(name, seed=world.rank)
            next(inner.parameters()).requires_grad_(False)
            model = kind(inner, world.comm)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
            for batch in whole:
                optimizer.zero_grad()
                loss_of(model, slice_of(batch, world.rank, world.size)).backward()
                if kind is DataParallelNaive:
                    model.average_gradients()
                optimizer.step()
            models.append(model)
        assert max(difference(model, models[-1]) for model in models) <= 1e-12


@on_ranks(2, 3)
def test_data_parallel_refuses_what_lies_outside_of_its_contract(world):
    comm = world.comm
    x = torch.ones(4, 6).double()

    def uneven(model):
        model(x[: 1 + comm.rank]).sum().backward()

    def unused(model):
        model.module[0].forward = model.module[0].forward if comm.rank else lambda x: x.new_ones(4, 10)
        model(x).sum().backward()

    def reentrant(model):
        first = model.module[0]
        model.forward = lambda x: sum(checkpoint(first, x.requires_grad_(), use_reentrant=True).sum() for _ in "ab")
        model.forward(x).backward()

    def unfrozen(model):
        model.module[0].weight.requires_grad_(False)
        model(x)

    def without_a_batch(model):
        model(torch.tensor(1.0))

    def interrupted(model):
        output = model(x)
        output.register_hook(lambda gradient: None)
        model.module[0].weight.register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        model(x)

    for kind in (DataParallelHooks, DataParallelBuckets):

        def made(comm, kind=kind):
            return kind(seeded(net), comm)

        refused_by(comm, "equal ones", made, uneven)
        refused_by(comm, r"0\.weight got .* gradients", made, unused)
        refused_by(comm, "got .* gradients", made, reentrant)
        refused_by(comm, "frozen, unfrozen or replaced", made, unfrozen)
        refused_by(comm, "was interrupted", made, interrupted)
        refused_by(comm, "no tensor of samples", made, without_a_batch)
        model = seeded(net)
        kind(model, comm)
        refused(comm, "earlier wrapper", kind, model, comm)

    def naive(*act):
        model = DataParallelNaive(seeded(net), comm.split(0))
        for do in act:
            do(model)
        model.average_gradients()

    refused(comm, "equal ones", naive, uneven)
    refused(comm, r"0\.weight got .* gradients", naive, unused)
    refused(comm, "requires a gradient", DataParallelNaive, nn.Tanh(), comm)
    refused(comm, "differ", DataParallelNaive, nn.Linear(2, 3 + comm.rank), comm)
    for kind in (DataParallelNaive, DataParallelHooks, DataParallelBuckets, *STAGES.values()):
        arguments = (comm, sparse(), torch.optim.SGD) if kind in STAGES.values() else (sparse(), comm)
        refused(comm, "0 gives sparse gradients", kind, *arguments)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    refused(comm, "several dtypes", DataParallelBuckets, mixed, comm)


def fails(gradient):
    raise ZeroDivisionError


def sparse():
    return nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Linear(6, 3))


class ByName(nn.Linear):
    def forward(self, *, batch):
        return super().forward(batch)


@on_ranks(2)
def test_a_batch_that_is_passed_by_its_name(world):
    x = torch.full((3, 6), world.rank + 1.0)
    for kind in (DataParallelNaive, DataParallelHooks, DataParallelBuckets):
        model = kind(ByName(6, 3), world.comm)
        model(batch=x).sum().backward()
        if kind is DataParallelNaive:
            model.average_gradients()
        assert (model.module.weight.grad == 4.5).all()
    for kind in STAGES.values():
        zero = kind(world.comm, model := ByName(6, 3), torch.optim.SGD, lr=1.0)
        before = zero.units[0].shard.detach().clone()
        model(batch=x).sum().backward()
        zero.step()
        moved = (before - zero.units[0].shard)[: 21 - 11 * world.rank]  # weights, biases, padding
        assert ((moved - 4.5).abs() < 1e-5).sum() + ((moved - 3).abs() < 1e-5).sum() == len(moved)
        model.zero_grad()
        refused_by(world.comm, "equal ones", lambda comm, kind=kind: named(kind, comm), lambda step: step(world.rank))


def named(kind, comm):
    zero = kind(comm, model := ByName(6, 3), torch.optim.SGD, lr=1.0)

    def step(more):
        model(batch=torch.ones(2 + more, 6)).sum().backward()
        zero.step()

    return step


# ZeRO


def full_zero(stage, model, comm, units):
    """The full class beside a plain one, and how to take its step."""
    if stage < 3:
        # One bucket has everything, as one unit has.
        return ZeroOptimizer(model.parameters(), torch.optim.AdamW, comm, stage=stage, **ADAMW)
    for unit in units:
        fully_shard(unit, comm)
    if units != [model]:
        fully_shard(model, comm)
    return torch.optim.AdamW(model.parameters(), **ADAMW)


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_zero_has_the_values_and_the_payload_of_the_full_classes(world):
    comm = world.comm
    alone, (_, slices) = train_alone(comm), batches_of(comm)
    for stage, kind in STAGES.items():
        for cut in (lambda model: [model], linears) if stage == 3 else (lambda model: [model],):
            plain, full = seeded(net, seed=world.rank), seeded(net, seed=0)
            zero = kind(comm, plain, torch.optim.AdamW, cut(plain), **ADAMW)
            optimizer = full_zero(stage, full, comm, cut(full))
            count = sum(parameter.numel() for parameter in alone.parameters())
            assert sum(len(unit.shard) for unit in zero.units) < count // comm.size + len(zero.units) + 1
            events = {}
            for name, model, after in (("plain", plain, [zero.step]), ("full", full, [optimizer.step])):
                with dtlib.trace() as trace:
                    train(model, slices, [*after, optimizer.zero_grad])
                events[name] = trace.events
            if stage == 3:
                assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in zero.units)
                assert all(parameter.isnan().all() for parameter in plain.parameters())
            for operation in ("reduce_scatter", "all_gather"):
                counted = [sorted(float_bytes(events[name], operation)) for name in ("plain", "full")]
                assert counted[0] == counted[1] != [], (stage, operation)
            if stage == 3:
                for unit in zero.units:
                    zero.gather(unit)
            for values in (dict(plain.named_parameters()), full_values(full, comm)):
                assert max((values[name] - value).abs().max() for name, value in alone.named_parameters()) <= 1e-12


@on_ranks(2, 3)
def test_zero_in_units_of_its_own_with_evaluation_recomputation_and_a_layer_used_twice(world):
    comm = world.comm
    _, slices = batches_of(comm)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            x = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
            return self.last(torch.relu_(self.again(torch.relu_(self.again(x)))))

    trained = []
    for kind in (None, *STAGES.values()):
        model = seeded(lambda: Twice().double(), seed=0 if kind is None else world.rank)
        if kind is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            train(model, batches_of(comm)[0], [optimizer.step, optimizer.zero_grad])
        else:
            zero = kind(comm, model, torch.optim.SGD, linears(model), lr=0.1, momentum=0.9)
            train(model, slices[:2], [zero.step])
            with torch.no_grad():
                model(slices[0][0])
            train(model, slices[2:], [zero.step])
        with torch.no_grad():
            trained.append(comm.broadcast(model(slices[0][0])))
    assert max((output - trained[0]).abs().max() for output in trained) <= 1e-12


@on_ranks(2, 3)
def test_zero_refuses_what_lies_outside_of_its_contract(world):
    comm = world.comm
    x = torch.ones(4, 6).double()
    adamw = torch.optim.AdamW

    def uneven(zero, model):
        model(x[: 1 + comm.rank]).sum().backward()
        zero.step()

    def unused(zero, model):
        model[:6](x).sum().backward()
        zero.step()

    def second_backward(zero, model):
        model(x).sum().backward()
        model(x).sum().backward()

    def twice_backward(zero, model):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        zero.step()

    def no_backward(zero, model):
        zero.step()

    def clipped(zero, model):
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def with_closure(zero, model):
        zero.step(lambda: model(x).sum())

    def frozen_later(zero, model):
        model[0].bias.requires_grad_(False)
        model(x)

    for kind in STAGES.values():
        for why, act in {
            "batches of": uneven,
            r"6\.weight got \[0, 0": unused,
            "no step\\(\\) followed": second_backward,
            "got \\[2, 2": twice_backward,
            "got \\[0, 0": no_backward,
            "cannot clip here": clipped,
            "takes no closure": with_closure,
            "frozen, unfrozen or replaced": frozen_later,
        }.items():
            model = seeded(net)
            refused(comm, why, act, kind(comm, model, adamw, linears(model), **ADAMW), model)
        model = seeded(net)
        refused(comm, "element by element", kind, comm, model, torch.optim.LBFGS)
        refused(comm, "in 0 units", kind, comm, model, adamw, linears(model)[:2])
        refused(comm, "in 2 units", kind, comm, model, adamw, [model, model[0]])
        refused(comm, "one of float32 and float64", kind, comm, seeded(net).bfloat16(), adamw)
        refused(comm, r"units are \['a'\]: give a list", kind, comm, model, adamw, {"a": model})
        turned = seeded(net)
        turned[0].weight.data = turned[0].weight.detach().t().contiguous().t()
        refused(comm, r"set 0\.weight\.data = 0\.weight\.data\.cont", kind, comm, turned, adamw)
        model[0].float()
        refused(comm, "one of float32 and float64", kind, comm, model, adamw)
        tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
        tied[1].weight = tied[0].weight
        refused(comm, "0.weight is in 2 units", kind, comm, tied, adamw, linears(tied))
        kind(comm, tied, adamw)
        frozen = seeded(net)
        frozen[0].bias.requires_grad_(False)
        refused(comm, "0.bias is frozen", kind, comm, frozen, adamw)
        kind(comm, model := seeded(net), adamw)
        refused(comm, "earlier wrapper", kind, comm, model, adamw)

    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    zero = Stage3(comm, pair := Pair(6, 6).double(), adamw)
    refused(comm, "has to give one tensor", pair, x)
    assert zero.units


# Pipelines


def stages_of(model, comm):
    """(Linear, Tanh) four times, shared out among ranks."""
    first, last = (4 * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    return model[2 * first : 2 * last]


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_pipeline_has_the_values_and_the_payload_of_the_full_classes(world):
    comm = world.comm
    (x, y), *_ = batches_of(comm)[0]
    is_last = comm.rank == comm.size - 1
    ends = x if comm.rank == 0 else None, y if is_last else None
    for name, schedule in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        for microbatches in (1, 2, 4):
            alone, plain, full = (seeded(net) for _ in range(3))
            expected = mse_loss(alone(x), y)
            expected.backward()
            stage = PipelineStage(stages_of(full, comm), comm.rank, comm.size, comm)
            whole = schedule(stage, microbatches, mse_loss)
            with dtlib.trace() as trace:
                loss = step(comm, stages_of(plain, comm), *ends, mse_loss, microbatches, name)
            with dtlib.trace() as other:
                whole.step(*([x] if comm.rank == 0 else []), target=ends[1])
            assert float_bytes(trace.events, "send") == float_bytes(other.events, "send")
            done = [event.action for event in trace.events if event.kind == "phase"]
            assert done == [event.action for event in other.events if event.kind == "phase"] and None not in done
            assert abs(loss - expected) <= 1e-12 if is_last else loss is None
            for model in (plain, full):
                for ours, theirs in zip(
                    stages_of(model, comm).parameters(), stages_of(alone, comm).parameters(), strict=True
                ):
                    assert (ours.grad - theirs.grad).abs().max() <= 1e-12


@on_ranks(2, 3)
def test_pipeline_refuses_what_lies_outside_of_its_contract(world):
    comm = world.comm
    x, y, stage = torch.ones(6, 6).double(), torch.ones(6, 3).double(), stages_of(seeded(net), comm)
    is_first, is_last = comm.rank == 0, comm.rank == comm.size - 1
    x, y = x if is_first else None, y if is_last else None
    refused(comm, "no 4 equal micro-batches", step, comm, stage, x, y, mse_loss, 4)
    refused(comm, "no 0 equal micro-batches", step, comm, stage, x, y, mse_loss, 0)
    refused(comm, "no 2.0 equal micro-batches", step, comm, stage, x, y, mse_loss, 2.0)
    refused(comm, "one of .*gpipe", step, comm, stage, x, y, mse_loss, 2, "zb")
    refused(comm, "as many micro-batches", step, comm, stage, x, y, mse_loss, 2 + is_last)
    refused(comm, "have None and 6", step, comm, stage, None, y, mse_loss, 2)
    refused(comm, "have 6 and 3", step, comm, stage, x, y[:3] if is_last else None, mse_loss, 2)
    refused(comm, "train no parameter", step, comm, nn.Tanh() if is_first else stage, x, y, mse_loss, 2)
    refused(comm, "no 2.* equal micro-batches", step, comm, stage, x, y, mse_loss, 2.0 if is_first else 2)
    for summed in (nn.MSELoss(reduction="sum"), partial(mse_loss, reduction="sum")):
        refused(comm, "reduction='sum': take the mean", step, comm, stage, x, y, summed, 2)
    norm = nn.Sequential(stage, nn.BatchNorm1d(7)).double() if is_first else stage
    refused(comm, "1 of rank 0 is batch norm", step, comm, norm, x, y, mse_loss, 2)
    shared = seeded(lambda: nn.Linear(6, 6), seed=0 if is_first or is_last else 1).double()
    tied = nn.Sequential(nn.Tanh(), shared) if is_last else nn.Sequential(shared)
    refused(comm, r"1\.weight of rank . has the values of 0\.weight of rank 0", step, comm, tied, x, y, mse_loss, 2)
    # From one seed, or of a constant: nothing is tied. Batch norm sees whole batches, or none.
    alike = nn.Sequential(seeded(lambda: nn.Linear(6, 6)), nn.BatchNorm1d(6)).double()
    y6 = torch.ones(6, 6).double() if is_last else None
    assert (step(comm, alike, x, y6, mse_loss, 1) is None) != is_last
    assert (step(comm, alike.eval(), x, y6, mse_loss, 2) is None) != is_last
    if is_first:
        for odd in (lambda x: (x, x), lambda x: x.half()):
            with pytest.raises(DtlibError, match="gives one tensor"):
                announce(comm, 1, odd(x))
    comm.barrier()


# Tensor parallelism


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_tensor_parallel_layers_have_the_values_and_the_payload_of_the_full_ones(world):
    comm, results, sent = world.comm, [], []
    for made in (
        lambda: ParallelMLP(6, 12, comm),
        lambda: tensor.ParallelMLP(6, 12, comm),
        lambda: nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)),
    ):
        model = seeded(made, seed=0).double()
        x = seeded(lambda: torch.randn(5, 2, 6)).double().requires_grad_()
        with dtlib.trace() as trace:
            output = model(x)
            output.square().sum().backward()
        results.append([output.detach(), x.grad, list(model.parameters())[-1].grad])
        sent.append(float_bytes(trace.events, "all_reduce"))
    for ours, full, alone in zip(*results, strict=True):
        assert max((ours - full).abs().max(), (ours - alone).abs().max()) <= 1e-12
    assert sent[0] == sent[1] and len(sent[0]) == 2


@on_ranks(2, 3)
def test_tensor_parallel_layers_refuse_what_lies_outside_of_their_contract(world):
    comm = world.comm
    refused(comm, f"no {comm.size} equal slices", ColumnParallelLinear, 6, 6 * comm.size + 1, comm)
    refused(comm, f"no {comm.size} equal slices", RowParallelLinear, 6 * comm.size + 1, 6, comm)
    refused(comm, "same on all ranks", ColumnParallelLinear, 6 + comm.rank, 6, comm)
    layer = ColumnParallelLinear(6, 6, comm)
    refused(comm, "different inputs", layer, torch.full((2, 6), float(comm.rank)))
    refused(comm, "different inputs", layer, torch.ones(2 + comm.rank, 6))
    refused(comm, "Column.* takes 6 features .*int64", layer, torch.ones(2, 6, dtype=torch.int64))
    rows = RowParallelLinear(6 * comm.size, 6, comm)
    refused(comm, r"Row.* takes 6 features .*float32 of shape \(2, 7\)", rows, torch.ones(2, 7))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert layer.weight.tensor_parallel
