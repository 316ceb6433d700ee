"""Communication between ranks: the operations and where they wait.

Names are loaded when they are first asked for: algorithms.py, and the sentences on whom everybody waits for, need
neither numpy nor MPI and run in a web page, too.
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
    from dtlib.comm.torch.process_group import ProcessGroupCommunicator
    from dtlib.comm.waiting import progress_thread

# By name, so that none of them is loaded.
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
    """A communicator with dtlib's operations, from whatever a program has for that; all of its ranks call this.

    Args:
        comm: a dtlib communicator, which is returned as it is; an mpi4py communicator, which is duplicated, so that
            dtlib's messages cannot meet the program's own; or a torch ``ProcessGroup``.

    Raises:
        CommunicationError: for anything else.
    """
    from dtlib.comm import lifetime
    from dtlib.comm.communicator import Communicator

    if isinstance(comm, Communicator):
        return comm
    # Whoever passes one of the others has loaded its library.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and isinstance(comm, mpi.Intracomm) and comm != mpi.COMM_NULL:
        mpi = comm.Dup()
        made = Communicator(mpi)
        key = made.meet("as_communicator", lifetime.draw(made.world_rank))[0]
        lifetime.look_after(mpi, key, made.members)
        made.name = f"mpi4py.{key[0]}.{key[1]}"  # whom a rank waits for must not be mixed up with the world's
        return made
    if torch_distributed := sys.modules.get("torch.distributed"):
        from dtlib.comm.torch.process_group import ProcessGroupCommunicator

        if isinstance(comm, ProcessGroupCommunicator):
            return comm  # type: ignore[return-value]  # it has the same operations
        if torch_distributed.is_available() and isinstance(comm, torch_distributed.ProcessGroup):
            if isinstance(own := getattr(comm, "comm", None), Communicator):  # a group of the backend dtlib
                return own
            return ProcessGroupCommunicator(comm)  # type: ignore[return-value]
    raise CommunicationError(
        f"comm={comm!r:.60} is no communicator: pass dtlib.init().comm, an mpi4py communicator such as MPI.COMM_WORLD, "
        "or a torch ProcessGroup."
    )
