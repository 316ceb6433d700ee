"""``dtlib lab``: open JupyterLab on the workshop; ``dtlib lab --hub``: the same for a learner of a JupyterHub."""

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path

from IPython.paths import get_ipython_dir
from jupyter_core.paths import jupyter_runtime_dir

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.world.launch import start_zygote

SETTINGS = Path(__file__).with_name("settings")
FIRST_PAGE = f"/lab/tree/{course.START_PAGE.as_posix()}"
COURSE = "course"  # the folder in a learner's home that `dtlib lab --hub` uses
HUB_TOKEN_VARIABLE = "JUPYTERHUB_API_TOKEN"
# Hide rfc3987_syntax, with which jsonschema checks addresses: its import takes seconds, and JupyterLab has no addresses
# to check.
START = "import runpy, sys; sys.modules['rfc3987_syntax'] = None; runpy.run_module(sys.argv.pop(1), {}, '__main__', 1)"


def command(folder: Path, browser: bool, extra: list[str], program: str = "jupyterlab") -> list[str]:
    """Return the command line of JupyterLab on the workshop in ``folder``, with kernels of this Python."""
    line = [
        sys.executable, "-c", START, program,
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url={FIRST_PAGE}",
        # Settings that suppress the question about news and updates.
        f"--LabApp.app_settings_dir={SETTINGS}",
        # End kernels of closed notebooks after one idle hour (3,600 seconds).
        "--MappingKernelManager.cull_idle_timeout=3600",
        # CSS that wraps output between words and colours code by the theme.
        "--LabApp.custom_css=True",
        f"--ServerApp.tornado_settings=static_custom_path={SETTINGS / 'custom'}",
        # Without a terminal, Jupyter would start login shells, which reset PATH.
        f"--ServerApp.terminado_settings=shell_command={os.environ.get('SHELL', 'bash')}",
    ]  # fmt: skip
    line.append(f"--KernelManager.transport={transport()}")
    if hasattr(os, "geteuid") and os.geteuid() == 0 and program == "jupyterlab":
        line.append("--allow-root")
    return line + ["--no-browser"] * (not browser) + extra


def transport() -> str:
    """Return the transport between notebook and kernel: sockets in a private folder, else TCP.

    Every user of a machine can reach TCP ports. On some systems a socket's path has at most 103 bytes, and it ends in
    /kernel-, 36 letters, -ipc-5.
    """
    return "ipc" if os.name == "posix" and len(os.fsencode(jupyter_runtime_dir())) + 50 <= 103 else "tcp"


def serve(browser: bool, extra: list[str]) -> int:
    """Copy missing and outdated files of the course, and replace this process by JupyterLab; does not return."""
    return _become("jupyterlab", browser, extra)


def serve_hub(extra: list[str]) -> int:
    """Start the course in a learner's home folder, in the hub's server; does not return.

    Raises:
        DtlibError: if JupyterHub is missing, or if no hub started this process.
    """
    if importlib.util.find_spec("jupyterhub") is None:
        raise DtlibError("--hub needs JupyterHub, which is not installed here: pip install 'dtlib[hub]'.")
    if HUB_TOKEN_VARIABLE not in os.environ:
        raise DtlibError("Only a JupyterHub passes --hub (docs/how-to/run_a_hub.md): leave --hub out.")
    home = Path.home() / COURSE
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        os.chdir(home)
    except OSError as problem:
        raise DtlibError(f"{home} cannot be used for the course ({problem.strerror}): rename that file.") from None
    return _become("jupyterhub.singleuser", False, [f"--ServerApp.default_url={FIRST_PAGE}", *extra])


def _become(program: str, browser: bool, extra: list[str]) -> int:
    _keep_private()
    folder, said = course.open_folder()
    course.write_start_page(folder)
    if said:
        print(said, flush=True)
    line = command(folder, browser, extra, program)
    # Kernels that know %%px from the start: this kernelspec python3 is found before the environment's own.
    os.environ["JUPYTER_PATH"] = os.pathsep.join(
        filter(None, [str(SETTINGS / "jupyter"), os.environ.get("JUPYTER_PATH")])
    )
    # Make `dtlib` available in JupyterLab's terminals.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # The zygote is ready when the first cell runs. It ends with JupyterLab, which execv puts into this process.
    start_zygote()
    os.execv(line[0], line)


def _keep_private() -> None:
    """Make files that are written from now on (cells, outputs, IPython's history) readable by their owner only."""
    os.umask(0o077)
    with suppress(OSError):  # a file system without permissions
        ipython = Path(get_ipython_dir())
        ipython.mkdir(exist_ok=True)
        ipython.chmod(0o700)
