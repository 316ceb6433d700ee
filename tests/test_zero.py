"""ZeRO stages 1 and 2 against one process, and against torch's ZeroRedundancyOptimizer."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import dtlib
from benchmarks.peers import torch_group
from dtlib.errors import DtlibError
from dtlib.gradients.precision import MasterWeights
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import ELEMENTWISE, ZeroOptimizer
from tests.models import batches, build, difference, loss_of, slice_of
from tests.ranks import on_ranks
from tests.test_data_parallel import STEPS, train_alone

CLASSES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4}),
}


def optimizer_of(model, name):
    kind, settings = CLASSES[name]
    return kind([p for p in model.parameters() if p.requires_grad], **settings)


def train(model, optimizer, data, comm, accumulate=1, clip=None):
    for step, batch in enumerate(data):
        loss_of(model, slice_of(batch, comm.rank, comm.size)).backward()
        if (step + 1) % accumulate == 0:
            if clip:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


def train_torch(model, optimizer, data, comm, accumulate=1, clip=None):
    """The same with torch's classes, which average in every backward pass."""
    for step, batch in enumerate(data):
        loss_of(model, slice_of(batch, comm.rank, comm.size)).backward()
        if (step + 1) % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2, 3, 4, slow=(4,))
@pytest.mark.parametrize("name", ["plain", "convolutional", "transformer"])
@pytest.mark.parametrize("optimizer,accumulate,clip", [("sgd", 1, None), ("adamw", 2, 0.5)])
def test_parity_with_one_process_and_with_torch(world, name, optimizer, accumulate, clip):
    comm, data = world.comm, batches(name, 2 * STEPS, 4 * world.size)
    kind, settings = CLASSES[optimizer]
    reference = build(name)
    train_alone(reference, optimizer_of(reference, optimizer), data, world.size, accumulate, clip)
    stages = {1: build(name, seed=world.rank), 2: build(name, seed=world.rank)}
    for stage, ours in stages.items():
        zero = ZeroOptimizer(ours.named_parameters(), kind, comm, stage, bucket_cap_mb=0.0005, **settings)
        train(ours, zero, data, comm, accumulate, clip)
        # The design's bound for float64.
        assert difference(ours, reference, buffers=False) <= 1e-12, stage
        assert stage == 1 or len(zero._buckets) > 1
    theirs = build(name)
    group = torch_group(world)
    ddp = nn.parallel.DistributedDataParallel(theirs, process_group=group, find_unused_parameters=name == "plain")
    trained = [p for p in theirs.parameters() if p.requires_grad]
    peer = ZeroRedundancyOptimizer(trained, kind, process_group=group, **settings)
    train_torch(ddp, peer, data, comm, accumulate, clip)
    assert max(difference(ours, theirs, buffers=False) for ours in stages.values()) <= 1e-12


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_float32_is_as_near_to_float64_as_torch(world, stage):
    comm, data = world.comm, batches("transformer", STEPS, 4 * world.size, torch.float32)
    exact = build("transformer")
    train_alone(exact, optimizer_of(exact, "sgd"), data, world.size)
    kind, settings = CLASSES["sgd"]
    ours = build("transformer", torch.float32)
    train(ours, ZeroOptimizer(ours.parameters(), kind, comm, stage, **settings), data, comm)
    theirs = build("transformer", torch.float32)
    ddp = nn.parallel.DistributedDataParallel(theirs, process_group=torch_group(world))
    peer = ZeroRedundancyOptimizer(theirs.parameters(), kind, process_group=torch_group(world), **settings)
    train(ddp, peer, data, comm)
    errors = [difference(model, exact, buffers=False) for model in (ours, theirs)]
    assert errors[0] <= max(2 * errors[1], 1e-5)


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_bfloat16_steps_on_float32_masters_like_data_parallelism(world, stage):
    comm, data = world.comm, batches("plain", STEPS, 4 * world.size, torch.bfloat16)
    ours, theirs = build("plain", torch.bfloat16), build("plain", torch.bfloat16)
    zero = ZeroOptimizer(ours.parameters(), torch.optim.AdamW, comm, stage, lr=0.01, eps=1e-4)
    assert {master.dtype for master in zero.masters.masters} == {torch.float32}
    ddp, masters = DataParallel(theirs, comm), MasterWeights(p for p in theirs.parameters() if p.requires_grad)
    peer = torch.optim.AdamW(masters.masters, lr=0.01, eps=1e-4)
    for batch in data:
        loss_of(ddp, slice_of(batch, comm.rank, comm.size)).backward()
        masters.take_gradients()
        peer.step()
        masters.give_values()
        peer.zero_grad()
        theirs.zero_grad()
    train(ours, zero, data, comm)
    # The two add in another order and round to 8 bits; with lr 0.01 five such steps part by a few roundings of weights
    # around 0.4, whose last bit is 0.002.
    assert difference(ours, theirs) <= 0.01


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_payload_is_that_of_data_parallelism_and_more_if_stage_2_accumulates(world, stage, accumulate):
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
    zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm, stage, lr=0.1)
    flat = sum(bucket.shards.length * world.size for bucket in zero._buckets)
    with dtlib.trace() as trace:
        for _ in range(accumulate):
            model(torch.randn(4, 7)).sum().backward()
        zero.step()
    once = 4 * flat * (world.size - 1) // world.size  # of float32
    assert trace.sent("reduce_scatter")[1] == once * (accumulate if stage == 2 else 1)
    assert trace.sent("all_gather")[1] == once
    parameters = sum(p.numel() for p in model.parameters())
    assert flat - parameters == sum(bucket.shards.padding for bucket in zero._buckets) < world.size
    # Which parameters were used is a line of its own: a byte a parameter, two for batch_size; at stage 2 in each pass.
    assert trace.sent("all_reduce")[1] <= 2 * (4 + 2) * (accumulate if stage == 2 else 1)


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_groups_schedulers_and_closures(world, stage):
    def build_both():
        model = build("plain")
        groups = [
            {"params": [model.first.weight], "lr": 0.2, "weight_decay": 0.1},
            {"params": [model.first.bias]},  # frozen: a group of nothing
            {"params": [*model.second.parameters(), *model.unused.parameters()]},
        ]
        return model, groups

    data = batches("plain", STEPS, 4 * world.size)
    reference, groups = build_both()
    plain = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    ours, groups = build_both()
    zero = ZeroOptimizer(groups, torch.optim.SGD, world.comm, stage, lr=0.1, momentum=0.9)
    assert [{**g, "params": 0} for g in zero.param_groups] == [{**g, "params": 0} for g in plain.param_groups]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (plain, zero)]
    for batch in data:
        plain.zero_grad()
        loss_of(reference, batch).backward()
        plain.step()

        def closure(batch=batch):
            zero.zero_grad()
            loss = loss_of(ours, slice_of(batch, world.rank, world.size))
            loss.backward()
            return loss

        assert zero.step(closure).item() > 0
        for schedule in schedules:
            schedule.step()
    assert difference(ours, reference) <= 1e-12


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_group_is_added_and_parameters_frozen_before_are_refused(world, stage):
    data = batches("plain", 6, 4 * world.size)
    reference, ours = build("plain"), build("plain")
    plain = torch.optim.SGD(reference.second.parameters(), lr=0.1, momentum=0.9)
    zero = ZeroOptimizer(ours.second.parameters(), torch.optim.SGD, world.comm, stage, lr=0.1, momentum=0.9)
    for step, batch in enumerate(data):
        if step == 3:
            plain.add_param_group({"params": [reference.first.weight], "lr": 0.3})
            zero.add_param_group({"params": [ours.first.weight], "lr": 0.3})
        plain.zero_grad(), zero.zero_grad()
        ours.zero_grad()
        loss_of(reference, batch).backward()
        plain.step()
        loss_of(ours, slice_of(batch, world.rank, world.size)).backward()
        zero.step()
    assert difference(ours, reference) <= 1e-12
    loss_of(ours, data[0]).backward()
    with pytest.raises(DtlibError, match="cannot be added while gradients wait"):
        zero.add_param_group({"params": [ours.first.bias]})
    zero.zero_grad()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    zero = ZeroOptimizer(frozen.named_parameters(), torch.optim.SGD, world.comm, stage)
    zero.step()  # nothing to train
    assert zero.clip_grad_norm_(1.0) == 0
    zero.zero_grad()
    frozen.requires_grad_(True)
    frozen(torch.ones(1, 2)).sum().backward()
    with pytest.raises(DtlibError, match="weight was frozen when ZeroOptimizer was made"):
        zero.step()
    model = nn.Linear(2, 2)
    zero = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, world.comm, stage)
    with pytest.raises(DtlibError, match="has got other memory"):
        model.double()(torch.ones(1, 2).double()).sum().backward()
        zero.step()


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_torchs_clipping_and_scaling_are_refused_and_other_norms_are_those_of_one_process(world, stage):
    batch = batches("plain", 1, 4 * world.size)[0]
    ours = build("plain")
    zero = ZeroOptimizer(ours.parameters(), torch.optim.SGD, world.comm, stage, lr=0.1)
    for norm_type in (1, 3, float("inf")):
        reference = build("plain")
        reference.load_state_dict(ours.state_dict())
        loss_of(reference, batch).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1).step()
        loss_of(ours, slice_of(batch, world.rank, world.size)).backward()
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(DtlibError, match=r"optimizer.clip_grad_norm_|clip with clip_grad_norm_ of"):
                clip(ours.parameters(), 0.01)
        assert abs(zero.clip_grad_norm_(0.01, norm_type) - norm) <= 1e-12
        zero.step()
        assert difference(ours, reference) <= 1e-12
    with pytest.raises(DtlibError, match="norm_type=0"):
        zero.clip_grad_norm_(1.0, 0)
    if stage == 1:
        loss_of(ours, batch).backward()
        for ask in (lambda grad: grad.norm(), lambda grad: grad.data.norm(2), lambda grad: grad.detach().norm()):
            with pytest.raises(DtlibError, match=r"look at gradient\.clone"):
                ask(ours.second.weight.grad)
        assert ours.second.weight.grad.clone().norm() > 0
        with pytest.raises(DtlibError, match="GradScaler would look"):
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            scaler.unscale_(zero)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_what_scripts_do_between_steps(world, stage):
    batch = batches("plain", 1, 8)[0]
    ours, reference = build("plain"), build("plain")
    zero = ZeroOptimizer(ours.named_parameters(), torch.optim.SGD, world.comm, stage, lr=0.1)
    loss_of(reference, batch).backward()
    loss_of(ours, slice_of(batch, world.rank, 2)).backward(create_graph=True)
    zero.step()
    torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1).step()
    assert difference(ours, reference) <= 1e-12
    # Values written into 16 bits reach the masters, which would write over them.
    ours, other = build("plain", torch.bfloat16), build("plain", torch.bfloat16, seed=5)
    zero = ZeroOptimizer(ours.named_parameters(), torch.optim.SGD, world.comm, stage, lr=1e-6)
    ours.load_state_dict(other.state_dict())
    loss_of(ours, (batch[0].bfloat16(), batch[1])).backward()
    zero.step()
    assert difference(ours, other) == 0
    if stage == 2:
        ours.second.weight.grad = torch.ones_like(ours.second.weight)
        with pytest.raises(DtlibError, match=r"second\.weight has a gradient that did not come"):
            zero.step()


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_batch_size_on_some_ranks_only_is_refused_on_all(world, stage):
    data = batches("plain", 4, 4 * world.size)
    reference, ours = build("plain"), build("plain")
    train_alone(reference, optimizer_of(reference, "sgd"), data, world.size, accumulate=2)
    kind, settings = CLASSES["sgd"]
    zero = ZeroOptimizer(ours.parameters(), kind, world.comm, stage, **settings)
    zero.batch_size = 4 if world.rank else None
    with pytest.raises(DtlibError, match="on some ranks only"):
        loss_of(ours, slice_of(data[0], world.rank, world.size)).backward()
        zero.step()
    zero.zero_grad()
    ours.zero_grad()
    zero.batch_size = 4  # and all goes on; averages of several passes are weighted one by one
    assert difference(train(ours, zero, data, world.comm, accumulate=2), reference) <= 1e-12


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_whole_state_is_that_of_one_optimizer(world, stage, dtype):
    data = batches("plain", 6, 4 * world.size, dtype)
    kind, settings = CLASSES["adamw"]
    ours, other, reference = build("plain", dtype), build("plain", dtype, seed=5), build("plain", dtype)
    zero = ZeroOptimizer(ours.parameters(), kind, world.comm, stage, **settings)
    train(ours, zero, data[:3], world.comm)
    to = world.size - 1
    zero.consolidate_state_dict(to=to)
    assert ("param_groups" in zero.state_dict()) == (world.rank == to)
    whole = world.comm.broadcast_object(zero.state_dict(), to)
    fresh = ZeroOptimizer(other.parameters(), kind, world.comm, stage, **{**settings, "lr": 1.0})
    other.load_state_dict(ours.state_dict())
    fresh.load_state_dict(copy.deepcopy(whole))
    assert fresh.param_groups[0]["lr"] == settings["lr"]
    if dtype == torch.float64:
        plain = kind(reference.parameters(), **settings)
        plain.load_state_dict(copy.deepcopy(whole))
        train_alone(reference, plain, data[:3], world.size)
        reference.load_state_dict(ours.state_dict())
        plain.load_state_dict(copy.deepcopy(whole))
        train_alone(reference, plain, data[3:], world.size)
    for model, optimizer in ((ours, zero), (other, fresh)):
        train(model, optimizer, data[3:], world.comm)
    assert "rank" in zero.state_dict()
    assert difference(ours, other) == 0
    if dtype == torch.float64:
        assert difference(ours, reference) <= 1e-12
        plain.zero_grad()
        fresh.load_state_dict(plain.state_dict())  # from one process to many


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_uneven_batches_and_a_rank_without_samples(world, stage):
    count = 3 * world.size
    data = batches("plain", STEPS, count)
    reference = build("plain")
    train_alone(reference, optimizer_of(reference, "sgd"), data, 1)
    ours = build("plain")
    kind, settings = CLASSES["sgd"]
    zero = ZeroOptimizer(ours.parameters(), kind, world.comm, stage, **settings)
    for x, y in data:
        # The last rank has nothing; the others share the samples unevenly.
        edges = [count * r // (2 * world.size - 2) for r in range(world.size - 1)] + [count, count]
        mine = slice(edges[world.rank], edges[world.rank + 1])
        zero.batch_size = len(x[mine])
        if zero.batch_size:
            loss_of(ours, (x[mine], y[mine])).backward()
        zero.step()
    assert difference(ours, reference) <= 1e-12


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_every_elementwise_optimizer(world, stage):
    data = batches("plain", 3, 4 * world.size)
    for kind in ELEMENTWISE:
        reference, ours = build("plain"), build("plain")
        plain = kind([p for p in reference.parameters() if p.requires_grad])
        train_alone(reference, plain, data, world.size)
        train(ours, ZeroOptimizer(ours.parameters(), kind, world.comm, stage), data, world.comm)
        # Some take the sign or a root of gradients near zero: their default eps magnifies rounding.
        assert difference(ours, reference) <= 1e-8, kind


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_on_a_process_group_an_mpi4py_communicator_and_an_emulated_network(world, stage):
    from mpi4py import MPI

    data = batches("transformer", 3, 8)
    reference = build("transformer")
    train_alone(reference, optimizer_of(reference, "sgd"), data, 2)
    kind, settings = CLASSES["sgd"]
    slow = world.comm.emulate_network(latency=1e-4, bandwidth=1e9)
    for comm in (torch_group(world), MPI.COMM_WORLD, slow):
        ours = build("transformer")
        zero = ZeroOptimizer(ours.parameters(), kind, comm, stage, **settings)
        assert zero.progress == ("thread" if comm is slow else "inline")
        assert difference(train(ours, zero, data, world.comm), reference) <= 1e-12


class Inheriting(torch.optim.AdamW):
    """What people write to change defaults."""


class Overriding(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@on_ranks(2, 3)
def test_what_it_cannot_do_is_refused(world):
    model = nn.Linear(2, 2)
    for _ in range(2):  # torch changes a class when the first optimizer is made of it
        Inheriting(model.parameters()), Overriding(model.parameters())
        assert ZeroOptimizer(model.parameters(), Inheriting).comm is dtlib.init().comm
    for arguments, words in {
        (model.parameters, torch.optim.LBFGS, 1): "LBFGS is not known to work element by element",
        (model.parameters, torch.optim.SGD, 3): "stage 3 is fully_shard in dtlib.parallel.zero.sharded",
        (model.parameters, Overriding, 1): "Overriding is not known to work element by element",
        (nn.Linear(2, 2 + world.rank).parameters, torch.optim.SGD, 2): r"parameter 0 of group 0 is .* on rank 1",
        (nn.Linear(2, 2, bias=world.rank == 0).parameters, torch.optim.SGD, 2): "1 of group 0 is .* missing on rank 1",
        (nn.Linear(2, 2, dtype=torch.complex64).named_parameters, torch.optim.SGD, 1): "weight is complex64",
    }.items():
        parameters, kind, stage = arguments
        with pytest.raises(DtlibError, match=words):
            ZeroOptimizer(parameters(), kind, world.comm, stage)
    for stage in (1, 2):
        words = nn.Embedding(3, 2, sparse=True)
        ZeroOptimizer(words.parameters(), torch.optim.SGD, world.comm.split(world.rank), stage)
        with pytest.raises(DtlibError, match="only dense ones are averaged"):
            words(torch.tensor([1])).sum().backward()
    zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm)
    state = zero.state_dict()
    with pytest.raises(DtlibError, match=r"use dtlib\.checkpoint"):
        zero.load_state_dict({**state, "size": world.size + 1})
    with pytest.warns(UserWarning, match="offload: there is no GPU"):
        ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm, offload=True)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_state_goes_on_where_it_was(world, stage):
    data = batches("plain", 6, 8)
    kind, settings = CLASSES["adamw"]
    ours, other = build("plain"), build("plain", seed=5)
    zero = ZeroOptimizer(ours.parameters(), kind, world.comm, stage, **settings)
    train(ours, zero, data[:3], world.comm)
    fresh = ZeroOptimizer(other.parameters(), kind, world.comm, stage, **{**settings, "lr": 1.0})
    fresh.load_state_dict(copy.deepcopy(zero.state_dict()))
    other.first.bias.data.copy_(ours.first.bias)
    for model, optimizer in ((ours, zero), (other, fresh)):
        train(model, optimizer, data[3:], world.comm)
    assert difference(ours, other) == 0


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_new_optimizer_of_the_same_model_takes_over_and_an_exception_is_forgotten(world, stage):
    data = batches("plain", 4, 8)
    reference = build("plain")
    train_alone(reference, optimizer_of(reference, "sgd"), data, 2)
    ours = build("plain")
    kind, settings = CLASSES["sgd"]
    ZeroOptimizer(ours.parameters(), torch.optim.AdamW, world.comm, stage, lr=1.0)
    zero = ZeroOptimizer(ours.parameters(), kind, world.comm, stage, **settings)
    hook = ours.second.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(ours, slice_of(data[0], world.rank, 2)).backward()
    hook.remove()
    zero.zero_grad()
    assert difference(train(ours, zero, data, world.comm), reference) <= 1e-12


@pytest.mark.gpu
@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
def test_on_a_gpu_with_states_there_or_in_host_memory(world, stage, offload):
    data = [(x.to(world.device), y.to(world.device)) for x, y in batches("transformer", STEPS, 4 * world.size)]
    reference, ours = build("transformer").to(world.device), build("transformer").to(world.device)
    kind, settings = CLASSES["adamw"]
    train_alone(reference, optimizer_of(reference, "adamw"), data, world.size)
    zero = ZeroOptimizer(ours.parameters(), kind, world.comm, stage, offload=offload, **settings)
    train(ours, zero, data, world.comm)
    devices = {state["exp_avg"].device.type for state in zero.optim.state.values()}
    assert devices == {"cpu" if offload else "cuda"}
    # Kernels of a GPU may add in another order every time.
    assert difference(ours, reference, buffers=False) <= 1e-9
