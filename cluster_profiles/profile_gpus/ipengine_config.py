"""What every engine of this profile is told when it starts: as on any single machine."""

from pathlib import Path

load_subconfig("ipengine_config.py", str(Path(__file__).parents[1] / "profile_local_mpi"))  # noqa: F821
