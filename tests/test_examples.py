"""examples/: the page with all kinds of parallelism equals one process, and scripts differ from serial.py as marked."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtlib.world.launch import find_mpiexec

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SERIAL = EXAMPLES / "serial.py"
DISTRIBUTED = sorted(set(EXAMPLES.glob("*.py")) - {SERIAL, EXAMPLES / "train.py"})
MPIEXEC = [find_mpiexec(), "--allow-run-as-root", "--oversubscribe"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def printed(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def losses(*command):
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed(*command, "--float64", "--steps", 5))]


@pytest.mark.parametrize("lesson,script", [("l04", "ddp"), ("l08", "mesh")])
def test_a_lesson_shows_lines_of_the_script_that_it_names(lesson, script):
    text = (ROOT / "dtlib" / "lessons" / lesson / "lecture.py").read_text()
    shown = re.search(r"(?ms)^# ```python\n(.*?)^# ```$.*?examples/(\w+)\.py", text)
    lines = shown[1].replace("# ", "", 1).replace("\n# ", "\n").splitlines()
    there = [line.split("  #")[0].strip() for line in (EXAMPLES / f"{script}.py").read_text().splitlines()]
    assert shown[2] == script and 6 < len(lines) <= 12
    at = [there.index(line.split("  #")[0]) for line in lines]
    assert at == sorted(at), "in the same order"


def test_train_is_one_page():
    assert len((EXAMPLES / "train.py").read_text().splitlines()) <= 150


@pytest.mark.slow
def test_all_kinds_of_parallelism_together_equal_one_process():
    script = EXAMPLES / "train.py"
    expected = losses(sys.executable, script)
    assert len(expected) == 5 and expected[-1] < expected[0]
    by_torch, by_mpi = [*TORCHRUN, "--nproc-per-node", 4], [*MPIEXEC, "-n", 4, sys.executable]
    for launcher, mesh in [
        (by_torch, "--data 2 --tensor 2"), (by_mpi, "--tensor 2 --pipe 2"), (by_mpi, "--data 2 --pipe 2"),
        (by_mpi, "--tensor 4"),
    ]:  # fmt: skip
        found = losses(*launcher, script, *mesh.split())
        assert found == pytest.approx(expected, rel=0, abs=1e-12), (launcher, mesh)


@pytest.mark.slow
def test_a_mesh_of_another_size_is_refused():
    ran = subprocess.run([sys.executable, EXAMPLES / "train.py", "--data", "2"], capture_output=True, text=True)
    assert ran.returncode and "needs 2 ranks, and there are 1" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize("script", DISTRIBUTED, ids=lambda script: script.stem)
def test_marked_lines_alone_differ_from_the_serial_script(script):
    """All but the docstring: with marked lines taken out nothing is left that serial.py does not say."""
    serial, distributed = (path.read_text().split('"""', 2)[2].splitlines() for path in (SERIAL, script))
    removed = 0
    for kind, a, b, c, d in difflib.SequenceMatcher(None, serial, distributed, autojunk=False).get_opcodes():
        if kind != "equal":
            removed += b - a
            same_but_indented = [line.strip() for line in serial[a:b]]
            for line in distributed[c:d]:
                assert "# <-" in line or not line.strip() or line.strip() in same_but_indented, line
    assert removed <= 3


@pytest.mark.slow
@pytest.mark.parametrize("script", DISTRIBUTED, ids=lambda script: script.stem)
def test_a_script_makes_the_steps_of_the_serial_one(script):
    expected = [float(number) for number in re.findall(r"\d+\.\d+", printed(sys.executable, SERIAL))]
    for ranks in (2, 4):
        launchers = [[*MPIEXEC, "-n", ranks, sys.executable]]
        if script.stem in ("ddp", "mesh"):
            launchers.append([*TORCHRUN, "--nproc-per-node", ranks])
        for launcher in launchers:
            found = [float(number) for number in re.findall(r"\d+\.\d+", printed(*launcher, script))]
            assert len(found) == 2 and found == pytest.approx(expected, rel=1e-3), (launcher, found)
