"""``lab.panel()``: a panel beside the notebook with the state of each rank, and working Stop and Reset buttons.

    kernel's main thread     a %%px cell waits ...                          ... ends, and resets the ranks
    a thread of the panel    reads the ranks' state, and redraws changes
    a subshell                                Stop or Reset is pressed: interrupts the ranks

JupyterLab sends widget events to a subshell, which is a separate thread of the kernel, so a click does not wait for the
cell. The widgets are in the sidebar and in no output, so nothing of the panel is saved in the notebook. The panel
belongs to the notebook that has the ranks, and moves with them to another notebook.
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

from dtlib.errors import DtlibError
from dtlib.lab.colours import rank_badge
from dtlib.lab.engines import workshop
from dtlib.lab.engines.live_view import is_watched, rank_states
from dtlib.world.processes import Process

CHECK_SECONDS = 0.5

_panel = None
_offered = False
# Set by engine_set.py, which imports this module and so cannot be imported here.
_sets: ModuleType | None = None


def panel() -> None:
    """Open the panel of ranks in JupyterLab's right sidebar.

    It shows for each rank whether it is idle, its line, the ranks it waits for, and its memory, also while cells run.
    Stop interrupts the ranks, including waits. Reset also calls ``dtlib.reset()`` on all ranks.

    Raises:
        DtlibError: if there are no ranks.
    """
    global _panel
    if _sets is None:
        raise DtlibError("This notebook has no ranks yet: run lab.engines(4) first.")
    record = _sets.current().record
    if _panel is not None:
        _panel.close()
    _panel = Panel()
    record.write("panel.json", asdict(Process.of(os.getpid())))
    if not is_watched():
        print("lab.panel() needs JupyterLab, which shows the panel on the right.")


def follow(sets: ModuleType, record: workshop.Record) -> None:
    """Open the panel here if it is open in the notebook that had the ranks; otherwise mention it once."""
    global _offered, _sets
    _sets = sets
    elsewhere = record.read("panel.json")
    if elsewhere and elsewhere["pid"] != os.getpid() and Process(**elsewhere).find():
        panel()
    elif is_watched() and not _offered:
        print("lab.panel() shows on the right the state of each rank, with Stop and Reset.")
    _offered = True


class Panel:
    """The widgets, and the thread that updates them until they are closed."""

    def __init__(self):
        from ipywidgets import HTML, Button, HBox, VBox
        from sidecar import Sidecar

        self.table, self.said = HTML(drawn()), HTML()
        self.stop = Button(description="Stop", tooltip="End what the ranks do")
        self.stop.on_click(lambda _: self._do("interrupt", "what the ranks did has been ended."))
        self.button = Button(description="Reset", tooltip="End what the ranks do, and bring them back into step")
        self.button.on_click(lambda _: self._do("reset", "the ranks are in step."))
        for button in (self.stop, self.button):
            # ipykernel 7.4 would handle a click in the loop that last used the widget's comm, which is the cell's: use
            # the subshell.
            button.comm._reply_subshell_for = lambda data, subshell: subshell
        self._sidecar = Sidecar(title="Ranks", anchor="right")
        self._sidecar.append_display_data(VBox([self.table, HBox([self.stop, self.button]), self.said]))
        threading.Thread(target=self._follow, name="dtlib panel", daemon=True).start()

    def close(self) -> None:
        """Close all widgets, which also ends the thread."""
        for widget in (self._sidecar, self.table, self.stop, self.button, self.said):
            widget.close()

    def _follow(self) -> None:
        while self.table.comm is not None:  # None after close()
            with suppress(Exception):  # ranks may end meanwhile; the next round reports it
                record = _current().record
                panels = record.read("panel.json")
                if panels and panels["pid"] != os.getpid() and not record.is_owned_here():
                    self.close()  # another notebook has taken the ranks and the panel
                else:
                    self.table.value = drawn()  # sent to the page only if it differs
            time.sleep(CHECK_SECONDS)

    def _do(self, what: str, done: str) -> None:
        self.button.disabled, self.said.value = True, "Ending what the ranks do ..."
        said = f"{time.strftime('%H:%M:%S')}: {done}"
        try:
            engines = _current()
            if engines.record.keeper() and engines.record.is_owned_here():  # otherwise the table shows the reason
                getattr(engines, what)()
            else:
                said = ""
        except DtlibError as problem:
            said = escape(str(problem))
        finally:
            self.said.value, self.button.disabled = said, False


def _current():
    """Return the ranks of this notebook, or None."""
    return _sets and _sets._current


def drawn() -> str:
    """Return the panel's table with one row per rank, or the reason why there is none.

    The table uses earlier reports, because busy ranks do not answer.
    """
    engines = _current()
    if engines is None or not engines.record.keeper():
        return "The ranks have ended: lab.engines() starts new ones."
    if not engines.record.is_owned_here():
        holder = engines.record.read("holder.json").get("notebook", "Another notebook")
        return f"{escape(holder)} has the ranks: lab.engines() takes them back."
    found = rank_states(engines.cell, engines.client)
    rows = "".join(
        f"<tr style='vertical-align:top'><td style='white-space:nowrap'>{rank_badge(row['rank'])}</td>"
        f"<td style='padding:0 .8em .5em'>{escape(found.get(row['rank'], 'idle'))}</td><td>{_gigabytes(row)}</td></tr>"
        for row in engines.table.rows
    )
    whose = f"<p>Ranks of <b>{escape(workshop.notebook_name())}</b></p>"
    heads = "".join(f"<th style='padding:0 .8em 0 0'>{head}</th>" for head in ("rank", "&ensp;does", "GB"))
    return f"{whose}<table style='line-height:1.3;text-align:left'><tr>{heads}</tr>{rows}</table>"


def _gigabytes(row: dict) -> str:
    """Return the memory of a rank's process in GB; empty for a rank on another machine."""
    if row["host"] != socket.gethostname():
        return ""
    with suppress(psutil.Error):
        return f"{psutil.Process(row['pid']).memory_info().rss / 1e9:.2f}"
    return "ended"
