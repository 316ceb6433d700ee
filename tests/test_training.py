import json
import math
import shutil
import tempfile

import pytest
import torch
from torch import nn

import dtlib
from dtlib.errors import DtlibError
from dtlib.precision import LossScale, MasterWeights, clip_by_norm
from dtlib.training import config as configuration
from dtlib.training.config import ConfigError
from dtlib.training.data import RankLoader
from dtlib.training.rates import WarmupDecayLR, WarmupLR, linear_rule, square_root_rule
from tests.models import batches, build, difference_of_values, full_values, loss_of, part
from tests.ranks import on_ranks

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("runtime", ["dtlib", "torch"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["plain", "transformer"])
def test_the_engine_trains_like_one_process(world, runtime, stage, name):
    steps, accumulate = 4, 2
    data = batches(name, steps * accumulate, 4 * world.size)
    reference = build(name)
    optimizer = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    schedule = WarmupLR(optimizer, warmup_num_steps=3)
    for number, batch in enumerate(data):
        (loss_of(reference, batch) / accumulate).backward()
        if number % accumulate:
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    config = {
        "train_batch_size": 4 * world.size * accumulate, "gradient_accumulation_steps": accumulate, "optimizer": SGD,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, _, loader, scheduler = dtlib.initialize(model=build(name), config=config, runtime=runtime)
    for batch in data:
        engine.backward(loss_of(engine, part(batch, world.rank, world.size)))
        engine.step()
    assert difference_of_values(engine.module, reference, world.comm) <= 1e-12
    assert (engine.global_steps, engine.micro_steps, loader) == (steps, steps * accumulate, None)
    assert engine.get_lr() == scheduler.get_last_lr() == schedule.get_last_lr()
    assert engine.get_global_grad_norm() > 0


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_sixteen_bits_follow_their_float32_masters(world, kind, stage):
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": SGD, kind: {"enabled": True}}
    config["zero_optimization"] = {"stage": stage}
    engine, _, _, _ = dtlib.initialize(model=build("plain", torch.float32), config=config)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    first = None
    for batch in batches("plain", 1, 4 * world.size, dtype) * 20:
        loss = loss_of(engine, part(batch, world.rank, world.size))
        first = first if first is not None else loss.item()
        engine.backward(loss)
        engine.step()
    assert loss.item() < first
    assert {parameter.dtype for parameter in engine.module.parameters()} == {dtype}
    assert {master.dtype for master in engine._masters.masters} == {torch.float32}
    for parameter, master in zip(engine._masters.parameters, engine._masters.masters, strict=True):
        assert torch.equal(parameter, master.to(dtype))
    values = full_values(engine.module, world.comm)
    everyones = world.comm.all_gather_object([value.tolist() for value in values.values()])
    assert all(value == everyones[0] for value in everyones)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(world, stage):
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 4, "optimizer": SGD,
        "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1},
    }  # fmt: skip
    engine, *_ = dtlib.initialize(model=build("plain", torch.float32), config=config)
    before = [parameter.clone() for parameter in engine.module.parameters()]
    x, y = part(batches("plain", 1, 8, torch.float16)[0], world.rank, 2)
    engine.backward(loss_of(engine, (x * (math.inf if world.rank else 1), y)))
    engine.step()
    assert (engine.skipped_steps, engine.loss_scale()) == (1, 512)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    engine.backward(loss_of(engine, (x, y)))
    engine.step()
    assert engine.skipped_steps == 1


@on_ranks(2, 3)
def test_train_batch_takes_its_micro_batches_from_the_training_data(world):
    x = torch.arange(48.0).view(48, 1) / 48
    data = torch.utils.data.TensorDataset(x, (2 * x).clone())
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": SGD}
    engine, _, loader, _ = dtlib.initialize(model=nn.Linear(1, 1), config=config, training_data=data)
    losses = [engine.train_batch(loss_fn=nn.functional.mse_loss).item() for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]
    assert len(set(world.comm.all_gather_object(losses[-1]))) == 1
    assert loader.epoch == math.ceil(80 / len(loader))
    with pytest.raises(DtlibError, match="train_batch\\(\\) has no data"):
        dtlib.initialize(model=nn.Linear(1, 1), config=config)[0].train_batch()


def test_ranks_share_a_data_set_and_reshuffle_it_alike():
    loaders = [RankLoader(list(range(11)), 2, rank, 2, seed=3) for rank in range(2)]
    epochs = [[[int(i) for batch in loader for i in batch] for loader in loaders] for _ in range(2)]
    for parts in epochs:
        assert len(parts[0]) == len(parts[1]) == 4
        assert set(parts[0]).isdisjoint(parts[1])
    assert epochs[0] != epochs[1]


WHOLE = {"train_batch_size": 8, "optimizer": SGD}


@pytest.mark.parametrize("config,words", [
    ({**WHOLE, "train_batchsize": 8}, "train_batchsize is no key of the config: did you mean 'train_batch_size'"),
    ({**WHOLE, "fp16": {"enabeld": True}}, "fp16.enabeld is no key of the config: did you mean 'enabled'"),
    ({**WHOLE, "train_batch_size": "8"}, "train_batch_size is '8': give a number"),
    ({**WHOLE, "train_batch_size": 8.5}, "train_batch_size is 8.5: give a whole number"),
    ({**WHOLE, "train_batch_size": 0}, "train_batch_size is 0: give a number above 0"),
    ({**WHOLE, "train_batch_size": True}, "train_batch_size is True: give a number"),
    ({**WHOLE, "gradient_clipping": -1}, "gradient_clipping is -1: give 0 or more"),
    ({**WHOLE, "bf16": {"enabled": 1}}, "bf16.enabled is 1: give true or false"),
    ({**WHOLE, "bf16": True}, "bf16 is True: give a dictionary"),
    ({**WHOLE, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled and fp16.enabled are both true"),
    ({**WHOLE, "optimizer": {"params": {}}}, "optimizer.type is missing"),
    ({**WHOLE, "zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4: choose one of 0, 1, 2, 3"),
    ({**WHOLE, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
     "zero_optimization.offload_optimizer.device is 'nvme': choose one of none, cpu"),
    ({**WHOLE, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
     "needs shards: set zero_optimization.stage to 1, 2 or 3"),
    ({**WHOLE, "zero_optimization": {"overlap_comm": 1}}, "zero_optimization.overlap_comm is 1: give true or false"),
    ({"optimizer": SGD}, "train_batch_size is missing: give it, or train_micro_batch_size_per_gpu"),
    ({**WHOLE, "train_micro_batch_size_per_gpu": 3},
     "train_batch_size is 8, but train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 1 x 2 ranks is 6: "
     "make train_batch_size a multiple of 6"),
    ({**WHOLE, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
     "2 x gradient_accumulation_steps 3 x 2 ranks is 12: give train_batch_size 12, or leave one of the three out"),
    ({**WHOLE, "train_batch_size": 1}, "make train_batch_size a multiple of 2"),
    ([], "pass a dictionary, or the path of a JSON file"),
    ("nowhere.json", "cannot be read"),
])  # fmt: skip
def test_a_mistake_in_the_config_names_the_key_the_value_and_what_is_right(config, words):
    with pytest.raises(ConfigError) as raised:
        configuration.read(config, ranks=2)
    assert words in str(raised.value)


@on_ranks(1)
def test_unknown_optimizers_and_their_parameters_are_refused(world):
    for optimizer, words in {
        "Sophia": "optimizer.type is 'Sophia': choose one of Adam, AdamW, SGD",
        "SGD": "optimizer.params .*learning_rate.* do not suit SGD",
    }.items():
        config = {**WHOLE, "optimizer": {"type": optimizer, "params": {"learning_rate": 1}}}
        with pytest.raises(ConfigError, match=words):
            dtlib.initialize(model=nn.Linear(1, 1), config=config)
    with pytest.raises(ConfigError, match=r"scheduler.type is 'Cosine': choose one of WarmupLR, WarmupDecayLR"):
        dtlib.initialize(model=nn.Linear(1, 1), config={**WHOLE, "scheduler": {"type": "Cosine"}})
    with pytest.raises(ConfigError, match="optimizer is missing"):
        dtlib.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 8})
    with pytest.raises(DtlibError, match="choose one of dtlib, torch"):
        dtlib.initialize(model=nn.Linear(1, 1), config=WHOLE, runtime="jax")


@pytest.mark.parametrize("given,made", [
    ({"train_batch_size": 24}, (24, 12, 1)),
    ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (24, 4, 3)),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, (24, 4, 3)),
    ({"train_micro_batch_size_per_gpu": 4}, (8, 4, 1)),
    ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 5}, (40, 4, 5)),
])  # fmt: skip
def test_two_of_three_batch_sizes_give_the_third(given, made, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(given))
    for source in (given, file, str(file)):
        config = configuration.read(source, ranks=2)
        assert (
            config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        ) == made  # fmt: skip


def rates_of(scheduler, steps):
    rates = []
    for _ in range(steps):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_is_deepspeeds_step_by_step():
    def optimizer():
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)

    # DeepSpeed 0.19.8 starts at the lowest rate and takes it for two steps.
    linear = WarmupLR(optimizer(), warmup_num_steps=4, warmup_type="linear")
    assert rates_of(linear, 7) == [0, 0, 0.25, 0.5, 0.75, 1, 1]
    logarithmic = rates_of(WarmupLR(optimizer(), warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4), 7)
    assert logarithmic == pytest.approx([0.1, 0.1, 0.3, 0.1 + 0.4 * math.log(3) / math.log(4), 0.5, 0.5, 0.5])
    decaying = WarmupDecayLR(optimizer(), total_num_steps=6, warmup_num_steps=2, warmup_type="linear")
    assert rates_of(decaying, 9) == pytest.approx([0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0])


def test_rules_for_larger_batches():
    assert linear_rule(0.1, 256, 64) == pytest.approx(0.4)
    assert square_root_rule(0.1, 256, 64) == pytest.approx(0.2)


def test_the_loss_scale_halves_after_overflows_and_doubles_after_good_steps():
    scale = LossScale(16.0, dynamic=True, window=2, hysteresis=2)
    history = []
    for overflow in (True, True, True, False, False, True, True):
        scale.update(overflow)
        history.append(scale.scale)
    assert history == [16, 8, 4, 4, 8, 8, 4]
    smallest = LossScale(2.0, dynamic=True, hysteresis=1)
    for _ in range(3):
        smallest.update(True)
    assert smallest.scale == 1
    fixed = LossScale(128.0)
    fixed.update(True)
    assert fixed.scale == 128


def test_clipping_and_masters():
    gradients = [torch.tensor([3.0]), torch.tensor([4.0]), None]
    assert clip_by_norm(gradients, 1.0) == pytest.approx(5)
    assert [g.item() for g in gradients[:2]] == pytest.approx([0.6, 0.8], rel=1e-5)
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    masters = MasterWeights([parameter])
    parameter.grad = torch.full((2,), 8.0, dtype=torch.bfloat16)
    masters.take_gradients(scale=4)
    torch.optim.SGD(masters.masters, lr=0.0005).step()
    masters.give_values()
    assert masters.masters[0].tolist() == pytest.approx([0.999] * 2)
    assert parameter.tolist() == [1.0, 1.0]  # bfloat16 has no number between 0.996 and 1


@on_ranks(3)
@pytest.mark.parametrize("stages,kind", [((3, 1), None), ((2, 0), "fp16"), ((0, 3), "bf16")])
def test_a_checkpoint_goes_on_at_another_stage_on_other_ranks(world, stages, kind):
    """Saved on 3 ranks and loaded on 2, with as many samples a step."""
    folder = world.comm.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
    x = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, torch.arange(48) % 3)

    def start(stage, comm):
        config = {
            "train_batch_size": 12, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}}, "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 20}},
        }  # fmt: skip
        if kind:
            config[kind] = {"enabled": True}
        return dtlib.initialize(model=build("plain"), config=config, training_data=data, comm=comm)[0]

    def losses(engine, steps):
        dtype = next(engine.module.parameters()).dtype
        batches = ((x.to(dtype), y) for x, y in engine._batches)
        return [engine.train_batch(batches).item() for _ in range(steps)]

    engine = start(stages[0], world.comm)
    losses(engine, 6)  # into the second pass over the data
    engine.save_checkpoint(folder, {"note": "six"})
    rate, expected = engine.get_lr(), losses(engine, 6)
    fewer = world.comm.split(0 if world.rank < 2 else None)
    if fewer:
        again = start(stages[1], fewer)
        assert again.load_checkpoint(folder) == {"note": "six"}
        assert (again.global_steps, again.get_lr()) == (6, rate)
        # In 16 bits three ranks round their averages where two do not.
        assert losses(again, 6) == pytest.approx(expected, abs=0.02 if kind else 1e-12)
    world.comm.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


@on_ranks(2)
def test_checkpoints_that_cannot_be_are_refused(world, tmp_path):
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": SGD}
    engine = dtlib.initialize(model=build("plain"), config=config)[0]
    engine.backward(loss_of(engine, batches("plain", 1, 4)[0]))
    engine.step()
    with pytest.raises(DtlibError, match="between steps"):
        engine.save_checkpoint(tmp_path)
    config = {**config, "zero_optimization": {"stage": 3}}
    engine = dtlib.initialize(model=build("plain"), config=config, runtime="torch")[0]
    with pytest.raises(DtlibError, match="torch has sharded this engine"):
        engine.save_checkpoint(tmp_path)
    engine = dtlib.initialize(model=build("plain"), config=config)[0]
    folder = world.comm.broadcast_object(str(tmp_path))
    dtlib.checkpoint.save(folder, engine.module, engine.optimizer)
    with pytest.raises(DtlibError, match="was not saved by an engine"):
        engine.load_checkpoint(folder)
