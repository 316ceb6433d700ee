"""``dtlib lab``: JupyterLab, opened on the workshop."""

import os
import sys
from pathlib import Path

from jupyter_core.paths import jupyter_runtime_dir

from dtlib.lab import course
from dtlib.lab.checks import progress
from dtlib.world.launch import start_zygote

SETTINGS = Path(__file__).with_name("settings")


def command(folder: Path, browser: bool, extra: list[str]) -> list[str]:
    """The command line of JupyterLab on the workshop in ``folder``, with this Python's kernels."""
    line = [
        sys.executable, "-m", "jupyterlab",
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{course.START_PAGE.as_posix()}",
        # No question about news and updates in front of the first lesson.
        f"--LabApp.app_settings_dir={SETTINGS}",
        # A kernel whose notebook is closed ends when it has done nothing for an hour.
        "--MappingKernelManager.cull_idle_timeout=3600",
        # Lines of output that break between words, and code in the colours of the theme.
        "--LabApp.custom_css=True",
        f"--ServerApp.tornado_settings=static_custom_path={SETTINGS / 'custom'}",
    ]  # fmt: skip
    line.append(f"--KernelManager.transport={transport()}")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        line.append("--allow-root")
    if not browser:
        line.append("--no-browser")
    return line + extra


def transport() -> str:
    """How a notebook reaches its kernel: by sockets in its owner's folder, since every user of a machine hears ports.

    A socket's path is at most 103 bytes long on some systems, and ends in /kernel-, 36 letters, -ipc-5.
    """
    return "ipc" if os.name == "posix" and len(os.fsencode(jupyter_runtime_dir())) + 50 <= 103 else "tcp"


def serve(browser: bool, extra: list[str]) -> int:
    """Lay out the course where it is missing or old, and become JupyterLab; does not return."""
    folder, said = course.open_folder()
    progress.write_start_page(folder)
    if said:
        print(said, flush=True)
    line = command(folder, browser, extra)
    # Kernels with %%px from the start: here python3 is found before the environment's own of that name.
    os.environ["JUPYTER_PATH"] = os.pathsep.join(
        filter(None, [str(SETTINGS / "jupyter"), os.environ.get("JUPYTER_PATH")])
    )
    # So that `dtlib` is known in JupyterLab's terminals.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    start_zygote()  # ready when the first cell runs; it ends with JupyterLab, which this process becomes
    os.execv(line[0], line)
