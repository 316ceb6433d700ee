"""Signs of life that travel with the gradients: how long each rank computed, whether its gradient is finite, and
whether somebody has asked it to end.

Each rank fills its own places of a vector and leaves zeros in those of the others, so the sum has everybody's:

               seconds           not finite    asked to end
    rank 0   [ 0.011  0      0     0  0  0       0  0  0 ]
    rank 1   [ 0      0.034  0     0  0  0       0  0  1 ]  ...
    sum      [ 0.011  0.034  0.01  0  0  1       0  0  0 ]   rank 2's gradient is not finite: all ranks know it
"""

import signal
from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median

import torch

from dtlib.comm import Communicator
from dtlib.errors import DtlibError

LOOK_BACK = 8  # steps: a rank is late if it was in the middle of so many
TIMES = 2.0  # as long as the others
LEAST_SECONDS = 0.02  # below, it is the noise of a busy machine


class NotFinite(DtlibError):
    """A gradient with inf or NaN on some rank; all ranks raise it, and no parameter has changed."""


class AskedToEnd(DtlibError):
    """A rank got SIGTERM or SIGUSR1; all ranks raise it together, between two steps."""


class Signs:
    """``late`` says in a sentence which rank holds up the others, or is empty."""

    def __init__(self):
        self.asked, self.late = False, ""
        self.seconds = defaultdict(lambda: deque(maxlen=LOOK_BACK))  # of each rank of the world

    def listen(self) -> "Signs":
        """From now on SIGTERM, and SIGUSR1, which mpiexec passes on, end the training after a step.

        Schedulers send one of them some time before the limit: ``sbatch --signal=B:USR1@60``. Of SIGTERM mpiexec leaves
        its ranks some tenths of a second only.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._hear)
        return self

    def _hear(self, *_) -> None:
        self.asked = True

    def of_this_rank(self, comm: Communicator, gradients: Iterable[torch.Tensor], seconds: float) -> torch.Tensor:
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        signs = torch.zeros(3, comm.size)
        signs[:, comm.rank] = torch.tensor([seconds, not finite, self.asked])
        return signs.flatten()

    def check(self, signs: torch.Tensor, step: int, comm: Communicator) -> None:
        """Raise what all ranks have to know. ``step`` is the one that is under way, counted from 0."""
        seconds, broken, asked = signs.view(3, comm.size).tolist()
        members = comm.members  # a rank keeps the number that it had in the world
        self._compare(dict(zip(members, seconds, strict=True)))
        if any(broken):
            raise NotFinite(
                f"The gradient of {ranks_in(broken, members)} is not finite in step {step}, and the mean would not be "
                "on any rank: no parameter has changed. Look at that rank's data and learning rate, or clip gradients."
            )
        if any(asked):
            raise AskedToEnd(
                f"{ranks_in(asked, members).capitalize()} was asked to end, for example by a scheduler at the time "
                f"limit: training ends after {step} steps."
            )

    def _compare(self, seconds: dict) -> None:
        for rank, took in seconds.items():
            self.seconds[rank].append(took)
        usual = {rank: median(self.seconds[rank]) for rank in seconds}
        slowest = max(usual, key=lambda rank: usual[rank])
        others = median([took for rank, took in usual.items() if rank != slowest] or usual.values())
        self.late = ""
        if len(self.seconds[slowest]) == LOOK_BACK and usual[slowest] > max(LEAST_SECONDS, TIMES * others):
            self.late = (
                f"Rank {slowest} computes {usual[slowest] / others:.1f} times as long as the others "
                f"({1e3 * usual[slowest]:.0f} ms a step, they {1e3 * others:.0f} ms), and all wait for it: look at "
                "what else runs there, and at its data."
            )


def ranks_in(flags: Iterable, members: Iterable[int]) -> str:
    """``rank 2``, or ``ranks 0 and 2``, as the world counts them."""
    found = [str(member) for flag, member in zip(flags, members, strict=True) if flag]
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(found[:-1])} and {found[-1]}"
