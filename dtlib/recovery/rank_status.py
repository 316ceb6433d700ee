"""Status of each rank, sent with the gradients: its compute time, whether its gradient is finite, and end requests.

Each rank fills its own elements of a vector and sets the others to zero. So the sum contains the elements of all ranks:

               seconds           not finite    asked to end
    rank 0   [ 0.011  0      0     0  0  0       0  0  0 ]
    rank 1   [ 0      0.034  0     0  0  0       0  1  0 ]
    rank 2   [ 0      0      0.01  0  0  1       0  0  0 ]
    sum      [ 0.011  0.034  0.01  0  0  1       0  1  0 ]   now all ranks know: rank 2's gradient is not finite, and
                                                             rank 1 has received a request to end
"""

import signal
from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median

import torch

from dtlib.comm import Communicator
from dtlib.errors import DtlibError

# A rank is late if the median of its compute times over the last WINDOW steps is over TIMES times the median of the
# other ranks. Times below LEAST_SECONDS do not count: on a busy machine they are noise.
WINDOW = 8
TIMES = 2.0
LEAST_SECONDS = 0.02


class NotFinite(DtlibError):
    """A gradient has an infinity or a NaN on some rank. All ranks raise it, and no parameter has changed."""


class EndRequested(DtlibError):
    """A rank has received SIGTERM or SIGUSR1. All ranks raise it in the same step, and no parameter has changed."""


class RankStatus:
    """The status of this rank and the others. ``late`` is a report of the rank that delays the others, or empty."""

    def __init__(self):
        self.end_requested, self.late = False, ""
        self.seconds = defaultdict(lambda: deque(maxlen=WINDOW))  # world rank -> its last compute times

    def listen(self) -> "RankStatus":
        """Install handlers so that SIGTERM and SIGUSR1 end the training between two steps; return this object.

        Schedulers can send a signal some time before the limit: ``sbatch --signal=B:USR1@60``. mpiexec forwards SIGUSR1
        to its ranks. After SIGTERM, mpiexec gives its ranks only some tenths of a second.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._hear)
        return self

    def _hear(self, *_) -> None:
        self.end_requested = True

    def of_this_rank(self, comm: Communicator, gradients: Iterable[torch.Tensor], seconds: float) -> torch.Tensor:
        """Return this rank's vector, of ``3 * comm.size`` elements, for the all-reduce."""
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        status = torch.zeros(3, comm.size)
        status[:, comm.rank] = torch.tensor([seconds, not finite, self.end_requested])
        return status.flatten()

    def check(self, status: torch.Tensor, step: int, comm: Communicator) -> None:
        """Evaluate the sum of all ranks' vectors; ``step`` is the current step, counted from 0.

        Raises:
            NotFinite: if a gradient of any rank is not finite.
            EndRequested: if any rank has received a signal.
        """
        seconds, broken, ended = status.view(3, comm.size).tolist()
        members = comm.members  # world ranks, which do not change when ranks die
        self._compare(dict(zip(members, seconds, strict=True)))
        if any(broken):
            raise NotFinite(
                f"The gradient of {ranks_in(broken, members)} is not finite in step {step}, and the mean would not be "
                "on any rank: no parameter has changed. Look at that rank's data and learning rate, or clip gradients."
            )
        if any(ended):
            raise EndRequested(
                f"{ranks_in(ended, members).capitalize()} was asked to end, for example by a scheduler at the time "
                f"limit: training ends after {step} steps."
            )

    def _compare(self, seconds: dict) -> None:
        for rank, took in seconds.items():
            self.seconds[rank].append(took)
        usual = {rank: median(self.seconds[rank]) for rank in seconds}
        slowest = max(usual, key=lambda rank: usual[rank])
        others = median([took for rank, took in usual.items() if rank != slowest] or usual.values())
        self.late = ""
        if len(self.seconds[slowest]) == WINDOW and usual[slowest] > max(LEAST_SECONDS, TIMES * others):
            self.late = (
                f"Rank {slowest} computes {usual[slowest] / others:.1f} times as long as the others "
                f"({1e3 * usual[slowest]:.0f} ms per step instead of {1e3 * others:.0f} ms), and all ranks wait for "
                "it: check its data, and other programs on its cores."
            )


def ranks_in(flags: Iterable, members: Iterable[int]) -> str:
    """Return the members whose flag is set as text: ``rank 2``, or ``ranks 0 and 2`` (world ranks)."""
    found = [str(member) for flag, member in zip(flags, members, strict=True) if flag]
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(found[:-1])} and {found[-1]}"
