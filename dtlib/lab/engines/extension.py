"""What every kernel of the workshop's JupyterLab loads when it starts: a ``%%px`` that says what it needs, and a memory
for what cells show (last_outputs.py).

The kernelspec in ``lab/settings/jupyter`` names it, and ``dtlib lab`` puts that folder on JUPYTER_PATH.
"""

from typing import NoReturn

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class

from dtlib.errors import DtlibError
from dtlib.lab import last_outputs


@magics_class
class MagicsBeforeEngines(Magics):
    """``%px`` and ``%%px`` as long as there are no ranks; ``lab.engines()`` puts its own in their place."""

    @line_cell_magic
    def px(self, line: str = "", cell: str | None = None) -> NoReturn:
        raise DtlibError(
            "Run lab.engines(4) first: this notebook has no ranks, or its kernel was restarted. The first cell of "
            "each lesson is `from dtlib import lab; lab.engines(4)`."
        )


def magic_first(lines: list[str]) -> list[str]:
    """A cell with %%px in its first line, where only comments and empty lines stand above it: IPython knows it there
    alone."""
    for at, line in enumerate(lines):
        if line.lstrip().startswith("%%px"):
            return [line.strip() + "\n", *lines[:at], *lines[at + 1 :]]
        if line.strip() and not line.startswith("#"):
            break
    return lines


def load_ipython_extension(shell: InteractiveShell) -> None:
    """IPython calls this when it loads an extension."""
    if magic_first not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(magic_first)
    if "px" not in shell.magics_manager.magics["cell"]:
        shell.register_magics(MagicsBeforeEngines)
    if kernel := getattr(shell, "kernel", None):
        last_outputs.install(kernel)
