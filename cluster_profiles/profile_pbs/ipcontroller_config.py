"""The controller: one address for engines on other nodes, encrypted (several_nodes.py)."""

from pathlib import Path

load_subconfig("several_nodes.py", str(Path(__file__).parents[1]))  # noqa: F821
