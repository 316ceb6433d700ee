"""Mistakes of a learner that would train on with wrong numbers: each is refused on every rank, or does no harm."""

import copy
import tempfile
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import dtlib
from dtlib import checkpoint
from dtlib.errors import DtlibError
from dtlib.parallel.compression import TopKState, top_k_hook
from dtlib.parallel.context import ContextParallel
from dtlib.parallel.context.attention import Sequence, ring_attention, ulysses_attention
from dtlib.parallel.data import DataParallel
from dtlib.parallel.expert import MixtureOfExperts
from dtlib.parallel.local import DiLoCo, LocalSGD
from dtlib.parallel.pipeline import LayerSpec, PipelineModule, PipelineStage
from dtlib.parallel.tensor import ParallelMLP, sum_over_ranks
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.sharded import fully_shard
from dtlib.training.run import train
from tests.cases import all_cases
from tests.models import EXACT, apart
from tests.ranks import on_ranks
from tests.test_any_mesh import config_of

CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def engine_of(model=None, **config):
    return dtlib.initialize(model=model or net(), config={**CONFIG, **config})[0]


def engine_step(engine, x=X):
    loss = engine(x.to(next(engine.module.parameters()).dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()


def all_refuse(world, mistakes: dict) -> None:
    """Each mistake is refused on every rank, with its words; and ranks are in step afterwards."""
    with all_cases() as case:
        for name, (words, make) in mistakes.items():
            world.comm.time_limit = 20
            try:
                with case(name), pytest.raises(DtlibError, match=words):
                    make(world)
            finally:
                world.comm.time_limit = None
            world.comm.barrier()


# A wrapper over the wrong axis, and a wrapper in a wrapper


def tensor_parallel(world):
    return nn.Sequential(ParallelMLP(6, 8, world.comm), nn.Linear(6, 3))


def stage_two_below(world):
    model = net()
    ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm, stage=2, lr=0.1)
    DataParallel(model, world.comm)


WRONG_AXIS = {
    "engine over tensor shards": ("shard of a tensor-parallel", lambda world: engine_of(tensor_parallel(world))),
    "data": ("shard of a tensor-parallel", lambda world: DataParallel(tensor_parallel(world), world.comm)),
    "zero": ("shard of a tensor-parallel",
             lambda world: ZeroOptimizer(tensor_parallel(world).parameters(), torch.optim.SGD, world.comm, lr=0.1)),
    "fully_shard": ("shard of a tensor-parallel", lambda world: fully_shard(tensor_parallel(world), world.comm)),
    "local": ("shard of a tensor-parallel",
              lambda world: LocalSGD(world.comm, model := tensor_parallel(world), sgd(model), 4)),
    "data in data": ("in a DataParallel", lambda world: DataParallel(DataParallel(net(), world.comm), world.comm)),
    "data over stages": ("stages of the pipeline", lambda world: PipelineStage(
        DataParallel(net(), world.comm), world.rank, 2, world.comm)),
    "stage 2 below": ("ZeroOptimizer", stage_two_below),
}  # fmt: skip


@on_ranks(2)
def test_wrappers_over_the_wrong_axis(world):
    all_refuse(world, WRONG_AXIS)


# A decision that each rank takes alone


def by_rank(world, same, other):
    return other if world.rank == 1 else same


def compressed(world):
    model = DataParallel(net(), world.comm)
    model.register_comm_hook(TopKState(world.comm, by_rank(world, 0.5, 0.3)), top_k_hook)


def a_step_left_out(world):
    model = DataParallel(net(), world.comm)
    optimizer = sgd(model)
    for step in range(4):
        loss = model(X * (step + 1)).square().mean()
        if step == 1 and world.rank == 1:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def changed_later(world, change):
    model = DataParallel(net(), world.comm)
    optimizer = sgd(model)
    for step in range(14):
        if step == 5 and world.rank == 1:
            change(model.module, optimizer)
        optimizer.zero_grad()
        model(X * (step + world.rank)).square().mean().backward()
        optimizer.step()


def zero_rates(world, stage):
    model = net()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm, stage, lr=by_rank(world, 0.1, 0.2))
    model(X).square().mean().backward()
    optimizer.step()


ALONE = {
    "weights, later": ("a step", lambda w: changed_later(w, lambda m, _: m.load_state_dict(net(7).state_dict()))),
    "rate, later": ("schedule", lambda world: changed_later(world, lambda _, o: o.param_groups[0].update(lr=0.01))),
    **{f"rates of stage {n}": ("learning rates", lambda world, n=n: zero_rates(world, n)) for n in (1, 2)},
    "length of the data": (r"len\(training_data\)", lambda world: dtlib.initialize(
        model=net(), config=CONFIG, training_data=[(one, 0) for one in torch.zeros(8 + world.rank, 6)])),
    "fp16 with tensor shards": ("fp16", lambda world: dtlib.initialize(
        model=tensor_parallel(world), config={**CONFIG, "fp16": {"enabled": True}}, comm=world.comm.split(world.rank))),
    "fp16 with experts": ("fp16", lambda world: dtlib.initialize(
        model=nn.Sequential(MixtureOfExperts(6, [nn.Linear(6, 6)], world.comm)),
        config={**CONFIG, "fp16": {"enabled": True}}, comm=world.comm)),
    "sync_every": ("sync_every",
                   lambda world: LocalSGD(world.comm, model := net(), sgd(model), by_rank(world, 4, 3))),
    "fraction": ("fraction", compressed),
    "accumulation": (
        "train_batch_size differs",
        lambda world: engine_of(gradient_accumulation_steps=1 + world.rank),
    ),
    "a step left out": ("backward pass", a_step_left_out),
}  # fmt: skip


@on_ranks(2)
def test_decisions_that_a_rank_takes_alone(world):
    all_refuse(world, ALONE)


# A model that is changed after wrapping


def loaded_on_rank_0(world, make):
    trained = make(model := net())
    if world.rank == 0:
        model.load_state_dict(net(7).state_dict())
    return trained


def data_parallel_loaded(world):
    model = loaded_on_rank_0(world, lambda model: DataParallel(model, world.comm))
    model(X).square().mean().backward()


def zero_loaded(world, stage):
    model = net()
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm, stage=stage, lr=0.1)
    if world.rank == 0:
        model.load_state_dict(net(7).state_dict())
    model(X).square().mean().backward()
    optimizer.step()


def replaced(world, stage):
    engine = engine_of(zero_optimization={"stage": stage})
    engine_step(engine)
    engine.module[2] = nn.Linear(8, 3)
    engine_step(engine)


def local_loaded(world):
    local = loaded_on_rank_0(world, lambda model: LocalSGD(world.comm, model, sgd(model), 4))
    local.step()


def saved_within_a_round(world):
    model = net()
    local = LocalSGD(world.comm, model, sgd(model), 4)
    model(X * (world.rank + 1)).square().mean().backward()
    local.step()
    checkpoint.save(new_folder(world), model)


def new_folder(world):
    return world.comm.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)


CHANGED = {
    "loaded on one rank": ("differ between ranks", data_parallel_loaded),
    "engine, loaded on one rank": ("differ between ranks", lambda world: engine_step(
        loaded_on_rank_0(world, engine_of))),
    "stage 1 loaded": ("differ between ranks", lambda world: zero_loaded(world, 1)),
    "stage 2 loaded": ("differ between ranks", lambda world: zero_loaded(world, 2)),
    **{f"replaced, {n}": ("or replaced", lambda world, stage=n: replaced(world, stage)) for n in range(4)},
    "local, loaded on one rank": ("differ between ranks", local_loaded),
    "saved within a round": ("differ", saved_within_a_round),
}  # fmt: skip


@on_ranks(2)
def test_models_that_are_changed_after_wrapping(world):
    all_refuse(world, CHANGED)
    model = nn.Linear(1, 1, bias=False)
    local = DiLoCo(world.comm, model, sgd(model, 0.0), torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9), 2)
    model.load_state_dict({"weight": torch.tensor([[5.0]])})  # on all ranks
    for _ in range(4):
        model(torch.ones(1, 1)).sum().backward()
        local.step()
    assert float(model.weight) == 5


# The same thing twice, and copies


def experts_twice(world):
    experts = [nn.Linear(6, 6)]
    MixtureOfExperts(6, experts, world.comm)
    MixtureOfExperts(6, experts, world.comm)


def data_then_stage_2(world):
    model = net()
    engine_of(model)
    engine_of(model, zero_optimization={"stage": 2})


def stage_3_then_1(world):
    model = net()
    engine_of(model, zero_optimization={"stage": 3})
    engine_of(model, zero_optimization={"stage": 1})


TWICE = {
    "experts": ("already in a MixtureOfExperts", experts_twice),
    "data, then stage 2": ("already averaged", data_then_stage_2),
    "stage 3, then 1": ("has put shards", stage_3_then_1),
    "engine copied": ("copied", lambda world: copy.deepcopy(engine_of())),
    "experts copied": ("copied", lambda world: copy.deepcopy(MixtureOfExperts(6, [nn.Linear(6, 6)], world.comm))),
    "context copied": ("copied", lambda world: copy.deepcopy(ContextParallel(Attention(), world.comm))),
    "experts saved": (
        "state_dict",
        lambda world: torch.save(MixtureOfExperts(6, [nn.Linear(6, 6)], world.comm), "/dev/null"),
    ),
}


@on_ranks(2)
def test_the_same_thing_twice_and_copies(world):
    all_refuse(world, TWICE)
    for stage in range(3):
        copied = copy.deepcopy(engine_of(zero_optimization={"stage": stage}).module)
        assert apart(copied(X), net()(X)) == 0
    for again in (copy.deepcopy, lambda norm: sum_over_ranks(norm, world.comm)):
        norm = again(sum_over_ranks(nn.LayerNorm(4), world.comm))
        norm(torch.eye(4)).sum().backward()
        assert (norm.bias.grad == 4 * world.size).all()


# The wrong call


def plain_backward(world):
    engine = engine_of()
    engine(X).square().mean().backward()
    engine.step()


def zero_grad_by_micro_batch(world, whose):
    engine = engine_of(gradient_accumulation_steps=2)
    for _ in range(2):
        {"model": engine.module, "engine": engine, "optimizer": engine.optimizer}[whose].zero_grad()
        engine_step(engine)


def two_backwards(world):
    engine = engine_of(gradient_accumulation_steps=2)
    engine.backward(engine(X).square().mean())
    engine.backward(engine(X).square().mean())


def inner_step(world):
    model = net()
    optimizer = sgd(model)
    local = LocalSGD(world.comm, model, optimizer, 4)  # noqa: F841  # it is not called
    model(X).square().mean().backward()
    optimizer.step()


def part_by_hand(world):
    model = fully_shard(net(), world.comm)
    model[0](X)


WRONG_CALL = {
    "loss.backward()": (r"engine.backward\(loss\)", plain_backward),
    "step() after two micro-batches": (r"step\(\) after each", two_backwards),
    **{f"zero_grad of {whose}": ("zero_grad", lambda world, whose=whose: zero_grad_by_micro_batch(world, whose))
       for whose in ("model", "engine", "optimizer")},
    "the inner optimizer's step": ("LocalSGD", inner_step),
    "a part of fully_shard": ("whole model", part_by_hand),
}  # fmt: skip


@on_ranks(2)
def test_the_wrong_call(world):
    all_refuse(world, WRONG_CALL)
    with all_cases() as case:
        for steps in (4, 5, 6):
            model = net()
            local = LocalSGD(world.comm, model, sgd(model), 4)
            for step in range(steps):
                model(X * (world.rank + step)).square().mean().backward()
                local.step()
            local.finish()
            values = world.comm.all_gather_object([p.tolist() for p in model.parameters()])
            with case(steps):
                assert values[0] == values[1]


# Tokens of other ranks


class Attention(nn.Module):
    def __init__(self, extra=None, inside=False):
        super().__init__()
        self.qkv, self.extra, self.inside = nn.Linear(8, 24), extra or nn.Identity(), inside

    def forward(self, x, positions=None):
        if self.inside:
            x = x + torch.arange(x.shape[1])[:, None]
        if positions is not None:
            x = x + positions[:, None]
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        return self.extra(functional.scaled_dot_product_attention(q, k, v, is_causal=True)).transpose(1, 2).flatten(2)


TEXT = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(1))


class TwoLengths(nn.Module):
    def forward(self, x):
        for n in (5, 4):
            functional.scaled_dot_product_attention(*[x[:, None, :n]] * 3)
        return x


class Settings(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.settings = settings

    def forward(self, x, y=None):
        y = x if y is None else y
        return functional.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None], **self.settings)


def context(world, module=None):
    torch.manual_seed(0)
    return ContextParallel(Attention() if module is None else module, world.comm)


TOKENS = {
    "whole sequences": (r"split\(x\)", lambda world: context(world)(TEXT)),
    "positions inside": (r"positions\(length\)",
                         lambda world: (m := context(world, Attention(inside=True)))(m.split(TEXT))),
    "the module itself": ("ContextParallel", lambda world: context(world).module(TEXT)),
    **{type(layer).__name__: ("only this rank's tokens", lambda world, layer=layer: context(world, Attention(layer)))
       for layer in (nn.GroupNorm(1, 2), nn.InstanceNorm1d(2), nn.AvgPool1d(1), nn.ConvTranspose1d(2, 2, 1))},
    "jit": ("only this rank's tokens", lambda world: context(world, Attention(torch.jit.script(nn.Linear(4, 4))))),
    "scale": ("scale", lambda world: (m := context(world, Settings(scale=0.5 + world.rank)))(m.split(TEXT))),
    "causal": ("is_causal", lambda world: (m := context(world, Settings(is_causal=world.rank == 0)))(m.split(TEXT))),
    "batch of keys": ("queries of", lambda world: (m := context(world, Settings()))(m.split(TEXT), m.split(TEXT[:1]))),
}  # fmt: skip


@on_ranks(2)
def test_tokens_of_other_ranks(world):
    all_refuse(world, TOKENS)
    model = ContextParallel(TwoLengths(), world.comm, "contiguous")  # ranks have 4 and 5 tokens, then 4 and 4
    here = TEXT[:1, 4 * world.rank : 4 + 5 * world.rank]
    world.comm.time_limit = 20
    for _ in range(5):
        model(here)
    world.comm.time_limit = None
    model = context(world, torch.compile(Attention(), backend="eager"))
    expected = Attention()
    expected.load_state_dict(model.module._orig_mod.state_dict())
    assert apart(model.gather(model(model.split(TEXT))), expected(TEXT)) < 1e-6
    q = torch.randn(1, 2, world.rank, 4)  # fewer tokens than ranks
    out = ulysses_attention(q, q, q, Sequence(world.comm, 1, "contiguous", True))
    assert out.shape == q.shape


# Precision


@on_ranks(2)
def test_precision_of_a_rank_is_that_of_torch(world):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 1, 2, 32, 16) * torch.tensor([6.0, 6.0, 1.0]).view(3, 1, 1, 1, 1)).bfloat16()
    exact = functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    here = slice(16 * world.rank, 16 * world.rank + 16)
    with torch.autocast("cpu", torch.bfloat16):
        mine = [x[:, :, here].clone().requires_grad_() for x in (q, k, v)]
        ours = ring_attention(*mine, Sequence(world.comm, 32, "contiguous", False))
        ours.float().sum().backward()
        torchs = functional.scaled_dot_product_attention(q, k, v)
        moe = MixtureOfExperts(16, [nn.Identity()] * 4, world.comm)
        logits = moe._logits(TEXT16)
    assert apart(ours, exact[:, :, here]) <= 1.5 * apart(torchs, exact)
    assert apart(logits, TEXT16 @ moe.gate.weight.T) < 1e-6


TEXT16 = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))


@on_ranks(2)
def test_a_loss_scale_that_skips_every_step_is_told(world):
    engine = engine_of(fp16={"enabled": True, "loss_scale": 1e8})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine_step(engine)
    assert engine.skipped_steps == 1
    assert any("loss_scale" in str(one.message) for one in seen) == (world.rank == 0)


@on_ranks(2)
def test_one_norm_where_a_rank_counts_nothing(world):
    from dtlib.gradients.precision import clip_by_norm

    gradients = [torch.full((3,), 0.7, dtype=torch.float64)]
    norm = clip_by_norm(gradients, 1.0, world.comm, gradients if world.rank else [])
    assert set(world.comm.all_gather_object(norm)) == {norm} and abs(norm - 0.7 * 3**0.5) <= EXACT
    values = world.comm.all_gather_object(gradients[0].tolist())
    assert values[0] == values[1]


# Checkpoints of other meshes


@on_ranks(2)
def test_checkpoints_of_another_cut(world):
    folder = new_folder(world)
    layers = [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]
    module = PipelineModule(layers, 2, nn.functional.mse_loss)
    engine = engine_of(module, gradient_accumulation_steps=2)
    data = iter([(X, X)] * 4)
    engine.train_batch(data)
    engine.save_checkpoint(folder)
    other = engine_of(PipelineModule(layers, 1, nn.functional.mse_loss), gradient_accumulation_steps=2)

    def resumed(world):
        other.load_checkpoint(folder)

    def trained(sizes, resume):
        return train("decoder", config_of(tensor=sizes), steps=1, save=f"{folder}/tensor", resume=resume)

    trained(2, False)
    all_refuse(world, {
        "as in a pipeline": ("2 stages", resumed),
        "a stage by hand": ("each stage", lambda world: checkpoint.save(f"{folder}/hand", module)),
        "tensor 2 to 1": ("tensor1of2|tensor0of2", lambda world: trained(1, True)),
    })  # fmt: skip
