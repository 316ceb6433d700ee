"""Ranks and sizes. Counterpart: ``horovod.common.basics``."""

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
    nodes: list  # the machine of each rank


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
        _state = _State(world.comm, own, own.all_gather_object(world.node))
    _initialized = True


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
    state = _initialised()
    return state.nodes[: state.comm.rank].count(state.nodes[state.comm.rank])


def local_size() -> int:
    """Return the number of ranks on this machine."""
    state = _initialised()
    return state.nodes.count(state.nodes[state.comm.rank])
