"""A program in the manner of DeepSpeed's pipeline example: layers, a PipelineModule, and train_batch()."""

import argparse
import json

import deepspeed
import torch
import torch.nn as nn
from deepspeed.pipe import LayerSpec, PipelineModule

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--pipeline-parallel-size", type=int, default=2)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--losses", type=str)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed()
torch.manual_seed(1138)
generator = torch.Generator().manual_seed(0)
images = torch.randn(96, 12, generator=generator)
trainset = torch.utils.data.TensorDataset(images, torch.arange(96) % 10)

layers = [LayerSpec(nn.Linear, 12, 32), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 32, 10)]
net = PipelineModule(
    layers=layers, loss_fn=nn.CrossEntropyLoss(), num_stages=args.pipeline_parallel_size,
    partition_method="parameters", activation_checkpoint_interval=0,
)  # fmt: skip
engine, _, _, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=trainset
)
losses = [engine.train_batch().item() for _ in range(args.steps)]
if engine.global_rank == 0:
    with open(args.losses, "w") as file:
        json.dump(losses, file)
