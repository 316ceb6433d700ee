"""Training from a config: ``dtlib.initialize`` and what belongs to it."""

from dtlib.training.engine import Engine
from dtlib.training.initialization import initialize

__all__ = ["Engine", "initialize"]
