"""The tensor-parallel MLP against torch's DTensor plan on gloo: forward and backward pass."""

import torch
from torch import nn

from benchmarks.compare import compare, repeated
from benchmarks.peers import torch_group
from dtlib.parallel.tensor import ParallelMLP

RANKS = 2
SIZES = {  # width, samples, and passes that are timed together
    "width 256, 64 samples": (256, 64, 20),
    "width 1024, 256 samples": (1024, 256, 1),
}


def rows(world, repeats: int):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch_group(world)
    mesh = DeviceMesh("cpu", list(range(world.size)))
    for size, (width, samples, times) in SIZES.items():
        ours = ParallelMLP(width, 4 * width, world.comm)
        theirs = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        theirs = parallelize_module(theirs, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.manual_seed(0)
        x = torch.randn(samples, width, requires_grad=True)
        case = f"tensor-parallel MLP, {size}"
        steps = (repeated(_step(module, x), times) for module in (ours, theirs))
        yield compare(world.comm, case, "torch DTensor, gloo", *steps, repeats)


def _step(module, x):
    def step():
        x.grad = None
        module(x).square().mean().backward()

    return step
