"""``lab.engines(4)``: four MPI ranks behind this notebook, and ``%%px`` to talk to them.

There is one set of engines a workshop folder. The first notebook that asks has a keeper start it (keeper.py);
a later one attaches to the set that runs and takes over. workshop.py keeps the record of who uses it.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtlib.errors import DtlibError, number
from dtlib.lab.engines import crowd, on_ranks, workshop
from dtlib.lab.engines.engine_processes import START_SECONDS, STUCK, end, interrupt, start_keeper, why_ended
from dtlib.lab.engines.rank_table import RankTable
from dtlib.lab.engines.starting import StartingLine, suitable_number, too_few, warning, why_new
from dtlib.lab.foreign import AsyncResult, Client
from dtlib.world import in_engine

SECONDS_A_RANK = 4  # that a start may take longer: one more imports Python on the same cores
CONNECT_SECONDS = 5
ANSWER_SECONDS = 10
MOST_RANKS = 64

_current = None


class EngineSet:
    """The ranks that this notebook uses: ``view`` and ``client`` are ipyparallel's, ``table`` lists the ranks."""

    table: RankTable

    def __init__(self, record: workshop.Record, client: Client):
        self.record, self.client = record, client
        self.view = client[:]
        self.view.block = True
        self.cell: AsyncResult | None = None  # what a %%px cell waits for, while it does
        self.turn = threading.RLock()  # whose it is, a cell runs or the ranks are reset
        self.reset_wanted = False  # while a cell runs: it resets the ranks at its end

    def _ipython_display_(self):
        """Nothing: ``engines()`` has shown the table already."""

    @property
    def size(self) -> int:
        return len(self.view.targets)

    def interrupt(self) -> None:
        """Stop what the ranks are doing, as Ctrl-C would."""
        interrupt(self.client, [(row["host"], row["pid"]) for row in self.table.rows])

    def check_held(self) -> None:
        """Raise unless the ranks still run and still hold this notebook's names. Ranks that have ended are replaced."""
        if not self.record.keeper():
            raise DtlibError(_replace(self))
        if not self.record.is_held_here():
            holder = self.record.read("holder.json").get("notebook", "Another notebook")
            raise DtlibError(
                f"{holder} has taken over the ranks, and names that were defined here are gone: run lab.engines() to "
                "take them back, then the cells that define what you need."
            )

    def ask(self, question: Callable, *arguments: object, seconds: float = ANSWER_SECONDS) -> list | None:
        """What all ranks answer; None where they do not. A kernel whose cell has just failed refuses for a moment."""
        from ipyparallel.error import CompositeError, RemoteError, TimeoutError

        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                answers = self.client[:].apply_async(question, *arguments).get(left)
                return answers if isinstance(answers, list) else [answers]  # ipyparallel unpacks that of a single rank
            except TimeoutError:  # ranks that are busy, or gone
                break
            except (CompositeError, RemoteError):
                time.sleep(0.05)
        return None

    def reset(self) -> None:
        """End what the ranks do, and bring them back into step: from any thread, also while a cell waits for them."""
        self.reset_wanted = True
        self.interrupt()
        if not self.turn.acquire(timeout=ANSWER_SECONDS):
            self.reset_wanted = False
            raise DtlibError(STUCK)
        try:
            if self.reset_wanted:  # no cell ran, or it ended before it was interrupted
                self.reset_now()
        finally:
            self.turn.release()

    def reset_now(self) -> None:
        """``dtlib.reset()`` on all ranks."""
        self.reset_wanted = False
        if self.ask(on_ranks.reset) is None:
            raise DtlibError(STUCK)

    def close(self) -> None:
        """Let go of the ranks; they run on for as long as a notebook is attached."""
        with suppress(Exception):
            self.client.close()

    def end(self) -> None:
        """End the ranks now."""
        self.close()
        with self.record.lock():
            end(self.record)


def engines(n: int | None = None, restart: bool = False, profile: str | Path | None = None) -> EngineSet:
    """Start ``n`` MPI ranks for this notebook, or take over those that run, and show who they are.

    Args:
        n: how many ranks; by default the number that suits the cores, GPUs and free memory of this machine, or
            the set that runs.
        restart: end the ranks that run and start new ones.
        profile: folder of an ipyparallel profile; by default the workshop's for this machine, or inside a job of
            several nodes for its scheduler.

    Run again, it changes nothing: names on the ranks stay. A notebook that takes over starts with clean ranks.
    Afterwards ``%%px`` runs a cell on all ranks. The ranks end with the last notebook that is attached.

    Raises:
        DtlibError: where the ranks cannot be started; the sentence says what to do.
    """
    global _current
    if in_engine():
        raise DtlibError("lab.engines() belongs in a plain cell: drop %%px from this one.")
    ranks = None if n is None else int(number("n of lab.engines(n)", n, most=MOST_RANKS))
    profile = Path(profile or workshop.profile())
    if not (profile / "ipcluster_config.py").is_file():
        raise DtlibError(f"{profile} is no ipyparallel profile: it has no ipcluster_config.py.")
    record = workshop.Record(profile)
    with record.lock():
        note = record.read("set.json")
        runs = record.keeper() and note.get("connection")  # without one, whoever started it did not get that far
        suits = runs and not restart and ranks in (None, note["ranks"])
        if not (suits and _current and record.is_held_here() and _answers(_current)):
            if _current:
                _current.close()
            found = _take_over(record) if suits else None
            _current = found or _start(record, ranks, why_new(note, ranks, restart))
    from dtlib.lab.engines import magics, panel

    magics.install(_current)
    _current.table.show()
    panel.follow(sys.modules[__name__], record)
    return _current


def _take_over(record) -> EngineSet | None:
    """The ranks that run, cleaned, now this notebook's; None where they do not answer."""
    holder = None if record.is_held_here() else record.read("holder.json").get("notebook")
    record.attach(workshop.notebook_name())
    found = _connect(record)
    if found and holder:
        print(f"These {found.size} ranks were running for {holder}: this notebook takes them over.")
        print("The variables on them are deleted. To switch back, run lab.engines() in the other notebook.")
    return found


def _start(record, ranks: int | None, why: str = "") -> EngineSet:
    """New ranks, in place of those that run, if any; then it is said why."""
    if record.keeper():
        ranks = ranks or record.read("set.json")["ranks"]
        print(f"Starting {ranks} new rank{'s' * (ranks > 1)}: {why}")
        if others := sorted({note["notebook"] for note in record.attached() if note["pid"] != os.getpid()}):
            print(f"They were also in use by {', '.join(others)}.")
    end(record)
    record.attach(workshop.notebook_name())
    ranks = ranks or suitable_number()
    if sentence := warning(ranks):
        print(sentence)
    line = StartingLine(ranks)
    try:
        start_keeper(record, ranks, line.say)
        found = _connect(record, line.say)
        if found is None:
            raise DtlibError(f"The ranks started but do not answer: see the logs in {record.profile / 'log'}.")
    except BaseException:  # Stop, too
        end(record)
        raise
    found.table.handle = line.handle
    return found


def _replace(ended: EngineSet) -> str:
    """New ranks for a set that has ended, and one sentence about it."""
    global _current
    record = ended.record
    with record.lock():
        if record.keeper():
            return "The ranks have ended, and another notebook has started new ones: run lab.engines() to use them."
        why = why_ended(record.profile)
        ended.close()
        _current = _start(record, ended.size)
    from dtlib.lab.engines import magics

    magics.install(_current)
    _current.table.show()
    return f"{why}: {_current.size} new ones have been started, so run the cells that define what you need again."


def current() -> EngineSet:
    """The ranks of this notebook.

    Raises:
        DtlibError: where there are none, or where another notebook has taken them over.
    """
    if _current is None:
        raise DtlibError("This notebook has no ranks yet: run lab.engines(4) first.")
    _current.check_held()
    return _current


def _connect(record, say=lambda how_far: None) -> EngineSet | None:
    """A client of the engines that run, with clean ranks; None where they do not answer. ``say`` is told of the way."""
    import ipyparallel as ipp

    note = record.read("set.json")
    limit = crowd.Limit(START_SECONDS + SECONDS_A_RANK * note["ranks"])
    while not Path(note["connection"]).exists() and record.keeper() and not limit.is_over():
        time.sleep(0.02)
    client = None
    while client is None or len(client.ids) < note["ranks"]:
        if not record.keeper() or limit.is_over():
            got = len(client.ids) if client else 0
            if client:
                client.close()
            seconds = limit.passed() if record.keeper() else None
            raise DtlibError(too_few(got, note["ranks"], seconds, record.profile / "log"))
        if client is None:
            # In short attempts: the controller may end while this waits for it.
            with suppress(TimeoutError):
                client = ipp.Client(note["connection"], timeout=CONNECT_SECONDS * crowd.patience())
        else:
            say(f"{len(client.ids)} of {note['ranks']} are there")
            time.sleep(0.02)
    say("they join one world")
    found = EngineSet(record, client)
    rows = _join_world(found, record, note)
    if rows is None:
        found.close()
        return None
    sizes = {row["size"] for row in rows}
    if sizes != {note["ranks"]}:
        found.close()
        raise DtlibError(
            f"{note['ranks']} engines started, but they form MPI worlds of {sorted(sizes)} ranks, because mpiexec and "
            "mpi4py use different MPI libraries: run `dtlib doctor`."
        )
    found.table = RankTable(rows, record.state)
    return found


def _join_world(found: EngineSet, record, note):
    """Who the ranks are, after they have dropped what they held; None where one of them is stuck."""
    import ipyparallel as ipp

    known = record.read("ranks.json")
    if known.get("name") == note["name"]:
        interrupt(found.client, known["places"])  # whatever the last notebook left running
    try:
        _clean(found)
        joined = found.view.apply_async(on_ranks.join, str(record.state), os.getcwd())
        rows = sorted(joined.get(START_SECONDS * crowd.patience()), key=lambda row: row["rank"])
    except (ipp.error.TimeoutError, ipp.error.RemoteError, ipp.error.CompositeError):
        return None
    record.write("ranks.json", {"name": note["name"], "places": [(row["host"], row["pid"]) for row in rows]})
    return rows


def _clean(found: EngineSet) -> None:
    """Have the ranks drop all names. Where the interrupt meets this in place of a cell, it is done once more."""
    import ipyparallel as ipp

    for tries_left in (1, 0):
        clean = found.view.execute("get_ipython().run_line_magic('reset', '-f')", silent=True, block=False)
        try:
            return clean.get(ANSWER_SECONDS * crowd.patience())
        except (ipp.error.RemoteError, ipp.error.CompositeError):
            if not tries_left:
                raise


def _answers(found: EngineSet) -> bool:
    import ipyparallel as ipp

    try:
        return len(found.view.apply_async(os.getpid).get(ANSWER_SECONDS)) == found.size
    except (ipp.error.TimeoutError, ipp.error.RemoteError, ipp.error.CompositeError):
        return False
