"""Profiles and batch scripts for clusters, as far as they can be looked at without one."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from traitlets.config import PyFileConfigLoader

from dtlib import lab
from dtlib.lab import doctor
from dtlib.lab.engines import starting, workshop
from dtlib.world import launch
from dtlib.world.allocation import Allocation, allocation
from tests.cases import refuses
from tests.conftest import ROOT

PROFILES = ROOT / "cluster_profiles"
SITE = tomllib.loads((PROFILES / "site.toml").read_text())
POLARIS = {
    **SITE, "account": "edu", "queue": "debug", "filesystems": "home:eagle", "gpus_a_node": 4, "interface": "hsn0",
    "minutes": 75, "prepare": "module use /soft/modulefiles", "hosts": ["n1", "n2"],
}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
NAMES = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE",
         "SLURMD_NODENAME", "PBS_JOBID", "PBS_NODEFILE", "DTLIB_RANKS")  # fmt: skip


@pytest.fixture
def no_job(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("render", PROFILES / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.render


def config_of(profile: str):
    """What a profile tells ipcluster."""
    return PyFileConfigLoader("ipcluster_config.py", str(PROFILES / profile)).load_config()


def test_what_a_scheduler_has_given(no_job, tmp_path):
    assert allocation() is None and workshop.profile().name == "profile_local_mpi"
    for told, expected, profile in (
        ({}, Allocation("Slurm", "7", 2, 8, False), "profile_slurm"),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURMD_NODENAME": "n1"}, Allocation("Slurm", "7", 2, 4, True),
         "profile_slurm"),
        ({"SLURM_NTASKS": "3"}, Allocation("Slurm", "7", 2, 3, False), "profile_slurm"),
        ({"SLURM_JOB_NUM_NODES": "1"}, Allocation("Slurm", "7", 1, 4, False), "profile_slurm"),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}, Allocation("Slurm", "7", 1, 4, True),
         "profile_local_mpi"),
    ):  # fmt: skip
        with no_job.context() as inner:
            for name, value in {**SLURM, **told}.items():
                inner.setenv(name, value)
            assert allocation() == expected and workshop.profile().name == profile
            said = doctor._scheduler(), doctor._ports() if not expected.is_here else "without encryption"
            assert f"in its job 7: {expected.nodes} node" in said[0] and "without encryption" in said[1]
            assert expected.is_here or (starting.suitable_number(), starting.warning(64)) == (expected.ranks, None)
    nodefile = tmp_path / "nodes"
    nodefile.write_text("n1\nn1\nn2\nn2\n")
    no_job.setenv("PBS_JOBID", "8.server")
    no_job.setenv("PBS_NODEFILE", str(nodefile))
    assert allocation() == Allocation("PBS", "8.server", 2, 4, True) and workshop.profile().name == "profile_pbs"
    assert launch.rank_environment(4) == {**launch.rank_environment(2), "DTLIB_RANKS": "4"}  # two a node either way


def test_profiles_start_ranks_where_they_should(no_job, tmp_path):
    from ipyparallel.controller.app import IPController

    def command(profile):
        return " ".join(map(str, config_of(profile).MPILauncher.mpi_cmd))

    no_job.setenv("DTLIB_RANKS", "6")
    asked = command("profile_slurm")
    assert asked.startswith("salloc --quiet --nodes=2 --ntasks=6 --time=30 --ntasks-per-node=3 ")
    assert "mpiexec" in asked and "-x OMP_NUM_THREADS" in asked and "-x DTLIB_RANKS" in asked
    for name, value in SLURM.items():
        no_job.setenv(name, value)
    assert "salloc" not in command("profile_slurm")
    refuses("inside a PBS job alone", command, "profile_pbs")
    no_job.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert f"--hostfile {tmp_path / 'nodes'} --prtemca plm_ssh_agent ssh" in command("profile_pbs")
    refuses("needs machines", command, "profile_ssh")
    no_job.setattr(tomllib, "loads", lambda text: POLARIS)
    no_job.setenv("DTLIB_CONTROLLER_IP", "127.0.0.1")
    assert "--host n1:4,n2:4 --prtemca plm_ssh_agent ssh --mca btl_tcp_if_include hsn0" in command("profile_ssh")
    no_job.delenv("DTLIB_CONTROLLER_IP")
    refuses("interface = 'hsn0' in site", command, "profile_ssh")
    no_job.undo()
    for profile in ("profile_slurm", "profile_pbs", "profile_ssh"):
        told = PyFileConfigLoader("ipcontroller_config.py", str(PROFILES / profile)).load_config().IPController
        assert told.enable_curve and told.client_ip == "127.0.0.1" and told.engine_ip not in ("*", "0.0.0.0")
    for profile in ("profile_local_mpi", "profile_gpus"):
        here = PyFileConfigLoader("ipcontroller_config.py", str(PROFILES / profile)).load_config()
        assert here.IPController.enable_curve
    assert IPController.enable_curve.default_value is False, "then the profile need not ask for it"


def test_the_profile_for_gpus(no_job):
    with no_job.context() as inner:
        inner.setattr("dtlib.world.machine.gpu_names", list)
        refuses("finds no NVIDIA GPU", config_of, "profile_gpus")
        inner.setattr("dtlib.world.machine.gpu_names", lambda: ["a", "b"])
        inner.setattr("dtlib.world.machine.usable_cores", lambda: 8)
        command = config_of("profile_gpus").MPILauncher.mpi_cmd
    assert command[-4:] == ["--map-by", "slot:PE=4:OVERSUBSCRIBE", "--bind-to", "core:overload-allowed"]


@pytest.mark.parametrize("job", [path.stem for path in sorted((PROFILES / "jobs").glob("*.sh"))])
@pytest.mark.parametrize("site", [SITE, POLARIS], ids=["as it comes", "polaris"])
def test_scripts_are_rendered_whole(render, job, site):
    text = render(job, site=site)
    assert not re.search(r"@\w+@", text) and text.startswith("#!/bin/bash")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    header = text.partition("set -euo pipefail")[0]
    assert ("account" in header or "-A" in header) == (site is POLARIS and job not in ("mpiexec", "deepspeed"))
    program = "--module dtlib" if job == "deepspeed" else "-m dtlib"
    runtime = {"torchrun": " --runtime torch", "deepspeed": " --runtime deepspeed"}.get(job, "")
    assert text.rstrip().endswith(f"{program} train vision{runtime}")
    assert render(job, ["my script.py", "--rate=1"], site).rstrip().endswith("'my script.py' --rate=1")


def test_the_script_for_polaris_asks_for_what_it_has(render):
    text = render("pbs", site=POLARIS)
    for line in (
        "#PBS -l select=2:ncpus=4:mpiprocs=4:ngpus=4", "#PBS -l place=scatter", "#PBS -l walltime=01:15:00",
        "#PBS -l filesystems=home:eagle", "#PBS -A edu", "#PBS -q debug", "module use /soft/modulefiles",
    ):  # fmt: skip
        assert f"\n{line}\n" in text
    assert '-n 8 --hostfile "$PBS_NODEFILE"' in text and "--mca btl_tcp_if_include hsn0" in text
    wrong = subprocess.run([sys.executable, PROFILES / "render.py", "lsf"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "one of deepspeed, mpiexec, pbs, slurm, torchrun" in wrong.stderr


def test_the_page_names_every_script_and_profile():
    page = (PROFILES / "README.md").read_text()
    for path in (*PROFILES.glob("jobs/*.sh"), *PROFILES.glob("profile_*")):
        assert f"render.py {path.stem} " in page or f"`{path.name}`" in page, f"{path.name} is not on the page"
    assert page.index("mpiexec -n 4 python notebooks/pi_mpi4py.py") < page.index("sbatch")


def test_pi_in_plain_mpi4py_as_a_notebook_starts_it(capsys, tmp_path):
    script = ROOT / "notebooks" / "pi_mpi4py.py"
    assert len([line for line in script.read_text().splitlines() if line.strip()]) <= 12
    lab.mpiexec(script, ranks=2)
    assert re.fullmatch(r"pi = 3\.14\d+ by 2 ranks\n", capsys.readouterr().out)
    (tmp_path / "fails.py").write_text("raise SystemExit('no points')")
    refuses(r"fails\.py on 2 ranks ended with status 1", lab.mpiexec, tmp_path / "fails.py", ranks=2)
    assert "no points" in capsys.readouterr().out


@pytest.mark.parametrize("text,says", [
    ("nodes = ", "Invalid value"), (None, "No such file"), ("nodes = 2", "ranks_a_node is missing"), (b"\xff", "utf-8"),
    ("SITE\nnodes = [2]", "nodes"), ("SITE\nnodes = -1", "nodes"), ("SITE\nminutes = 'x'", "minutes"),
])  # fmt: skip
def test_a_broken_site_is_named_and_no_script_is_written(tmp_path, text, says):
    profiles = tmp_path / "cluster_profiles"
    shutil.copytree(PROFILES, profiles, ignore=shutil.ignore_patterns("log", "pid", "security", "state"))
    site = profiles / "site.toml"
    if text is None:
        site.unlink()
    elif isinstance(text, bytes):
        site.write_bytes(text)
    else:
        name = text.split("\n")[-1].partition(" ")[0]
        lines = [line for line in site.read_text().splitlines() if not line.startswith(f"{name} ")]
        site.write_text(text.replace("SITE\n", "").strip() + "\n" + "\n".join(lines) if "SITE" in text else text)
    ran = subprocess.run([sys.executable, profiles / "render.py", "slurm"], capture_output=True, text=True)
    assert ran.returncode and not ran.stdout and ran.stderr.count("\n") == 1, ran.stderr
    assert f"{site}" in ran.stderr and says in ran.stderr
