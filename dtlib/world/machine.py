"""Cores and GPUs of this machine, found without importing torch or MPI."""

import os
import shutil
import subprocess


def usable_cores() -> int:
    """Return the number of cores that this process may use (fewer under Slurm, taskset or in a container)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_names() -> list[str]:
    """Return the names of the GPUs that ranks may use, without importing torch."""
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
    """Return entries for ``CUDA_VISIBLE_DEVICES``, one per GPU: the current entries, or all GPUs if it is not set."""
    count = len(gpu_names())
    return _chosen_gpus()[:count] or [str(index) for index in range(count)]


def _chosen_gpus() -> list[str]:
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
