"""Communication between ranks: collectives, point-to-point messages, and the code that waits for them.

Names are imported on first use. algorithms.py and the error messages in watch/missing_ranks.py need neither numpy nor
MPI, so the page in the browser can import them too.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias, Union

from dtlib.errors import CommunicationError

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup

    from dtlib.comm.communicator import Communicator
    from dtlib.comm.one_rank import solo
    from dtlib.comm.torch.communicator_on_group import ProcessGroupCommunicator
    from dtlib.comm.waiting import progress_thread

# Strings, so that importing this package loads neither mpi4py nor torch.
AnyCommunicator: TypeAlias = Union["Communicator", "ProcessGroupCommunicator", "MPI.Intracomm", "ProcessGroup"]
_LAZY = {
    "Communicator": "dtlib.comm.communicator",
    "progress_thread": "dtlib.comm.waiting",
    "solo": "dtlib.comm.one_rank",
}

__all__ = ["Communicator", "as_communicator", "progress_thread", "solo"]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dtlib.comm' has no attribute {name!r}")


def as_communicator(comm: AnyCommunicator) -> Communicator:
    """Return a communicator with dtlib's operations for a communicator of dtlib, mpi4py or torch.

    Collective: all ranks of ``comm`` call it.

    Args:
        comm: a dtlib communicator, which is returned unchanged; an mpi4py communicator, which is duplicated so that
            dtlib's messages cannot match the program's own receives; or a torch ``ProcessGroup``.

    Raises:
        CommunicationError: for any other object.
    """
    from dtlib.comm import lifetime
    from dtlib.comm.communicator import Communicator

    if isinstance(comm, Communicator):
        return comm
    # If `comm` is an mpi4py or torch object, that library is already loaded: look it up, do not import it.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and isinstance(comm, mpi.Intracomm) and comm != mpi.COMM_NULL:
        mpi = comm.Dup()
        made = Communicator(mpi)
        key = made.gather_and_free("as_communicator", lifetime.draw(made.world_rank))[0]
        lifetime.free_when_unused(mpi, key, made.members)
        # Each communicator needs its own name, because the board compares call numbers only within one name.
        made.name = f"mpi4py.{key[0]}.{key[1]}"
        return made
    if torch_distributed := sys.modules.get("torch.distributed"):
        from dtlib.comm.torch.communicator_on_group import ProcessGroupCommunicator

        if isinstance(comm, ProcessGroupCommunicator):
            return comm  # type: ignore[return-value]  # it has the same operations
        if torch_distributed.is_available() and isinstance(comm, torch_distributed.ProcessGroup):
            if isinstance(own := getattr(comm, "comm", None), Communicator):  # a group of the `dtlib` backend
                return own
            return ProcessGroupCommunicator(comm)  # type: ignore[return-value]
    raise CommunicationError(
        f"comm={comm!r:.60} is not a communicator: pass dtlib.init().comm, an mpi4py communicator such as "
        "MPI.COMM_WORLD, or a torch ProcessGroup."
    )
