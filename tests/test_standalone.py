"""The plain cores need torch alone: each trains under torchrun on gloo, without dtlib, as it does on our ranks."""

import ast
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import dtlib
from tests.plain_demos import DEMOS, losses_alone, losses_of
from tests.ranks import on_ranks

CORES = Path(dtlib.__file__).parent / "parallel"
FILES = sorted(CORES.glob("*/plain*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_plain_core_imports_torch_alone(file):
    nodes = list(ast.walk(ast.parse(file.read_text())))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {module.partition(".")[0] for module in imported} <= {"torch", *sys.stdlib_module_names}


def test_each_plain_core_is_tried():
    assert {(folder, file) for folder, file, *_ in DEMOS.values()} == {(f.parent.name, f.stem) for f in FILES}


def on_gloo(ranks):
    """The losses of all, as torchrun and gloo give them to rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    script = [str(Path(__file__).with_name("plain_demos.py")), str(CORES)]
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, *script], env=clean, cwd="/", capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@on_ranks(2, 3, 4, slow=(2, 3, 4))
def test_values_are_those_of_gloo_and_of_one_process(world):
    """On two ranks a sum has one order, so values are the same to the bit."""
    gloo = world.comm.broadcast_object(on_gloo(world.size) if world.rank == 0 else None)
    for name in DEMOS:
        ours = losses_of(name, world.comm.group, lambda folder, file: import_module(f"dtlib.parallel.{folder}.{file}"))
        assert len(ours) == len(gloo[name]) == 5 and ours[-1] != ours[0], name
        worst = max(abs(a - b) for a, b in zip(ours, gloo[name], strict=True))
        assert worst <= (0 if world.size == 2 else 1e-12), (name, ours, gloo[name])
        if expected := losses_alone(name, world.size):
            assert max(abs(a - b) for a, b in zip(ours, expected, strict=True)) <= 1e-12, (name, ours, expected)
