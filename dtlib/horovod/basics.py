"""Who am I, what is Horovod built with, and what is refused. Counterpart: ``horovod.common.basics``."""

import warnings
from dataclasses import dataclass

import dtlib
from dtlib.comm import as_communicator
from dtlib.errors import DtlibError
from dtlib.horovod.negotiation import Negotiator

# The values that Horovod's library gives them.
Average, Sum, Adasum, Min, Max, Product = range(6)
OPS = {Average: "average", Sum: "sum", Min: "min", Max: "max", Product: "product"}


class NotOffered(DtlibError, NotImplementedError):
    """A part of Horovod that this module leaves out."""


class GlobalProcessSet:
    """All ranks: the only process set here."""

    process_set_id = 0

    def included(self) -> bool:
        return True

    def size(self) -> int:
        return size()

    def rank(self) -> int:
        return rank()


global_process_set = GlobalProcessSet()


@dataclass
class _State:
    """What this process knows between ``init`` and ``shutdown``."""

    negotiator: Negotiator
    source: object  # the communicator that it was made from
    of_world: bool  # which is that of dtlib.init()
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


_state = None
_kept = None  # after a shutdown: a communicator that the next init can use again


def init(comm=None, process_sets=None) -> None:
    """Join the world; all ranks call it, as often as they like. After ``dtlib.reset()`` it must be called again.

    ``comm`` is a dtlib communicator, one of mpi4py, or None for all ranks; a list of ranks, and ``process_sets``, are
    refused.
    """
    global _state
    if isinstance(comm, (list, tuple)):
        raise NotOffered(
            f"hvd.init(comm={list(comm)!r:.40}): pass a communicator of these ranks, such as "
            "dtlib.init().comm.split(color), and only on its ranks."
        )
    if process_sets:
        raise NotOffered(
            "hvd.init(process_sets=...): only the global process set exists here; use communicators of "
            "dtlib.init().comm.split(color)."
        )
    world = dtlib.init()
    source = world.comm if comm is None else comm
    if _state is not None and _state.source is source:
        return
    if _kept is not None and _kept.source is source:
        _state = _kept
        return
    # A communicator of our own, so that our rounds meet no other messages.
    of_world = source is world.comm
    own = source.split(0) if of_world else as_communicator(comm)
    places = own.all_gather_object((world.node, world.local_rank))
    local = [place for place in places if place[0] == world.node]
    cross = [place for place in places if place[1] == world.local_rank]
    mine = world.node, world.local_rank
    counts = {sum(place[0] == node for place in places) for node, _ in places}
    _state = _State(
        Negotiator(own), source, of_world, sorted(local).index(mine), len(local), sorted(cross).index(mine), len(cross),
        len(counts) == 1,
    )  # fmt: skip


def shutdown() -> None:
    """Wait until all that this rank has submitted is executed, and forget; ``init`` can follow."""
    global _state, _kept
    if _state is not None:
        _state.negotiator.finish_all()
        _state, _kept = None, _state


def is_initialized() -> bool:
    return _state is not None


def _initialised() -> _State:
    if _state is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _state


def negotiator() -> Negotiator:
    """The one through which all operations go."""
    state = _initialised()
    if state.of_world and state.source is not dtlib.init().comm:
        raise DtlibError("dtlib.reset() gave all ranks a new communicator: call hvd.init() again on all ranks.")
    return state.negotiator


def rank() -> int:
    return _initialised().negotiator.comm.rank


def size() -> int:
    return _initialised().negotiator.comm.size


def local_rank() -> int:
    """This rank among those of its machine."""
    return _initialised().local_rank


def local_size() -> int:
    """How many ranks run on this machine."""
    return _initialised().local_size


def cross_rank() -> int:
    """This rank among those of the same local rank, one a machine."""
    return _initialised().cross_rank


def cross_size() -> int:
    """How many machines have this local rank."""
    return _initialised().cross_size


def is_homogeneous() -> bool:
    """True if every machine has the same number of ranks."""
    return _initialised().homogeneous


# What it is built with: verbs over MPI on the CPU, whatever libraries this machine has besides.


def mpi_built(verbose: bool = False) -> bool:
    return True


def mpi_enabled() -> bool:
    return True


def mpi_threads_supported() -> bool:
    """True if MPI may be called from several threads."""
    _initialised()
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _not_built(name: str, answer):
    def built(verbose: bool = False):
        return answer

    built.__name__ = built.__qualname__ = name
    built.__doc__ = f"{answer!r}: communication goes through MPI."
    return built


def gloo_enabled() -> bool:
    return False


gloo_built = _not_built("gloo_built", False)
nccl_built = _not_built("nccl_built", 0)  # a version number in Horovod
ddl_built = _not_built("ddl_built", False)
ccl_built = _not_built("ccl_built", False)
cuda_built = _not_built("cuda_built", False)
rocm_built = _not_built("rocm_built", False)


# Arguments that all operations share


def check_op(op, verb: str, allowed=tuple(OPS)) -> str:
    """The name of a reduction, where ``verb`` offers it."""
    if op == Adasum:
        raise NotOffered(f"{verb}(op=hvd.Adasum): Adasum is not offered here; use hvd.Average or hvd.Sum.")
    if op not in allowed:
        raise ValueError(f"{verb}(op={op!r}): choose one of {', '.join('hvd.' + OPS[one].title() for one in allowed)}.")
    return OPS[op]


def op_or_average(op, average):
    """``op``, or what the deprecated argument ``average`` says."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("Parameter `average` has been replaced with `op`: use op=hvd.Average or hvd.Sum.",
                  DeprecationWarning, stacklevel=4)  # fmt: skip
    return Average if average else Sum


def check_process_set(process_set, verb: str) -> None:
    if process_set is not None and process_set is not global_process_set:
        raise NotOffered(
            f"{verb}(process_set={process_set!r:.40}): only the global process set exists here; use the verbs of "
            "dtlib.init().comm.split(color) for a part of the ranks."
        )
