"""The table of ranks that ``lab.engines()`` shows."""

import threading
import time
from collections import Counter
from pathlib import Path

from IPython.display import DisplayHandle

from dtlib.comm import shared_gpus
from dtlib.lab.engines.live_view import shown_in
from dtlib.lab.tables import Table

# Limit of the wait for torch. Four ranks on a busy machine need a minute.
IMPORT_SECONDS = 600


class RankTable:
    """The ranks, one per row; the table is redrawn when all ranks have imported torch."""

    def __init__(self, rows: list[dict], state: Path):
        self.rows = rows
        self._state = state
        self.handle: DisplayHandle | None = None  # a display that the table replaces

    def ready(self) -> list[bool]:
        """Return for each rank whether it has imported torch."""
        return [(self._state / f"torch-{row['host']}-{row['pid']}").exists() for row in self.rows]

    def show(self) -> None:
        """Display the table, in the place of ``handle`` if there is one."""
        handle, self.handle = shown_in(self.handle, self.table()), None
        if handle is not None and not all(self.ready()):
            threading.Thread(target=self._redraw_when_ready, args=(handle,), daemon=True).start()

    def _redraw_when_ready(self, handle) -> None:
        deadline = time.monotonic() + IMPORT_SECONDS
        while not all(self.ready()) and time.monotonic() < deadline:
            time.sleep(0.2)
        handle.update(self.table())

    def table(self) -> Table:
        """Return the table as it is now."""
        cells = []
        sharing = Counter(row["host"] for row in self.rows)
        devices = Counter((row["host"], row["device"]) for row in self.rows)
        for row, ready in zip(self.rows, self.ready(), strict=True):
            ranks_here = sharing[row["host"]]
            cores = f"{row['cores']}, shared by {ranks_here}" if ranks_here > 1 else str(row["cores"])
            device, users = row["device"], devices[row["host"], row["device"]]
            if device != "cpu" and users > 1:
                device += f", shared by {users} through {shared_gpus.transport()}"
            cells.append((row["rank"], row["host"], str(row["pid"]), device, cores, "yes" if ready else "importing"))
        return Table(cells, ("rank", "host", "process id", "device", "cores", "torch ready"), align="rlrlrl")
