"""Ranks and sizes. Counterpart: ``horovod.common.basics``."""

from dataclasses import dataclass

import dtlib
from dtlib.comm import Communicator
from dtlib.errors import DtlibError


class HorovodInternalError(DtlibError, RuntimeError):
    """Error for a collective that failed. It is a RuntimeError, like Horovod's exception of the same name."""


@dataclass
class _State:
    world: Communicator  # the communicator of dtlib.init()
    comm: Communicator  # a copy over the same ranks, used by Horovod's operations only
    nodes: list  # the machine of each rank, in rank order


_state: _State | None = None


def init() -> None:
    """Create the communicator of Horovod's operations, over all ranks. All ranks call it; it may be called repeatedly.

    Call it again on all ranks after ``dtlib.reset()``.
    """
    global _state
    world = dtlib.init()
    # dtlib.reset() replaces the world's communicator, so a copy of the old one must not be used any more.
    if _state is None or _state.world is not world.comm:
        own = world.comm.split(0)
        _state = _State(world.comm, own, own.all_gather_object(world.node))


def shutdown() -> None:
    """Mark Horovod as not initialised; ``init`` may be called again."""
    global _state
    _state = None


def is_initialized() -> bool:
    """Return whether ``init`` has been called, and no ``shutdown`` since."""
    return _state is not None


def _initialised() -> _State:
    if _state is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _state


def communicator() -> Communicator:
    """Return the communicator of all operations."""
    state = _initialised()
    if state.world is not dtlib.init().comm:
        raise DtlibError("dtlib.reset() gave all ranks a new communicator: call hvd.init() again on all ranks.")
    return state.comm


def rank() -> int:
    """Return this rank, from 0 to ``size() - 1``."""
    return _initialised().comm.rank


def size() -> int:
    """Return the number of ranks."""
    return _initialised().comm.size


def local_rank() -> int:
    """Return this rank's number among the ranks on its machine, from 0."""
    state = _initialised()
    return state.nodes[: state.comm.rank].count(state.nodes[state.comm.rank])


def local_size() -> int:
    """Return the number of ranks on this machine."""
    state = _initialised()
    return state.nodes.count(state.nodes[state.comm.rank])
