"""Ranks and sizes, and the libraries that Horovod is built with. Counterpart: ``horovod.common.basics``."""

from dataclasses import dataclass

import dtlib
from dtlib.comm import Communicator
from dtlib.errors import DtlibError


class NotOffered(DtlibError, NotImplementedError):
    """A part of Horovod that this module leaves out."""


class HorovodInternalError(DtlibError, RuntimeError):
    """A collective that could not be executed. Horovod's exception of this name is a RuntimeError too."""


@dataclass
class _State:
    world: Communicator  # that of dtlib.init()
    comm: Communicator  # of the same ranks, for these operations alone
    local: tuple[int, int]  # this rank's number and the count of ranks on its machine
    cross: tuple[int, int]  # the same among ranks of this local rank, one per machine


_state: _State | None = None
_initialized = False


def init(comm: object = None, process_sets: object = None) -> None:
    """Join the world; all ranks call it, as often as they like. After ``dtlib.reset()`` it must be called again."""
    global _state, _initialized
    if comm is not None or process_sets:
        raise NotOffered(
            f"hvd.init({comm if process_sets is None else process_sets!r:.40}): it is for all ranks together; use the "
            "operations of dtlib.init().comm.split(color) for some of them."
        )
    world = dtlib.init()
    if _state is None or _state.world is not world.comm:
        own = world.comm.split(0)
        _state = _State(world.comm, own, *places(own.all_gather_object(world.node), own.rank))
    _initialized = True


def places(nodes: list, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return local rank and size, and cross rank and size, of ``rank``, if rank r runs on ``nodes[r]``."""
    local = [nodes[:r].count(node) for r, node in enumerate(nodes)]
    alike = [r for r, mine in enumerate(local) if mine == local[rank]]
    return (local[rank], nodes.count(nodes[rank])), (alike.index(rank), len(alike))


def shutdown() -> None:
    """Leave; ``init`` may follow."""
    global _initialized
    _initialized = False


def is_initialized() -> bool:
    return _initialized


def _initialised() -> _State:
    if not _initialized or _state is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _state


def communicator() -> Communicator:
    """Return the communicator of all operations."""
    state = _initialised()
    if state.world is not dtlib.init().comm:
        raise DtlibError("dtlib.reset() gave all ranks a new communicator: call hvd.init() again on all ranks.")
    return state.comm


def rank() -> int:
    return _initialised().comm.rank


def size() -> int:
    return _initialised().comm.size


def local_rank() -> int:
    """Return the number of this rank among those of its machine."""
    return _initialised().local[0]


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return _initialised().local[1]


def cross_rank() -> int:
    """Return the number of this rank among ranks of the same local rank, one per machine."""
    return _initialised().cross[0]


def cross_size() -> int:
    """Return the number of machines that have this local rank."""
    return _initialised().cross[1]


def mpi_built(verbose: bool = False) -> bool:
    """Return True: operations run over MPI, whatever other libraries this machine has."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """Return 0: Horovod's NCCL, Gloo, DDL, CCL, CUDA and ROCm are not used here."""
    return 0


mpi_enabled = mpi_built
gloo_built = gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = nccl_built
