"""Train on handwritten digits in Horovod's way.

    mpiexec --oversubscribe -n 4 python examples/horovod.py

Lines with an arrow differ from serial.py. The batch of all ranks is that of serial.py, and so are the steps."""

import torch
from torch.nn.functional import cross_entropy

import dtlib.horovod as hvd  # <- with Horovod: import horovod.torch as hvd
from dtlib.lab import digits

hvd.init()  # <-
rank, ranks = hvd.rank(), hvd.size()  # <- which rank am I?
BATCH = 96
torch.manual_seed(0)
(images, labels), test = digits.load()

model = digits.net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # <- averages gradients
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # <- all begin as rank 0 does

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
