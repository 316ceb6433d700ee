"""Run a learner's cell on ranks that take turns: a rank that waits lets the others run.

If no rank can continue, each waiting rank gets an error that names the missing ranks, as in a notebook.
"""

import builtins
import inspect
import linecache
import re
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

from dtlib.browser.simulated import distributed
from dtlib.browser.simulated.awaiting import compiled
from dtlib.browser.simulated.communicator import Event, Pending, SimulatedCommunicator, Wires
from dtlib.browser.simulated.tensors import fake_module
from dtlib.comm import waiting
from dtlib.comm.watch import missing_ranks
from dtlib.comm.watch.board import BoardEntry
from dtlib.errors import RESET, DtlibError, MissingName, WaitTimeout

LINES, LETTERS = 200, 10_000  # printed per rank and cell; further lines are only counted
ABSENT = ("numpy", "mpi4py", "deepspeed", "horovod", "ipyparallel")


@dataclass
class Outcome:
    """The result of a cell on all ranks.

    ``said[rank]`` is the text that a rank printed, ``failed[rank]`` its error or an empty string. ``awaited`` has the
    lines with an added ``await``. ``problem`` is the reason if the cell did not run at all.
    """

    said: list = field(default_factory=list)
    failed: list = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    messages: list = field(default_factory=list)
    rounds: int = 0
    awaited: tuple = ()
    problem: str = ""
    stuck: bool = False


class Ranks:
    """``size`` ranks, each with its own variables, which persist from cell to cell."""

    def __init__(self, size: int):
        self.size, self.wires, self.number = size, Wires(size), 0
        self.ranks = [_Rank(rank, self.wires) for rank in range(size)]
        self._waiting_functions: set[str] = set()  # functions of earlier cells that must be awaited

    def run(self, source: str) -> Outcome:
        """Run a cell on all ranks, and return its outcome."""
        self.number += 1
        file = f"<cell {self.number}>"
        source = re.sub(r"(?m)^%px\b[ \t]*", "", re.sub(r"\A\s*%%px\b[^\n]*\n?", "", source))
        try:
            code, lines = compiled(source, file, self._waiting_functions)
        except SyntaxError as error:
            line = (error.text or "").strip()
            return Outcome(problem=f"Nothing ran. Line {error.lineno}: {error.msg}" + (f": {line}" if line else "."))
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        wires = self.wires
        wires.events.clear()
        wires.network.arrived.clear()
        wires.network.number = 0
        for rank in self.ranks:
            rank.begin(code)
        stuck = self._run_to_end()
        said = [rank.text() for rank in self.ranks]
        failed = [rank.failed for rank in self.ranks]
        return Outcome(
            said, failed, list(wires.events), list(wires.network.arrived), wires.network.number, lines, "", stuck
        )

    def _run_to_end(self) -> bool:
        """Run all ranks to the end of the cell; return True if they were in a deadlock."""
        stuck = False
        while any(rank.runs for rank in self.ranks):
            # Operations progress before and after each delivery, so that a rank sees messages of the same round.
            waiting.advance_all()
            moved = [rank.resume() for rank in self.ranks if rank.can_resume()]
            waiting.advance_all()
            got = self.wires.network.deliver()
            waiting.advance_all()
            for rank in self.ranks:
                rank.comm_ended()
            if not moved and not got and not any(rank.can_resume() for rank in self.ranks):
                stuck = True
                self._report_deadlock()
        return stuck

    def _report_deadlock(self) -> None:
        waits = {rank: rank.waits.task.call for rank in self.ranks if rank.runs and rank.waits}
        sentences = {}
        for rank, call in waits.items():
            sentences[rank] = (
                f"{call} (`{call.where}`) cannot end: {missing_ranks.describe(rank.rank, self.wires.seen)}. {RESET}"
            )
        for rank, call in waits.items():
            rank.world.comm.abandon(f"was interrupted in {call}")
        for rank in self.ranks:
            rank.world.comm.abandon("was left by others in the middle of an operation")
        self.wires.network.forget()
        for rank in waits:
            rank.resume(WaitTimeout(sentences[rank]))


class _Rank:
    """One rank: its variables, its modules, and the state of its cell."""

    def __init__(self, rank: int, wires: Wires):
        self.rank, self.wires, self.resets = rank, wires, 0
        self.world = SimpleNamespace(rank=rank, size=wires.size, comm=SimulatedCommunicator(rank, wires))
        self.world.local_rank, self.world.node, self.world.nodes = rank, 0, 1
        self.modules = {"torch": fake_module(), "dtlib": self._dtlib()}
        self.modules["torch.distributed"] = distributed.fake_module(lambda: self.world.comm)
        vars(self.modules["torch"])["distributed"] = self.modules["torch.distributed"]
        own = {**vars(builtins), "print": self.print, "__import__": self._import, "input": self._input}
        self.names = {
            "__name__": "__main__", "__builtins__": own, "_await": _await, "_show": self._show,
            "rank": rank, "world": self.world, "comm": self.world.comm,
        }  # fmt: skip
        self.runs: Generator | None = None
        self.waits: Pending | None = None
        self.failed = ""

    def begin(self, code) -> None:
        self._said: list = []
        self._letters, self._left_out, self.failed, self.waits = 0, 0, "", None
        self.wires.seen.pop(self.rank, None)
        self.world.comm.pending.clear()
        self.runs = _started(code, self.names)

    def can_resume(self) -> bool:
        return self.runs is not None and (self.waits is None or self.waits.task.complete)

    def resume(self, error: Exception | None = None) -> bool:
        """Run this rank until it waits or its cell ends; return True."""
        try:
            assert self.runs is not None
            self.waits = self.runs.send(None) if error is None else self.runs.throw(error)
            return True
        except StopIteration:
            state = "has finished its cell"
        except BaseException as problem:
            self.failed = _describe(problem)
            state = f"raised {type(problem).__name__}: {problem}"[:120]
        self.runs = self.waits = None
        last = self.wires.seen.get(self.rank, BoardEntry("finished"))
        self.wires.seen[self.rank] = BoardEntry(state, last.operation, last.what, last.where, last.group, last.number)
        return True

    def comm_ended(self) -> None:
        """Record the round in which each operation completed, and the messages and bytes it sent."""
        for pending in self.world.comm.pending:
            pending.ended()
            pending.event.messages, pending.event.bytes = pending.link.messages, pending.link.bytes
        self.world.comm.pending[:] = [each for each in self.world.comm.pending if not each.task.complete]

    def text(self) -> str:
        more = [f"... and {self._left_out:,} more lines, which are not shown"] if self._left_out else []
        return "\n".join(["".join(self._said).rstrip("\n"), *more]).strip("\n")

    def print(self, *things, sep=" ", end="\n", file=None, flush=False) -> None:
        if len(self._said) >= LINES or self._letters >= LETTERS:
            self._left_out += 1
            return
        text = sep.join(map(str, things))[: LETTERS - self._letters] + end
        self._letters += len(text)
        self._said.append(text)

    def _show(self, value) -> None:
        """Print the value of a cell's last line, unless it is None."""
        if value is not None:
            self.print(repr(value))

    def _input(self, *_):
        raise DtlibError("input() has nobody to ask on a rank: write the value into the cell.")

    def _import(self, name, globals=None, locals=None, fromlist=(), level=0):
        # torch and dtlib are stand-ins, other packages that need ranks are refused, and the standard library is real.
        package = name.partition(".")[0]
        if name in self.modules:
            return self.modules[name if fromlist else package]
        if package == "dtlib" and "print_error" in (fromlist or ()):
            return self.modules["dtlib"]
        if package in (*self.modules, *ABSENT):
            raise MissingName(
                f"{name} is not in this page: torch is a stand-in here, and of dtlib there are init, reset, trace and "
                "the operations."
            )
        return builtins.__import__(name, globals, locals, fromlist, level)

    def _dtlib(self) -> ModuleType:
        module = ModuleType("dtlib", "init, reset and trace of ranks that take turns")
        vars(module).update(init=lambda: self.world, reset=self._reset, trace=self._trace, DtlibError=DtlibError)

        @contextmanager
        def print_error(pause=1.0):
            try:
                yield
                self.print("finished")
            except DtlibError as error:
                self.print(f"{type(error).__name__}: {error}")

        vars(module).update(print_error=print_error)
        return module

    def _reset(self):
        self.resets += 1
        self.world.comm = self.names["comm"] = SimulatedCommunicator(self.rank, self.wires, self.resets)
        return self.world

    @contextmanager
    def _trace(self):
        events, before = self.wires.events, len(self.wires.events)

        def sent(operation=None):
            self.comm_ended()
            own = [e for e in events[before:] if e.rank == self.rank and operation in (None, e.name)]
            return sum(e.messages for e in own), sum(e.bytes for e in own)

        yield SimpleNamespace(sent=sent)


async def _await(value):
    """Return the result of an operation, after other ranks had their turns."""
    if inspect.isawaitable(value):
        value = await value
    return value


async def _plain(code, names):
    eval(code, names)


def _started(code, names):
    return eval(code, names) if code.co_flags & inspect.CO_COROUTINE else _plain(code, names)


def _describe(problem: BaseException) -> str:
    if isinstance(problem, DtlibError):
        return f"{type(problem).__name__}: {problem}"
    lines = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename.startswith("<cell")]
    where = f" (`line {lines[-1].lineno}: {lines[-1].line}`)" if lines else ""
    return f"{type(problem).__name__}: {problem}{where}"
