"""``runtime="deepspeed"``: its absence in one sentence, and the thing itself in the nightly tier.

The nightly tier takes the Python that ``DTLIB_DEEPSPEED`` names, or makes one in ``~/.cache/dtlib``, which has
DeepSpeed beside what is installed here. Where it cannot be had, these tests fail: to skip them would say that they
pass.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from dtlib.errors import DtlibError
from dtlib.lessons.l10 import stage3
from dtlib.training.run import train
from dtlib.world.launch import mpiexec_command, rank_environment
from tests.conftest import ROOT
from tests.ranks import on_ranks

PIN = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["deepspeed"][0]
ENVIRONMENT = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
COMPILES = 1500  # seconds, the first time, on a busy machine
TINY = {"model": "tiny", "dropout": 0.0, "test_articles": 4, "article_tokens": 24, "summary_tokens": 12}

PROGRAM = """
import json, sys
import dtlib
from dtlib.errors import DtlibError
from dtlib.training.run import train

out, save, tiny = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
found, rank = {}, dtlib.init().rank
for workload, own in (("vision", {"model": "mlp"}), ("summarization", tiny)):
    for stage in range(4):
        name, more = f"stage {stage}", {"zero_optimization": {"stage": stage}}
        config = {"workload": own, "run": {"steps": 4}, "train_batch_size": 24, "gradient_accumulation_steps": 2,
                  "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "eps": 1e-4}}, **more}
        for runtime in ("dtlib", "deepspeed"):
            result = train(workload, config, runtime)
            found[f"{workload}, {name}, {runtime}"] = {k: v for k, v in result.items() if k in
                ("losses", "accuracy", "rouge_l", "bytes_per_rank", "steps")}
config = {"workload": {"model": "mlp"}, "run": {"steps": 6}, "train_batch_size": 24,
          "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "zero_optimization": {"stage": 1}}
found["unbroken"] = train("vision", config, "deepspeed")["losses"]
found["before"] = train("vision", config, "deepspeed", save=save, steps=3)["losses"]
found["after"] = train("vision", config, "deepspeed", save=save, resume=True)["losses"]
try:
    train("vision", {**config, "run": {"steps": 1, "float64": True}}, "deepspeed")
except DtlibError as sentence:
    found["refused"] = str(sentence)
if rank == 0:
    with open(out, "w") as file:
        json.dump(found, file)
"""


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
@on_ranks(2)
def test_without_it_the_sentence_says_how_to_install_it(world):
    with pytest.raises(
        DtlibError, match=r"finds no DeepSpeed: install it with DS_BUILD_OPS=0 pip install 'dtlib\[deepsp"
    ):
        train("vision", {"train_batch_size": 24, "optimizer": {"type": "SGD"}}, "deepspeed", steps=1)


def python_with_deepspeed() -> str:
    return os.environ.get("DTLIB_DEEPSPEED") or python_with(PIN)


def folder_of(pin: str) -> Path:
    return Path("~/.cache/dtlib").expanduser() / pin.replace("==", "-")


def python_with(pin: str, *more: str) -> str:
    """A Python in ``~/.cache/dtlib`` that has this package beside what is installed here; ``more``: for pip."""
    folder = folder_of(pin)
    python = folder / "bin" / "python"
    is_new = not (folder / "ready").exists()
    if is_new:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    beside = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages" / "beside.pth"
    beside.write_text(sysconfig.get_paths()["purelib"] + "\n")  # of this checkout: the one before may be gone
    if is_new:
        command = [python, "-m", "pip", "install", "-q", pin, *more]
        ran = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-2000:]
        (folder / "ready").write_text("")
    return str(python)


def on_two_ranks(python: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **rank_environment(2), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"  # where ninja is
    pipes = {"capture_output": True, "text": True, "errors": "replace", "timeout": COMPILES}
    return subprocess.run([*mpiexec_command(2), python, *arguments], env=environment, **pipes)


@pytest.mark.nightly
@pytest.mark.timeout(2 * COMPILES)
def test_all_stages_have_the_losses_of_ours(tmp_path):
    python, out = python_with_deepspeed(), tmp_path / "out.json"
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = [str(tmp_path / "program.py"), str(out), str(tmp_path / "save"), json.dumps(TINY)]
    for attempt in (1, 2):
        ran = on_two_ranks(python, *arguments)
        if ran.returncode == 0:
            break
        said = (ran.stdout + ran.stderr)[-3000:]
        assert attempt == 1, said
        warnings.warn(f"DeepSpeed ended with {ran.returncode} and is tried once more; it said: {said}", stacklevel=1)
    found = json.loads(out.read_text())
    for name, theirs in found.items():
        if name.endswith(", deepspeed"):
            ours = found[name.replace("deepspeed", "dtlib")]
            assert theirs["losses"] == pytest.approx(ours["losses"], rel=1e-5), name
            for figure in ("accuracy", "rouge_l"):
                assert theirs.get(figure) == pytest.approx(ours.get(figure), abs=0.02), name
            assert len(theirs["bytes_per_rank"]) == 2 and theirs["steps"] == 4
    assert len([name for name in found if name.endswith(", deepspeed")]) == 8
    assert found["before"] + found["after"] == pytest.approx(found["unbroken"], rel=1e-5)
    assert "DeepSpeed does not average float64" in found["refused"]


@pytest.mark.nightly
@pytest.mark.timeout(2 * COMPILES)
def test_lesson_10_stores_what_deepspeed_sends_and_holds(tmp_path):
    python = python_with_deepspeed()
    ran = on_two_ranks(python, "-m", "dtlib.lessons.l10.stage3", "dtlib", "deepspeed", "tuned")
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    ours, *theirs = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    assert ours["sent"] == pytest.approx(1.5 * 4 * stage3.PARAMETERS, rel=1e-4)
    assert PIN.partition("==")[2] in stage3.WHEN
    for found, stored in zip(theirs, stage3.STORED.values(), strict=True):
        assert {name: found[name] for name in stored} == pytest.approx(stored, rel=0.01)
