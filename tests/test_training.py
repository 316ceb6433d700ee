import gc
import itertools
import json
import math
import re
import shutil
import tempfile
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import dtlib
from dtlib.errors import DtlibError
from dtlib.gradients.precision import LossScale, MasterWeights, clip_by_norm
from dtlib.storage import Loader, open_samples, write
from dtlib.training import config as configuration
from dtlib.training.config import ConfigError
from dtlib.training.data import RankLoader
from dtlib.training.rates import WarmupDecayLR, WarmupLR, linear_rule, square_root_rule
from dtlib.training.torch_runtime import process_group
from tests.cases import all_cases, refuses
from tests.models import EXACT, batches, build, difference_of_values, full_values, loss_of, slice_of
from tests.ranks import on_ranks

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


@on_ranks(1, 2, slow=(1,))
def test_steps_rates_and_norms_are_counted_in_both_runtimes(world):
    data, rates = batches("plain", 8, 4 * world.size), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = WarmupLR(rates, warmup_num_steps=3)
    for _ in range(4):
        rates.step()
        schedule.step()
    config = {
        "train_batch_size": 8 * world.size, "gradient_accumulation_steps": 2, "optimizer": SGD,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}, "gradient_clipping": 0.5,
    }  # fmt: skip
    with all_cases() as case:
        for runtime, stage in itertools.product(("dtlib", "torch"), range(4)):
            config[ZERO] = {"stage": stage}
            engine, _, loader, scheduler = dtlib.initialize(model=build("plain"), config=config, runtime=runtime)
            train(engine, data, world.rank, world.size)
            with case(runtime, stage):
                assert (engine.global_steps, engine.micro_steps, loader) == (4, 8, None)
                assert engine.get_lr() == scheduler.get_last_lr() == schedule.get_last_lr()
                assert engine.get_global_grad_norm() > 0


@on_ranks(2, 3, slow=(3,))
def test_sixteen_bits_follow_their_float32_masters(world):
    with all_cases() as case:
        for (kind, dtype), stage in itertools.product(
            {"bf16": torch.bfloat16, "fp16": torch.float16}.items(), range(4)
        ):
            config = {"train_micro_batch_size_per_gpu": 4, "optimizer": SGD, kind: {"enabled": True}}
            config[ZERO] = {"stage": stage}
            engine, *_ = dtlib.initialize(model=build("plain", torch.float32), config=config)
            losses = []
            for batch in batches("plain", 1, 4 * world.size, dtype) * 12:
                loss = loss_of(engine, slice_of(batch, world.rank, world.size))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            values = full_values(engine.module, world.comm)
            everyones = world.comm.all_gather_object([value.tolist() for value in values.values()])
            with case(kind, stage):
                assert losses[-1] < losses[0]
                assert {parameter.dtype for parameter in engine.module.parameters()} == {dtype}
                assert {master.dtype for master in engine._masters.masters} == {torch.float32}
                for parameter, master in zip(engine._masters.parameters, engine._masters.masters, strict=True):
                    assert torch.equal(parameter, master.to(dtype))
                assert all(value == everyones[0] for value in everyones)


@on_ranks(2)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(world):
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": SGD,
        "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1},
    }  # fmt: skip
    x, y = slice_of(batches("plain", 1, 8, torch.float16)[0], world.rank, 2)
    for stage in range(4):
        config[ZERO] = {"stage": stage}
        engine, *_ = dtlib.initialize(model=build("plain", torch.float32), config=config)
        before = [parameter.clone() for parameter in engine.module.parameters()]
        engine.backward(loss_of(engine, (x * (math.inf if world.rank else 1), y)))
        engine.step()
        assert (engine.skipped_steps, engine.loss_scale()) == (1, 512), stage
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
    assert loader.epoch == 80 // len(loader)
    first = []
    for comm in (world.comm, world.comm.mpi, process_group(world.comm)):
        torch.manual_seed(0)
        engine, *_ = dtlib.initialize(model=nn.Linear(1, 1), config=config, training_data=data, comm=comm)
        first.append(engine.train_batch(loss_fn=nn.functional.mse_loss).item())
    assert first == pytest.approx([first[0]] * 3, rel=1e-6) and first[0] > 0
    with pytest.raises(DtlibError, match="train_batch\\(\\) has no data"):
        dtlib.initialize(model=nn.Linear(1, 1), config=config)[0].train_batch()


@on_ranks(1, 2, 3)
def test_samples_in_files_feed_the_engine_and_go_on_in_the_middle_of_an_epoch(world, tmp_path):
    dtype = np.dtype([("x", "f4", (1,)), ("y", "f4", (1,))])
    if world.rank == 0:
        records = np.zeros(50, dtype)
        records["x"] = records["y"] = np.arange(50.0)[:, None] / 50
        write(tmp_path / "samples", records, dtype, "shards", per_shard=16)
    world.comm.barrier()
    reader = open_samples(tmp_path / "samples")

    def start():
        torch.manual_seed(0)
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD}
        engine, _, loader, _ = dtlib.initialize(model=nn.Linear(1, 1), config=config, training_data=reader)
        return engine, loader, lambda: engine.train_batch(loss_fn=nn.functional.mse_loss).item()

    engine, loader, step = start()
    stored = Loader(reader, 2, world.rank, world.size, drop_last=True)
    for _ in range(2):
        for (x, y), same in zip(loader, stored, strict=True):
            assert torch.equal(x, same["x"]) and torch.equal(y, same["y"])
    engine, _, step = start()
    for _ in range(30 // world.size):
        step()
    engine.save_checkpoint(tmp_path / "saved")
    unbroken = [step() for _ in range(6)]
    again, _, step = start()
    again.load_checkpoint(tmp_path / "saved")
    assert [step() for _ in range(6)] == unbroken and len(set(unbroken)) == 6


def test_ranks_share_a_data_set_and_reshuffle_it_alike():
    loaders = [RankLoader(list(range(11)), 2, rank, 2, seed=3) for rank in range(2)]
    epochs = [[[int(i) for batch in loader for i in batch] for loader in loaders] for _ in range(2)]
    for slices in epochs:
        assert len(slices[0]) == len(slices[1]) == 4
        assert set(slices[0]).isdisjoint(slices[1])
    assert epochs[0] != epochs[1]


WHOLE = {"train_batch_size": 8, "optimizer": SGD}
ZERO = "zero_optimization"


def test_keys_without_effect_are_refused_here_and_left_to_deepspeed():
    keys = {"steps_per_print": 2000, "wall_clock_breakdown": False, ZERO: {"stage": 2, "contiguous_gradients": True}}
    for key in ("wall_clock_breakdown", f"{ZERO}.contiguous_gradients"):
        with pytest.raises(ConfigError, match=f"^{key} is no key of the config"):
            configuration.read({**WHOLE, **{name: one for name, one in keys.items() if name == key.split(".")[0]}}, 2)
    config = configuration.read({**WHOLE, **keys, "gradient_accumulation_steps": None}, 2, others=True)
    assert (config.zero_optimization.stage, config.steps_per_print, config.gradient_accumulation_steps) == (2, 2000, 1)


MISTAKES = [
    ({**WHOLE, "train_batchsize": 8}, "train_batchsize is no key of the config: did you mean 'train_batch_size'"),
    ({**WHOLE, "fp16": {"enabeld": True}}, "fp16.enabeld is no key of the config: did you mean 'enabled'"),
    ({**WHOLE, "train_batch_size": "8"}, "train_batch_size is '8': give a whole number from 1 to"),
    ({**WHOLE, "train_batch_size": 8.5}, "train_batch_size is 8.5: give a whole number from 1"),
    ({**WHOLE, "train_batch_size": 0}, "train_batch_size is 0: give a whole number from 1"),
    ({**WHOLE, "train_batch_size": True}, "train_batch_size is True: give a whole number"),
    ({**WHOLE, "gradient_clipping": -1}, "gradient_clipping is -1: give a number from 0"),
    ({**WHOLE, "bf16": {"enabled": 1}}, "bf16.enabled is 1: give true or false"),
    ({**WHOLE, "bf16": True}, "bf16 is True: pass a dictionary"),
    ({**WHOLE, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled and fp16.enabled are both true"),
    ({**WHOLE, "optimizer": {"params": {}}}, "optimizer.type is missing"),
    ({**WHOLE, "zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4: choose one of 0, 1, 2, 3"),
    ({**WHOLE, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
     "zero_optimization.offload_optimizer.device is 'nvme': choose one of none, cpu"),
    ({**WHOLE, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
     "needs shards: set zero_optimization.stage to 1, 2 or 3"),
    ({**WHOLE, "zero_optimization": {"overlap_comm": 1}}, "zero_optimization.overlap_comm is 1: give true or false"),
    ({"optimizer": SGD}, "train_batch_size is missing: set it, or train_micro_batch_size_per_gpu"),
    ({**WHOLE, "train_micro_batch_size_per_gpu": 3},
     "train_batch_size is 8, but train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 1 x 2 ranks is 6: "
     "make train_batch_size a multiple of 6"),
    ({**WHOLE, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
     "2 x gradient_accumulation_steps 3 x 2 ranks is 12: set train_batch_size 12, or leave one of the three out"),
    ({**WHOLE, "train_batch_size": 1}, "make train_batch_size a multiple of 2"),
    ({**WHOLE, "steps_per_print": 0}, "steps_per_print is 0: give a whole number from 1"),
    ({**WHOLE, "steps_per_prin": 1}, "did you mean 'steps_per_print'"),
    ({**WHOLE, ZERO: {"reduce_buckets_size": 5}}, "did you mean 'reduce_bucket_size'"),
    ({**WHOLE, "optimizer": {"type": "SGD", "lr": 0.1}}, "optimizer.lr is no key of the config: leave it out."),
    ({**WHOLE, ZERO: None}, "zero_optimization is null: pass a dictionary"),
    ({**WHOLE, ZERO: {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights is no key"),
    ({**WHOLE, "amp": {"enabled": True}}, "amp is no key of the config"),
    ({**WHOLE, "fp16": {"initial_scale_power": 128}}, "float32 ends at 2 ** 127: use less, such as 16"),
    ({**WHOLE, "gradient_clipping": None}, "gradient_clipping is null: give a number"),
    ({**WHOLE, "gradient_clipping": math.nan}, "gradient_clipping is nan: give a number from"),
    ({**WHOLE, "train_batch_size": math.inf}, "train_batch_size is inf: give a number from"),
    ({**WHOLE, "train_batch_size": "auto"}, "train_batch_size is 'auto', which only Hugging Face's Trainer supports"),
    ({**WHOLE, "optimizer": {"type": "SGD", "params": {"lr": "auto"}}}, "optimizer.params.lr is 'auto'"),
    ({**WHOLE, "optimizer": {"type": "AdamW", "params": {"betas": [0.9, math.inf]}}}, "params.betas.1 is inf"),
    ({**WHOLE, "train_batch_size": [8]}, "train_batch_size is [8]: give a whole number from 1"),
    ({**WHOLE, "train_batch_size": 10**400}, "train_batch_size is 1000"),
    ({**WHOLE, "seed": 10**16}, "seed is 10000000000000000: give a number from"),
    ({**WHOLE, "seed": -1}, "seed is -1: give a whole number from 0"),
    ({**WHOLE, "fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale is 0: give a number from 1e-09"),
    ({**WHOLE, "optimizer": {"type": "AdamW", "params": {"weight_decay": 10**400}}}, "params.weight_decay is 1000"),
    ([], "pass a dictionary, or the path of a JSON file"),
    ("nowhere.json", "cannot be read"),
]  # fmt: skip


def test_a_mistake_in_the_config_names_the_key_the_value_and_what_is_right():
    with all_cases() as case:
        for config, words in MISTAKES:
            with case(words):
                refuses(re.escape(words), configuration.read, config, ranks=2, error=ConfigError)


def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"fp16": {"hysteresis": 1, "enabled": true, "hysteresis": 2}}')
    with pytest.raises(ConfigError, match="hysteresis occurs twice in the same section"):
        configuration.read(tmp_path / "config.json", ranks=2)


@on_ranks(1)
def test_unknown_optimizers_and_their_parameters_are_refused(world):
    def refused(words, error=ConfigError, runtime="dtlib", **settings):
        config = {**WHOLE, **settings}
        refuses(words, dtlib.initialize, model=nn.Linear(1, 1), config=config, runtime=runtime, error=error)

    wrong = {"learning_rate": 1}
    refused("optimizer.type is 'Sophia': choose one of Adam, AdamW, SGD", optimizer={"type": "Sophia", "params": wrong})
    refused("optimizer.params .*learning_rate.* do not match SGD", optimizer={"type": "SGD", "params": wrong})
    refused(r"scheduler.type is 'Cosine': choose one of WarmupLR, WarmupDecayLR", scheduler={"type": "Cosine"})
    for kind, name, value, words in (
        ("WarmupLR", "warmup_type", "cosine", "warmup_type is 'cosine': choose one of log, linear"),
        ("WarmupLR", "warmup_num_steps", -1, "warmup_num_steps is -1: give a whole number from 0"),
        ("WarmupDecayLR", "total_num_steps", 5, "total_num_steps is 5: give a whole number from 1,000"),
    ):
        refused(words, scheduler={"type": kind, "params": {name: value}})
    with pytest.raises(ConfigError, match="optimizer is missing"):
        dtlib.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 8})
    refused("choose one of dtlib, torch", DtlibError, runtime="jax")


def test_two_of_three_batch_sizes_give_the_third(tmp_path):
    file = tmp_path / "config.json"
    for total, micro, steps, made in (
        (24, None, None, (24, 12, 1)), (24, None, 3, (24, 4, 3)), (24, 4, None, (24, 4, 3)),
        (None, 4, None, (8, 4, 1)), (None, 4, 5, (40, 4, 5)),
    ):  # fmt: skip
        names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
        given = {name: value for name, value in zip(names, (total, micro, steps), strict=True) if value}
        file.write_text(json.dumps(given))
        for source in (given, file, str(file)):
            config = configuration.read(source, ranks=2)
            assert tuple(getattr(config, name) for name in names) == made


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
    at_once = WarmupDecayLR(optimizer(), total_num_steps=3, warmup_num_steps=2, warmup_type="linear")
    assert rates_of(at_once, 6) == pytest.approx([0, 0, 0.5, 1, 0, 0])


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
    masters.copy_to_parameters()
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
    engine.save_checkpoint(folder, "six", {"note": {6: (1, 2)}})
    rate, expected = engine.get_lr(), losses(engine, 6)
    fewer = world.comm.split(0 if world.rank < 2 else None)
    if fewer:
        again = start(stages[1], fewer)
        assert again.load_checkpoint(folder) == (f"{folder}/six", {"note": {6: (1, 2)}})
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
    refuses("between steps", engine.save_checkpoint, tmp_path)
    engine = dtlib.initialize(model=build("plain"), config=config)[0]
    dtlib.checkpoint.save(tmp_path / "mine", engine.module, engine.optimizer)
    refuses("was not saved by an engine", engine.load_checkpoint, tmp_path, "mine")
    for arguments, words in (
        (("a/b",), "tag is 'a/b': pass the name of a folder"),
        (("latest",), "tag is 'latest'"),
        (((),), r"tag is \(\)"),
        ((f"rank {world.rank}",), "tag differs between ranks: rank 0 has 'rank 0'"),
        ((None, 3), "client_state is 3: pass a dictionary"),
        ((None, {"a": {1, 2}}), "cannot be written as JSON"),
    ):
        refuses(words, engine.save_checkpoint, tmp_path, *arguments)


def engine_of(model, stage=0, accumulate=1, settings=None, **given):
    """An engine for ``model`` with micro-batches of 2 and SGD, or the optimizer that is given."""
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulate, **(settings or {})}
    config[ZERO] = {"stage": stage}
    if "optimizer" not in given:
        config.setdefault("optimizer", SGD)
    return dtlib.initialize(model=model, config=config, **given)[0]


def train(engine, data, rank=0, ranks=1):
    for batch in data:
        engine.backward(loss_of(engine, slice_of(batch, rank, ranks)))
        engine.step()
    return engine


@on_ranks(2)
def test_tags_and_latest_are_deepspeeds(world, tmp_path):
    one, two = batches("plain", 2, 4)
    engine = train(engine_of(build("plain"), 1), [one], world.rank, 2)
    with pytest.warns(UserWarning, match="no file 'latest'") if world.rank == 0 else nullcontext():
        assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.save_checkpoint(tmp_path)
    first = full_values(engine.module, world.comm)["second.weight"].clone()
    train(engine, [two], world.rank, 2).save_checkpoint(tmp_path, tag="best", client_state={"loss": 0.5})
    train(engine, [one], world.rank, 2).save_checkpoint(tmp_path, 7)
    assert engine.load_checkpoint(tmp_path, "global_step1") == (str(tmp_path / "global_step1"), {})
    assert engine.global_steps == 1 and torch.equal(engine.module.second.weight, first)
    assert engine.load_checkpoint(tmp_path, "best") == (str(tmp_path / "best"), {"loss": 0.5})
    assert engine.global_steps == 2 and not torch.equal(engine.module.second.weight, first)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "7") and engine.global_steps == 3
    assert (tmp_path / "latest").read_text() == "7"


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_scheduler_and_an_optimizer_made_before_change_the_rates_that_count(world, stage):
    schedules = torch.optim.lr_scheduler
    data, model, control = batches("plain", 4, 4), build("plain"), build("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def two(optimizer):
        inside = [schedules.ConstantLR(optimizer, 0.5, 2), schedules.StepLR(optimizer, 1)]
        return schedules.SequentialLR(optimizer, inside, [2])

    engine, rates = engine_of(model, stage, optimizer=optimizer, lr_scheduler=two), []
    for batch in data:
        rates.append(train(engine, [batch], world.rank, 2).get_lr()[0])
    assert rates == pytest.approx([0.05, 0.1, 0.01, 0.001])
    words = "lr_scheduler is a StepLR, made for another optimizer: pass a function"
    refuses(words, engine_of, control, stage, lr_scheduler=schedules.StepLR(optimizer, 1))
    plateau = schedules.ReduceLROnPlateau
    refuses("ReduceLROnPlateau needs a loss", engine_of, build("plain"), stage, lr_scheduler=plateau)
    # What it does not train counts in no norm; what it has learnt would be lost with shards.
    norms = []
    for other in (stage, 0):
        model = build("plain")
        partial = torch.optim.SGD([model.second.weight], lr=0.1)
        engine = engine_of(model, other, optimizer=partial, settings={"gradient_clipping": 0.01})
        norms.append(train(engine, data, world.rank, 2).get_global_grad_norm())
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, data[0]).backward()
    used.step()
    with pytest.raises(DtlibError, match=f"states, which stage {stage} would lose") if stage else nullcontext():
        used.state[model.second.bias]["momentum_buffer"].add_(world.rank)  # all ranks go on from those of rank 0
        train(engine_of(model, stage, optimizer=used), data, world.rank, 2)
        values = model.second.bias.tolist()
        assert values == world.comm.broadcast_object(values)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_groups_of_parameters_keep_their_settings(world, stage):
    data, model, control = batches("plain", 3, 4), build("plain"), build("plain")

    def groups(model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        return [
            {"params": matrices, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.01},
        ]

    reference = torch.optim.SGD(groups(control), lr=0.1, momentum=0.9)
    for batch in data:
        reference.zero_grad()
        loss_of(control, batch).backward()
        reference.step()
    engine = train(engine_of(model, stage, model_parameters=groups(model)), data, world.rank, 2)
    assert difference_of_values(engine.module, control, world.comm) <= EXACT
    assert engine.get_lr() == [0.1, 0.01]
    stranger = nn.Linear(3, 1)
    for parameters, words in (
        ([*build("plain").parameters(), *stranger.parameters()], "8 parameters to train do not belong to the model"),
        ([], "There is no parameter to train"),
    ):
        refuses(words, engine_of, build("plain"), stage, model_parameters=parameters)
    given = {"model_parameters": groups(model := build("plain")), "optimizer": lambda p: torch.optim.SGD(p, lr=1)}
    refuses("Only the config's optimizer uses groups", engine_of, model, stage, **given)


@on_ranks(1)
def test_adam_decays_weights_as_in_deepspeed(world):
    for name, params, expected in (
        ("Adam", {}, (torch.optim.AdamW, 0)), ("AdamW", {}, (torch.optim.AdamW, 0)),
        ("AdamW", {"adam_w_mode": False}, (torch.optim.AdamW, 0)),
        ("Adam", {"adam_w_mode": False}, (torch.optim.Adam, 0)),
        ("AdamW", {"torch_adam": True}, (torch.optim.AdamW, 0.01)),
        ("AdamW", {"weight_decay": 0.1}, (torch.optim.AdamW, 0.1)),
    ):  # fmt: skip
        engine = engine_of(nn.Linear(1, 1), settings={"optimizer": {"type": name, "params": params}})
        assert (type(engine.optimizer), engine.optimizer.param_groups[0]["weight_decay"]) == expected


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_that_raised_leaves_nothing_behind(world, stage, tmp_path):
    one, two, three = (slice_of(batch, world.rank, 2) for batch in batches("plain", 3, 4))
    engine, calls = engine_of(build("plain"), stage, accumulate=2), []

    def raises(output, target):
        calls.append(1)
        return nn.functional.cross_entropy(output, target) * (1 // (len(calls) < 2))

    with pytest.raises(ZeroDivisionError):
        engine.train_batch(iter([three, three]), raises)
    refuses("needs 2 micro-batches, but data_iter ended after 1", engine.train_batch, iter([three]))
    refuses("a list, which is not an iterator: pass data_iter", engine.train_batch, [one, two])
    engine.train_batch(iter([one, two]))
    control = engine_of(build("plain"), stage, accumulate=2)
    control.train_batch(iter([one, two]))
    assert engine.micro_steps == 2
    assert difference_of_values(engine.module, control.module, world.comm) == 0
    # A step that was begun is forgotten by loading.
    engine.save_checkpoint(tmp_path)
    engine.backward(loss_of(engine, three))
    engine.step()
    engine.load_checkpoint(tmp_path)
    for either in (engine, control):
        either.train_batch(iter([two, one]))
    assert difference_of_values(engine.module, control.module, world.comm) == 0


@on_ranks(2)
def test_training_goes_on_in_the_middle_of_a_pass_number_for_number(world, tmp_path):
    """Dropout, a schedule that counts by numbers, and the loss scale."""
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)).half()
    data = torch.utils.data.TensorDataset(x, torch.arange(24) % 3)

    def start(kind="fp16", schedule=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]), **fp16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        settings = {kind: {"enabled": True, **fp16}}
        return engine_of(model, 1, settings=settings, training_data=data, lr_scheduler=schedule)

    engine = start(initial_scale_power=10)
    torch.manual_seed(world.rank)
    for _ in range(3):
        engine.train_batch()
    engine.save_checkpoint(tmp_path)
    unbroken = [engine.train_batch().item() for _ in range(6)]
    again = start()
    again.load_checkpoint(tmp_path)
    again.save_checkpoint(tmp_path)  # before a batch is taken
    again.load_checkpoint(tmp_path)
    assert [again.train_batch().item() for _ in range(6)] == unbroken
    assert again.get_lr() == engine.get_lr() == pytest.approx([0.001]) and again.loss_scale() == 1024
    # A scale belongs to its kind of scaling, a scheduler's state to its class.
    for other, scale in ((start(loss_scale=128), 128), (start("bf16"), 1)):
        other.load_checkpoint(tmp_path)
        assert other.loss_scale() == scale
    before = [p.clone() for p in again.module.parameters()]
    for schedule, words in (
        (None, "the engine has none"),
        (torch.optim.lr_scheduler.ExponentialLR, "has ExponentialLR"),
    ):
        make = schedule and (lambda o, schedule=schedule: schedule(o, 0.5))
        other = start(schedule=make)
        refuses(f"was saved with MultiStepLR, but .*{words}", other.load_checkpoint, tmp_path)
        other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    other.save_checkpoint(tmp_path)
    assert all(map(torch.equal, before, again.module.parameters()))


def test_a_pass_that_was_left_is_over_and_positions_survive_being_loaded_twice():
    def loader(rank=0, ranks=2, samples=24):
        return RankLoader(list(range(samples)), 2, rank, ranks)

    left = loader()
    next(iter(left))
    assert len(list(left)) == len(left) == 6
    going = loader()
    passing = iter(going)
    taken = [next(passing), next(passing)]
    state = going.state_dict()
    state_before_random = torch.get_rng_state()
    for _ in range(3):
        again = loader()
        again.load_state_dict(state)
        state = again.state_dict()
        assert state == {"epoch": 0, "samples": 8, "of": 24, "seed": 0, "shuffle": True, "block": 1, "window": 1}
    rest = list(again)
    assert torch.equal(torch.get_rng_state(), state_before_random)
    assert sorted(int(i) for b in [*taken, *rest] for i in b) == sorted(int(i) for b in loader() for i in b)
    assert [b.tolist() for b in rest] == [b.tolist() for b in passing]
    fewer = loader(0, 1)
    fewer.load_state_dict(state)
    assert len(list(fewer)) == 8 and fewer.epoch == 1
    refuses("training_data has 3 samples, but 2 ranks need 4 per step", loader, samples=3)
    refuses("training_data is a generator", RankLoader, (i for i in range(8)), 2, 0, 1)


@on_ranks(2)
def test_the_engine_says_what_would_not_train(world):
    data = batches("plain", 2, 4, torch.bfloat16)
    for stage in (0, 1, 3):
        model = build("plain", torch.float32)
        engine = engine_of(model, stage, settings={"bf16": {"enabled": True}})
        control = engine_of(build("plain", torch.float32), stage, settings={"bf16": {"enabled": True}})
        engine.backward(loss_of(engine, slice_of(data[1], world.rank, 2)))
        refuses(r"call engine.step\(\)", engine.optimizer.step)
        engine.optimizer.zero_grad()
        train(engine, data[:1], world.rank, 2), train(control, data[:1], world.rank, 2)
        assert difference_of_values(engine.module, control.module, world.comm) == 0
        model.first.bias.requires_grad_(True)
        words = ("first.bias" if stage else "A parameter") + " was unfrozen (or replaced )?after"
        refuses(words, train, engine, data[:1], world.rank, 2)
    model = build("plain")
    engine_of(model, 2)
    refuses("takes this model's gradients as they come: build the model again", engine_of, model, 0)
    engine = engine_of(build("plain"), settings={"fp16": {"enabled": True, "initial_scale_power": 0}})
    x, y = slice_of(data[0], world.rank, 2)
    words = "overflow at the smallest loss scale, 1, so training stops"
    refuses(words, train, engine, [(x.half() * math.inf, y)])


def test_others_frozen_objects_stay_frozen():
    from dtlib.lab.checks.answer_memory import Snapshot

    gc.freeze()
    count = gc.get_freeze_count()
    with Snapshot() as before:
        kept = torch.ones(5)
        assert [tensor.numel() for tensor in before.new()] == [kept.numel()]
    assert 0 < gc.get_freeze_count() <= count
    gc.unfreeze()
    with Snapshot() as before:
        assert (frozen := gc.get_freeze_count()) > 0
        kept = torch.ones(3)
        assert [tensor.numel() for tensor in before.new()] == [kept.numel()]
    assert gc.get_freeze_count() < frozen / 10  # Python 3.12 counts what is immortal, some hundreds


@on_ranks(2)
def test_groups_of_an_optimizer_keep_their_place_at_every_stage(world):
    """Also an empty one, as a model without biases makes it (OpenRLHF#1225), and with a scheduler."""
    bounds, make, rate = (0.1, 0.0), torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR

    def groups(model):
        return [
            {"params": [p for name, p in model.named_parameters() if "bias" not in name], "weight_decay": bounds[0]},
            {"params": [p for name, p in model.named_parameters() if "bias" in name], "weight_decay": bounds[1]},
        ]

    with all_cases() as case:
        for stage, how in itertools.product(range(4), ("made", "function")):
            if (stage, how) == (3, "made"):
                continue  # refused, as stage 3 replaces the parameters
            model = nn.Linear(4, 3, bias=False)
            config = {"train_micro_batch_size_per_gpu": 2, ZERO: {"stage": stage}}
            optimizer = make(groups(model), lr=0.1) if how == "made" else lambda _, m=model: make(groups(m), lr=0.1)
            scheduler = partial(rate, lr_lambda=lambda step: 1 / (step + 1)) if how == "made" else None
            engine, used, *_ = dtlib.initialize(
                model=model, config=config, optimizer=optimizer, lr_scheduler=scheduler, comm=world.comm
            )
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 4)).pow(2).mean())
                engine.step()
            with case(stage, how):
                assert [group["weight_decay"] for group in used.param_groups] == list(bounds)
                assert [len(group["params"]) for group in used.param_groups] == [1, 0]
                if scheduler is not None:
                    assert [group["lr"] for group in used.param_groups] == [0.1 / 4] * 2
