"""Programs written for DeepSpeed, Horovod and torch, on our ranks: their import lines are all that changes."""

import json
import os
import re
import subprocess
import sys

import pytest

from dtlib.world.launch import start_ranks
from tests.conftest import ROOT
from tests.test_deepspeed import COMPILES, ENVIRONMENT, python_with_deepspeed

IMPORTS = {
    r"^import deepspeed$": "import dtlib.deepspeed as deepspeed",
    r"^from deepspeed\.": "from dtlib.deepspeed.",
    r"^import horovod\.torch as hvd$": "import dtlib.horovod as hvd",
    r"^from torch\.nn\.parallel import DistributedDataParallel as DDP$":
        "from dtlib.parallel.data import DataParallel as DDP",
    r"^from torch\.distributed\.optim import ZeroRedundancyOptimizer$":
        "from dtlib.parallel.zero import ZeroOptimizer as ZeroRedundancyOptimizer",
}  # fmt: skip


def losses(program, folder, ranks, *arguments, torchrun=False):
    """Of the program, with its imports changed, on so many ranks of MPI or of torchrun."""
    text = (ROOT / "tests" / "programs" / f"{program}.py").read_text()
    for before, after in IMPORTS.items():
        text = re.sub(before, after, text, flags=re.MULTILINE)
    script, out = folder / f"{program}.py", folder / f"losses{ranks}.json"
    script.write_text(text)
    command = [str(script), f"--losses={out}", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if torchrun:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        process = subprocess.Popen([*start, *command], **pipes)
    else:
        process = start_ranks(command, ranks, **pipes)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    out.with_suffix(".txt").write_text(said)
    return json.loads(out.read_text())


def config(folder, **keys):
    optimizer = {"type": "Adam", "params": {"lr": 0.002, "eps": 1e-4}}
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 20, "warmup_num_steps": 3}}
    path = folder / "ds_config.json"
    path.write_text(json.dumps({
        "train_batch_size": 24, "steps_per_print": 2000, "optimizer": optimizer, "scheduler": scheduler,
        **keys,
    }))  # fmt: skip
    return f"--deepspeed_config={path}"


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2)), 3])
def test_a_program_for_deepspeed(tmp_path, stage):
    flag = config(tmp_path, zero_optimization={"stage": stage})
    two = losses("deepspeed_images", tmp_path, 2, "--deepspeed", flag)
    assert two == pytest.approx(losses("deepspeed_images", tmp_path, 1, "--deepspeed", flag), rel=1e-5)
    assert two[-1] < two[0]


@pytest.mark.slow
def test_a_pipeline_for_deepspeed(tmp_path):
    flag = config(tmp_path, train_micro_batch_size_per_gpu=6, steps_per_print=3)
    two = losses("deepspeed_pipeline", tmp_path, 2, flag)
    printed = re.findall(r"^steps: (\d+) loss: (\d\.\d{4}) ", (tmp_path / "losses2.txt").read_text(), re.MULTILINE)
    assert printed == [("3", f"{two[2]:.4f}"), ("6", f"{two[5]:.4f}")]
    assert two == pytest.approx(losses("deepspeed_pipeline", tmp_path, 1, flag, "--pipeline-parallel-size=1"), rel=1e-5)


@pytest.mark.nightly
@pytest.mark.timeout(2 * COMPILES)
@pytest.mark.parametrize("program,batch,micro", [("deepspeed_images", 16, 8), ("deepspeed_pipeline", 96, 12)])
def test_a_program_for_deepspeed_on_deepspeed_itself(tmp_path, program, batch, micro):
    """The same losses: in the first epoch, whose order DeepSpeed keeps in the next; or of all samples in each step, as
    it does not shuffle those of a pipeline. Its default is to clip at 1."""
    sgd = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}  # its own Adam is compiled for minutes
    flag = config(
        tmp_path, train_batch_size=batch, train_micro_batch_size_per_gpu=micro, optimizer=sgd, gradient_clipping=1.0
    )
    ours = losses(program, tmp_path, 2, flag)
    text, out = (ROOT / "tests" / "programs" / f"{program}.py").read_text(), tmp_path / "theirs.json"
    # Ours always builds a layer with a seed of its own; DeepSpeed's own seed_fn refuses its numbers, which are numpy's.
    seeds = "seed_layers=True, seed_fn=torch.manual_seed, loss_fn="
    (tmp_path / "theirs.py").write_text(text.replace("loss_fn=", seeds))
    python = python_with_deepspeed()
    ran = subprocess.run(
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "theirs.py",
         f"--losses={out}", flag],
        env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1",
             "TORCH_EXTENSIONS_DIR": str(tmp_path.parent / "extensions"),
             "PATH": f"{os.path.dirname(python)}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=COMPILES,
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    theirs = json.loads(out.read_text())
    assert ours == pytest.approx(theirs, rel=1e-5) and len(set(theirs)) >= 4


@pytest.mark.slow
def test_a_program_for_horovod(tmp_path):
    two = losses("horovod_digits", tmp_path, 2)
    assert len(two) == 8 and two[-1] < two[0]
    assert two == pytest.approx(losses("horovod_digits", tmp_path, 1, "--batch-size=16"), rel=1e-5)


@pytest.mark.slow
def test_a_program_for_torch(tmp_path):
    two = losses("torch_ddp", tmp_path, 2, torchrun=True)
    assert two == pytest.approx(losses("torch_ddp", tmp_path, 1, torchrun=True), rel=1e-5)


def test_modules_of_deepspeed_that_programs_import():
    import dtlib.deepspeed as deepspeed

    assert list(zip(deepspeed.utils.RepeatingLoader([1, 2]), range(3), strict=False)) == [(1, 0), (2, 1), (1, 2)]
    assert deepspeed.pipe.PipelineModule is deepspeed.PipelineModule
