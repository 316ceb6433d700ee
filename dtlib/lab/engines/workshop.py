"""The workshop's ipyparallel profile for this machine, and the record of its one set of engines."""

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
from filelock import AcquireReturnProxy, FileLock, Timeout

from dtlib.errors import DtlibError
from dtlib.files import read_json, write_atomically, writing
from dtlib.lab.course import PROFILE, folder
from dtlib.world.allocation import allocation
from dtlib.world.processes import Process

CURE = (
    "engines store their keys and logs there, so free some space, make it writable with chmod -R u+w, or work in a "
    "copy of the workshop in your home folder"
)
OF_SCHEDULERS = {"Slurm": "profile_slurm", "PBS": "profile_pbs"}


def notebook_name() -> str:
    """Return the name of this notebook, as JupyterLab tells its kernel; for other programs the program's name."""
    name = os.environ.get("JPY_SESSION_NAME", "")
    return Path(name).name if name else Path(sys.argv[0]).name.replace("ipykernel_launcher.py", "a notebook")


def profile(root: Path | None = None) -> Path:
    """Return the profile folder in the workshop (at ``root`` or the current one).

    In a job on other machines it is the profile for the job's scheduler, otherwise the local one.
    """
    job = allocation()
    name = PROFILE if job is None or job.is_here else PROFILE.with_name(OF_SCHEDULERS[job.scheduler])
    return (root or folder()) / name


class Record:
    """Small files in the profile folder: which engines run, who started them, and which notebooks use them.

    ``set.json`` describes the engines, and ``holder.json`` the notebook whose names they have. ``attached/`` has one
    file for each notebook that keeps them alive. A process must hold the lock to change these files.
    """

    def __init__(self, profile: Path):
        self.profile = Path(profile)
        self.state = self.profile / "state"
        with writing(self.profile, CURE):
            for folder in (self.state, self.state / "attached"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.state / "writable").write_text("")
        self._lock = FileLock(self.state / "lock")

    def lock(self, seconds: float = 90) -> AcquireReturnProxy:
        """Acquire the lock, as a context manager: no other process starts, takes over or ends the engines in the block.

        Raises:
            DtlibError: if another process holds it for ``seconds``.
        """
        try:
            return self._lock.acquire(timeout=seconds)
        except Timeout:
            raise DtlibError(
                f"Another notebook has been starting or ending these engines for {seconds:.0f} s: try again, or run "
                "`dtlib doctor` to see what runs."
            ) from None

    def read(self, name: str) -> dict:
        """Return the contents of a file, or an empty dictionary."""
        with suppress(FileNotFoundError, ValueError):
            return read_json(self.state / name, dict)
        return {}

    def write(self, name: str, content: dict) -> None:
        """Replace the contents of a file."""
        with writing(self.profile, CURE):
            write_atomically(self.state / name, json.dumps(content))

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""
        (self.state / name).unlink(missing_ok=True)

    def keeper(self) -> psutil.Process | None:
        """Return the keeper of the running engines, or None."""
        keeper = self.read("set.json").get("keeper")
        return Process(**keeper).find() if keeper else None

    def attach(self, notebook: str) -> None:
        """Record that this process uses the engines and owns them from now on."""
        me = {**asdict(Process.of(os.getpid())), "notebook": notebook}
        self.write(f"attached/{os.getpid()}.json", me)
        self.write("holder.json", me)

    def attached(self) -> list[dict]:
        """Return the running processes that use the engines; remove the records of ended ones."""
        living = []
        for path in sorted((self.state / "attached").glob("*.json")):
            note = self.read(f"attached/{path.name}")
            if note and Process(note["pid"], note["created"]).find():
                living.append(note)
            else:
                path.unlink(missing_ok=True)
        return living

    def is_owned_here(self) -> bool:
        """Return whether the engines belong to this process."""
        holder = self.read("holder.json")
        return bool(holder) and Process(holder["pid"], holder["created"]) == Process.of(os.getpid())
