"""DeepSpeed's name for mixtures of experts, which are not offered: for programs that import it and go on without."""

from dtlib.errors import MissingName
from dtlib.moe import utils

__all__ = ["utils"]


def __getattr__(name: str) -> object:
    if name in ("layer", "MoE"):
        raise MissingName(f"dtlib.moe.{name} is not offered: run the program without its option for experts.")
    raise AttributeError(f"module 'dtlib.moe' has no attribute {name!r}")
