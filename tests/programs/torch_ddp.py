"""A program in the manner of torch's tutorials on DistributedDataParallel and ZeroRedundancyOptimizer."""

import argparse
import json

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def main(args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = ToyModel()
    ddp_model = DDP(model)
    loss_fn = nn.MSELoss()
    optimizer = ZeroRedundancyOptimizer(ddp_model.parameters(), torch.optim.AdamW, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(6):
        x, labels = torch.randn(16, 10, generator=generator), torch.randn(16, 5, generator=generator)
        optimizer.zero_grad()
        outputs = ddp_model(x[rank::world_size])
        loss = loss_fn(outputs, labels[rank::world_size])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    if rank == 0:
        with open(args.losses, "w") as file:
            json.dump(losses, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=str)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    main(args)
    dist.destroy_process_group()
