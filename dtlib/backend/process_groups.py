"""Creation of process groups, their renewal after ``dtlib.reset()``, and their end.

torch's call             called by      the group's communicator is made with
init_process_group       all ranks      MPI's Idup of the world
new_group, DeviceMesh    its members    MPI's Create_group, in which only the members take part
"""

import os
import sys
from urllib.parse import parse_qsl, urlsplit

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtlib import world as worlds
from dtlib.backend.interrupted_modules import mark_stopped_modules
from dtlib.comm import Communicator, lifetime
from dtlib.comm.slow_link import Wire
from dtlib.comm.torch.backend_work import torchs_errors
from dtlib.comm.torch.group_on_communicator import TAG_OF_NEW_GROUPS, Group
from dtlib.errors import CommunicationError, DtlibError
from dtlib.world import torchrun
from dtlib.world.launch import is_rank

network = None  # the emulated network, if any; new groups use it, too
_store = None  # torch's key-value store; one per process, because the file behind it stays open
_port: dist.TCPStore | None = None  # the store of env://; rank 0 serves it while this object lives
_meetings = 0  # number of rendezvous so far; gives each one its own prefix in the store
# The groups in use, in the order of their creation. The order is the same on all members, which renew() relies on.
_groups: list[Group] = []


def rendezvous(url: str) -> tuple[dist.Store, int, int]:
    """Return a store that all ranks share, this rank and the world size, as torch's rendezvous handlers do.

    Raises:
        DtlibError: if rank or world size in the URL differ from MPI's.
    """
    global _store, _meetings
    world = _world()
    there = {"rank": world.rank, "world_size": world.size}
    for name, asked in parse_qsl(urlsplit(url).query):
        if name in there and int(asked) != there[name]:
            raise CommunicationError(
                f"{name} is {asked}, but this process is rank {world.rank} of {world.size} in MPI: leave rank and "
                "world_size out of init_process_group."
            )
    if _store is None:
        from dtlib.comm.torch.store import shared_store

        _store = shared_store(world.comm)
    _meetings += 1
    return dist.PrefixStore(f"meeting {_meetings}", _store), world.rank, world.size


def variables() -> dict[str, str]:
    """Join the world, and return the environment variables that torch's launchers set."""
    global _port
    world = _world()
    from dtlib.comm.torch.store import store_on_a_port

    _port = store_on_a_port(world.comm)
    on_node = [node for node in world.comm.all_gather_object(world.node) if node == world.node]
    return {
        "RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(len(on_node)), "MASTER_ADDR": _port.host, "MASTER_PORT": str(_port.port),
    }  # fmt: skip


def make_group(options: c10d._DistributedBackendOptions) -> Group:
    """Create a group; torch calls this function. ``options`` has the group's size, ranks, this rank and the timeout."""
    world = _world()
    seconds = _time_limit(options.timeout, world)
    members = list(options.global_ranks_in_group)  # empty for the default group
    with torchs_errors():
        _refuse_other_worlds(options, members or range(world.size), world)
        comm = _of_members(members, seconds) if members else worlds.fresh_communicator(seconds, "init_process_group")
    comm.verify = comm.verify or dist.get_debug_level() == dist.DebugLevel.DETAIL
    comm.wire = network
    group = Group(options.store, comm, members, _forget)
    _groups.append(group)
    if renew not in worlds.after_reset:
        worlds.after_reset.append(renew)
    return group


def renew() -> None:
    """Give all groups in use new communicators; runs on all ranks after ``dtlib.reset()``."""
    for group in _groups:
        old = group.comm
        assert old is not None  # it is in use
        if group.members:
            new = _of_members(group.members, old.time_limit)
        else:
            new = worlds.fresh_communicator(old.time_limit, "dtlib.reset()")
        new.verify, new.wire = old.verify, old.wire
        group.comm = new
    mark_stopped_modules(_groups)


def emulate_network(latency: float, bandwidth: float, group: dist.ProcessGroup | None = None) -> None:
    """Slow down the messages of a group: ``latency`` seconds per message, ``bandwidth`` bytes per second.

    EMULATED: for lessons, never for claims about performance. ``group`` is the default group if None. Later groups use
    the same network. All ranks call this function.
    """
    global network
    wire, group = Wire(latency, bandwidth), group or dist.group.WORLD
    if not isinstance(group, Group):
        raise CommunicationError('emulate_network needs a group of the backend "dtlib": create one first.')
    network = wire
    assert group.comm is not None
    group.comm.wire = network


def _forget(group) -> None:
    global network
    _groups.remove(group)
    network = network if _groups else None


def _world():
    """Return the world of MPI's ranks; raise ``DtlibError`` if torchrun started this process without MPI."""
    # If _port is set, the variables that look like torchrun's are from variables().
    if _port is None and torchrun.started_this() and not is_rank():
        program = next((word for word in sys.argv if word.endswith(".py") and "dtlib/backend" not in word), "train.py")
        raise DtlibError(
            'The backend "dtlib" communicates over MPI, and torchrun started these processes without it: start them '
            f"with `mpiexec -n {os.environ['WORLD_SIZE']} python -m dtlib.backend {program}`, or call "
            'init_process_group("gloo"), and then dtlib.init() uses that group.'
        )
    return worlds.init()


def _refuse_other_worlds(options, members, world) -> None:
    """Refuse a group whose ranks differ from MPI's ranks, because messages would reach wrong ranks."""
    rank = members[options.group_rank] if options.group_rank < len(members) else options.group_rank
    if (rank, options.group_size) != (world.rank, len(members)) or max(members) >= world.size:
        raise CommunicationError(
            f"A group of rank {rank} and {options.group_size} ranks, but this process is rank {world.rank} of "
            f"{world.size} in MPI: leave rank and world_size out of init_process_group."
        )


def _time_limit(timeout, world) -> float:
    """Return the limit of a wait in seconds: the caller's, else the notebook's if any, else torch's default."""
    if timeout == dist.distributed_c10d.default_pg_timeout and world.comm.time_limit is not None:
        return world.comm.time_limit
    return timeout.total_seconds()


def _of_members(members: list[int], seconds: float | None) -> Communicator:
    """Create a communicator of these world ranks; exactly they call this function."""
    parent = worlds.init().comm
    _gather(parent, members)
    everyone = parent.mpi.Get_group()
    chosen = everyone.Incl(members)
    try:
        mpi = parent.mpi.Create_group(chosen)
    finally:
        chosen.Free()
        everyone.Free()
    made = Communicator(mpi, seconds, parent.verify)
    # All members must use the same key, so all take the key that the first member has drawn.
    drawn = made.gather_and_free("new_group", lifetime.draw(made.world_rank))[0]
    lifetime.free_when_unused(mpi, drawn, made.members)
    made.name = f"group.{drawn[0]}.{drawn[1]}"
    return made


def _gather(parent, members: list[int]) -> None:
    """Wait for all members, because MPI's Create_group can neither be interrupted nor timed out."""
    import numpy as np

    first, *others = members
    note = np.zeros(1, dtype=np.uint8)
    if parent.rank != first:
        parent.send(note, first, TAG_OF_NEW_GROUPS)
        parent.recv(note, first, TAG_OF_NEW_GROUPS)
        return
    for other in others:
        parent.recv(note, other, TAG_OF_NEW_GROUPS)
    for other in others:
        parent.send(note, other, TAG_OF_NEW_GROUPS)
