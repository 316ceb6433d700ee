"""``%%px``: run a cell on all ranks, and show what each of them said, in rank order.

The cell runs through ipyparallel's own magic. What is ours is how it looks: every output line names its rank, a
cell without output says where it ran, equal errors are shown once, and a NameError names its cure.
"""

import functools
import re
import sys
import time

from ipyparallel.client.magics import ParallelMagics
from IPython.display import display, publish_display_data
from tqdm.auto import tqdm

from dtlib.errors import DtlibError
from dtlib.lab.colours import rank_prefix
from dtlib.lab.engines.engine_processes import interrupt

INTERRUPT_SECONDS = 5
KEEPER_SECONDS = 2  # until the keeper has noticed that ranks have ended
MOST_LINES = 1000  # of one rank in one cell


def install(engines) -> None:
    """Register ``%px`` and ``%%px`` for these engines, where there is an IPython to register them in."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is not None:
        shell.register_magics(RankMagics(shell, engines))
        shell.set_custom_exc((NameError,), functools.partial(_explain_local_name_error, engines))


class RanksFailed(DtlibError):
    """A cell raised an error on at least one rank: ``errors`` maps ranks to ipyparallel's RemoteError."""

    def __init__(self, errors: dict, cures: list[str]):
        self.errors = errors
        self.cures = cures
        super().__init__("; ".join(f"{who}: {error.ename}: {error.evalue}" for who, error in self._groups()))

    def _groups(self):
        """Ranks that raised the same error, with one example of it."""
        groups = {}
        for rank, error in self.errors.items():
            groups.setdefault((error.ename, error.evalue), []).append(rank)
        for ranks in groups.values():
            yield _ranks(ranks), self.errors[ranks[0]]

    def _render_traceback_(self):
        lines = []
        for who, error in self._groups():
            if error.ename == "KeyboardInterrupt":
                lines.append(f"Interrupted on {who}. If they waited for one another, run %px dtlib.reset() to go on.")
            else:
                lines += [f"On {who}:", error.traceback or f"{error.ename}: {error.evalue}"]
        return lines + self.cures


class RankMagics(ParallelMagics):
    """``%px`` and ``%%px`` with outputs in rank order."""

    def __init__(self, shell, engines):
        super().__init__(shell, engines.view)
        self.engines = engines

    @functools.wraps(ParallelMagics.cell_px)  # its parser of arguments too
    def cell_px(self, line="", cell=None):
        words = line.split()
        if "--local" in words:  # here first, so that the outputs of ranks come in the usual form
            words.remove("--local")
            if not self.shell.run_cell(cell).success:  # which has shown the error
                raise DtlibError("The cell failed here in the notebook, so it was not run on the ranks.")
        try:
            return super().cell_px(" ".join(words), cell)
        except IndexError:
            known = _ranks(list(range(self.engines.size)))
            raise DtlibError(f"%%px {line}: there is no such rank; there are {known}.") from None

    def parallel_execute(self, cell, block=None, save_name=None, **options):
        self.engines.check_held()
        block = self.view.block if block is None else block
        if not block:
            return super().parallel_execute(cell, block=False, save_name=save_name)
        result = self.last_result = self.view.execute(cell, silent=False, block=False)
        if save_name:
            self.shell.user_ns[save_name] = result
        try:
            _wait(result, self.engines)
        except KeyboardInterrupt:
            interrupt(self.engines.pids())
            result.wait(INTERRUPT_SECONDS)
            if not result.done():
                raise DtlibError(
                    "Some ranks do not react to the interrupt: run lab.engines(restart=True) for new ones."
                ) from None
        result.wait_for_output(1)
        targets = _targets(result)
        said_something = _show(result, targets)
        self._raise_errors(result, targets)
        if not said_something:
            print(f"(ran on {_ranks(targets)})")
        return None

    def _raise_errors(self, result, ranks) -> None:
        from ipyparallel.error import RemoteError

        outcomes = _as_list(result.get(return_exceptions=True))
        errors = {rank: error for rank, error in zip(ranks, outcomes, strict=True) if isinstance(error, RemoteError)}
        if any(error.ename == "EngineError" for error in errors.values()):
            time.sleep(KEEPER_SECONDS)
            self.engines.check_held()  # says what has become of them
        if errors:
            raise RanksFailed(errors, _cures(errors.values(), self.shell)) from None


def _wait(result, engines) -> None:
    """Wait for a cell; where ranks report progress, draw one bar for all of them; where they wait, say for whom."""
    bar, line = None, _WaitingLine()
    try:
        while not result.done():
            result.wait(0.1)
            engines.check_held()  # ranks that have ended will not answer
            reports = {rank: data or {} for rank, data in zip(_targets(result), _as_list(result.data), strict=True)}
            for data in reports.values():
                if "progress" in data:
                    done, total, unit = data["progress"]
                    bar = bar or tqdm(total=total, unit=f" {unit}", unit_scale=True, delay=2, leave=False)
                    bar.update(done - bar.n)
            line.show({rank: data["waiting"] for rank, data in reports.items() if data.get("waiting")})
    finally:
        line.show({})
        if bar is not None:
            bar.close()


class _WaitingLine:
    """One line below the cell that says whom everybody waits for; it goes away when the waiting is over."""

    def __init__(self):
        self._display = None
        self._shown = ""

    def show(self, waiting: dict[int, str]) -> None:
        text = ""
        if waiting:
            text = f"Waiting: {_ranks(sorted(waiting))}, {next(iter(waiting.values()))}. Stop ends the wait."
        if text == self._shown:
            return
        self._shown = text
        content = {"text/plain": text}
        if self._display is None:
            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)


def _targets(result) -> list[int]:
    return result.engine_id if isinstance(result.engine_id, list) else [result.engine_id]


def _show(result, ranks) -> bool:
    """Every rank's output, rank by rank; False where there is none."""
    said_something = False
    outputs = zip(
        ranks, _as_list(result.stdout), _as_list(result.stderr),
        result.outputs if len(ranks) > 1 else [result.outputs],  # each is a list itself
        _as_list(result.execute_result), strict=True,
    )  # fmt: skip
    for rank, stdout, stderr, displayed, value in outputs:
        _print_lines(rank, stdout, sys.stdout)
        _print_lines(rank, stderr, sys.stderr)
        for output in displayed:
            print(f"{rank_prefix(rank)} shows:")
            sys.stdout.flush()
            publish_display_data(output["data"], output.get("metadata"))
        if value is not None:
            _print_lines(rank, _text_of(value), sys.stdout)
        said_something = said_something or bool(stdout or stderr or displayed or value)
    return said_something


def _print_lines(rank, text, file) -> None:
    lines = text.removesuffix("\n").split("\n") if text else []
    if len(lines) > MOST_LINES:
        left_out = f"... {len(lines) - MOST_LINES:,} lines are left out here ..."
        lines = [*lines[: MOST_LINES // 2], left_out, *lines[-MOST_LINES // 2 :]]
    if lines:
        print("\n".join(f"{rank_prefix(rank)} {line}" for line in lines), file=file)


def _text_of(value) -> str:
    content = getattr(value, "data", None) or value["data"]
    return content.get("text/plain", "")


def _as_list(value):
    """One entry a rank, also where ipyparallel unpacks the list of a single rank."""
    return value if isinstance(value, list) else [value]


def _cures(errors, shell) -> list[str]:
    if any(error.ename == "StdinNotImplementedError" for error in errors):
        return ["Ranks cannot ask: use input() in a plain cell, and give the answer to the ranks with lab.push."]
    names = {match.group(1) for error in errors if error.ename == "NameError" and (match := _NAME.search(error.evalue))}
    return [
        f"`{name}` is defined in the notebook but not on the ranks: drop %%px from this cell, or run the cell that "
        f"defines `{name}` with %%px (or with %%px --local for both)."
        if name in shell.user_ns
        else f"`{name}` is not defined on the ranks: run the %%px cell that defines it first."
        for name in sorted(names)
    ]


_NAME = re.compile(r"name '(\w+)' is not defined")


def _explain_local_name_error(engines, shell, kind, value, trace, tb_offset=None):
    """Show a NameError of the notebook, and where the name is defined if the ranks have it."""
    lines = shell.InteractiveTB.structured_traceback(kind, value, trace, tb_offset=tb_offset)
    match = _NAME.search(str(value))
    if match and _ranks_know(engines, match.group(1)):
        lines.append(
            f"`{match.group(1)}` is defined on the ranks but not in the notebook: start the cell with %%px to run it "
            "there."
        )
    shell._showtraceback(kind, value, lines)
    return lines


def _ranks_know(engines, name: str) -> bool:
    try:
        engines.check_held()
        known = engines.view.apply_async(_knows, name)
        deadline = time.monotonic() + 1
        while not known.done() and time.monotonic() < deadline:
            known.wait(0.05)
        return known.done() and any(_as_list(known.get()))
    except Exception:  # an explanation must not hide the error that it explains
        return False


def _knows(name: str) -> bool:
    from IPython import get_ipython

    return name in get_ipython().user_ns


def _ranks(ranks: list[int]) -> str:
    """``rank 2``, ``ranks 0 to 3`` or ``ranks 0, 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
