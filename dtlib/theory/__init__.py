"""The closed formulas of the lectures (pure Python)."""
