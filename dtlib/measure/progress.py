"""One progress bar for all ranks.

Every rank reports what it has done; rank 0 adds up and draws. Reports are small messages that nobody waits for:
rank 0 looks for them whenever it has something to report itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dtlib.comm.link import CALLER_TAGS
from dtlib.world import in_engine

if TYPE_CHECKING:
    from dtlib.comm import Communicator


PUBLISH_SECONDS = 0.2
MOST_POINTS = 300  # of a curve that is shown while it grows
_TAG = CALLER_TAGS - 1  # the last of those that callers have


def tell(words: str) -> None:
    """Say what this rank is busy with, where a notebook shows it while the cell runs; "" takes it back."""
    if in_engine():
        from ipyparallel.engine.datapub import publish_data

        publish_data({"doing": words})


class RankProgress:
    """Progress of a known amount of work over all ranks of ``comm``.

    Use as a context manager and call it with the units done since the last call. The bar shows on rank 0 once
    the work has taken two seconds; in an engine the notebook draws it. Leaving is collective: rank 0 waits there for
    the last reports. ``in_step``: all ranks do the same at the same time, and each reports what all have done: then
    nobody sends anything.
    """

    def __init__(self, comm: Communicator, total: int, unit: str = "points", in_step: bool = False):
        self.in_step = in_step
        self._published = 0.0  # when, in an engine
        self.comm = comm
        self._sent: list = []  # reports on their way
        self.total = total
        self.unit = unit
        self.done = 0
        self._finished_ranks = 0
        self._bar = None
        if comm.rank == 0 and not in_engine():
            from tqdm.auto import tqdm  # which looks now whether this is a notebook's kernel

            self._bar = tqdm(total=total, unit=f" {unit}", unit_scale=True, delay=2, leave=False)

    def __enter__(self) -> RankProgress:
        return self

    def __call__(self, units: int, curve: Sequence[float] = (), held: list[int] | None = None) -> None:
        """``curve``, such as the losses so far, and ``held``, the bytes of each rank, are shown beside it."""
        if self.comm.rank == 0:
            self._add(units, curve, held)
        if self.in_step:
            return
        if self.comm.rank == 0:
            self._collect()
        else:
            self._send(units)

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is None and not self.in_step:
            if self.comm.rank == 0:
                while self._finished_ranks < self.comm.size - 1:
                    self._receive()
            else:
                self._send(-1)  # the last word of this rank; messages do not overtake one another
                for request, message in self._sent:
                    self.comm.wait_for(request, message, "progress on its way to rank 0")
        if self._bar is not None:
            self._bar.close()

    def _send(self, units):
        # Not the communicator's send: reports come whenever they do, without a note about each.
        self._sent = [(request, message) for request, message in self._sent if not request.Test()]
        message = np.array([units], dtype=np.int64)
        self._sent.append((self.comm.mpi.Isend(message, 0, _TAG), message))

    def _collect(self):
        while self.comm.mpi.Iprobe(tag=_TAG):
            self._receive()

    def _receive(self):
        from mpi4py import MPI

        message = np.zeros(1, dtype=np.int64)
        self.comm.wait_for(self.comm.mpi.Irecv(message, MPI.ANY_SOURCE, _TAG), message, "progress of the other ranks")
        if message[0] < 0:
            self._finished_ranks += 1
        else:
            self._add(int(message[0]))

    def _add(self, units, curve=(), held=None):
        self.done += units
        if self._bar is not None:
            shown = [f"loss {curve[-1]:.4f}"] if curve else []
            shown += [f"{max(held) / 1e6:.3g} MB a rank"] if held else []
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
            self._bar.update(units)
        elif not curve or self.done >= self.total or time.monotonic() - self._published > PUBLISH_SECONDS:
            from ipyparallel.engine.datapub import publish_data

            self._published = time.monotonic()
            every = 1 + len(curve) // MOST_POINTS
            publish_data({"progress": (self.done, self.total, self.unit), "curve": list(curve[::-every])[::-1]})
