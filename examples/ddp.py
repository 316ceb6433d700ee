"""Train on handwritten digits with torch's DistributedDataParallel.

    torchrun --nproc-per-node 4 examples/ddp.py            gloo
    mpiexec --oversubscribe -n 4 python examples/ddp.py    MPI ranks, dtlib's backend

Lines with an arrow differ from serial.py. The batch of all ranks is that of serial.py, and so are the steps."""

import os  # <-

import torch
from torch import distributed as dist  # <-
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel  # <-

import dtlib.backend  # noqa: F401  # <-
from dtlib.lab import digits

if "LOCAL_RANK" in os.environ:  # <- torchrun started this process
    dist.init_process_group("gloo")  # <- on GPUs: "nccl"
else:  # <-
    dist.init_process_group("dtlib", init_method="dtlib://")  # <-
rank, ranks = dist.get_rank(), dist.get_world_size()  # <-
BATCH = 96
torch.manual_seed(0)
(images, labels), test = digits.load()

model = digits.net()
model = DistributedDataParallel(model)  # <- rank 0's values; averages gradients in the backward pass
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for first in range(0, len(images) - BATCH + 1, BATCH):
    x, y = images[first : first + BATCH], labels[first : first + BATCH]
    x, y = x[rank::ranks], y[rank::ranks]  # <- every rank takes another part of the batch
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

accuracy = digits.accuracy(model, test)
if rank == 0:  # <- one rank prints
    print(f"{accuracy:.1%} of the test images are right, norm of the first layer {next(model.parameters()).norm():.4f}")
dist.destroy_process_group()  # <-
