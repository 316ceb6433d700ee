"""The controller, as on any single machine: encrypted."""

from pathlib import Path

load_subconfig("ipcontroller_config.py", str(Path(__file__).parents[1] / "profile_local_mpi"))  # noqa: F821
