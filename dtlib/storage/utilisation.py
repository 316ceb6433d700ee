"""How well is an accelerator fed? It is EMULATED: a step takes as long as one is told, and nothing is computed.

As DLIO measures it (H. Devarajan et al., CCGrid 2021), and MLPerf Storage with it:

    accelerator utilisation (AU) = time in which the accelerator computes / time of all

The first step is left out, as workers start in it. The accelerator's time is the nominal one: if the host wakes up
late the accelerator has waited.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtlib.comm.watch import recorder

if TYPE_CHECKING:
    from dtlib.comm import Communicator


@dataclass(frozen=True)
class Utilisation:
    """What one rank saw: ``seconds`` of ``steps`` steps (without the first) with ``samples``; AU is a fraction."""

    steps: int
    samples: int
    compute_seconds: float  # nominal, of one step
    seconds: float
    counters: dict = field(default_factory=dict)  # of the reader; with the first step
    skipped: int = 0
    injected: str = ""  # what was made slow on purpose

    @property
    def au(self) -> float:
        return self.steps * self.compute_seconds / self.seconds if self.seconds else 0.0

    @property
    def samples_a_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        text = f"AU {self.au:.0%}, {self.samples_a_second:,.0f} samples/s, {self.counters.get('bytes', 0):,} bytes read"
        text += f", {self.skipped} samples SKIPPED" if self.skipped else ""
        return text + (f" ({self.injected})" if self.injected else "")


class EmulatedAccelerator:
    """Computes for ``seconds`` a step, by sleeping: the host's cores are free for the loader, as beside a GPU.

    A timeline shows its steps as those of ``rank``.
    """

    def __init__(self, seconds: float, rank: int = 0):
        self.seconds, self.rank = seconds, rank

    def step(self, batch: object) -> None:
        with recorder.phase("computes", self.rank):
            time.sleep(self.seconds)


def measure(
    loader: Iterable,
    accelerator: EmulatedAccelerator,
    steps: int | None = None,
    comm: Communicator | None = None,
) -> Utilisation:
    """Feed the accelerator from ``loader``, for so many steps or to the end of the epoch.

    With ``comm`` ranks wait for each other after each step, as they do for their gradients.
    """
    reader = getattr(loader, "reader", None)
    if reader is not None:
        reader.files.counters.reset()
    times: list[float] = []
    lengths: list[int] = []
    batches = iter(loader)
    while steps is None or len(times) <= steps:
        with recorder.phase("reads", accelerator.rank):
            batch = next(batches, None)
        if batch is None:
            break
        accelerator.step(batch)
        if comm is not None:
            comm.barrier()
        times.append(time.perf_counter())
        lengths.append(_length(batch))
    seconds = times[-1] - times[0] if times else 0.0
    counters, injected = ({}, "") if reader is None else (reader.files.counters.totals(), reader.injected)
    skipped = len(getattr(loader, "skipped", ()))
    return Utilisation(len(lengths[1:]), sum(lengths[1:]), accelerator.seconds, seconds, counters, skipped, injected)


def _length(batch) -> int:
    """Samples of a batch, as our loader and others make them."""
    if isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return _length(batch[0]) if isinstance(batch, (list, tuple)) else len(batch)
