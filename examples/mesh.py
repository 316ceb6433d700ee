"""Train on handwritten digits on a mesh of torch's: layers cut over two ranks, batches over the others.

    torchrun --nproc-per-node 4 examples/mesh.py           gloo
    mpiexec --oversubscribe -n 4 python examples/mesh.py   MPI ranks, dtlib's backend

Lines with an arrow differ from serial.py. The batch of all ranks is that of serial.py, and so are the steps."""

import os  # <-
import warnings  # <-

import torch
from torch import distributed as dist  # <-
from torch.distributed.fsdp import fully_shard  # <-
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # <-
from torch.nn.functional import cross_entropy

import dtlib.backend  # noqa: F401  # <-
from dtlib.lab import digits

if "LOCAL_RANK" in os.environ:  # <- torchrun started this process
    dist.init_process_group("gloo")  # <- on GPUs: "nccl"
else:  # <-
    dist.init_process_group("dtlib", init_method="dtlib://")  # <-
mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))  # <-
rank, ranks = mesh["data"].get_local_rank(), mesh["data"].size()  # <-
warnings.filterwarnings("ignore", message="FSDP2-wrapped")  # <- of a view as the output, which is only read
BATCH = 96
torch.manual_seed(0)
(images, labels), test = digits.load()

model = digits.net()
cuts = {"0": ColwiseParallel(), "2": RowwiseParallel()}  # <- by columns, then by rows
model = parallelize_module(model, mesh["tensor"], cuts)  # <-
model = fully_shard(model, mesh=mesh["data"])  # <- averages gradients over the ranks with other batches
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for first in range(0, len(images) - BATCH + 1, BATCH):
    x, y = images[first : first + BATCH], labels[first : first + BATCH]
    x, y = x[rank::ranks], y[rank::ranks]  # <- both ranks that share a layer take the same part of the batch
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

accuracy = digits.accuracy(model, test)
norm = next(model.parameters()).full_tensor().norm()  # <- all ranks gather it
if dist.get_rank() == 0:  # <- one rank prints
    print(f"{accuracy:.1%} of the test images are right, norm of the first layer {norm:.4f}")  # <-
dist.destroy_process_group()  # <-
