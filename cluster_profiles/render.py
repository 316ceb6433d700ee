"""Batch scripts with what site.toml says filled in: ``python render.py slurm [program ...] > job.sh``.

The scripts are in jobs/. The program is `-m dtlib train vision` unless another one is given, with its arguments.
"""

import re
import shlex
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
KINDS = {
    **dict.fromkeys(("nodes", "ranks_a_node", "gpus_a_node", "minutes"), int), "hosts": list, "hub": dict,
    **dict.fromkeys(("account", "queue", "filesystems", "interface", "ssh", "course", "prepare"), str),
}  # fmt: skip
TRAIN = {"torchrun": ["--runtime", "torch"], "deepspeed": ["--runtime", "deepspeed"]}


def read_site() -> dict:
    """Return the settings of site.toml.

    Raises:
        ValueError: one sentence with its path and what is wrong in it.
    """
    path = HERE / "site.toml"
    try:
        site = tomllib.loads(path.read_text(encoding="utf-8"))
        for name, kind in KINDS.items():
            if name not in site:
                raise ValueError(f"{name} is missing")
            if type(site[name]) is not kind or (kind is int and site[name] < (name != "gpus_a_node")):
                raise ValueError(f"{name} is {site[name]!r}")
    except (OSError, ValueError) as problem:
        raise ValueError(f"{path} cannot be used ({problem}): correct it, or copy it from the course.") from None
    return site


def render(job: str, program: list[str] | None = None, site: dict | None = None) -> str:
    """Return the script of ``jobs/<job>.sh`` for this site, which starts Python with ``program`` on every rank."""
    site = site or read_site()
    program = list(program or ["-m", "dtlib", "train", "vision", *TRAIN.get(job, [])])
    slots = [f"{host} slots={site['ranks_a_node']}" for host in site["hosts"]]
    hosts = ",".join(f"{host}:{site['ranks_a_node']}" for host in site["hosts"])
    slurm, gpus, interface = job != "pbs", site["gpus_a_node"], site["interface"]
    if job == "deepspeed" and program[0] == "-m":
        program[0] = "--module"
    filled = {
        **site,
        "program": shlex.join(program),
        "ranks": site["nodes"] * site["ranks_a_node"],
        "walltime": f"{site['minutes'] // 60:02}:{site['minutes'] % 60:02}:00",
        "account": _option("#SBATCH --account=" if slurm else "#PBS -A ", site["account"]),
        "queue": _option("#SBATCH --partition=" if slurm else "#PBS -q ", site["queue"]),
        "filesystems": _option("#PBS -l filesystems=", site["filesystems"]),
        "gpus": _option("#SBATCH --gpus-per-node=" if slurm else ":ngpus=", gpus),
        "network": f"--mca btl_tcp_if_include {interface}" if interface else "",
        "hosts": f"--prtemca plm_ssh_agent {site['ssh']} --host {hosts}" if hosts else "--oversubscribe",
        "hostlines": shlex.join(slots or [f"localhost slots={site['ranks_a_node']}"]),
    }
    text = re.sub(r"@(\w+)@", lambda found: str(filled[found[1]]), (HERE / "jobs" / f"{job}.sh").read_text())
    lines = [re.sub(r"(?<=\S) {2,}", " ", line) for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _option(words: str, value) -> str:
    return f"{words}{value}" if value else ""


if __name__ == "__main__":
    known = sorted(path.stem for path in (HERE / "jobs").glob("*.sh"))
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        sys.exit(f"render.py: name a script, one of {', '.join(known)}; what follows it is the program.")
    try:
        print(render(sys.argv[1], sys.argv[2:]), end="")
    except ValueError as problem:
        sys.exit(f"render.py: {problem}")
