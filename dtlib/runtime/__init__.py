"""DeepSpeed's name for what its engine is made of: of it there is ``runtime.utils``."""

from dtlib.runtime import utils

__all__ = ["utils"]
