"""From a wheel, without the clone: built, installed into an environment of its own, and used in an empty folder."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from dtlib.lab.course import sources
from dtlib.lab.lesson_files import notebooks
from tests.conftest import ROOT, wait_until
from tests.test_browser import jupyterlab

pytestmark = pytest.mark.timeout(1200)
SECONDS = 300  # that any program may take on a busy machine

CHECK = """
import dtlib
from dtlib import lab
print(dtlib.__file__)
ranks = lab.engines(2)
ranks.view.execute("import dtlib, torch; world = dtlib.init(); total = torch.tensor(world.rank)", block=True)
lab.check("first-sum")
ranks.view.execute("world.comm.all_reduce(total)", block=True)
lab.check("first-sum")
"""


def needs(module):
    if importlib.util.find_spec(module) is None:
        problem = f"{module} is not installed: pip install -e '.[book]'"
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)


def built_wheel(folder: Path) -> Path:
    """The wheel of a copy of this clone in which engines have run."""
    left_out = shutil.ignore_patterns(".git", ".venv", "build", "work", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder / "clone", symlinks=True, ignore=left_out)
    key = folder / "clone" / "cluster_profiles" / "profile_local_mpi" / "security" / "ipcontroller-engine.json"
    key.parent.mkdir(exist_ok=True)
    key.write_text("secret")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "clone")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def link(path: Path, target: Path) -> None:
    if target.exists() and not path.exists():
        path.symlink_to(target)


def environment_with(wheel: Path, folder: Path) -> dict:
    """Variables of an environment that has the wheel, and otherwise what this one has; not its dtlib."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files are not read from there
    install = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-index", "--no-deps"]
    # What is found in the others' folder would count as installed: force.
    subprocess.run([*install, "--force-reinstall", "--ignore-installed", "-q", wheel], check=True, timeout=SECONDS)
    for name in ("share", "etc"):  # JupyterLab's pages and the settings of its extensions
        link(folder / name, Path(sys.prefix) / name)
    for path in (Path(sys.prefix) / "lib").iterdir():  # Open MPI
        link(folder / "lib" / path.name, path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = [str(folder / "bin"), str(Path(sys.prefix) / "bin"), environment["PATH"]]
    return environment | {"PATH": os.pathsep.join(path)}


def is_there(url: str) -> bool:
    """Whether there is a page. The server says where it will be before it listens there."""
    try:
        with urlopen(url, timeout=SECONDS) as answer:
            return bool(answer.read())
    except HTTPError:
        raise
    except URLError:
        return False


@pytest.mark.slow
def test_a_wheel_has_the_course_in_an_empty_folder(tmp_path):
    needs("build")
    wheel = built_wheel(tmp_path)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in names if "security" in name or "/source/" in name]
    lessons = {name for name in names if name.startswith("dtlib/lessons/")}
    assert "dtlib/lessons/l03/judge_ring.py" in lessons
    assert not lessons & {path.relative_to(ROOT).as_posix() for path in notebooks().values()}
    beside = [
        path
        for path in (ROOT / "dtlib").rglob("*.*")
        if path.suffix not in (".py", ".xz") and path.parent.name != "__pycache__"  # .xz: recordings of wrong answers
    ]
    wanted = [path.relative_to(ROOT).as_posix() for path in beside] + [
        f"dtlib/course/{name}" for name in sources() if name != "AGENTS.md"
    ]
    assert set(wanted) <= names, f"pyproject.toml leaves these behind: {set(wanted) - names}"
    environment, empty = environment_with(wheel, tmp_path / "env"), tmp_path / "empty"
    empty.mkdir()

    def run(*command):
        ran = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=SECONDS)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    with jupyterlab(empty, tmp_path, dtlib=["dtlib"], env=environment) as address:
        page = "/lab/tree/notebooks/start.md"
        assert page in address
        wait_until(lambda: is_there(address), SECONDS)
        for path in ("/files/notebooks/start.md", "/files/notebooks/lectures/00_start_here.ipynb"):
            assert is_there(address.replace(page, path))
    said = run("python", "-c", CHECK)
    assert str(tmp_path / "env") in said.splitlines()[0], "this is another dtlib"
    assert said.count("Passed: first-sum") == 1, said
    assert (empty / "cluster_profiles" / "profile_local_mpi" / "log").is_dir(), "ranks are those of this folder"
    tour = run("dtlib", "tour")
    assert " yes " in tour and "NO" not in tour
