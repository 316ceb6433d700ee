"""This process's rank, the number of ranks, and a communicator of all ranks."""

from __future__ import annotations

import atexit
import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dtlib.comm import Communicator, lifetime, waiting
from dtlib.comm.watch import board, on_stderr
from dtlib.errors import DtlibError
from dtlib.world import loopback, torchrun
from dtlib.world.launch import INSTALL_MPI, is_rank
from dtlib.world.machine import usable_cores
from dtlib.world.mesh import Mesh

if TYPE_CHECKING:
    import torch


_world = None
_pending_communicator = None  # a communicator that is being created, and its request
_made = 0  # number of communicators of all ranks that were created
# Functions that every rank calls after `reset` has created clean communicators.
after_reset: list[Callable[[], object]] = []


@dataclass
class World:
    """All ranks that were started together, as seen from one rank.

    ``rank`` counts from 0 to ``size - 1`` over all nodes. ``node`` is the index of this rank's machine, out of
    ``nodes``. ``local_rank`` counts the ranks on that machine. ``comm`` is a communicator of all ranks. Counterparts:
    ``MPI.COMM_WORLD``; ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` under torchrun.
    """

    rank: int
    size: int
    node: int
    local_rank: int
    comm: Communicator  # under torchrun a ProcessGroupCommunicator, which has the same operations
    nodes: int = 1

    @cached_property
    def device(self) -> torch.device:
        """This rank's ``torch.device``: a separate GPU if there are enough, otherwise a shared GPU, otherwise the CPU.

        A GPU also becomes torch's current device, so that ``"cuda"`` means this GPU.
        """
        import torch

        gpus = torch.cuda.device_count()
        if not gpus:
            return torch.device("cpu")
        device = torch.device("cuda", self.local_rank % gpus)
        torch.cuda.set_device(device)
        return device

    def mesh(self, **axes: int) -> Mesh:
        """Return all ranks on a grid: ``mesh(data=2, tensor=-1)["data"]`` is a communicator along one axis."""
        return Mesh(self.comm, axes)


def init() -> World:
    """Join the world and return it; further calls return the same world.

    This works inside an engine, under ``mpiexec``, ``srun`` or ``torchrun``, and in a plain process (a world of one
    rank). In a script, an exception on one rank ends all ranks, so that none waits for ever (``sys.exit`` does not).
    Under torchrun, ``comm`` uses ``torch.distributed``: its default group, which is created if the program has not done
    so.

    Raises:
        DtlibError: if processes were started together but do not form one MPI world, and if there is no MPI.
    """
    global _world
    if _world is None:
        _world = _join()
    return _world


def in_engine() -> bool:
    """Return True in an ipyparallel engine."""
    app = sys.modules.get("ipyparallel.engine.app")
    return app is not None and app.IPEngine.initialized()


def reset() -> World:
    """Create a clean communicator for all ranks after an interrupt or an error. Every rank must call it.

    Messages of interrupted operations stay in the old communicator and cannot match new operations.
    """
    world = init()
    if isinstance(world.comm, Communicator):
        world.comm = fresh_communicator(world.comm.time_limit, "dtlib.reset()")
    else:
        world.comm = torchrun.fresh_communicator(world.comm)
    board.last = None
    board.publish("has called no operation since dtlib.reset()")
    for renew in after_reset:
        renew()
    return world


def fresh_communicator(time_limit: float | None, description: str, on_board: bool = True) -> Communicator:
    """Return a new communicator of all ranks; all of them call this. ``on_board=False`` hides its operations.

    If an earlier call was interrupted, this call completes the communicator that it began, so that ranks are in step.
    """
    global _pending_communicator, _made
    from mpi4py import MPI

    _pending_communicator = _pending_communicator or MPI.COMM_WORLD.Idup()
    new, request = _pending_communicator
    # The duplication is non-blocking, so waiting for it can be interrupted and can time out.
    everyone = Communicator(MPI.COMM_WORLD, time_limit)
    everyone.on_board = on_board
    everyone.wait_for(request, new, description)
    _pending_communicator = None
    _made += 1
    made = Communicator(new, time_limit, verify=init().comm.verify, name=f"world.{_made}")
    made.on_board = on_board
    lifetime.free_when_unused(new, (-1, _made), made.members)
    made.gather_and_free(description)
    return made


def _join() -> World:
    if torchrun.started_this() and (not is_rank() or _start_mpi().COMM_WORLD.Get_size() == 1):
        world = World(**torchrun.join())
        if board.current is not None:
            _explain_hangs()
        return world
    mpi = _start_mpi()
    everyone = mpi.COMM_WORLD
    _refuse_split_world(everyone.Get_size())
    # dtlib's messages must not match those of other users of COMM_WORLD.
    comm = Communicator(own := everyone.Dup(), time_limit=30 if in_engine() else None, verify=in_engine())
    lifetime.free_when_unused(own, (-1, 0), comm.members)
    neighbours = everyone.Split_type(mpi.COMM_TYPE_SHARED)
    # With more ranks than cores, a waiting rank must yield its core at once.
    waiting.oversubscribed = neighbours.Get_size() > usable_cores()
    first_on_node = neighbours.bcast(comm.rank)
    nodes = sorted(set(everyone.allgather(first_on_node)))
    if len(nodes) == 1 < comm.size:
        loopback.use_loopback_for_groups()
    if comm.size > 1:
        _create_board(comm, neighbours, nodes.index(first_on_node), len(nodes))
    # Engines stay alive after an error: one bad cell must not end them.
    if comm.size > 1 and not in_engine():
        _abort_on_error(mpi)
        _explain_hangs()
    local_rank = neighbours.Get_rank()
    neighbours.Free()
    return World(comm.rank, comm.size, nodes.index(first_on_node), local_rank, comm, len(nodes))


def _create_board(comm, neighbours, node: int, nodes: int) -> None:
    """Create the board on which ranks see the last operation of ranks that hang."""
    members = neighbours.allgather(comm.rank)
    file = neighbours.bcast(board.Board.make_file(len(members)) if neighbours.Get_rank() == 0 else None)
    if nodes == 1:
        board.current = board.Board(file, comm.rank, members)
    else:
        from dtlib.comm.torch.store import shared_store

        store = shared_store(comm)
        board.current = board.ClusterBoard(file, comm.rank, members, node, nodes, store)
    neighbours.Barrier()
    if neighbours.Get_rank() == 0:
        os.unlink(file)  # all ranks have opened it


def _explain_hangs() -> None:
    """Report hangs of a script as in a notebook: which rank is missing, and which one will not arrive."""
    board.cell = board.PROGRAM
    on_stderr.start()
    atexit.register(_say_the_end)  # before MPI.Finalize, which waits for other ranks


def _say_the_end() -> None:
    board.publish("has ended its program", over=board.PROGRAM)


def _start_mpi():
    with loopback.shared_memory():
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as problem:
            reason = str(problem).splitlines()[0]
            raise DtlibError(
                f"dtlib.init() finds no MPI library ({reason}): {INSTALL_MPI}, and start Python from there."
            ) from None
        if not MPI.Is_initialized():
            MPI.Init_thread()
            atexit.register(MPI.Finalize)
    return MPI


def _refuse_split_world(size: int) -> None:
    """Raise an error if the launcher belongs to another MPI: each rank would then be alone in its own world."""
    for launcher, variable in (("dtlib", "DTLIB_RANKS"), ("torchrun", "WORLD_SIZE"), ("Slurm", "SLURM_STEP_NUM_TASKS")):
        started = os.environ.get(variable, "")
        if size == 1 and started.isdigit() and int(started) > 1:
            raise DtlibError(
                f"{launcher} started {started} processes ({variable}={started}), but each sees an MPI world of one "
                f"rank: start them with the mpiexec of this environment, mpiexec -n {started} python ..."
            )


def _abort_on_error(mpi) -> None:
    show = sys.excepthook

    def show_and_abort(kind, value, trace):
        show(kind, value, trace)
        # stderr may be missing or closed.
        with suppress(Exception):
            stderr = sys.__stderr__ or sys.stderr
            # torch.distributed's hook collects the message and prints it only after this hook has returned.
            if isinstance(sys.stderr, io.StringIO):
                stderr.write(sys.stderr.getvalue())
            stderr.flush()
        with suppress(Exception):
            sys.stdout.flush()
        # The death of a rank closes connections, which raises errors on other ranks. mpiexec should report the death
        # first.
        time.sleep(0.3)
        mpi.COMM_WORLD.Abort(2 if isinstance(value, DtlibError) else 1)

    sys.excepthook = show_and_abort
