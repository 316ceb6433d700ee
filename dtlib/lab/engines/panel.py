"""``lab.panel()``: beside the notebook, what each rank does and holds, and a Reset button that is heard at any time.

    kernel's main thread     a %%px cell waits ...                          ... ends, and resets the ranks
    a thread of the panel    looks at the ranks, and draws what has changed
    a subshell                                Reset is pressed: interrupts the ranks

JupyterLab sends what happens to widgets to a subshell, a thread of the kernel's own, so a click need not wait for the
cell. The panel's widgets stand in the sidebar and in no output, so nothing of them is saved with the notebook.
"""

import socket
import threading
import time
from contextlib import suppress
from html import escape

import psutil

from dtlib.errors import DtlibError
from dtlib.lab.colours import rank_badge
from dtlib.lab.engines import engine_set
from dtlib.lab.engines.live import whereabouts

LOOK_SECONDS = 0.5

_panel = None


def panel() -> None:
    """Open the panel of ranks in JupyterLab's right sidebar: what each does (idle, in which line, waiting for whom) and
    how much memory it holds, brought up to date while cells run. Its Reset button ends what the ranks do, waits
    included, and brings them back into step, as Stop and ``%px dtlib.reset()`` do together.

    Raises:
        DtlibError: where there are no ranks.
    """
    global _panel
    engine_set.current()
    if _panel is not None:
        _panel.close()
    _panel = Panel()


class Panel:
    """The widgets, and the thread that keeps them up to date until they are closed."""

    def __init__(self):
        from ipywidgets import HTML, Button, VBox
        from sidecar import Sidecar

        self.table, self.said = HTML(drawn()), HTML()
        self.button = Button(description="Reset", tooltip="End what the ranks do, and bring them back into step")
        self.button.on_click(self._reset)
        # ipykernel 7.4 hands a message to the loop that last used its comm, which is that of the cell: to the subshell.
        self.button.comm._reply_subshell_for = lambda data, subshell: subshell
        self._sidecar = Sidecar(title="Ranks", anchor="right")
        self._sidecar.append_display_data(VBox([self.table, self.button, self.said]))
        threading.Thread(target=self._follow, name="dtlib panel", daemon=True).start()

    def close(self) -> None:
        for widget in (self._sidecar, self.table, self.button, self.said):
            widget.close()

    def _follow(self) -> None:
        while self.table.comm is not None:  # until the panel is closed
            with suppress(Exception):  # ranks may end while they are looked at; the next look says so
                self.table.value = drawn()  # is sent if it is another one
            time.sleep(LOOK_SECONDS)

    def _reset(self, _) -> None:
        self.button.disabled, self.said.value = True, "Resetting the ranks ..."
        said = f"{time.strftime('%H:%M:%S')}: the ranks are in step."
        try:
            engines = engine_set._current
            if engines.record.keeper() and engines.record.is_held_here():  # else the table says why not
                engines.reset()
            else:
                said = ""
        except DtlibError as problem:
            said = escape(str(problem))
        finally:
            self.said.value, self.button.disabled = said, False


def drawn() -> str:
    """The table of the panel, a row a rank; or why there is none. Ranks are not asked: they are busy."""
    engines = engine_set._current
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
    heads = "".join(f"<th style='padding:0 .8em 0 0'>{head}</th>" for head in ("rank", "&ensp;does", "GB"))
    return f"<table style='line-height:1.3;text-align:left'><tr>{heads}</tr>{rows}</table>"


def _gigabytes(row: dict) -> str:
    """Memory that a rank's process holds; of a rank on another machine it is not known here."""
    if row["host"] != socket.gethostname():
        return ""
    with suppress(psutil.Error):
        return f"{psutil.Process(row['pid']).memory_info().rss / 1e9:.2f}"
    return "ended"
