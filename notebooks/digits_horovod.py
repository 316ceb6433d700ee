"""Handwritten digits on many ranks: mpiexec -n 4 python digits_horovod.py 24 0.02"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtlib.horovod as hvd  # with Horovod: import horovod.torch as hvd
from dtlib.lab import digits

batch_size, rate = int(sys.argv[1]), float(sys.argv[2])
hvd.init()  # 1. Which rank am I?
# 2. On GPUs, one per rank: torch.cuda.set_device(hvd.local_rank())
torch.manual_seed(0)
(x, y), test = digits.load()
train_set = TensorDataset(x, y)
# 3. Each rank has its own images. (If it shuffles: sampler.set_epoch(epoch) in the loop.)
sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), shuffle=False)
loader = DataLoader(train_set, batch_size, sampler=sampler)

net = digits.net()
# 4. The batch of all ranks is hvd.size() times as large, and so is the rate.
optimizer = torch.optim.SGD(net.parameters(), lr=rate * hvd.size(), momentum=0.9)
# 5. Hooks average gradients during the backward pass; optimizer.step() waits for them.
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
# 6. All begin as rank 0 does.
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()

if hvd.rank() == 0:  # 7. One rank prints, or saves.
    print(f"{digits.accuracy(net, test):.0%} of the test images are right")
