"""Train on handwritten digits in one process: python examples/serial.py"""

import torch
from torch.nn.functional import cross_entropy

from dtlib.lab import digits

BATCH = 96
torch.manual_seed(0)
(images, labels), test = digits.load()

model = digits.net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for first in range(0, len(images) - BATCH + 1, BATCH):
    x, y = images[first : first + BATCH], labels[first : first + BATCH]
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

accuracy = digits.accuracy(model, test)
print(f"{accuracy:.1%} of the test images are right, norm of the first layer {next(model.parameters()).norm():.4f}")
