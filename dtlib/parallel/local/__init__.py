"""Local training: ranks take several steps between two messages; plain.py is read in class, full.py is complete."""

from dtlib.parallel.local import checks  # noqa: F401  # installs the checks of plain.py on import
from dtlib.parallel.local.full import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
