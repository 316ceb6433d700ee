"""ZeRO stages 1 and 2 beside their values (test_parity.py): payload, groups, state, 16 bits and refusals."""

import copy

import pytest
import torch
from torch import nn

import dtlib
from dtlib.errors import DtlibError
from dtlib.gradients.precision import MasterWeights
from dtlib.measure.live import Live
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import ELEMENTWISE, ZeroOptimizer
from tests.cases import all_cases, refuses
from tests.models import EXACT, adamw, batches, build, difference, loss_of, sgd, slice_of, train, train_alone
from tests.ranks import on_ranks

STEPS = 3
SGD, ADAMW = {"lr": 0.1, "momentum": 0.9}, {"lr": 0.01, "eps": 1e-4}  # as in tests/models.py


def zero_of(model, comm, stage, adam=False):
    kind, settings = (torch.optim.AdamW, ADAMW) if adam else (torch.optim.SGD, SGD)
    return ZeroOptimizer(model.named_parameters(), kind, comm, stage, **settings)


@on_ranks(2, 3)
def test_a_gradient_stays_if_a_later_pass_has_none_and_may_be_given_by_hand(world):
    for stage in (1, 2):
        always, once = (nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(2))
        for layer in (always, once):
            nn.init.zeros_(layer.weight)
        parameters = [always.weight, once.weight]
        zero = ZeroOptimizer(parameters, torch.optim.SGD, world.comm, stage, lr=1.0)
        x = torch.full((1, 2), world.rank + 1.0, dtype=torch.float64)
        (always(x) + once(x)).sum().backward()
        always(x).sum().backward()
        zero.step()
        mean = (world.size + 1) / 2
        assert (always.weight == -2 * mean).all() and (once.weight == -mean).all(), stage
        if stage == 1:
            once.weight.grad = torch.full((2, 2), world.rank + 1.0, dtype=torch.float64)
            zero.step()
            assert (always.weight == -2 * mean).all() and (once.weight == -2 * mean).all()


@on_ranks(2, 3)
def test_bfloat16_steps_on_float32_masters_like_data_parallelism(world):
    comm, data = world.comm, batches("plain", STEPS, 4 * world.size, torch.bfloat16)
    theirs = build("plain", torch.bfloat16)
    ddp, masters = DataParallel(theirs, comm), MasterWeights(p for p in theirs.parameters() if p.requires_grad)
    peer = torch.optim.AdamW(masters.masters, **ADAMW)
    for batch in data:
        loss_of(ddp, slice_of(batch, comm.rank, comm.size)).backward()
        masters.take_gradients()
        peer.step()
        masters.copy_to_parameters()
        peer.zero_grad()
        theirs.zero_grad()
    for stage in (1, 2):
        ours = build("plain", torch.bfloat16)
        zero = zero_of(ours, comm, stage, adam=True)
        assert {master.dtype for master in zero.masters.masters} == {torch.float32}
        # The two add in another order and round to 8 bits; with lr 0.01 five such steps part by a few roundings of
        # weights around 0.4, whose last bit is 0.002.
        assert difference(train(ours, zero, data, comm), theirs) <= 0.01, stage


@on_ranks(2, 3, 4)
def test_payload_is_that_of_data_parallelism_and_more_if_stage_2_accumulates(world):
    with all_cases() as case:
        for stage, accumulate in ((1, 1), (1, 3), (2, 1), (2, 3)):
            model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
            zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm, stage, lr=0.1)
            flat = sum(bucket.shards.length * world.size for bucket in zero._buckets)
            with dtlib.trace() as trace:
                for _ in range(accumulate):
                    model(torch.randn(4, 7)).sum().backward()
                zero.step()
            once = 4 * flat * (world.size - 1) // world.size  # of float32
            times = accumulate if stage == 2 else 1
            parameters = sum(p.numel() for p in model.parameters())
            with case(stage, accumulate):
                assert trace.sent("reduce_scatter")[1] == once * times
                assert trace.sent("all_gather")[1] == once
                assert flat - parameters == sum(bucket.shards.padding for bucket in zero._buckets)
                assert all(bucket.shards.padding < world.size for bucket in zero._buckets)
                # Which parameters were used is a line of its own: a byte for each, and two for each flag: the forward
                # pass, and eight that compare values in the first passes; at stage 2 in each pass.
                assert trace.sent("all_reduce")[1] <= 2 * (4 + 2 * 9) * times


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
    assert difference(ours, reference) <= EXACT


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_groups_added_later_and_parameters_frozen_before_are_refused(world, stage):
    ours = build("plain")
    zero = ZeroOptimizer(ours.second.parameters(), torch.optim.SGD, world.comm, stage, lr=0.1)
    refuses("create a new one with all groups", zero.add_param_group, {"params": [ours.first.weight]})
    frozen = nn.Linear(2, 2).requires_grad_(False)
    zero = ZeroOptimizer(frozen.named_parameters(), torch.optim.SGD, world.comm, stage)
    zero.step()  # nothing to train
    assert zero.clip_grad_norm_(1.0) == 0
    zero.zero_grad()
    frozen.requires_grad_(True)
    frozen(torch.ones(1, 2)).sum().backward()
    refuses("weight was frozen when ZeroOptimizer was created", zero.step)
    model = nn.Linear(2, 2)
    zero = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, world.comm, stage)
    with pytest.raises(DtlibError, match="has other memory"):
        model.double()(torch.ones(1, 2).double()).sum().backward()
        zero.step()


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_torchs_clipping_and_scaling_are_refused_and_other_norms_are_those_of_one_process(world, stage):
    batch = batches("plain", 1, 4 * world.size)[0]
    ours = build("plain")
    zero = ZeroOptimizer(ours.parameters(), torch.optim.SGD, world.comm, stage, lr=0.1)
    reference = build("plain")
    reference.load_state_dict(ours.state_dict())
    loss_of(reference, batch).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1).step()
    loss_of(ours, slice_of(batch, world.rank, world.size)).backward()
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        refuses(r"optimizer.clip_grad_norm_|clip with clip_grad_norm_ of", clip, ours.parameters(), 0.01)
    if stage == 2:
        left = next(parameter.grad for parameter in ours.parameters() if parameter.requires_grad)
        refuses("under ZeRO it left", left.abs)
        refuses("under ZeRO it left", torch.optim.SGD(ours.parameters(), lr=0.1).step)
        left.zero_()  # as zero_grad(set_to_none=False) of a model does
        with Live():  # autograd adds to placeholders, also where a dispatch mode looks
            loss_of(ours, slice_of(batch, world.rank, world.size)).backward()
        zero.zero_grad()
        loss_of(ours, slice_of(batch, world.rank, world.size)).backward()
    assert abs(zero.clip_grad_norm_(0.01) - norm) <= EXACT
    zero.step()
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert difference(ours, reference) <= EXACT
    if stage == 1:
        loss_of(ours, batch).backward()
        for ask in (lambda grad: grad.norm(), lambda grad: grad.data.norm(2), lambda grad: grad.detach().norm()):
            refuses(r"use gradient\.clone", ask, ours.second.weight.grad)
        assert ours.second.weight.grad.clone().norm() > 0
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        refuses("GradScaler checks", scaler.unscale_, zero)


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
    assert difference(ours, reference) <= EXACT
    # Values written into 16 bits reach the masters, which would write over them.
    ours, other = build("plain", torch.bfloat16), build("plain", torch.bfloat16, seed=5)
    zero = ZeroOptimizer(ours.named_parameters(), torch.optim.SGD, world.comm, stage, lr=1e-6)
    ours.load_state_dict(other.state_dict())
    loss_of(ours, (batch[0].bfloat16(), batch[1])).backward()
    zero.step()
    assert difference(ours, other) == 0
    if stage == 2:
        ours.second.weight.grad = torch.ones_like(ours.second.weight)
        refuses(r"second\.weight has a gradient that did not come", zero.step)


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_backward_pass_after_the_gradients_were_reduced_is_refused(world, stage):
    data = batches("plain", 4, 4 * world.size)
    for dtype in (torch.bfloat16, torch.float64):
        ours = build("plain").to(dtype)
        zero = zero_of(ours, world.comm, stage)
        mine = [(x.to(dtype), y) for x, y in (slice_of(batch, world.rank, world.size) for batch in data)]
        loss_of(ours, mine[0]).backward()
        zero.clip_grad_norm_(1.0)
        zero.reduce_gradients()  # nothing is left to do
        loss_of(ours, mine[1]).backward()
        refuses("step.. would lose its gradients", zero.step)
        zero.zero_grad()
    reference = build("plain")
    train_alone(reference, sgd(reference), data, accumulate=2)
    assert difference(train(ours, zero, data, world.comm, accumulate=2), reference) <= EXACT


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_new_optimizer_goes_on_from_the_state_of_this_rank(world, stage):
    for dtype in (torch.float64, torch.bfloat16):
        data = batches("plain", 6, 4 * world.size, dtype)
        ours = build("plain", dtype)
        zero = zero_of(ours, world.comm, stage, adam=True)
        train(ours, zero, data[:3], world.comm)
        twin, state = copy.deepcopy(ours), copy.deepcopy(zero.state_dict())
        fresh = ZeroOptimizer(twin.parameters(), torch.optim.AdamW, world.comm, stage, **{**ADAMW, "lr": 1.0})
        fresh.load_state_dict(state)
        assert fresh.param_groups[0]["lr"] == ADAMW["lr"]
        for model, optimizer in ((ours, zero), (twin, fresh)):
            train(model, optimizer, data[3:], world.comm)
        assert difference(ours, twin) == 0
    refuses("use dtlib.checkpoint", zero.load_state_dict, torch.optim.AdamW(ours.parameters()).state_dict())


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_state_that_is_saved_after_the_schedule_has_its_rate(world, stage):
    model = nn.Linear(2, 1)

    def made():
        zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm, stage, lr=1.0)
        return zero, torch.optim.lr_scheduler.StepLR(zero, 1, 0.5)

    zero, schedule = made()
    zero.step()
    schedule.step()
    states = zero.state_dict(), schedule.state_dict()
    later, its_schedule = made()
    later.load_state_dict(states[0])
    its_schedule.load_state_dict(states[1])
    assert later.param_groups[0]["lr"] == 0.5


@on_ranks(2, 3)
def test_a_rank_without_samples(world):
    count = 3 * world.size
    data = batches("plain", STEPS, count)
    reference = build("plain")
    train_alone(reference, sgd(reference), data)
    for stage in (1, 2):
        ours = build("plain")
        zero = zero_of(ours, world.comm, stage)
        for x, y in data:
            # The last rank has nothing; the others share the samples unevenly.
            edges = [count * r // (2 * world.size - 2) for r in range(world.size - 1)] + [count, count]
            mine = slice(edges[world.rank], edges[world.rank + 1])
            if samples := len(x[mine]):
                (loss_of(ours, (x[mine], y[mine])) * world.size * samples / len(x)).backward()
            zero.step()
        assert difference(ours, reference) <= EXACT, stage


@on_ranks(2, 3, slow=(3,))
def test_every_elementwise_optimizer(world):
    data = batches("plain", 3, 4 * world.size)
    with all_cases() as case:
        for kind in ELEMENTWISE:
            reference = build("plain")
            train_alone(reference, kind([p for p in reference.parameters() if p.requires_grad]), data)
            for stage in (1, 2):
                ours = build("plain")
                train(ours, ZeroOptimizer(ours.parameters(), kind, world.comm, stage), data, world.comm)
                with case(kind.__name__, stage):
                    # Some take the sign or a root of gradients near zero: their default eps magnifies rounding.
                    assert difference(ours, reference) <= 1e-8


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
        (model.parameters, torch.optim.LBFGS, 1): "but LBFGS may need whole parameters",
        (model.parameters, torch.optim.SGD, 3): "stage 3 is fully_shard in dtlib.parallel.zero.sharded",
        (model.parameters, Overriding, 1): "but Overriding may need whole parameters",
        (nn.Linear(2, 2 + world.rank).parameters, torch.optim.SGD, 2): r"parameter 0 of group 0 is .* on rank 1",
        (nn.Linear(2, 2, bias=world.rank == 0).parameters, torch.optim.SGD, 2): "1 of group 0 is .* missing on rank 1",
        (nn.Linear(2, 2, dtype=torch.complex64).named_parameters, torch.optim.SGD, 1): "weight is complex64",
    }.items():
        parameters, kind, stage = arguments
        refuses(words, ZeroOptimizer, parameters(), kind, world.comm, stage)
    # A refused model is as before: no group was flattened.
    memory = {parameter.data_ptr() for parameter in model.parameters()}
    groups = [{"params": [model.weight]}, {"params": [nn.Parameter(torch.ones(2 + world.rank))]}]
    refuses("parameter 0 of group 1 is", ZeroOptimizer, groups, torch.optim.SGD, world.comm)
    words = "choose 'inline' or 'thread'"
    refuses(words, ZeroOptimizer, model.parameters(), torch.optim.SGD, world.comm, progress="often")
    assert {parameter.data_ptr() for parameter in model.parameters()} == memory
    for stage in (1, 2):
        words = nn.Embedding(3, 2, sparse=True)
        ZeroOptimizer(words.parameters(), torch.optim.SGD, world.comm.split(world.rank), stage)
        with pytest.raises(DtlibError, match="only dense ones are averaged"):
            words(torch.tensor([1])).sum().backward()
    zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm)
    state = zero.state_dict()
    refuses(r"use dtlib\.checkpoint", zero.load_state_dict, {**state, "size": world.size + 1})
    with pytest.warns(UserWarning, match="offload: there is no GPU"):
        ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm, offload=True)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_new_optimizer_of_the_same_model_takes_over_and_an_exception_is_forgotten(world, stage):
    data, reference, ours = batches("plain", 4, 8), build("plain"), build("plain")
    train_alone(reference, sgd(reference), data)
    zero_of(ours, world.comm, stage, adam=True)
    zero = zero_of(ours, world.comm, stage)
    hook = ours.second.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(ours, slice_of(data[0], world.rank, 2)).backward()
    hook.remove()
    zero.zero_grad()
    assert difference(train(ours, zero, data, world.comm), reference) <= EXACT


@pytest.mark.gpu
@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
def test_on_a_gpu_with_states_there_or_in_host_memory(world, stage, offload):
    data = [(x.to(world.device), y.to(world.device)) for x, y in batches("transformer", STEPS, 4 * world.size)]
    reference, ours = build("transformer").to(world.device), build("transformer").to(world.device)
    train_alone(reference, adamw(reference), data)
    zero = ZeroOptimizer(ours.parameters(), torch.optim.AdamW, world.comm, stage, offload=offload, **ADAMW)
    train(ours, zero, data, world.comm)
    devices = {state["exp_avg"].device.type for state in zero.optim.state.values()}
    assert devices == {"cpu" if offload else "cuda"}
    # Kernels of a GPU may add in another order every time.
    assert difference(ours, reference, buffers=False) <= 1e-9
