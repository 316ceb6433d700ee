"""``lab.last()``: show a cell's output again. A page that was closed meanwhile has lost it; the kernel keeps a copy.

A kernel sends all output through its session's ``send``, with the id of the request. This module records the output
there, for the latest cells and up to a limited size for each.
"""

import sys
import threading
import time
from dataclasses import dataclass, field

from dtlib.errors import DtlibError
from dtlib.lab.foreign import Kernel

MOST_CELLS = 20
MOST_BYTES = 1_000_000  # per cell; later output is dropped

_cells: dict[str, "Ran"] = {}  # id of the request -> cell, in order
_lock = threading.Lock()  # the kernel sends prints from another thread


@dataclass
class Ran:
    """A cell that ran, and its outputs so far: (type, content) of the messages."""

    number: int
    code: str
    began: float
    ended: float | None = None
    outputs: list[tuple[str, dict]] = field(default_factory=list)
    bytes: int = 0
    clears: bool = False  # drop the outputs when the next one arrives

    def keep(self, kind: str, content: dict) -> None:
        """Record one output message."""
        if kind == "clear_output":
            self.clears = True
            return
        # An update replaces the recorded output with the same display id.
        if kind == "update_display_data":
            for _, shown in self.outputs:
                if shown.get("transient") == content.get("transient", ""):
                    shown.update(data=content["data"], metadata=content["metadata"])
            return
        if self.clears:
            self.outputs.clear()
            self.bytes, self.clears = 0, False
        self.bytes += len(str(content))
        if self.bytes > MOST_BYTES:
            return
        if kind == "stream" and self.outputs and self.outputs[-1][1].get("name") == content["name"]:
            self.outputs[-1][1]["text"] += content["text"]
        else:
            self.outputs.append((kind, dict(content)))


def last(number: int | None = None) -> None:
    """Show the output of a cell of this notebook again, for example of one that ended while its page was closed.

    Args:
        number: the number in brackets beside the cell; by default the latest cell.

    Raises:
        DtlibError: if the cell is not among the latest twenty.
    """
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        raise DtlibError("lab.last() belongs in a notebook: a terminal still shows what was printed.")
    install(kernel)
    with _lock:
        _cells.pop(kernel.get_parent()["header"]["msg_id"], None)  # this cell shows another one's output
        kept = [ran for ran in _cells.values() if number in (None, ran.number)]
    if not kept:
        which = "No cell" if number is None else f"Cell [{number}]"
        raise DtlibError(f"{which} is stored: the kernel stores the outputs of its last {MOST_CELLS} cells.")
    _show(kept[-1])


def _show(ran: Ran) -> None:
    from IPython.display import publish_display_data

    first = ran.code.strip().splitlines()[0] if ran.code.strip() else ""
    how_long = f"{(ran.ended or time.time()) - ran.began:.0f} s"
    when = f"ended at {time.strftime('%H:%M:%S', time.localtime(ran.ended))}, after" if ran.ended else "runs, for"
    print(f"Cell [{ran.number}], {first!r}, {when} {how_long} (an earlier one: lab.last(NUMBER)):")
    with _lock:
        outputs = [(kind, dict(content)) for kind, content in ran.outputs]
    for kind, content in outputs:
        sys.stdout.flush()
        if kind == "stream":
            print(content["text"], end="", file=sys.stdout if content["name"] == "stdout" else sys.stderr)
        elif kind == "error":
            print("\n".join(content["traceback"]), file=sys.stderr)
        else:
            publish_display_data(content["data"], content.get("metadata"))
    if ran.bytes > MOST_BYTES:
        print(f"... the rest, beyond {MOST_BYTES / 1e6:g} MB, was not stored.")


def cells() -> list[tuple[int, str, bool]]:
    """Return number, code, and whether it ended with an error, for the latest cells; the newest first."""
    with _lock:
        return [
            (ran.number, ran.code, any(kind == "error" for kind, _ in ran.outputs)) for ran in reversed(_cells.values())
        ]


def install(kernel: Kernel) -> None:
    """Make this kernel record the output of its cells; a second call changes nothing."""
    session = kernel.session
    if session is None or hasattr(session.send, "keeps"):
        return
    send = session.send

    def send_and_keep(stream, msg_or_type, content=None, parent=None, *arguments, **options):
        sent = send(stream, msg_or_type, content, parent, *arguments, **options)
        if sent:
            _note(sent["header"]["msg_type"], sent["parent_header"].get("msg_id"), sent["content"])
        return sent

    vars(send_and_keep)["keeps"] = True
    vars(session)["send"] = send_and_keep


def _note(kind: str, request: str, content: dict) -> None:
    with _lock:
        if kind == "execute_input":
            _cells[request] = Ran(content["execution_count"], content["code"], time.time())
            while len(_cells) > MOST_CELLS:
                del _cells[next(iter(_cells))]
        elif ran := _cells.get(request):
            if kind == "status" and content["execution_state"] == "idle":
                ran.ended = time.time()
            elif kind in _OUTPUTS:
                ran.keep(kind, content)


_OUTPUTS = ("stream", "display_data", "execute_result", "error", "clear_output", "update_display_data")
