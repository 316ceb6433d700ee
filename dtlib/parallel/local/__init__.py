"""Steps that each rank takes alone, and seldom a message: plain.py is read in class, full.py adds what runs need."""

from dtlib.parallel.local import contract  # noqa: F401  # plain.py's, on import
from dtlib.parallel.local.full import DiLoCo, LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
