"""A slow network, measured: two hosts of two ranks each on one machine, 5 ms and 20 MB/s apart. Needs Linux and root.

The hosts have networks of their own (tests/hosts.py), and MPI between them is that of a cluster: ranks of one host talk
by shared memory, those of two by TCP. Measured are algorithms of all-reduce, and a backward pass with EMULATED
computing (64 layers of 32 KiB that sleep for 4 ms each) whose gradients leave in 2, 8 or 64 buckets, after it ("then")
or meanwhile.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.compare import Row, in_turns, row

RANKS = 0  # it starts them itself, on the hosts
REPEATS = 7
LATENCY, BANDWIDTH = 0.005, 20e6
ALGORITHMS = ("ring", "tree", "recursive_doubling", "rabenseifner")
SIZES = {"4 kB": 4_000, "4 MB": 4_000_000}
LAYERS, COUNT, SECONDS = 64, 2**13, 0.004
BUCKETS = (2, 8, 64)
LIMIT = 240.0  # seconds of all


def rows(_, repeats: int) -> list[Row]:
    from dtlib.errors import DtlibError
    from tests import hosts

    if hosts.missing():
        raise DtlibError(f"{hosts.missing()}.")
    with tempfile.TemporaryDirectory() as folder, hosts.Hosts(Path(folder), LATENCY, BANDWIDTH) as both:
        said = both.run_ranks(["-m", "benchmarks.slow_network", str(repeats)], a_host=2, timeout=LIMIT)
    found = []
    for title, seconds in json.loads(said.splitlines()[-1]).items():
        first, *others = seconds
        for name in others:
            found.append(row(f"{title}: {name}", first, np.array(seconds[name]), np.array(seconds[first])))
    return found


def measure(repeats: int) -> None:
    """On each rank: seconds of each way, under what it is done; rank 0 prints them."""
    import torch

    import dtlib

    comm = dtlib.init().comm
    found = {}
    for size, count in SIZES.items():
        tensor = torch.zeros(count // 4)
        ways = {name: lambda name=name: comm.all_reduce(tensor, algorithm=name) for name in ALGORITHMS}  # noqa: B023
        found[f"all-reduce of {size}"] = in_turns(comm, ways, repeats)
    kinds = [(number, when) for when in ("then", "meanwhile") for number in BUCKETS]
    steps = {f"{number} buckets, {when}": _step(comm, number, when) for number, when in kinds}
    found["backward pass"] = in_turns(comm, steps, repeats)
    if comm.rank == 0:
        print(json.dumps({title: {way: list(took) for way, took in each.items()} for title, each in found.items()}))


def _step(comm, number: int, when: str):
    """A backward pass whose gradients are averaged in so many messages, then or meanwhile."""
    import torch

    from dtlib.lessons.l04.emulated import EmulatedAccelerator
    from dtlib.parallel.data import DataParallel

    model = net = EmulatedAccelerator(LAYERS, COUNT, SECONDS)
    if when == "meanwhile":
        model = DataParallel(net, comm, bucket_cap_mb=LAYERS * COUNT * 4 / 2**20 / number, progress="thread")

    def step():
        net.zero_grad()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        if when == "then":
            for bucket in torch.cat([weight.grad for weight in net.weights]).chunk(number):
                comm.all_reduce(bucket, op="mean")

    return step


if __name__ == "__main__":
    measure(int(sys.argv[1]))
