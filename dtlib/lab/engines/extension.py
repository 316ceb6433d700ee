"""The IPython extension that every kernel of the workshop's JupyterLab loads when it starts.

It adds a ``%%px`` that says what to do first, and the record of outputs for ``lab.last()`` (last_outputs.py). The
kernelspec in ``lab/settings/jupyter`` names the extension, and ``dtlib lab`` puts that folder on JUPYTER_PATH.
"""

from typing import NoReturn

from IPython.core.interactiveshell import InteractiveShell

from dtlib.errors import DtlibError
from dtlib.lab import last_outputs


def _px_without_ranks(line: str, cell: str | None = None) -> NoReturn:
    """Stand in for ``%px`` and ``%%px`` until ``lab.engines()`` replaces it."""
    raise DtlibError(
        "Run the first cell of this notebook first: it has no ranks yet, or its kernel was restarted. That cell is "
        "`from dtlib import lab; lab.engines(4)`, or has another number of ranks."
    )


def _px_in_a_later_line(line: str) -> NoReturn:
    raise DtlibError("%%px belongs in the first line of a cell: move it above the other lines.")


def magic_first(lines: list[str]) -> list[str]:
    """Move a %%px below comments and empty lines to the first line of the cell, where IPython requires it."""
    for at, line in enumerate(lines):
        if line.lstrip().startswith("%%px"):
            return [line.strip() + "\n", *lines[:at], *lines[at + 1 :]]
        if line.strip() and not line.startswith("#"):
            break
    return lines


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Install the extension; IPython calls this."""
    if magic_first not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(magic_first)
    # IPython looks for a magic of this name if %%px stands in a later line.
    shell.magics_manager.register_function(_px_in_a_later_line, magic_name="%px")
    if "px" not in shell.magics_manager.magics["cell"]:
        shell.magics_manager.register_function(_px_without_ranks, "line_cell", "px")
    if kernel := getattr(shell, "kernel", None):
        last_outputs.install(kernel)
