"""Handwritten digits in one process: python digits_serial.py 96 0.08"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dtlib.lab import digits

batch_size, rate = int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
(x, y), test = digits.load()
train_set = TensorDataset(x, y)
loader = DataLoader(train_set, batch_size)

net = digits.net()
optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)

for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()

print(f"{digits.accuracy(net, test):.0%} of the test images are right")
