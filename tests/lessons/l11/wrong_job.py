"""Plausible wrong answers to lesson 11's batch script, and the mistake that the check must recognise in each."""

RIGHT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=00:30:00
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes=2 --nproc-per-node=4 \\
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:29500" \\
    train.py --resume checkpoints
"""


FIRST = 'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'


def but(*changes: tuple[str, str]) -> str:
    job = RIGHT
    for old, new in changes:
        assert old in job
        job = job.replace(old, new)
    return job


AS_IT_WAS = but(
    ("per-node=1\n#SBATCH --gpus-per-node=4", "per-node=4"), ("00:30:00", "30:00:00"), ('"$first:', "localhost:"),
    ('29500"', "29500"),
)  # fmt: skip
OTHERS = {  # right, in other words
    "short options": but(("--nodes=2\n#SBATCH --ntasks-per-node=1", "-N 2 -n 2"), ("--time=00:30:00", "-t 30")),
    "of all machines": but(("--gpus-per-node=4", "--gpus=8"), ("--nproc-per-node=4", "--nproc_per_node gpu")),
    "gres": but(("--gpus-per-node=4", "--gres=gpu:a100:4  # of each machine"), ("00:30:00", "30:00")),
    "the shell's own name": but(("$first:29500", "$(hostname):29500")),
}
NAMED = {
    "job-fix": {
        "as it was": (AS_IT_WAS, "no-gpu"),
        "no GPUs": (but(("#SBATCH --gpus-per-node=4\n", "")), "no-gpu"),
        "GPUs after a command": (
            but(("#SBATCH --gpus-per-node=4\n", ""), ("pipefail", "pipefail\n#SBATCH --gpus=8")),
            "no-gpu",
        ),
        "eight GPUs a machine": (but(("--gpus-per-node=4", "--gpus-per-node=8")), "gpus"),
        "four GPUs in all": (but(("--gpus-per-node=4", "--gpus=4")), "gpus"),
        "a torchrun for each GPU": (but(("--ntasks-per-node=1", "--ntasks-per-node=4")), "torchruns"),
        "eight tasks": (but(("--ntasks-per-node=1", "--ntasks=8")), "torchruns"),
        "all ranks on each machine": (but(("--nproc-per-node=4", "--nproc-per-node=8")), "ranks"),
        "one rank": (but((" --nproc-per-node=4", "")), "ranks"),
        "eight cores": (but(("--cpus-per-task=32", "--cpus-per-task=8")), "cores"),
        "no srun": (but(("srun torchrun", "torchrun")), "first-machine-alone"),
        "localhost": (but(("$first:29500", "localhost:29500")), "meets-itself"),
        "no address": (but((' --rdzv-endpoint="$first:29500"', "")), "meets-itself"),
        "nobody sets the address": (but((FIRST, "")), "unset"),
        "thirty hours": (but(("00:30:00", "30:00:00")), "time"),
        "thirty seconds": (but(("00:30:00", "00:00:30")), "time"),
        "no limit": (but(("#SBATCH --time=00:30:00\n", "")), "time"),
        "one machine in torchrun": (but(("--nnodes=2", "--nnodes=1")), "machines"),
        "one machine": (but(("--nodes=2\n", "--nodes=1\n")), "machines"),
        "no shebang": (RIGHT.removeprefix("#!/bin/bash\n"), "type"),
        "a comment alone": (but(("srun torchrun", "# srun torchrun")), "no-launcher"),
    }
}  # fmt: skip
