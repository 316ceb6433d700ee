"""``lab.engines(4)``: four MPI ranks behind this notebook, used through ``%%px``.

Each workshop folder has one set of engines. The first notebook makes a keeper process start it (keeper.py). A later
notebook attaches to the running set and takes it over. workshop.py records which notebooks use it.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtlib.errors import DtlibError, number
from dtlib.lab.engines import on_ranks, start_queue, workshop
from dtlib.lab.engines.engine_processes import NOT_INTERRUPTED, START_SECONDS, end, interrupt, start_keeper, why_ended
from dtlib.lab.engines.rank_table import RankTable
from dtlib.lab.engines.starting import StartingLine, suitable_number, too_few, warning, why_new
from dtlib.lab.foreign import AsyncResult, Client
from dtlib.world import in_engine

SECONDS_A_RANK = 4  # added to the time limit for each rank, because all start Python on the same cores
CONNECT_SECONDS = 5
ANSWER_SECONDS = 10
MOST_RANKS = 64

_current = None


class EngineSet:
    """The ranks of this notebook: ``view`` and ``client`` are ipyparallel's, ``table`` lists the ranks."""

    table: RankTable

    def __init__(self, record: workshop.Record, client: Client):
        self.record, self.client = record, client
        self.view = client[:]
        self.view.block = True
        # Set after the keeper has ended; then all ranks have ended, too.
        self.ended = threading.Event()
        threading.Thread(target=self._await_the_end, daemon=True).start()
        self.cell: AsyncResult | None = None  # result of the %%px cell that runs now
        self.cell_lock = threading.RLock()  # held while a cell runs or the ranks are reset
        self.reset_wanted = False  # asks a running cell to reset the ranks at its end

    def _ipython_display_(self):
        """Display nothing: ``engines()`` has displayed the table already."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.view.targets)

    def _await_the_end(self) -> None:
        if keeper := self.record.keeper():
            keeper.wait()
        self.ended.set()

    def interrupt(self) -> None:
        """Interrupt the ranks, as Ctrl-C would."""
        interrupt(self.client, [(row["host"], row["pid"]) for row in self.table.rows])

    def check_ownership(self) -> None:
        """Raise unless the ranks run and belong to this notebook. Ranks that have ended are replaced first."""
        if not self.record.keeper():
            raise DtlibError(_replace(self))
        if not self.record.is_owned_here():
            holder = self.record.read("holder.json").get("notebook", "Another notebook")
            raise DtlibError(
                f"{holder} has taken over the ranks, and the variables that you defined on them are deleted: run "
                "lab.engines() to take the ranks back, then run the cells that define your variables."
            )

    def ask(self, question: Callable, *arguments: object, seconds: float = ANSWER_SECONDS) -> list | None:
        """Call ``question`` on all ranks and return the answers; None if they do not answer in time.

        A rank whose cell has just failed refuses requests for a moment, so the call is repeated.
        """
        from ipyparallel.error import RemoteError, TimeoutError

        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                return self.client[:].apply_async(question, *arguments).get(left)
            except TimeoutError:  # the ranks are busy or have ended
                break
            except RemoteError:
                time.sleep(0.05)
        return None

    def reset(self) -> None:
        """Interrupt the ranks and reset them; callable from any thread, also while a cell waits for the ranks.

        Raises:
            DtlibError: if the ranks do not react.
        """
        # A running cell holds `cell_lock`. When the interrupt ends it, it sees `reset_wanted`, resets the ranks and
        # releases `cell_lock`.
        self.reset_wanted = True
        self.interrupt()
        if not self.cell_lock.acquire(timeout=ANSWER_SECONDS):
            self.reset_wanted = False
            raise DtlibError(NOT_INTERRUPTED)
        try:
            if self.reset_wanted:  # no cell has reset the ranks
                self.reset_now()
        finally:
            self.cell_lock.release()

    def reset_now(self) -> None:
        """Call ``dtlib.reset()`` on all ranks."""
        self.reset_wanted = False
        if self.ask(on_ranks.reset) is None:
            raise DtlibError(NOT_INTERRUPTED)

    def close(self) -> None:
        """Disconnect from the ranks; they continue while any notebook is attached."""
        with suppress(Exception):
            self.client.close()

    def end(self) -> None:
        """End the ranks now."""
        self.close()
        with self.record.lock():
            end(self.record)


def engines(n: int | None = None, restart: bool = False, profile: str | Path | None = None) -> EngineSet:
    """Start ``n`` MPI ranks for this notebook, or take over running ones, and show a table of them.

    A second call with the same ``n`` changes nothing: names on the ranks stay. A notebook that takes over starts with
    clean ranks. Afterwards ``%%px`` runs a cell on all ranks. The ranks end with the last notebook that is attached.

    Args:
        n: number of ranks; by default that of the running set, or else a number that suits the cores, GPUs and free
            memory of this machine.
        restart: end running ranks and start new ones.
        profile: folder of an ipyparallel profile; by default the workshop's: the one for this machine or, in a job on
            several nodes, the one for the job's scheduler.

    Raises:
        DtlibError: if the ranks cannot be started; the message says what to do.
    """
    global _current
    if in_engine():
        raise DtlibError("lab.engines() belongs in a cell without %%px: remove %%px from this cell.")
    ranks = None if n is None else int(number("n of lab.engines(n)", n, most=MOST_RANKS))
    profile = Path(profile or workshop.profile())
    if not (profile / "ipcluster_config.py").is_file():
        raise DtlibError(f"{profile} is not an ipyparallel profile: it has no ipcluster_config.py.")
    record = workshop.Record(profile)
    with record.lock():
        note = record.read("set.json")
        runs = record.keeper() and note.get("connection")  # without a connection, the start was not completed
        suits = runs and not restart and ranks in (None, note["ranks"])
        # Keep ranks that already belong to this notebook and answer: names on them stay.
        if suits and _current and record.is_owned_here() and len(_current.ask(os.getpid) or ()) == _current.size:
            print("The ranks still run, and keep their variables. lab.last() shows output that a closed page missed.")
        else:
            if _current:
                _current.close()
            engine_set = _take_over(record) if suits else None
            _current = engine_set or _start(record, ranks, why_new(note, ranks, restart))
    from dtlib.lab.engines import magics, panel

    magics.install(_current)
    _current.table.show()
    panel.follow(sys.modules[__name__], record)
    return _current


def _take_over(record) -> EngineSet | None:
    """Return the running ranks, cleaned and owned by this notebook; None if they do not answer."""
    holder = None if record.is_owned_here() else record.read("holder.json").get("notebook")
    record.attach(workshop.notebook_name())
    engine_set = _connect(record)
    if engine_set and holder == workshop.notebook_name():
        print("The ranks of this notebook still run. The variables on them are deleted.")
    elif engine_set and holder:
        print(f"These {engine_set.size} ranks were running for {holder}: this notebook takes them over.")
        print("The variables on them are deleted. To switch back, run lab.engines() in the other notebook.")
    return engine_set


def _start(record, ranks: int | None, why: str = "") -> EngineSet:
    """Start new ranks in place of any running ones, and print the reason ``why``."""
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
        engine_set = _connect(record, line.say)
        if engine_set is None:
            raise DtlibError(f"The ranks started but do not answer: see the logs in {record.profile / 'log'}.")
    except BaseException:  # also after Stop
        end(record)
        raise
    engine_set.table.handle = line.handle
    return engine_set


def _replace(ended: EngineSet) -> str:
    """Start new ranks for a set that has ended; return a message about it."""
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
    """Return the ranks of this notebook.

    Raises:
        DtlibError: if there are none, or if another notebook has taken them over.
    """
    if _current is None:
        raise DtlibError("This notebook has no ranks yet: run lab.engines(4) first.")
    _current.check_ownership()
    return _current


def _connect(record, say=lambda how_far: None) -> EngineSet | None:
    """Connect to the running engines and return them as a set, with clean ranks; None if they do not answer.

    ``say`` is called with the progress.
    """
    import ipyparallel as ipp

    note = record.read("set.json")
    limit = start_queue.Limit(START_SECONDS + SECONDS_A_RANK * note["ranks"])
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
            # Short attempts, because the controller may end in the meantime.
            with suppress(TimeoutError):
                client = ipp.Client(note["connection"], timeout=CONNECT_SECONDS * start_queue.load_factor())
        else:
            say(f"{len(client.ids)} of {note['ranks']} are there")
            time.sleep(0.02)
    say("they join one world")
    engine_set = EngineSet(record, client)
    rows = _join_world(engine_set, record, note)
    sizes = {row["size"] for row in rows or ()}
    if sizes != {note["ranks"]}:
        engine_set.close()
        if rows is None:
            return None
        raise DtlibError(
            f"{note['ranks']} engines started, but they form MPI worlds of {sorted(sizes)} ranks, because mpiexec and "
            "mpi4py use different MPI libraries: run `dtlib doctor`."
        )
    engine_set.table = RankTable(rows, record.state)
    return engine_set


def _join_world(engine_set: EngineSet, record, note):
    """Clean the ranks and return one row per rank for the table; None if a rank does not react."""
    import ipyparallel as ipp

    known = record.read("ranks.json")
    if known.get("name") == note["name"]:
        interrupt(engine_set.client, known["places"])  # a cell of the last notebook may still run
    try:
        _clean(engine_set)
        joined = engine_set.view.apply_async(on_ranks.join, str(record.state), os.getcwd())
        rows = sorted(joined.get(START_SECONDS * start_queue.load_factor()), key=lambda row: row["rank"])
    except (ipp.error.TimeoutError, ipp.error.RemoteError):
        return None
    record.write("ranks.json", {"name": note["name"], "places": [(row["host"], row["pid"]) for row in rows]})
    return rows


def _clean(engine_set: EngineSet) -> None:
    """Delete all names on the ranks; try again if a late interrupt hits the deletion."""
    import ipyparallel as ipp

    for tries_left in (1, 0):
        clean = engine_set.view.execute("get_ipython().run_line_magic('reset', '-f')", silent=True, block=False)
        try:
            return clean.get(ANSWER_SECONDS * start_queue.load_factor())
        except ipp.error.RemoteError:
            if not tries_left:
                raise
