"""One progress bar for all ranks. Rank 0 draws its own progress, so no messages are sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtlib.world import in_engine

if TYPE_CHECKING:
    from dtlib.comm import Communicator


PUBLISH_SECONDS = 0.2
MOST_POINTS = 300  # the largest number of points of a curve in the notebook


def print_line(words: str) -> None:
    """Show in the notebook what this rank does while the cell runs; "" removes the text."""
    if in_engine():
        from ipyparallel.engine.datapub import publish_data

        publish_data({"doing": words})


class RankProgress:
    """A progress bar for ``total`` units of work over all ranks of ``comm``.

    Use it as a context manager. Call it with the number of units that all ranks have done since the last call. Rank 0
    shows the bar after two seconds. In an engine the notebook draws it.
    """

    def __init__(self, comm: Communicator, total: int, unit: str = "points"):
        self.total, self.unit, self.done = total, unit, 0
        self._draws, self._published = comm.rank == 0, 0.0  # the second is the time of the last message to the notebook
        self._bar = None
        if self._draws and not in_engine():
            from tqdm.auto import tqdm  # imported here, because it checks on import whether a notebook's kernel runs it

            self._bar = tqdm(total=total, unit=f" {unit}", unit_scale=True, delay=2, leave=False)

    def __enter__(self) -> RankProgress:
        return self

    def __exit__(self, *problem: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, units: int, curve: Sequence[float] = (), memory: list[int] | None = None) -> None:
        """Add ``units`` to the bar; show ``curve``, such as the losses so far, and ``memory``, the bytes per rank."""
        if not self._draws:
            return
        self.done += units
        if self._bar is not None:
            shown = [f"loss {curve[-1]:.4f}"] if curve else []
            shown += [f"{max(memory) / 1e6:.3g} MB a rank"] if memory else []
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
            self._bar.update(units)
        elif not curve or self.done >= self.total or time.monotonic() - self._published > PUBLISH_SECONDS:
            from ipyparallel.engine.datapub import publish_data

            self._published = time.monotonic()
            every = 1 + len(curve) // MOST_POINTS
            publish_data({"progress": (self.done, self.total, self.unit), "curve": list(curve[::-every])[::-1]})
