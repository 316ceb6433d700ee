"""A torch store that all ranks of a communicator reach: for torch's groups, and for the board of several nodes.

one machine       an unnamed file, which no other process can open
several           a port on rank 0's machine: rank 0 offers all its addresses, and the first that every rank reaches is
                  used; a host name may be unknown on the other machines
"""

import atexit
import os
import shutil
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
from torch import distributed as dist

from dtlib.comm.objects import ObjectOperations
from dtlib.comm.watch.board import folder_in_memory
from dtlib.errors import CommunicationError

REACH_SECONDS = 3  # long enough for a lost packet to be sent twice more


def shared_store(comm: ObjectOperations) -> dist.Store:
    """Return a torch store that all ranks of ``comm`` reach. All ranks call it; the store lives as long as rank 0.

    Across machines, any process that reaches its port can read and write it, because torch's store has no password.

    Raises:
        CommunicationError: on all ranks, if no address of rank 0's machine is reached by all ranks.
    """
    return _in_a_file(comm) or store_on_a_port(comm)


def _in_a_file(comm):
    """Return a file store, or None if not all ranks can open the same file."""
    folder = path = handle = None
    if comm.rank == 0:
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix="dtlib-store-", dir=folder_in_memory())  # readable by this user only
            path = os.path.join(folder, "store")
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    path = comm.broadcast_object(path)
    with suppress(OSError, TypeError):
        handle = os.open(path, os.O_RDWR)
    nameless = f"/proc/self/fd/{handle}"
    everyone = comm.all_gather_object((handle is not None, os.path.exists(nameless)))
    all_open, all_nameless = map(all, zip(*everyone, strict=True))
    # Delete the file if all ranks reach it through their open handle, or if it is not used.
    if folder and (all_nameless or not all_open):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if all_open:
        return dist.FileStore(nameless if all_nameless else path, comm.size)
    if handle is not None:
        os.close(handle)
    return None


def store_on_a_port(comm: ObjectOperations) -> dist.TCPStore:
    """Return a store at the first address of rank 0's machine that all ranks reach.

    Other stores in rank 0's process may use the same port.
    """
    listeners = _listeners() if comm.rank == 0 else {}
    offered = comm.broadcast_object({address: listener.getsockname()[1] for address, listener in listeners.items()})
    with ThreadPoolExecutor(max(1, len(offered))) as pool:
        reached = dict(zip(offered, pool.map(_reach, offered, offered.values()), strict=True))
    mine = [address for address in offered if reached[address] is not None]
    # All ranks must use the same address, so exchange the lists of reached addresses.
    everyone = comm.all_gather_object((socket.gethostname(), mine))
    common = [address for address in offered if all(address in seen for _, seen in everyone)]
    chosen = common[0] if common else None
    for address, listener in listeners.items():
        if address != chosen:
            listener.close()
    if chosen is None:
        cut_off = sorted({host for host, seen in everyone if host != everyone[0][0] and not seen})
        who = f"{', '.join(cut_off)} reach none" if cut_off else "not all ranks reach the same one"
        raise CommunicationError(
            f"Ranks connect to a port of rank 0's machine {everyone[0][0]} ({', '.join(offered)}), but {who} of these "
            "addresses: open TCP between the machines in their firewalls, or start all ranks on one."
        )
    if (interface := reached[chosen] or "lo") not in ("lo", "lo0"):
        # Without it, gloo looks up this machine's host name, which may be unknown.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    port = offered[chosen]
    if comm.rank:
        return dist.TCPStore(chosen, port, None, False, wait_for_workers=False)
    listener = listeners[chosen].detach()
    return dist.TCPStore(chosen, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener)


def _addresses() -> dict[str, str]:
    """Return this machine's addresses and their interfaces: loopback, IPv4, IPv6; no link-local addresses."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        (entry.family, entry.address, name)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
    ]
    found.sort(key=lambda entry: (not entry[1].startswith("127."), entry[0] != socket.AF_INET))
    return {address: name for _, address, name in found}


def _listeners() -> dict[str, socket.socket]:
    """Return a listening socket for each address of this machine."""
    found = {}
    for address in _addresses():
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            found[address] = socket.create_server((address, 0), family=family, backlog=1024)
    return found


def _reach(address: str, port: int) -> str | None:
    """Return the interface that reaches ``address`` from this machine: "" if it has no name, None if unreachable."""
    try:
        with socket.create_connection((address, port), REACH_SECONDS) as connection:
            return _addresses().get(connection.getsockname()[0], "")
    except OSError:
        return None
