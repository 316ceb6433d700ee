"""A wire between two network namespaces that takes its time: ``python slow_wire.py PID PID SECONDS``.

A tun device in the namespace of each process; what is written to one comes out of the other ``SECONDS`` later. It
stands in for netem where the kernel has none.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
MOST_BYTES = 65536


def tun(pid: int, name: str = "wire") -> int:
    """A handle of a new device in the network namespace of this process."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return handle


def carry(ends: list[int], seconds: float) -> None:
    """Packets from each end to the other, in order, each ``seconds`` after it arrived."""
    under_way = collections.deque()
    while True:
        left = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], left)[0]:
            packet = os.read(end, MOST_BYTES)
            under_way.append((time.monotonic() + seconds, ends[1 - ends.index(end)], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, other, packet = under_way.popleft()
            with contextlib.suppress(OSError):  # a device that is not up yet loses packets, as a cable does
                os.write(other, packet)


if __name__ == "__main__":
    both = [tun(int(pid)) for pid in sys.argv[1:3]]
    print("ready", flush=True)
    carry(both, float(sys.argv[3]))
