"""Closed formulas of the lectures (pure Python)."""
