"""Who am I, what is Horovod built with, and what is refused. Counterpart: ``horovod.common.basics``."""

from dataclasses import dataclass

import dtlib
from dtlib.errors import DtlibError
from dtlib.horovod.negotiation import Negotiator


class NotOffered(DtlibError, NotImplementedError):
    """A part of Horovod that this module leaves out."""


@dataclass
class _State:
    """What this process knows from the first ``init`` on."""

    world: object  # the communicator of dtlib.init()
    negotiator: Negotiator
    local: tuple  # this rank among those of its machine, and how many they are
    cross: tuple  # likewise among those of the same local rank, one a machine


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
        own = world.comm.split(0)  # so that our rounds meet no other messages
        _state = _State(world.comm, Negotiator(own), *places(own.all_gather_object(world.node), own.rank))
    _initialized = True


def places(nodes: list, rank: int) -> tuple[tuple, tuple]:
    """Where ``rank`` is, if rank r runs on ``nodes[r]``: its local rank and size, its cross rank and size."""
    local = [nodes[:r].count(node) for r, node in enumerate(nodes)]
    alike = [r for r, mine in enumerate(local) if mine == local[rank]]
    return (local[rank], nodes.count(nodes[rank])), (alike.index(rank), len(alike))


def shutdown() -> None:
    """Wait until all that this rank has submitted is executed; ``init`` can follow."""
    global _initialized
    if _initialized and _state:
        _state.negotiator.finish_all()
    _initialized = False


def is_initialized() -> bool:
    return _initialized


def _initialised() -> _State:
    if not _initialized or _state is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _state


def negotiator() -> Negotiator:
    """The one through which all operations go."""
    state = _initialised()
    if state.world is not dtlib.init().comm:
        raise DtlibError("dtlib.reset() gave all ranks a new communicator: call hvd.init() again on all ranks.")
    return state.negotiator


def rank() -> int:
    return _initialised().negotiator.comm.rank


def size() -> int:
    return _initialised().negotiator.comm.size


def local_rank() -> int:
    """This rank among those of its machine."""
    return _initialised().local[0]


def local_size() -> int:
    """How many ranks run on this machine."""
    return _initialised().local[1]


def cross_rank() -> int:
    """This rank among those of the same local rank, one a machine."""
    return _initialised().cross[0]


def cross_size() -> int:
    """How many machines have this local rank."""
    return _initialised().cross[1]


def mpi_threads_supported() -> bool:
    """True if MPI may be called from several threads."""
    _initialised()
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def mpi_built(verbose: bool = False) -> bool:
    """True: operations go over MPI, whatever libraries this machine has besides."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """False, as 0: Horovod's NCCL, Gloo, DDL, CCL, CUDA and ROCm are not used here. Horovod gives NCCL's version."""
    return 0


mpi_enabled = mpi_built
gloo_built = gloo_enabled = ddl_built = ccl_built = cuda_built = rocm_built = nccl_built
