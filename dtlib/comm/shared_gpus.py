"""Find out how CUDA tensors travel between ranks that share a GPU. This file imports no torch."""

import importlib.metadata
import os
from contextlib import suppress

VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
FROM = (2, 30)  # the first NCCL version that connects ranks on one GPU
ADVICE = f"NCCL {'.'.join(map(str, FROM))} or newer takes them with {VARIABLE}=1"


def asked_for() -> bool:
    """Return True if this environment allows NCCL to connect ranks that share a GPU."""
    return os.environ.get(VARIABLE) == "1"


def transport() -> str:
    """Return ``NCCL`` or ``host memory``, depending on this environment and on the installed NCCL."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with suppress(importlib.metadata.PackageNotFoundError):
            major, minor = importlib.metadata.version(package).split(".")[:2]
            return "NCCL" if asked_for() and (int(major), int(minor)) >= FROM else "host memory"
    return "host memory"
