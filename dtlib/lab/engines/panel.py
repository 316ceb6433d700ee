"""``lab.panel()``: beside the notebook, what each rank does and holds, with Stop and Reset, heard at any time.

    kernel's main thread     a %%px cell waits ...                          ... ends, and resets the ranks
    a thread of the panel    looks at the ranks, and draws what has changed
    a subshell                                Stop or Reset is pressed: interrupts the ranks

JupyterLab sends what happens to widgets to a subshell, a thread of the kernel's own, so a click need not wait for the
cell. The panel's widgets stand in the sidebar and in no output, so nothing of them is saved with the notebook. There is
one panel, that of the notebook that has the ranks: with them it moves to another notebook.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from html import escape
from types import ModuleType

import psutil
from IPython import get_ipython

from dtlib.errors import DtlibError
from dtlib.lab.colours import rank_badge
from dtlib.lab.engines import workshop
from dtlib.lab.engines.live import whereabouts
from dtlib.lab.tables import fold
from dtlib.world.processes import Process

LOOK_SECONDS = 0.5
MANY_KERNELS = 5

_panel = None
_offered = False
_sets: ModuleType | None = None  # engine_set.py makes itself known here: it cannot be imported by what it imports


def panel() -> None:
    """Open the panel of ranks in JupyterLab's right sidebar: what each does (idle, in which line, waiting for whom) and
    how much memory it holds, brought up to date while cells run. Stop ends what the ranks do, waits included; Reset
    also brings them back into step, as ``%px dtlib.reset()`` does.

    Raises:
        DtlibError: where there are no ranks.
    """
    global _panel
    if _sets is None:
        raise DtlibError("This notebook has no ranks yet: run lab.engines(4) first.")
    record = _sets.current().record
    if _panel is not None:
        _panel.close()
    _panel = Panel()
    record.write("panel.json", asdict(Process.of(os.getpid())))
    if not _is_watched():
        print("lab.panel() needs JupyterLab, which shows the panel on the right.")


def follow(sets: ModuleType, record: workshop.Record) -> None:
    """Open the panel here if it is open in the notebook that had the ranks; else say once that there is one."""
    global _offered, _sets
    _sets = sets
    elsewhere = record.read("panel.json")
    if elsewhere and elsewhere["pid"] != os.getpid() and Process(**elsewhere).find():
        panel()
    elif _is_watched() and not _offered:
        print("lab.panel() shows on the right what each rank does, with Stop and Reset.")
        if sentence := _of_other_kernels(record.attached()):
            print(fold(sentence))
    _offered = True


def _of_other_kernels(attached: list[dict]) -> str:
    """What the kernels of many other notebooks hold, and how to end them."""
    others = [note for note in attached if note["pid"] != os.getpid()]
    if len(others) < MANY_KERNELS:
        return ""
    held = 0
    for note in others:
        with suppress(psutil.Error):
            held += psutil.Process(note["pid"]).memory_info().rss
    return (
        f"{len(others)} other notebooks have a kernel each, which hold {held / 1e9:.1f} GB together: shut down those "
        "that you no longer need, under the square in a circle on the left."
    )


def _is_watched() -> bool:
    """Whether somebody could answer a question, and so sees a page."""
    return getattr(getattr(get_ipython(), "kernel", None), "_allow_stdin", False)


class Panel:
    """The widgets, and the thread that keeps them up to date until they are closed."""

    def __init__(self):
        from ipywidgets import HTML, Button, HBox, VBox
        from sidecar import Sidecar

        self.table, self.said = HTML(drawn()), HTML()
        self.stop = Button(description="Stop", tooltip="End what the ranks do")
        self.stop.on_click(lambda _: self._do("interrupt", "what the ranks did has been ended."))
        self.button = Button(description="Reset", tooltip="End what the ranks do, and bring them back into step")
        self.button.on_click(lambda _: self._do("reset", "the ranks are in step."))
        for button in (self.stop, self.button):
            # ipykernel 7.4 hands a message to the loop that last used its comm, that of the cell: to the subshell.
            button.comm._reply_subshell_for = lambda data, subshell: subshell
        self._sidecar = Sidecar(title="Ranks", anchor="right")
        self._sidecar.append_display_data(VBox([self.table, HBox([self.stop, self.button]), self.said]))
        threading.Thread(target=self._follow, name="dtlib panel", daemon=True).start()

    def close(self) -> None:
        for widget in (self._sidecar, self.table, self.stop, self.button, self.said):
            widget.close()

    def _follow(self) -> None:
        while self.table.comm is not None:  # until the panel is closed
            with suppress(Exception):  # ranks may end while they are looked at; the next look says so
                record = _current().record
                panels = record.read("panel.json")
                if panels and panels["pid"] != os.getpid() and not record.is_held_here():
                    self.close()  # another notebook has the ranks, and the panel
                else:
                    self.table.value = drawn()  # is sent if it is another one
            time.sleep(LOOK_SECONDS)

    def _do(self, what: str, done: str) -> None:
        self.button.disabled, self.said.value = True, "Ending what the ranks do ..."
        said = f"{time.strftime('%H:%M:%S')}: {done}"
        try:
            engines = _current()
            if engines.record.keeper() and engines.record.is_held_here():  # else the table says why not
                getattr(engines, what)()
            else:
                said = ""
        except DtlibError as problem:
            said = escape(str(problem))
        finally:
            self.said.value, self.button.disabled = said, False


def _current():
    """The ranks of this notebook, or None."""
    return _sets and _sets._current


def drawn() -> str:
    """The table of the panel, a row a rank; or why there is none. Ranks are not asked: they are busy."""
    engines = _current()
    if engines is None or not engines.record.keeper():
        return "The ranks have ended: lab.engines() starts new ones."
    if not engines.record.is_held_here():
        holder = engines.record.read("holder.json").get("notebook", "Another notebook")
        return f"{escape(holder)} has the ranks: lab.engines() takes them back."
    found = whereabouts(engines.cell, engines.client)
    rows = "".join(
        f"<tr style='vertical-align:top'><td style='white-space:nowrap'>{rank_badge(row['rank'])}</td>"
        f"<td style='padding:0 .8em .5em'>{escape(found.get(row['rank'], 'idle'))}</td><td>{_gigabytes(row)}</td></tr>"
        for row in engines.table.rows
    )
    whose = f"<p>Ranks of <b>{escape(workshop.notebook_name())}</b></p>"
    heads = "".join(f"<th style='padding:0 .8em 0 0'>{head}</th>" for head in ("rank", "&ensp;does", "GB"))
    return f"{whose}<table style='line-height:1.3;text-align:left'><tr>{heads}</tr>{rows}</table>"


def _gigabytes(row: dict) -> str:
    """Memory that a rank's process holds; of a rank on another machine it is not known here."""
    if row["host"] != socket.gethostname():
        return ""
    with suppress(psutil.Error):
        return f"{psutil.Process(row['pid']).memory_info().rss / 1e9:.2f}"
    return "ended"
