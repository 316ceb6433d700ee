"""Lesson 11: check of a batch script for two machines of four GPUs, line by line, without running it."""

import re
import shlex

from dtlib.lab.checks.exercise import Exercise, Wrong, rows

MACHINES, GPUS, CORES, MINUTES = 2, 4, 8, 30
SHORT = {"-N": "--nodes", "-n": "--ntasks", "-t": "--time", "-c": "--cpus-per-task", "-G": "--gpus"}


def request(job: str) -> dict[str, str]:
    """Return the options of ``#SBATCH`` lines before the first command: ``{"nodes": "2", ...}``."""
    found: dict[str, str] = {}
    for line in job.splitlines()[1:]:
        if line.strip() and not line.startswith("#"):
            break
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True) if line.startswith("#SBATCH") else []
        found.update(_options([SHORT.get(word, word) for word in words]))
    return found


def command(job: str) -> tuple[list[str], list[str], dict[str, str]]:
    """Return the words before ``torchrun``, the words from there on, and torchrun's options."""
    for line in job.replace("\\\n", " ").splitlines():
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if "torchrun" in words:
            at = words.index("torchrun")
            return words[:at], words[at:], _options(words[at + 1 :])
    return [], [], {}


def _options(words: list[str]) -> dict[str, str]:
    """Return options of the forms ``--name=value`` and ``--name value``; ``_`` in names counts as ``-``."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            found[name[2:].replace("_", "-")] = value if equals else following
    return found


def minutes(time: str) -> float | None:
    """Return Slurm's time in minutes, or None if it cannot be read.

    Forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not match:
        return None
    days, *parts = match.groups()
    a, b, c = (int(part or 0) for part in parts)
    if days is not None:
        return 60 * (24 * int(days) + a) + b + c / 60
    return 60 * a + b + c / 60 if parts[2] is not None else a + b / 60


def observe_job(job, comm):
    """Return the script, or a description if it is no text."""
    return job if isinstance(job, str) else f"{job!r:.60}"


def _count(options: dict, name: str) -> int | None:
    """Return the number at the end of an option, as in ``gpu:a100:4``."""
    found = re.search(r"(\d+)$", options.get(name, ""))
    return int(found[1]) if found else None


def _gpus(asked: dict) -> float:
    """Return the GPUs per machine that the script asks for, 0 if none."""
    for name, share in (("gpus-per-node", 1), ("gres", 1), ("gpus", MACHINES), ("gpus-per-task", 1)):
        if (count := _count(asked, name)) is not None:
            return count / share
    return 0


def judge_job(seen: list) -> None:
    """Check that Slurm's request and torchrun's options fit each other and the machines."""
    for rank, job in enumerate(seen):
        wrong = rows(rank)
        wrong("type", not job.startswith("#!"), "a batch script, whose first line is #!/bin/bash", f"{job!r:.40}",
              "sbatch refuses a file without that line.")
        asked, (before, words, options) = request(job), command(job)
        wrong("no-launcher", not words, "a line with torchrun", "none that is a command",
              "Which command starts the ranks on each machine?")
        tasks = _count(asked, "ntasks-per-node") or (_count(asked, "ntasks") or 1) / (_count(asked, "nodes") or 1)
        nodes, cores = _count(asked, "nodes"), _count(asked, "cpus-per-task") or 1
        gpus = _gpus(asked)
        agree = "The request and torchrun must have the same number of machines.", "--nodes=2, and --nnodes=2"
        wrong("machines", nodes != MACHINES, f"{MACHINES} machines", f"{nodes} in the request", *agree)
        there = _count(options, "nnodes")
        wrong("machines", there != MACHINES, f"{MACHINES} machines", f"{there} for torchrun", *agree)
        wrong("no-gpu", gpus == 0, f"{GPUS} GPUs on each machine", "no GPU is requested",
              "The job starts, and trains. On which device?", "#SBATCH --gpus-per-node=4")
        wrong("gpus", gpus != GPUS, f"{GPUS} GPUs on each machine", f"{gpus:g}",
              "Is the number per machine, or for the whole job?", "#SBATCH --gpus-per-node=4")
        wrong("torchruns", tasks != 1, "one torchrun on each machine", f"{tasks:g}",
              "srun starts one torchrun per requested task. How many ranks are that per machine?",
              "#SBATCH --ntasks-per-node=1: torchrun starts the ranks.")
        ranks = options.get("nproc-per-node", "1")
        wrong("ranks", ranks not in (f"{GPUS}", "gpu", "auto"), f"{GPUS} ranks on each machine", ranks,
              "Which option of torchrun sets this?", "--nproc-per-node=4")
        wrong("cores", cores < GPUS * CORES, f"{GPUS * CORES} cores for each torchrun", f"{cores}",
              "A torchrun has four ranks, with 8 cores each.", "#SBATCH --cpus-per-task=32")
        started = {"srun", "mpiexec", "mpirun"} & set(before)
        wrong("first-machine-alone", not started, "srun before torchrun", " ".join(before) or "nothing",
              "A batch script runs on the first machine. What starts torchrun on the second?", "srun torchrun ...")
        endpoint = options.get("rdzv-endpoint") or options.get("master-addr") or ""
        wrong("meets-itself", re.search(r"localhost|127\.0|^$", endpoint), "a name of the first machine",
              endpoint or "none", "Each machine searches for the others at this address. Which machine has this name?",
              '--rdzv-endpoint="$first:29500"')
        _judge_variable(rank, job, endpoint)
        limit = minutes(asked.get("time", ""))
        wrong("time", "time" not in asked, f"{MINUTES} minutes", "no --time before the first command",
              "How long may a job run that sets no time?", "#SBATCH --time=00:30:00")
        wrong("time", limit is None or abs(limit - MINUTES) > 1, f"{MINUTES} minutes",
              f"--time={asked['time']}" + (f", {limit:g} minutes" if limit is not None else ""),
              "Long jobs wait longer. Which unit has each part of the time?",
              "#SBATCH --time=00:30:00")


def _judge_variable(rank: int, job: str, endpoint: str) -> None:
    name = re.search(r"\$\{?(\w+)", endpoint)
    given = name is None or name[1] in ("HOSTNAME", "SLURM_LAUNCH_NODE_IPADDR")
    if not given and not re.search(rf"^\s*(export )?{name[1]}=", job, re.M):
        raise Wrong("unset", rank, f"a value for ${name[1]}", "no line sets it",
                    "With `set -u` the job ends at a name without a value.", "first=$(scontrol show hostnames ...")


EXERCISES = {"job-fix": Exercise("job", observe_job, judge_job)}
