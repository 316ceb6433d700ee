"""Training from a config: ``dtlib.initialize`` and what belongs to it."""

from dtlib.training.engine import Engine, initialize

__all__ = ["Engine", "initialize"]
