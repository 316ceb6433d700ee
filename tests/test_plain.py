"""The plain cores beside their values (test_parity.py): as short as promised, payload as of full classes, strict."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import dtlib
from dtlib.gradients.shard_info import info_of
from dtlib.parallel import tensor
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive
from dtlib.parallel.pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe
from dtlib.parallel.pipeline.plain import announce, step
from dtlib.parallel.tensor.plain import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from dtlib.parallel.zero.sharded import fully_shard
from tests.cases import refuses
from tests.models import build, seeded
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


def net():
    """Four layers of different sizes: (Linear, Tanh) four times."""
    return build("chain")


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def slices_of(comm):
    """This rank's slices of some batches."""
    chance = torch.Generator().manual_seed(1)
    return [
        [torch.randn(4 * comm.size, size, generator=chance).double().chunk(comm.size)[comm.rank] for size in (6, 3)]
        for _ in range(STEPS)
    ]


def train(model, slices, after_backward):
    for x, y in slices:
        mse_loss(model(x), y).backward()
        for do in after_backward:
            do()
    return model


def refused(comm, why, function, *arguments, **settings):
    """``function`` raises a DtlibError that says why, on every rank, and the ranks stay together."""
    refuses(why, function, *arguments, **settings)
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
def test_data_parallel_has_the_payload_of_the_full_class(world):
    comm, sent = world.comm, {}
    for kind in (DataParallelNaive, DataParallelHooks, DataParallelBuckets, DataParallel):
        settings = {"bucket_cap_mb": CAP} if kind in (DataParallelBuckets, DataParallel) else {}
        model = kind(net(), comm, **settings)
        average = [model.average_gradients] if kind is DataParallelNaive else []
        with dtlib.trace() as trace:
            train(model, slices_of(comm), [*average, model.zero_grad])
        sent[kind] = float_bytes(trace.events, "all_reduce")
    parameters = list(net().parameters())
    assert len(sent[DataParallelNaive]) == len(sent[DataParallelHooks]) == STEPS * len(parameters)
    assert 1 < len(model.buckets) < len(parameters)
    # Behind each bucket of the full class travel a flag for each parameter, one about the pass, and in the first three
    # passes eight about values: with as many messages a number, as many bytes.
    steps = [1 + 8 * (step < 3) for step in range(STEPS)]
    flags = [len(bucket.parameters) + more for more in steps for bucket in model.buckets]
    for (plain, its_bytes), (full, all_bytes), flag in zip(
        sent[DataParallelBuckets], sent[DataParallel], flags, strict=True
    ):
        assert full == plain + flag
        assert its_bytes * full == all_bytes * plain


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
            return kind(net(), comm)

        refused_by(comm, "equal batches", made, uneven)
        refused_by(comm, r"0\.weight got .* gradients", made, unused)
        refused_by(comm, "got .* gradients", made, reentrant)
        refused_by(comm, "frozen, unfrozen or replaced", made, unfrozen)
        refused_by(comm, "was interrupted", made, interrupted)
        refused_by(comm, "no tensor of samples", made, without_a_batch)
        model = net()
        kind(model, comm)
        refused(comm, "another wrapper", kind, model, comm)

    def naive(*act):
        model = DataParallelNaive(net(), comm.split(0))
        for do in act:
            do(model)
        model.average_gradients()

    refused(comm, "equal batches", naive, uneven)
    refused(comm, r"0\.weight got .* gradients", naive, unused)
    refused(comm, "requires a gradient", DataParallelNaive, nn.Tanh(), comm)
    refused(comm, "differ", DataParallelNaive, nn.Linear(2, 3 + comm.rank), comm)
    for kind in (DataParallelNaive, DataParallelHooks, DataParallelBuckets, *STAGES.values()):
        arguments = (comm, sparse(), torch.optim.SGD) if kind in STAGES.values() else (sparse(), comm)
        refused(comm, "needs dense gradients: build 0", kind, *arguments)
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
        refused_by(
            world.comm, "equal batches", lambda comm, kind=kind: named(kind, comm), lambda step: step(world.rank)
        )


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
        return ZeroOptimizer(model.parameters(), torch.optim.AdamW, comm, stage=stage, bucket_cap_mb=25, **ADAMW)
    for unit in units:
        fully_shard(unit, comm)
    if units != [model]:
        fully_shard(model, comm)
    return torch.optim.AdamW(model.parameters(), **ADAMW)


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_zero_has_the_payload_and_the_shards_of_the_full_classes(world):
    comm, count = world.comm, sum(parameter.numel() for parameter in net().parameters())
    for stage, kind in STAGES.items():
        for cut in (lambda model: [model], linears) if stage == 3 else (lambda model: [model],):
            plain, full, events = net(), net(), []
            zero = kind(comm, plain, torch.optim.AdamW, cut(plain), **ADAMW)
            optimizer = full_zero(stage, full, comm, cut(full))
            assert sum(len(unit.shard) for unit in zero.units) < count // comm.size + len(zero.units) + 1
            for model, after in ((plain, [zero.step]), (full, [optimizer.step])):
                with dtlib.trace() as trace:
                    train(model, slices_of(comm), [*after, optimizer.zero_grad])
                events.append(trace.events)
            if stage == 3:
                assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in zero.units)
                assert all(parameter.isnan().all() for parameter in plain.parameters())
            for operation in ("reduce_scatter", "all_gather"):
                counted = [sorted(float_bytes(each, operation)) for each in events]
                assert counted[0] == counted[1] != [], (stage, operation)


@on_ranks(2, 3)
def test_zero_refuses_what_lies_outside_of_its_contract(world):
    comm = world.comm
    x = torch.ones(4, 6).double()
    adamw = torch.optim.AdamW

    def uneven(zero, model):
        model(x[: 1 + comm.rank]).sum().backward()
        zero.step()

    def unused(zero, model):
        nn.Sequential(*list(model)[:6])(x).sum().backward()
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
            "a step\\(\\) is missing": second_backward,
            "got \\[2, 2|under ZeRO it left": twice_backward,
            "got \\[0, 0": no_backward,
            "of this gradient would be .* of this rank's batch|under ZeRO it left": clipped,
            "takes no closure": with_closure,
            "frozen, unfrozen or replaced": frozen_later,
        }.items():
            model = net()
            refused(comm, why, act, kind(comm, model, adamw, linears(model), **ADAMW), model)
        model = net()
        refused(comm, "may need whole parameters", kind, comm, model, torch.optim.LBFGS)
        refused(comm, "in 0 units", kind, comm, model, adamw, linears(model)[:2])
        refused(comm, "in 2 units", kind, comm, model, adamw, [model, model[0]])
        refused(comm, "one of float32 and float64", kind, comm, net().bfloat16(), adamw)
        refused(comm, r"units are \['a'\]: pass a list", kind, comm, model, adamw, {"a": model})
        turned = net()
        turned[0].weight.data = turned[0].weight.detach().t().contiguous().t()
        refused(comm, r"set 0\.weight\.data = 0\.weight\.data\.cont", kind, comm, turned, adamw)
        model[0].float()
        refused(comm, "one of float32 and float64", kind, comm, model, adamw)
        tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
        tied[1].weight = tied[0].weight
        refused(comm, "0.weight is in 2 units", kind, comm, tied, adamw, linears(tied))
        kind(comm, tied, adamw)
        frozen = net()
        frozen[0].bias.requires_grad_(False)
        refused(comm, "0.bias is frozen", kind, comm, frozen, adamw)
        kind(comm, model := net(), adamw)
        refused(comm, "another wrapper", kind, comm, model, adamw)

    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    zero = Stage3(comm, pair := Pair(6, 6).double(), adamw)
    refused(comm, "must return a single tensor", pair, x)
    assert zero.units


# Pipelines


def stages_of(model, comm):
    """(Linear, Tanh) four times, shared out among ranks."""
    first, last = (4 * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    return nn.Sequential(*list(model)[2 * first : 2 * last])


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_pipeline_has_the_payload_and_the_order_of_the_full_classes(world):
    comm = world.comm
    x, y = torch.randn(2, 12, 6).double().unbind()
    ends = x if comm.rank == 0 else None, y[:, :3] if comm.rank == comm.size - 1 else None
    for name, schedule in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        for microbatches in (1, 2, 4):
            whole = schedule(PipelineStage(stages_of(net(), comm), comm.rank, comm.size, comm), microbatches, mse_loss)
            with dtlib.trace() as trace:
                step(comm, stages_of(net(), comm), *ends, mse_loss, microbatches, name)
            with dtlib.trace() as other:
                whole.step(*([x] if comm.rank == 0 else []), target=ends[1])
            assert float_bytes(trace.events, "send") == float_bytes(other.events, "send")
            done = [event.action for event in trace.events if event.kind == "phase"]
            assert done == [event.action for event in other.events if event.kind == "phase"] and None not in done


@on_ranks(2, 3)
def test_pipeline_refuses_what_lies_outside_of_its_contract(world):
    comm = world.comm
    x, y, stage = torch.ones(6, 6).double(), torch.ones(6, 3).double(), stages_of(net(), comm)
    is_first, is_last = comm.rank == 0, comm.rank == comm.size - 1
    x, y = x if is_first else None, y if is_last else None
    refused(comm, "not divide into 4 micro-batches", step, comm, stage, x, y, mse_loss, 4)
    refused(comm, "not divide into 0 micro-batches", step, comm, stage, x, y, mse_loss, 0)
    refused(comm, "not divide into 2.0 micro-batches", step, comm, stage, x, y, mse_loss, 2.0)
    refused(comm, "one of .*gpipe", step, comm, stage, x, y, mse_loss, 2, "zb")
    refused(comm, "the same number of micro-batches", step, comm, stage, x, y, mse_loss, 2 + is_last)
    refused(comm, "have None and 6", step, comm, stage, None, y, mse_loss, 2)
    refused(comm, "have 6 and 3", step, comm, stage, x, y[:3] if is_last else None, mse_loss, 2)
    refused(comm, "have no parameter to train", step, comm, nn.Tanh() if is_first else stage, x, y, mse_loss, 2)
    refused(comm, "not divide into 2.* micro-batches", step, comm, stage, x, y, mse_loss, 2.0 if is_first else 2)
    for summed in (nn.MSELoss(reduction="sum"), partial(mse_loss, reduction="sum")):
        refused(comm, "reduction='sum': use the mean", step, comm, stage, x, y, summed, 2)
    norm = nn.Sequential(stage, nn.BatchNorm1d(7)).double() if is_first else stage
    refused(comm, "1 of rank 0 is batch norm", step, comm, norm, x, y, mse_loss, 2)
    shared = seeded(lambda: nn.Linear(6, 6), seed=0 if is_first or is_last else 1)
    tied = nn.Sequential(nn.Tanh(), shared) if is_last else nn.Sequential(shared)
    refused(comm, r"1\.weight of rank . has the values of 0\.weight of rank 0", step, comm, tied, x, y, mse_loss, 2)
    # From one seed, or of a constant: nothing is tied. Batch norm sees whole batches, or none.
    alike = nn.Sequential(seeded(lambda: nn.Linear(6, 6)), nn.BatchNorm1d(6)).double()
    y6 = torch.ones(6, 6).double() if is_last else None
    assert (step(comm, alike, x, y6, mse_loss, 1) is None) != is_last
    assert (step(comm, alike.eval(), x, y6, mse_loss, 2) is None) != is_last
    if is_first:
        for odd in (lambda x: (x, x), lambda x: x.half()):
            refuses("returns one tensor", announce, comm, 1, odd(x))
    comm.barrier()


# Tensor parallelism


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_tensor_parallel_layers_have_the_payload_of_the_full_ones(world):
    sent = []
    for kind in (ParallelMLP, tensor.ParallelMLP):
        model, x = seeded(lambda kind=kind: kind(6, 12, world.comm)), torch.ones(5, 2, 6).double().requires_grad_()
        with dtlib.trace() as trace:
            model(x).square().sum().backward()
        sent.append(float_bytes(trace.events, "all_reduce"))
    assert sent[0] == sent[1] and len(sent[0]) == 2


@on_ranks(2, 3)
def test_tensor_parallel_layers_refuse_what_lies_outside_of_their_contract(world):
    comm = world.comm
    refused(comm, f"do not divide into {comm.size} equal slices", ColumnParallelLinear, 6, 6 * comm.size + 1, comm)
    refused(comm, f"do not divide into {comm.size} equal slices", RowParallelLinear, 6 * comm.size + 1, 6, comm)
    refused(comm, "same on all ranks", ColumnParallelLinear, 6 + comm.rank, 6, comm)
    layer = ColumnParallelLinear(6, 6, comm)
    refused(comm, "different inputs", layer, torch.full((2, 6), float(comm.rank)))
    refused(comm, "different inputs", layer, torch.ones(2 + comm.rank, 6))
    refused(comm, r"shape \(2, 7\).* must be 6: as Column", layer, torch.ones(2, 7))
    rows = RowParallelLinear(6 * comm.size, 6, comm)
    refused(comm, r"shape \(2, 7\).* must be 6: as RowParallelLinear takes", rows, torch.ones(2, 7))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert info_of(layer.weight).tensor == comm.members
