"""The scripts of docs/how-to/use_torch_on_mpi_ranks.md, on our backend and on gloo: the same losses."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from dtlib.world.launch import start_ranks
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "how-to" / "use_torch_on_mpi_ranks.md").read_text()
SCRIPTS = {
    text.split("\n")[0].removeprefix("# "): text
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if text.startswith("# ")
}
NEEDS = {"ddp": (), "trainer": ("transformers", "accelerate"), "lightning": ("lightning",), "torchrun": ()}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def test_scripts_of_the_page_are_all_run():
    assert set(SCRIPTS) == set(NEEDS)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if needs else pytest.mark.slow) for name, needs in NEEDS.items()],
)
def test_a_script_of_the_page(tmp_path, name):
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install --constraint requirements.lock {' '.join(NEEDS[name])}")
    ours, theirs = tmp_path / "ours.py", tmp_path / "theirs.py"
    ours.write_text(SCRIPTS[name])
    theirs.write_text(re.sub(r'init_process_group\("dtlib".*?\)', 'init_process_group("gloo")', SCRIPTS[name]))
    options = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "cwd": tmp_path, **PIPES}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(theirs)]
    launcher = [] if "dtlib://" in SCRIPTS[name] else ["-m", "dtlib.backend"]
    mpiexec = start_ranks([*launcher, str(ours)], 2, **options)
    losses = [losses_of(mpiexec), losses_of(subprocess.Popen(torchrun, **options))]
    assert losses[0] == losses[1] and len(losses[0]) >= 6
    assert all(0 < loss < 10 for loss in losses[0])


def losses_of(process) -> list[float]:
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    [line] = re.findall(r"^losses (.+)$", said, re.MULTILINE)
    return [float(number) for number in line.split()]
