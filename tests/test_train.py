"""``dtlib train``: one config, any runtime, any number of ranks, with the same curve."""

import copy
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import dtlib
from dtlib.errors import DtlibError
from dtlib.files import private_temp_folder
from dtlib.parallel.pipeline import PipelineModule
from dtlib.training.config import ConfigError, dictionary_of
from dtlib.training.data import RankLoader
from dtlib.training.run import CONFIGS, train
from dtlib.world.launch import start_ranks
from dtlib.world.processes import Process, end_processes, with_descendants
from tests.cases import refuses
from tests.conftest import files_of_at_most, wait_until
from tests.ranks import on_ranks

EXACT = {
    "run": {"steps": 5, "float64": True}, "train_batch_size": 24, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "eps": 1e-4}}, "gradient_clipping": 1.0,
}  # fmt: skip
SHORT = {"train_batch_size": 12, "run": {"steps": 3, "float64": True}}
WORKLOADS = {
    "vision": {"model": "mlp"},
    "summarization": {"model": "tiny", "dropout": 0.0, "test_articles": 4, "article_tokens": 24, "summary_tokens": 12},
}


def config_of(workload, **more):
    return {**EXACT, "workload": WORKLOADS[workload], **more}


def made(workload):
    """A workload, and a function that gives it anew: to read and to cut its texts takes longer than to train."""
    work = import_module(f"dtlib.workloads.{workload}").workload(WORKLOADS[workload])
    return work, lambda own: replace(work, model=copy.deepcopy(work.model))


def by_hand(work):
    """The losses of one process with torch alone, on whole batches."""
    model = copy.deepcopy(work.model).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, eps=1e-4, weight_decay=0.0)
    loader = RankLoader(work.train, SHORT["train_batch_size"], 0, 1, 0, work.collate)
    losses = []
    for _, (x, y) in zip(range(SHORT["run"]["steps"]), loader.forever(), strict=False):
        loss = work.loss_fn(model(_double(x)), _double(y))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _double(batch):
    if isinstance(batch, tuple):
        return tuple(map(_double, batch))
    return batch.double() if batch.is_floating_point() else batch


@on_ranks(2, 3, slow=(3,))
@pytest.mark.parametrize("workload", ["vision", pytest.param("summarization", marks=pytest.mark.slow)])
def test_every_stage_and_the_pipeline_have_one_curve_on_dtlib_and_on_torch(world, workload):
    work, again = made(workload)
    expected, measured = by_hand(work), set()
    for runtime in ("dtlib", "torch"):
        for more in (
            *({"zero_optimization": {"stage": stage}} for stage in range(4)),
            *({"pipeline": {"stages": 2, "schedule": kind}} for kind in ("gpipe", "1f1b") if world.size == 2),
        ):
            result = train(again, config_of(workload, **SHORT, **more), runtime)
            assert result["losses"] == pytest.approx(expected, abs=1e-12), (runtime, more)
            assert len(result["bytes_per_rank"]) == world.size and result["steps"] == 3
            measured.add(tuple(result[name] for name in ("accuracy", "rouge_l") if name in result))
    assert len(measured) == 1  # the trained model is whole again, whoever had cut it


@on_ranks(2)
def test_a_pipeline_beside_data_parallelism_is_told_apart_from_what_does_not_divide(world):
    for more, words in (
        ({"pipeline": {"stages": 3}}, "pipeline.stages is 3, but there are 2 ranks"),
        ({"run": {"gpus": 16}}, "run.gpus is 16, but there are . GPUs here and 2 ranks"),
        ({"run": {"steps": 5, "epochs": 5}}, "run.steps and run.epochs are both set"),
        ({"run": {"step": 5}}, "run.step is no key of the config: did you mean 'steps'"),
        ({"workload": {"modle": "mlp"}}, "did you mean 'model'"),
        ({"workload": {"data": "/nowhere"}}, "no folder '/nowhere'"),
        ({"pipeline": {"stages": 2, "schedule": "zero_bubble_h1"}}, "choose gpipe or 1f1b"),
        ({"pipeline": {"stages": 2}, "zero_optimization": {"stage": 2}}, "torch's pipelines support"),
    ):
        refuses(words, train, "vision", {**config_of("vision"), **more}, "torch")
    for arguments, words in (
        ({"runtime": "jax"}, "runtime is 'jax': choose one of dtlib, torch, deepspeed"),
        ({"resume": True}, "set its folder"),
    ):
        refuses(words, train, "vision", config_of("vision"), **arguments)
    refuses("no workload 'audio': choose one of vision, summarization, decoder", train, "audio", config_of("vision"))
    with pytest.raises(DtlibError, match="Stage 0 of the pipeline has no parameter to train"):
        layers = [nn.ReLU(), nn.Linear(4, 4)]
        dtlib.initialize(
            PipelineModule(layers, 2, partition_method="uniform"),
            {"train_batch_size": 2, "optimizer": EXACT["optimizer"]},
        )
    with pytest.raises(DtlibError, match=r"pipeline.stages is 2, but the model is not a PipelineModule"):
        dtlib.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 2, "pipeline": {"stages": 2}})


@on_ranks(2)
def test_training_goes_on_with_the_same_curve(world, tmp_path):
    """Into the second pass over the data; stages of a pipeline each have a checkpoint of their own."""
    config = config_of("vision", pipeline={"stages": 2}) | {"train_batch_size": 480, "gradient_accumulation_steps": 1}
    unbroken = train("vision", config)["losses"]
    assert train("vision", config, save=tmp_path, steps=2)["losses"] == unbroken[:2]
    log = tmp_path / "log.jsonl"
    assert train("vision", config, save=tmp_path, resume=True, log=log)["losses"] == unbroken[2:]
    world.comm.barrier()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 4, 5]
    assert [row["loss"] for row in rows] == pytest.approx(unbroken[2:], abs=1e-12)
    assert {"seconds", "samples_per_second", "bytes_per_rank"} <= rows[0].keys()


@on_ranks(3)
def test_torchs_classes_save_and_go_on_at_any_stage_on_another_number_of_ranks(world, tmp_path):
    """3 -> 2 -> 3 ranks, and from one runtime to the other; buckets of rows that do not divide."""
    _, again = made("vision")
    config = config_of("vision") | {"train_batch_size": 480, "gradient_accumulation_steps": 1}
    unbroken = train(again, config)["losses"]
    fewer = world.comm.split(0 if world.rank < 2 else None)
    for begun, went, ended in (
        (("torch", 0), ("torch", 1), ("torch", 2)), (("torch", 1), ("torch", 3), ("dtlib", 1)),
        (("torch", 2), ("dtlib", 3), ("torch", 1)), (("torch", 3), ("torch", 2), ("torch", 0)),
    ):  # fmt: skip
        folder, losses = tmp_path / f"{begun[0]}{begun[1]}", []
        for (runtime, stage), last, comm in ((begun, 2, world.comm), (went, 4, fewer), (ended, 5, world.comm)):
            if comm:
                ran = train(again, config, runtime, comm=comm, save=folder, resume=last > 2, stage=stage, steps=last)
                losses += ran["losses"]
            world.comm.barrier()
        assert losses == pytest.approx(unbroken if fewer else [*unbroken[:2], unbroken[4]], abs=1e-12), (begun, went)


@on_ranks(2)
def test_torchs_shards_are_saved_behind_a_forward_pass_and_other_shards_refused(world, tmp_path):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from dtlib.training.torch_runtime import process_group

    config = {"train_batch_size": 4, "optimizer": EXACT["optimizer"], "zero_optimization": {"stage": 2}}
    engine = dtlib.initialize(model=nn.Linear(4, 4), config=config, runtime="torch")[0]
    engine(torch.zeros(2, 4))  # torch leaves parameters whole
    engine.save_checkpoint(tmp_path)
    before = [parameter.full_tensor().clone() for parameter in engine.module.parameters()]
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load_checkpoint(tmp_path)
    assert all(map(torch.equal, before, [parameter.full_tensor() for parameter in engine.module.parameters()]))
    net = nn.Linear(4, 4)
    mesh = DeviceMesh.from_group(process_group(world.comm), "cpu")
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(1)]))
    scale = nn.Linear(4, 4)
    scale.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(DtlibError, match=r"scale is a parameter without a dimension, .* use the shape \(1,\)"):
        dtlib.initialize(model=scale, config=config, runtime="torch")
    refuses(r"weight is sharded as .* whole rows over all 2", dtlib.checkpoint.save, tmp_path / "other", net)


def run(*arguments):
    command = [sys.executable, "-m", "dtlib", "train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


def test_on_the_command_line_with_a_sentence_for_a_mistake(tmp_path, run_here):
    out = tmp_path / "result.json"
    ran = run("vision", "--ranks=2", "--steps=30", f"--json={out}", f"--log={tmp_path / 'log.jsonl'}")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(out.read_text())
    assert {"seconds", "steps", "loss", "accuracy", "samples_per_second", "bytes_per_rank"} <= result.keys()
    assert (result["steps"], result["ranks"], len(result["bytes_per_rank"])) == (30, 2, 2)
    assert result["losses"][-1] < result["losses"][0] and "accuracy" in ran.stdout
    (tmp_path / "wrong.json").write_text('{"train_batch_size": 63}')
    os.mkfifo(pipe := tmp_path / "pipe")
    for arguments, words in (
        (["vision", "--ranks=2", f"--config={tmp_path / 'wrong.json'}"], "make train_batch_size a multiple of 2"),
        (["audio"], "there is no 'audio': type dtlib train vision or summarization or decoder"),
        (["vision", "--runtime=jax"], "invalid choice: 'jax'"),
        (["vision", "--steps=0"], "--steps is 0: give a whole number from 1"),
        (["vision", "--ranks=2", f"--json={tmp_path}"], "cannot be written (Is a directory): name another"),
        (["vision", "--ranks=2", f"--log={tmp_path}"], "Is a directory"),
        (["vision", "--ranks=2", f"--json={pipe}"], "pipe cannot be written (No such device or address): name another"),
    ):
        ran = run_here("train", *arguments)
        assert (ran.returncode, ran.stdout) == (2, ""), ran
        assert ran.stderr.count("\n") == 1 and words in ran.stderr, ran.stderr


def test_a_full_disk_costs_rows_of_the_log_and_not_the_run(tmp_path):
    """/dev/full takes nothing; a log that may not grow any more keeps the rows that found room, whole."""
    ran = run("vision", "--ranks=2", "--steps=3", "--log=/dev/full", "--json=/dev/full")
    assert ran.returncode == 2 and "samples per second" in ran.stdout, ran.stderr
    assert ran.stderr.count("/dev/full cannot be written (No space left on device): rows of steps from 1 on") == 1
    assert "dtlib train: /dev/full cannot be written (No space left on device): training is done" in ran.stderr
    assert ran.stderr.count("\n") == 2 and all(line.startswith("dtlib train: ") for line in ran.stderr.splitlines())


@pytest.mark.parametrize(
    "text", ["[" * 10**5, "1" * 5000, "\0", '{"train_batch_size": 1%s}' % ("0" * 5000), '{"a":' * 990 + "1" + "}" * 990]
)
def test_a_config_that_is_none_is_refused_in_a_sentence(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    refuses("config", dictionary_of, tmp_path / "config.json", error=ConfigError)


def test_folders_of_runs_that_were_killed_are_removed(tmp_path, monkeypatch):
    """A run that lives keeps its own, and so does anything else of that name: a link, a young one, another's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    holds = (
        "import sys, time; from dtlib.files import private_temp_folder as f\nwith f('x') as it: print(it, flush=True); "
    )
    others = []
    for _ in range(2):
        others.append(subprocess.Popen(
            [sys.executable, "-c", f"{holds}time.sleep(600)"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        ))  # fmt: skip
    living, dead = (Path(each.stdout.readline().strip()) for each in others)
    (dead / "sentence").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "dtlib-x-link").symlink_to(tmp_path / "mine")
    (tmp_path / "dtlib-x-young").mkdir()
    (tmp_path / "dtlib-xy-1").mkdir()
    others[1].kill()
    others[1].wait()
    for each in (living, dead, tmp_path / "mine", tmp_path / "dtlib-xy-1"):
        os.utime(each, (0, 0))
    with private_temp_folder("x") as mine:
        assert mine.parent == tmp_path and mine.stat().st_mode & 0o777 == 0o700
        assert living.is_dir() and not dead.exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        [living.name, "mine", "dtlib-x-link", "dtlib-x-young", "dtlib-xy-1"]
    )
    others[0].terminate()
    for each in others:
        each.wait()
        each.stdout.close()


def test_a_run_that_is_killed_leaves_a_folder_that_the_next_one_removes(tmp_path):
    command = [sys.executable, "-m", "dtlib", "train", "vision", "--ranks=1", "--steps=100000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: list(tmp_path.glob("dtlib-train-*")))
    family = with_descendants(Process.of(killed.pid))
    killed.kill()
    killed.wait()
    (left,) = tmp_path.glob("dtlib-train-*")
    end_processes(family)
    os.utime(left, (0, 0))
    assert subprocess.run([*command[:-1], "--steps=1"], env=environment, capture_output=True).returncode == 0
    assert not list(tmp_path.glob("dtlib-train-*"))


@on_ranks(2)
def test_a_file_that_cannot_be_written_or_would_wait_is_refused_on_all_ranks(world, tmp_path):
    pipe = tmp_path / "pipe"
    if world.rank == 0:
        os.mkfifo(pipe)
    world.comm.barrier()
    refuses(r"/no/l cannot be written \(No such file or directory\): name another", train, "vision", EXACT, log="/no/l")
    refuses(r"pipe cannot be written \(No such device or address\): name another", train, "vision", EXACT, log=pipe)
    refuses(r"pipe cannot be written \(File exists\): name another folder", train, "vision", EXACT, save=pipe)
    refuses(r"pipe' cannot be read \(it is no ordinary file\): pass the path", train, "vision", pipe)


@on_ranks(1)
def test_numbers_that_make_no_sense_are_refused_by_name(world):
    for config, words in (
        ({"pipeline": [2]}, r"pipeline is \[2\]: pass a dictionary"),
        ({"zero_optimization": 2}, "zero_optimization is 2: pass a dictionary"),
        ({"tensor_parallel": "two"}, "tensor_parallel is 'two': pass a dictionary"),
        ({"workload": [1]}, r"workload is \[1\]: pass a dictionary"),
        ({"pipeline": {"stages": 1.5}}, "pipeline.stages is 1.5: give a whole number from 1"),
        ({"pipeline": {"stages": [2]}}, r"pipeline.stages is \[2\]: give a whole number from 1"),
        ({"tensor_parallel": {"autotp_size": -1}}, "tensor_parallel.autotp_size is -1: give a whole number"),
        ({"run": {"steps": 0}}, "run.steps is 0: give a whole number from 1"),
        ({"run": {"seed": 10**400}}, "run.seed is 1000"),
        ({"run": {"link_latency": -1}}, "run.link_latency is -1: give a number from 0"),
        ({"run": {"epochs": 2.5}}, "run.epochs is 2.5: give a whole number"),
        ({"context_parallel": {"size": True}}, "context_parallel.size is True: give a whole number"),
        ({"train_batch_size": math.nan}, "train_batch_size is nan: give a number"),
    ):
        refuses(words, train, "decoder", {**EXACT, **config}, stage=1)


@on_ranks(1)
def test_a_log_keeps_whole_rows(world, tmp_path):
    log = tmp_path / "log.jsonl"
    with files_of_at_most(400), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = train("vision", config_of("vision"), log=log)
    assert len(result["losses"]) == 5 and ["File too large" in str(each.message) for each in told].count(True) == 1
    rows = log.read_text()
    assert rows.endswith("}\n") and 0 < len(rows.splitlines()) < 5 and [*map(json.loads, rows.splitlines())]


@pytest.mark.slow
def test_joins_the_ranks_that_torchrun_started(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "dtlib"]
    ran = subprocess.run([*command, "train", "vision", "--steps=3", f"--json={out}"], capture_output=True, timeout=150)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(out.read_text())["ranks"] == 2


@pytest.mark.parametrize("runtime", ["dtlib", pytest.param("torch", marks=pytest.mark.slow)])
def test_killed_in_the_middle_and_started_again(tmp_path, runtime):
    config, save, log = tmp_path / "config.json", tmp_path / "save", tmp_path / "log.jsonl"
    many = config_of("vision") | {"run": {"steps": 4000, "float64": True, "save_every": 5}}
    config.write_text(json.dumps(many))
    arguments = ["vision", f"--config={config}", f"--save={save}", f"--runtime={runtime}"]
    command = ["-m", "dtlib", "train", *arguments, f"--log={log}"]
    ranks = start_ranks(command, 2, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until((save / "latest").exists)
    everyone = with_descendants(Process.of(ranks.pid))
    with suppress(ProcessLookupError):
        os.kill(ranks.pid, signal.SIGKILL)
    end_processes(everyone)
    ranks.wait()
    there = int((save / "latest").read_text().removeprefix("global_step"))
    assert 5 <= there < 4000
    killed = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    out = tmp_path / "result.json"
    ran = run(*arguments, "--ranks=3", "--resume", f"--steps={there + 5}", f"--json={out}")
    assert ran.returncode == 0, ran.stderr
    again = json.loads(out.read_text())
    assert again["steps"] == there + 5
    unbroken = train("vision", many, steps=there + 5)["losses"]
    assert killed[:there] == pytest.approx(unbroken[:there], abs=1e-12)
    assert again["losses"] == pytest.approx(unbroken[there:], abs=1e-12)


def test_configs_of_the_lessons_are_read():
    from dtlib.training import config

    for path in CONFIGS.glob("*.json"):
        given = config.dictionary_of(path)
        given.pop("workload"), given.pop("run")
        config.read(given, ranks=2)
