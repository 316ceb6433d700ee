"""A training script as one writes it for Horovod; only its import line is dtlib's. Rank 0 prints a line of JSON.

A model learns to tell three shifted clouds of points apart; the run begins from a checkpoint that only rank 0 has.
"""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import dtlib.horovod as hvd

EPOCHS = 4


def average(value, name):
    return hvd.allreduce(torch.tensor(float(value)), name=name).item()


def main():
    hvd.init()
    torch.manual_seed(hvd.rank())  # models differ until rank 0's is broadcast
    points = torch.Generator().manual_seed(7)
    labels = torch.arange(240) % 3
    data = TensorDataset(torch.randn(240, 5, generator=points) + 1.5 * labels[:, None], labels)
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=1)
    loader = DataLoader(data, batch_size=10, sampler=sampler)

    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
    if hvd.rank() == 0:  # as after loading a checkpoint
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        losses.append(average(total / len(loader), "avg_loss"))

    with torch.no_grad():
        hits = (model(data.tensors[0]).argmax(1) == labels).float().mean()
    everyones = hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])
    if hvd.rank() == 0:
        agree = all(one == everyones[0] for one in everyones)
        rates = optimizer.param_groups[0]["lr"]
        accuracy = average(hits, "accuracy")
        print(json.dumps({"ranks": hvd.size(), "losses": losses, "accuracy": accuracy, "agree": agree, "lr": rates}))
    else:
        average(hits, "accuracy")
    hvd.shutdown()


if __name__ == "__main__":
    main()
