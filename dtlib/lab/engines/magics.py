"""``%px`` and ``%%px``: ipyparallel's magics parse the arguments, and cells.py runs the cell."""

import functools
from contextlib import suppress

from ipyparallel.client.magics import ParallelMagics
from IPython.core.interactiveshell import InteractiveShell

from dtlib.errors import DtlibError
from dtlib.lab.engines import cells, completion
from dtlib.lab.engines.cell_errors import NAME, did_you_mean, names
from dtlib.lab.engines.extension import load_ipython_extension
from dtlib.lab.engines.live_view import ranks_in_words
from dtlib.lab.foreign import EngineSet
from dtlib.world import after_reset


def install(engines: EngineSet) -> None:
    """Register ``%px`` and ``%%px`` for these engines, if IPython runs."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is not None:
        load_ipython_extension(shell)
        shell.register_magics(RankMagics(shell, engines))
        completion.install(shell, engines)
        shell.set_custom_exc((NameError,), functools.partial(_explain_local_name_error, engines))


class RankMagics(ParallelMagics):
    """``%px`` and ``%%px`` with output in rank order."""

    def __init__(self, shell: InteractiveShell, engines: EngineSet):
        super().__init__(shell, engines.view)
        self.engines = engines
        self._alone = False  # whether the notebook's cell has no other output

    @functools.wraps(ParallelMagics.cell_px)  # also copies its parser of arguments
    def cell_px(self, line: str = "", cell: str = "") -> object:
        words = line.split()
        self._refuse_await(cell)
        # Run the cell here first, so that the ranks' output has the usual form.
        if "--local" in words:
            words.remove("--local")
            if not self.shell.run_cell(cell).success:  # run_cell has shown the error
                raise DtlibError("The cell failed in the notebook, so it did not run on the ranks.")
        self._alone = "--local" not in line.split()
        try:
            return super().cell_px(" ".join(words), cell)
        except IndexError:
            known = ranks_in_words(list(range(self.engines.size)))
            raise DtlibError(f"%%px {line}: this rank does not exist; the ranks are {known}.") from None
        finally:
            self._alone = False

    def parallel_execute(
        self, cell: str, block: bool | None = None, save_name: str | None = None, **options: object
    ) -> object:
        self.engines.check_ownership()
        self._refuse_await(cell)
        if cell.strip() == "dtlib.reset()":
            cell = "dtlib.reset();"  # the semicolon hides each rank's World
        if not (self.view.block if block is None else block):
            return super().parallel_execute(cell, block=False, save_name=save_name)
        # A reset from the panel's thread waits for this lock.
        with self.engines.cell_lock:
            self.last_result = cells.run_cell(cell, self.engines, self.shell, save_name, self._alone)
        return None

    def _refuse_await(self, cell: str) -> None:
        """Raise for a top-level await, after which an engine never answers."""
        with suppress(SyntaxError):  # the ranks will report it
            if self.shell.should_run_async(cell, transformed_cell=self.shell.transform_cell(cell)):
                raise DtlibError(
                    "Ranks cannot await at the top level of a cell: write `async def main(): ...` around it and call "
                    "`concurrent.futures.ThreadPoolExecutor().submit(asyncio.run, main()).result()`, or drop %%px to "
                    "await in the notebook."
                )


def _explain_local_name_error(engines, shell, kind, value, trace, tb_offset=None):
    """Show a NameError of the notebook, and whether the ranks define the name."""
    lines = shell.InteractiveTB.structured_traceback(kind, value, trace, tb_offset=tb_offset)
    if match := NAME.search(str(value)):
        name = match.group(1)
        cure = did_you_mean(name, shell.user_ns)
        if _ranks_know(engines, name):
            cure = f"`{name}` is defined on the ranks but not in the notebook: start the cell with %%px."
        lines += [cure] * bool(cure)
    shell._showtraceback(kind, value, lines)
    return lines


def _refuse_reset() -> None:
    """Raise after ``dtlib.reset()`` in a cell without %px: it has no effect on the ranks."""
    raise DtlibError("This resets the notebook, which is no rank. To reset the ranks, type %px dtlib.reset().")


after_reset.append(_refuse_reset)


def _ranks_know(engines, name: str) -> bool:
    with suppress(Exception):  # an explanation must not hide the error
        return any(name in known for known in engines.ask(names, seconds=1) or ())
    return False
