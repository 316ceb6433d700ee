"""Accelerator utilisation: the fraction of time in which an accelerator computes and does not wait for data.

The accelerator is EMULATED: a step sleeps for a given time, and computes nothing. The definition is that of DLIO (H.
Devarajan et al., CCGrid 2021) and MLPerf Storage:

    accelerator utilisation (AU) = compute time / total time

The first step is left out, because workers start in it. The compute time is nominal: if the host wakes up late, the
delay counts as waiting.
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
    """The result of ``measure`` on one rank: ``steps`` steps with ``samples`` samples took ``seconds``.

    The first step is not included. ``au`` is a fraction from 0 to 1.
    """

    steps: int
    samples: int
    compute_seconds: float  # nominal time of one step
    seconds: float
    counters: dict = field(default_factory=dict)  # the reader's counters; they include the first step
    skipped: int = 0
    injected: str = ""  # a note about an injected delay

    @property
    def au(self) -> float:
        """The accelerator utilisation, a fraction."""
        return self.steps * self.compute_seconds / self.seconds if self.seconds else 0.0

    @property
    def samples_a_second(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        text = f"AU {self.au:.0%}, {self.samples_a_second:,.0f} samples/s, {self.counters.get('bytes', 0):,} bytes read"
        text += f", {self.skipped} samples SKIPPED" if self.skipped else ""
        return text + (f" ({self.injected})" if self.injected else "")


class EmulatedAccelerator:
    """An accelerator that sleeps for ``seconds`` per step, so that the loader can use the host's cores, as with a GPU.

    Timelines show its steps in the row of ``rank``.
    """

    def __init__(self, seconds: float, rank: int = 0):
        self.seconds, self.rank = seconds, rank

    def step(self, batch: object) -> None:
        """Sleep for the time of a step; the batch is not used."""
        with recorder.phase("computes", self.rank):
            time.sleep(self.seconds)


def measure(
    loader: Iterable,
    accelerator: EmulatedAccelerator,
    steps: int | None = None,
    comm: Communicator | None = None,
) -> Utilisation:
    """Run the accelerator on batches of ``loader``, for ``steps`` steps or to the end of the epoch; return the result.

    With ``comm``, ranks wait for each other after each step, as they would for gradients.
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
    """Return the number of samples of a batch: a tensor, or a dict, list or tuple with tensors."""
    if isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return _length(batch[0]) if isinstance(batch, (list, tuple)) else len(batch)
