"""Data parallelism against torch's DistributedDataParallel on gloo, and what hides behind computing."""

import time

import torch
from torch import nn

from benchmarks.compare import in_turns, row
from benchmarks.peers import torch_group
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets

RANKS = 2
BATCH = 32  # a rank
SLEEP_SECONDS = 0.005  # of a layer's backward pass on the emulated accelerator
BUCKETS_MB = (0.5, 1, 2, 5, 10, 25)


def rows(world, repeats: int):
    for name, build in {"784-128-10": small, "784-2048-2048-10": large, "transformer 4 x 256": transformer}.items():
        yield from _against_ddp(world, name, build, repeats)
    yield from _hidden(world, repeats)
    yield from _bucket_sizes(world, repeats)


def small():
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(BATCH, 784)


def large():
    layers = nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    return nn.Sequential(*layers), torch.randn(BATCH, 784)


def transformer():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 32, 256)


def training_step(model, x):
    """A whole step, as a function without arguments."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _against_ddp(world, name, build, repeats):
    models = {"alone": build()}
    models["ours"] = DataParallel(build()[0], world.comm), models["alone"][1]
    models["plain"] = DataParallelBuckets(build()[0], world.comm), models["alone"][1]
    ddp = nn.parallel.DistributedDataParallel(
        build()[0], process_group=torch_group(world), gradient_as_bucket_view=True
    )
    models["theirs"] = ddp, models["alone"][1]
    seconds = in_turns(world.comm, {key: training_step(*model) for key, model in models.items()}, repeats)
    for key, said in {"ours": "", "plain": "plain, "}.items():
        yield row(f"{said}step {name}", "torch DDP, gloo", seconds[key], seconds["theirs"])
        ours, theirs = (seconds[one] - seconds["alone"] for one in (key, "theirs"))
        yield row(f"{said}communication {name}", "torch DDP, gloo", ours, theirs)


class Sleeping(torch.autograd.Function):
    """A layer on an EMULATED accelerator: its backward pass leaves the core alone for a while."""

    @staticmethod
    def forward(ctx, x, weight, gradient):
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(SLEEP_SECONDS)
        return grad, ctx.gradient, None


class Accelerated(nn.Module):
    """Eight layers of 6 MB on an emulated accelerator."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(1_500_000) for _ in range(8))
        self.gradients = [torch.ones(1_500_000) for _ in range(8)]

    def forward(self, x):
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            x = Sleeping.apply(x, weight, gradient)
        return x


def _hidden(world, repeats):
    """What is left to wait for, as a fraction of what the communication takes by itself: 0.4 means that 60 % is hidden.

    The step without communication is that of the same class on one rank: it fills and scales its buckets, too.
    """
    from mpi4py import MPI

    x = torch.zeros(1, requires_grad=True)
    for progress in ("inline", "thread"):
        alone, ours = (
            DataParallel(Accelerated(), comm, bucket_cap_mb=6, progress=progress)
            for comm in (MPI.COMM_SELF, world.comm)
        )

        def communicate(ours=ours):
            for bucket in ours.buckets:
                size = sum(parameter.numel() + 1 for parameter in bucket.parameters) + 1  # with flags
                world.comm.all_reduce(torch.empty(size, dtype=bucket.dtype))

        def step(model):
            def run():
                model.zero_grad()
                model(x).sum().backward()

            return run

        functions = {"alone": step(alone), "ours": step(ours), "communication": communicate}
        seconds = in_turns(world.comm, functions, repeats)
        yield row(
            f"emulated accelerator, {progress}: time left", "all of the communication",
            (seconds["ours"] - seconds["alone"]).clip(0), seconds["communication"],
        )  # fmt: skip


def _bucket_sizes(world, repeats):
    """Sizes of buckets against one that holds everything, with an emulated accelerator."""
    x = torch.zeros(1, requires_grad=True)
    functions = {}
    for size in (*BUCKETS_MB, 1000):
        model = DataParallel(Accelerated(), world.comm, bucket_cap_mb=size, progress="thread")

        def run(model=model):
            model.zero_grad()
            model(x).sum().backward()

        functions[size] = run
    seconds = in_turns(world.comm, functions, repeats)
    for size in BUCKETS_MB:
        yield row(f"emulated accelerator, buckets of {size:g} MiB", "one bucket", seconds[size], seconds[1000])
