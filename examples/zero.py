"""Train on handwritten digits with ZeRO: each rank keeps a part of the optimizer's states and gradients.

    mpiexec --oversubscribe -n 4 python examples/zero.py

Lines with an arrow differ from serial.py. The batch of all ranks is that of serial.py, and so are the steps."""

import torch
from torch.nn.functional import cross_entropy

import dtlib  # <-
from dtlib.lab import digits
from dtlib.parallel.zero import ZeroOptimizer  # <-

world = dtlib.init()  # <- which rank am I?
rank, ranks = world.rank, world.size  # <-
BATCH = 96
torch.manual_seed(0)
(images, labels), test = digits.load()

model = digits.net()
optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, world.comm, stage=2,  # <- averages gradients, and
                          lr=0.05, momentum=0.9)  # fmt: skip  # <- steps with this rank's part of them

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
