"""A program in the manner of DeepSpeed's tutorial on CIFAR: a config file; forward, backward, step."""

import argparse
import json

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed.utils import RepeatingLoader


def add_argument():
    parser = argparse.ArgumentParser(description="images")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--losses", type=str)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(6 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


args = add_argument()
deepspeed.init_distributed()

generator = torch.Generator().manual_seed(0)
images = torch.randn(96, 3, 16, 16, generator=generator)
trainset = torch.utils.data.TensorDataset(images, torch.arange(96) % 10)
if torch.distributed.get_rank() != 0:
    torch.distributed.barrier()  # rank 0 fetches the data first
if torch.distributed.get_rank() == 0:
    torch.distributed.barrier()

torch.manual_seed(0)
net = Net()
parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=trainset
)
local_device = model_engine.device
target_dtype = None
if model_engine.bfloat16_enabled():
    target_dtype = torch.bfloat16
elif model_engine.fp16_enabled():
    target_dtype = torch.half
criterion = nn.CrossEntropyLoss()

losses = []
batches = RepeatingLoader(trainloader)
for _ in range(args.steps):
    inputs, labels = (tensor.to(local_device) for tensor in next(batches))
    if target_dtype is not None:
        inputs = inputs.to(target_dtype)
    outputs = model_engine(inputs)
    loss = criterion(outputs, labels)
    model_engine.backward(loss)
    model_engine.step()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    losses.append(mean.item() / model_engine.world_size)

if model_engine.global_rank == 0:
    with open(args.losses, "w") as file:
        json.dump(losses, file)
