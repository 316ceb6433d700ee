"""``%%px``: run a cell on all ranks, and show what each of them said, in rank order.

The cell runs through ipyparallel's own magic. What is ours is how it looks: while it runs, a live view (live.py); at
its end every output line names its rank, what several ranks say alike is shown once, as are equal errors, a cell
without output says where it ran (outputs.py), and a NameError names its cure. Where an error has left ranks out of
step, what they communicate with is refused on all.
"""

import functools
import itertools
import re
import textwrap
import time
from contextlib import suppress
from difflib import get_close_matches

from ipyparallel.client.magics import ParallelMagics
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import publish_display_data

from dtlib.errors import DtlibError
from dtlib.lab.engines import completion, on_ranks, outputs
from dtlib.lab.engines.engine_processes import STUCK, Ranks
from dtlib.lab.engines.extension import load_ipython_extension
from dtlib.lab.engines.live import LiveView, ranks_in_words
from dtlib.lab.engines.outputs import as_list

INTERRUPT_SECONDS = 20  # on a busy machine a rank takes its time
KEEPER_SECONDS = 2  # until the keeper has noticed that ranks have ended
ANSWER_SECONDS = 2  # for what takes ranks that are idle no time
# Errors of ranks that another one's error has reached.
AFTERMATH = ("PeerFailed", "WaitTimeout", "GroupPeerFailed", "GroupTimeout")

_serial = itertools.count()


def install(engines: Ranks) -> None:
    """Register ``%px`` and ``%%px`` for these engines, where there is an IPython to register them in."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is not None:
        load_ipython_extension(shell)
        shell.register_magics(RankMagics(shell, engines))
        completion.install(shell, engines)
        shell.set_custom_exc((NameError,), functools.partial(_explain_local_name_error, engines))


class RanksFailed(DtlibError):
    """A cell raised an error on at least one rank: ``errors`` maps ranks to ipyparallel's RemoteError."""

    def __init__(self, errors: dict, cures: list[str], waited: str = ""):
        self.errors, self.cures, self.waited = errors, cures, waited  # waited: whom everybody waited for
        super().__init__("; ".join(f"{who}: {error.ename}: {error.evalue}" for who, error in self._groups()))

    def _groups(self):
        """Ranks that raised the same error, with one example of it."""
        groups: dict = {}
        for rank, error in self.errors.items():
            groups.setdefault((error.ename, error.evalue), []).append(rank)
        for ranks in sorted(groups.values(), key=lambda ranks: self.errors[ranks[0]].ename in AFTERMATH):
            yield ranks_in_words(ranks), self.errors[ranks[0]]

    def _render_traceback_(self):
        lines = []
        for who, error in self._groups():
            if error.ename == "KeyboardInterrupt":
                lines.append(f"Interrupted on {who}.")
                if self.waited:
                    lines.append(textwrap.fill(f"Until then they waited: {self.waited}", 95))
            else:
                lines += [f"On {who}:", error.traceback or f"{error.ename}: {error.evalue}"]
        return lines + self.cures


class RankMagics(ParallelMagics):
    """``%px`` and ``%%px`` with outputs in rank order."""

    def __init__(self, shell: InteractiveShell, engines: Ranks):
        super().__init__(shell, engines.view)
        self.engines = engines
        self._alone = False  # whether the notebook's cell shows nothing else

    @functools.wraps(ParallelMagics.cell_px)  # its parser of arguments too
    def cell_px(self, line: str = "", cell: str = "") -> object:
        words = line.split()
        self._refuse_await(cell)
        if "--local" in words:  # here first, so that the outputs of ranks come in the usual form
            words.remove("--local")
            if not self.shell.run_cell(cell).success:  # which has shown the error
                raise DtlibError("The cell failed here in the notebook, so it was not run on the ranks.")
        self._alone = "--local" not in line.split()
        try:
            return super().cell_px(" ".join(words), cell)
        except IndexError:
            known = ranks_in_words(list(range(self.engines.size)))
            raise DtlibError(f"%%px {line}: there is no such rank; there are {known}.") from None
        finally:
            self._alone = False

    def parallel_execute(
        self, cell: str, block: bool | None = None, save_name: str | None = None, **options: object
    ) -> object:
        self.engines.check_held()
        self._refuse_await(cell)
        if cell.strip() == "dtlib.reset()":
            cell = "dtlib.reset();"  # nobody wants to see the world of each rank
        block = self.view.block if block is None else block
        if not block:
            return super().parallel_execute(cell, block=False, save_name=save_name)
        with self.engines.turn:
            return self._execute(cell, save_name)

    def _execute(self, cell, save_name):
        """Run a cell on the ranks, and show what they said."""
        # Ranks count the cell as the notebook does, and know which one it is (on_ranks.py).
        label = f"{self.shell.displayhook.prompt_count}.{next(_serial)}"
        result = self.last_result = self.view.execute(cell, silent=False, block=False, label=label)
        if save_name:
            self.shell.user_ns[save_name] = result
        view = LiveView(self._alone)
        try:
            _wait(result, self.engines, view)
        except KeyboardInterrupt:
            self.engines.interrupt()
            result.wait(INTERRUPT_SECONDS)
            if not result.done():
                raise DtlibError(STUCK) from None
        result.wait_for_output(1)
        targets = list(result._targets)  # ``engine_id`` would know those that have answered
        said_something = outputs.show(result, targets)
        view.keep(_reports(result))
        outcomes = self._outcomes(result, targets, view.waited)
        for page in _pages(outcomes[0]):  # of the first rank: a question mark is asked of all of them
            publish_display_data(page)
            said_something = True
        if not said_something:
            print(f"(ran on {ranks_in_words(targets)})")
        return None

    def _refuse_await(self, cell: str) -> None:
        """An engine that awaits at the top level of a cell never answers."""
        with suppress(SyntaxError):  # which ranks will report
            if self.shell.should_run_async(cell, transformed_cell=self.shell.transform_cell(cell)):
                raise DtlibError(
                    "Ranks cannot await at the top level of a cell: write `async def main(): ...` around it and call "
                    "`concurrent.futures.ThreadPoolExecutor().submit(asyncio.run, main()).result()`, or drop %%px to "
                    "await in the notebook."
                )

    def _outcomes(self, result, ranks, waited: str) -> list:
        from ipyparallel.error import RemoteError

        outcomes = as_list(result.get(return_exceptions=True))
        errors = {rank: error for rank, error in zip(ranks, outcomes, strict=True) if isinstance(error, RemoteError)}
        if any(error.ename == "EngineError" for error in errors.values()):
            time.sleep(KEEPER_SECONDS)
            self.engines.check_held()  # says what has become of them
        if errors:
            first = [rank for rank, error in errors.items() if error.ename not in AFTERMATH] or list(errors)
            cures = _cures(errors.values(), self.shell, self.engines)
            cures += self._refuse_where_out_of_step(ranks_in_words(first))
            raise RanksFailed(errors, cures, waited) from None
        return outcomes

    def _refuse_where_out_of_step(self, who: str) -> list[str]:
        """After an error, have all ranks refuse the communicators that they have not used alike; says how to go on."""
        from dtlib.comm.watch import in_step

        if self.engines.reset_wanted:
            self.engines.reset_now()
            return ["Reset was pressed: the ranks are back in step."]
        counts = self.engines.ask(in_step.counts, seconds=ANSWER_SECONDS)
        if counts is None:
            return ["Some ranks do not report whether they are in step: run %px dtlib.reset() before they continue."]
        names = in_step.differing(counts)
        if not names:
            return []
        why = f"was in use when a cell ended with an error on {who}"
        self.engines.ask(in_step.refuse, names, why, seconds=ANSWER_SECONDS)
        return ["The ranks are out of step: run %px dtlib.reset() before they communicate again."]


def _wait(result, engines, view: LiveView) -> None:
    """Wait for a cell, and show meanwhile what ranks say."""
    ranks = list(result._targets)
    engines.cell = result
    try:
        while not result.done():
            result.wait(0.1)
            engines.check_held()  # ranks that have ended will not answer
            running = [str(message) in engines.client.outstanding for message in result.msg_ids]
            texts = [out + err for out, err in zip(as_list(result.stdout), as_list(result.stderr), strict=True)]
            view.show(ranks, running, texts, _reports(result))
    finally:
        engines.cell = None
        view.close()


def _reports(result) -> list[dict]:
    """What each rank has told of itself so far (on_ranks.py, and whatever else calls publish_data)."""
    return [data or {} for data in as_list(result.data)]


def _pages(outcome) -> list[dict]:
    """What ``name?`` would show in the pager, as MIME types."""
    return [page["data"] for page in outcome._content.get("payload", ()) if page.get("source") == "page"]


def _cures(errors, shell, engines) -> list[str]:
    if any(error.ename == "StdinNotImplementedError" for error in errors):
        return ["Ranks cannot ask: use input() in a plain cell, and give the answer to the ranks with lab.push."]
    names = {match.group(1) for error in errors if error.ename == "NameError" and (match := _NAME.search(error.evalue))}
    return [
        f"`{name}` is defined in the notebook but not on the ranks: drop %%px from this cell, or run the cell that "
        f"defines `{name}` with %%px (or with %%px --local for both)."
        if name in shell.user_ns
        else _did_you_mean(name, itertools.chain(*(engines.ask(on_ranks.names, seconds=ANSWER_SECONDS) or [])))
        or f"`{name}` is not defined on the ranks: run the %%px cell that defines it first."
        for name in sorted(names)
    ]


def _did_you_mean(name: str, names) -> str:
    near = get_close_matches(name, set(names), n=1, cutoff=0.75)
    return f"`{name}` is not defined: did you mean `{near[0]}`?" if near else ""


_NAME = re.compile(r"name '(\w+)' is not defined")


def _explain_local_name_error(engines, shell, kind, value, trace, tb_offset=None):
    """Show a NameError of the notebook, and where the name is defined if the ranks have it."""
    lines = shell.InteractiveTB.structured_traceback(kind, value, trace, tb_offset=tb_offset)
    if match := _NAME.search(str(value)):
        name = match.group(1)
        if _ranks_know(engines, name):
            cure = (
                f"`{name}` is defined on the ranks but not in the notebook: start the cell with %%px to run it there."
            )
        else:
            cure = _did_you_mean(name, shell.user_ns)
        lines += [cure] * bool(cure)
    shell._showtraceback(kind, value, lines)
    return lines


def _ranks_know(engines, name: str) -> bool:
    with suppress(Exception):  # an explanation must not hide the error that it explains
        return any(name in known for known in engines.ask(on_ranks.names, seconds=1) or ())
    return False
