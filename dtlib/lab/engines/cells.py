"""A ``%%px`` cell from start to end: ``run_cell`` in the notebook, and ``follow`` on each rank."""

import faulthandler
import itertools
import re
import tempfile
import threading
import time

from ipyparallel.error import RemoteError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import publish_display_data

from dtlib.errors import DtlibError
from dtlib.lab.engines import cell_errors, outputs
from dtlib.lab.engines.engine_processes import NOT_INTERRUPTED
from dtlib.lab.engines.live_view import LiveView, ranks_in_words
from dtlib.lab.engines.outputs import as_list
from dtlib.lab.foreign import EngineSet

INTERRUPT_SECONDS = 20  # seconds for a rank to react to an interrupt on a busy machine

_serial = itertools.count()


def run_cell(cell: str, engines: EngineSet, shell: InteractiveShell, save_name: str | None, alone: bool) -> object:
    """Run a cell on the ranks of ``engines.view``, and show their outputs. Return ipyparallel's AsyncResult.

    ``save_name`` is the notebook's variable for that result; ``alone``: the notebook's cell shows nothing else.

    Raises:
        RanksFailed: the cell raised an error on a rank.
        DtlibError: the ranks have ended, or do not react to Stop.
    """
    # The label has the cell's number in the notebook, which ranks also use, and a serial number.
    label = f"{shell.displayhook.prompt_count}.{next(_serial)}"
    result = engines.view.execute(cell, silent=False, block=False, label=label)
    if save_name:
        shell.user_ns[save_name] = result
    ranks = list(result._targets)  # ``engine_id`` lists only ranks that have answered

    # Until all ranks have answered, show each rank's newest lines and waits. Stop interrupts the ranks.
    view = LiveView(alone)
    engines.cell = result
    try:
        while not result.done():
            result.wait(0.1)
            if engines.ended.is_set():
                engines.check_ownership()  # raises, as ranks that have ended do not answer
            running = [str(message) in engines.client.outstanding for message in result.msg_ids]
            texts = [out + err for out, err in zip(as_list(result.stdout), as_list(result.stderr), strict=True)]
            view.show(ranks, running, texts, [data or {} for data in as_list(result.data)])
    except KeyboardInterrupt:
        engines.interrupt()
        result.wait(INTERRUPT_SECONDS)
        if not result.done():
            raise DtlibError(NOT_INTERRUPTED) from None
    finally:
        engines.cell = None
        view.close()

    # What stays below the cell: outputs in rank order, then a loss curve that was drawn, then one error for all ranks.
    result.wait_for_output(1)
    shown = outputs.show(result, ranks)
    view.keep([data or {} for data in as_list(result.data)])
    outcomes = as_list(result.get(return_exceptions=True))
    errors = {rank: each for rank, each in zip(ranks, outcomes, strict=True) if isinstance(each, RemoteError)}
    if errors:
        if any(error.ename == "EngineError" for error in errors.values()):
            engines.ended.wait(2)  # seconds for the keeper (which starts the ranks) to see that ranks ended
        engines.check_ownership()  # another notebook may have taken the ranks, or they have ended
        cell_errors.raise_errors(errors, view.waited, shell, engines)
    for page in outcomes[0]._content.get("payload", ()):  # ``name?`` asks all ranks; the first one answers for all
        if page.get("source") == "page":
            publish_display_data(page["data"])
            shown = True
    if not shown:
        print(f"(ran on {ranks_in_words(ranks)})")
    return result


def follow() -> None:
    """On a rank: report the current line and waits to the notebook, and the end of each cell to the board."""
    from ipyparallel.engine.datapub import publish_data
    from IPython import get_ipython

    from dtlib.comm import waiting
    from dtlib.comm.watch import board

    shell, running = get_ipython(), threading.Event()
    execute, apply = shell.kernel.do_execute, shell.kernel.do_apply

    async def do_execute(*args, **kwargs):
        """Run a cell with the notebook's cell number, which the notebook sends as the label."""
        board.begin_cell(shell.kernel.get_parent().get("metadata", {}).get("label") or "")
        if (number := board.cell.partition(".")[0]).isdigit():
            shell.execution_count = int(number)
        state = "was interrupted"
        running.set()
        try:
            reply = await execute(*args, **kwargs)
            error, state = reply.get("ename"), "has finished its cell"
            if error in cell_errors.FOLLOW_UP_ERRORS:
                state = "timed out"  # so that other ranks also name the missing rank
            elif error not in (None, "NoneType"):  # an output without a text has no type of error
                state = f"raised {error}: {reply['evalue']}"[:120]
            return reply
        finally:
            running.clear()
            board.end_cell(state)

    def do_apply(*args):
        """Run a function that the notebook sends, such as a check."""
        board.begin_cell("")
        running.set()
        reply = apply(*args)
        running.clear()
        board.publish("finished")
        return reply

    shell.kernel.do_execute, shell.kernel.do_apply = do_execute, do_apply
    waiting.notice = lambda sentence: publish_data({"waiting": sentence})
    threading.Thread(target=_tell_where, args=(running, publish_data), daemon=True).start()


def _tell_where(running, publish) -> None:
    """Once per second, report to the notebook which line of a cell this rank runs, and to the board the innermost."""
    from dtlib.comm.call import line_of
    from dtlib.comm.watch import board, missing_ranks

    heading = f"Thread 0x{threading.main_thread().ident:016x}"  # of the main thread's part of the text
    with tempfile.TemporaryFile("w+") as dumped:
        while running.wait():
            time.sleep(1)
            # `faulthandler` keeps no frame: a frame would keep its function's tensors alive.
            dumped.truncate(dumped.seek(0))
            faulthandler.dump_traceback(dumped)
            dumped.seek(0)
            stack = dumped.read().partition(heading)[2].partition("\n\n")[0]
            # The last line is the outermost: the cell.
            lines = [line_of(file, int(n)) for file, n in re.findall(r'File "(.*ipykernel_.*)", line (\d+)', stack)]
            if running.is_set():
                call, mine = board.waits, board.current
                if call is None:
                    board.publish("elsewhere" if lines else "finished", where=lines[0] if lines else "")
                if lines:
                    waits = (call.operation, missing_ranks.missing(mine.rank, mine.seen())) if call and mine else None
                    publish({"line": lines[-1], "waits": waits})
