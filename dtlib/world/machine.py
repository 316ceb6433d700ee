"""What this machine offers, without importing torch or MPI."""

import os
import shutil
import subprocess


def usable_cores() -> int:
    """Cores that this process may run on (fewer than the machine's under Slurm, taskset or a container)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_names() -> list[str]:
    """Names of the GPUs that ranks may use, without importing torch."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = found.stdout.strip().splitlines() if found.returncode == 0 else []
    return names[: len(_chosen_gpus())] if "CUDA_VISIBLE_DEVICES" in os.environ else names


def visible_gpus() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` may name, one entry a GPU: those that it names now, else all."""
    count = len(gpu_names())
    return _chosen_gpus()[:count] or [str(index) for index in range(count)]


def _chosen_gpus() -> list[str]:
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
