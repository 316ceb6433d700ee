"""Training on a slow network, measured: two hosts of one rank each on one machine, 5 ms and 20 MB/s apart. Needs Linux
and root, as slow-network does.

"training" is a network of a million parameters on digits, 64 images a rank and a step, until its loss over 512 images
is 0.1, looked at every ten steps: steps of the same optimizer alone, with a message every H = 10 (LocalSGD), over
data parallelism. The bound is what H = 10 can reach at best, 10 (c + m) / (10 c + m), of a step's computing c and its
messages m, both measured in the same run. "average of n" is one bucket of n gradients on its way, computing of the
hooks included, over an all_reduce of it: below 1, sending less pays.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.compare import Row, in_turns, row

RANKS = 0  # it starts them itself, on the hosts
REPEATS = 5
LATENCY, BANDWIDTH = 0.005, 20e6
LIMIT = 240.0  # seconds of all
WIDTH, BATCH, EVERY, RATE, TARGET, MOST_STEPS = 960, 64, 10, 0.1, 0.1, 120
SIDES = (95, 320, 1000, 2000)  # square matrices of 9,025 to 4,000,000 gradients


def rows(_, repeats: int) -> list[Row]:
    from dtlib.errors import DtlibError
    from tests import hosts

    if hosts.missing():
        raise DtlibError(f"{hosts.missing()}.")
    with tempfile.TemporaryDirectory() as folder, hosts.Hosts(Path(folder), LATENCY, BANDWIDTH) as both:
        said = both.run_ranks(["-m", "benchmarks.slow_training", str(repeats)], a_host=1, timeout=LIMIT)
    found = []
    for title, seconds in json.loads(said.splitlines()[-1]).items():
        first, *others = seconds
        found += [row(f"{title}: {name}", first, np.array(seconds[name]), np.array(seconds[first])) for name in others]
    return found


def measure(repeats: int) -> None:
    """On each rank: seconds of each way, under what it is done; rank 0 prints them."""
    import torch

    import dtlib

    torch.set_num_threads(1)
    comm = dtlib.init().comm
    found = {}
    for side in SIDES:
        found[f"average of {side * side:,}"] = in_turns(comm, _averages(comm, side), repeats)
    trained = {"data parallelism": [], "the bound of H = 10": [], "local steps, H = 10": []}
    for _ in range(repeats):
        trained["data parallelism"].append(_trained(comm, local=False))
        trained["local steps, H = 10"].append(_trained(comm, local=True))
        computing, messages = _a_step(comm)
        best = (EVERY * computing + messages) / (EVERY * (computing + messages))
        trained["the bound of H = 10"].append(trained["data parallelism"][-1] * best)
    found["training"] = trained
    if comm.rank == 0:
        print(json.dumps({title: {way: list(took) for way, took in each.items()} for title, each in found.items()}))


def _averages(comm, side: int) -> dict:
    import torch

    from dtlib.gradients.buckets import FlatBuffer
    from dtlib.parallel import compression
    from dtlib.parallel.data.hooks import GradBucket

    parameter = torch.nn.Parameter(torch.empty(side, side))
    buffer = FlatBuffer([parameter.shape], parameter.dtype)
    drawn = torch.randn(side * side)

    def averaged(hook, state):
        def average():
            buffer.flat.copy_(drawn)
            hook(state, GradBucket(0, True, [parameter], buffer)).wait()

        return average

    return {
        "all_reduce": lambda: comm.all_reduce(buffer.flat.copy_(drawn), op="mean"),
        "8 bits": averaged(compression.eight_bit_hook, compression.EightBitState(comm)),
        "top 1 %": averaged(compression.top_k_hook, compression.TopKState(comm, 0.01)),
        "PowerSGD, rank 1": averaged(compression.powerSGD_hook, compression.PowerSGDState(comm, 1)),
        "PowerSGD, rank 4": averaged(compression.powerSGD_hook, compression.PowerSGDState(comm, 4)),
    }


def _model():
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)


def _gradients(model, comm, step: int) -> None:
    import torch

    from dtlib.workloads import digits

    images, labels = digits.load()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    at = order[(torch.arange(BATCH) + BATCH * (comm.size * step + comm.rank)) % len(order)]
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(images[at]), labels[at]).backward()


def _trained(comm, local: bool) -> float:
    """Seconds to the loss."""
    import torch

    from dtlib.parallel.data import DataParallel
    from dtlib.parallel.local import LocalSGD
    from dtlib.workloads import digits

    model, optimizer = _model()
    takes_steps = LocalSGD(comm, model, optimizer, EVERY) if local else optimizer
    model = model if local else DataParallel(model, comm)
    images, labels = digits.load()
    comm.barrier()
    began = time.perf_counter()
    for step in range(MOST_STEPS):
        _gradients(model, comm, step)
        takes_steps.step()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                loss = torch.nn.functional.cross_entropy(model(images[:512]), labels[:512])
            if comm.all_reduce(loss, op="mean").item() <= TARGET:
                return time.perf_counter() - began
    raise RuntimeError(f"The loss is {loss:.3f} after {MOST_STEPS} steps: take another rate.")


def _a_step(comm) -> tuple[float, float]:
    """Seconds of its computing, on all ranks at once, and of its messages."""
    import torch

    model, optimizer = _model()
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))

    def compute():
        for step in range(EVERY):
            _gradients(model, comm, step)
            optimizer.step()

    seconds = in_turns(comm, {"computing": compute, "messages": lambda: comm.all_reduce(flat)}, 3)
    return float(np.median(seconds["computing"])) / EVERY, float(np.median(seconds["messages"]))


if __name__ == "__main__":
    measure(int(sys.argv[1]))
