"""Data, tensor and pipeline parallelism in one page: train a small transformer on a mesh of ranks.

    python examples/train.py                                                   one process
    torchrun --nproc-per-node 4 examples/train.py --tensor 2 --pipe 2          torch's launcher, gloo
    mpiexec --oversubscribe -n 4 python examples/train.py --data 2 --pipe 2    MPI, dtlib's backend

All of them print the same losses. Ranks form a mesh of data x pipe x tensor. These are eight ranks, two on each axis:

              pipeline stage 0         pipeline stage 1
    data 0    rank 0 --tensor-- 1      rank 2 --tensor-- 3      half of the batch
    data 1    rank 4 --tensor-- 5      rank 6 --tensor-- 7      the other half

Ranks 0 and 1 each have half of the heads and hidden features of stage 0: they all-reduce activations. Ranks 0 and 2
are neighbours in a pipeline: they send activations and gradients. Ranks 0 and 4 have the same parameters: they
average gradients. Each kind of parallelism is a plain core of dtlib, and needs torch alone.
"""

import argparse
import os

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from dtlib.parallel.data.plain import DataParallelNaive
from dtlib.parallel.pipeline.plain import step as pipeline_step
from dtlib.parallel.tensor.plain import ColumnParallelLinear, ParallelMLP, RowParallelLinear

VOCABULARY, LENGTH, WIDTH, HEADS = 16, 12, 32, 4


class Attention(nn.Module):
    """Causal self-attention. Each tensor rank computes ``HEADS / size`` heads; (batch, length, WIDTH) in and out."""

    def __init__(self, group: ProcessGroup):
        super().__init__()
        self.qkv = ColumnParallelLinear(WIDTH, 3 * WIDTH, group)  # features are ordered by head, then by q, k and v
        self.out = RowParallelLinear(WIDTH, WIDTH, group)
        self.heads = HEADS // group.size()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's block with norms before attention and MLP. The norms are computed alike on all tensor ranks."""

    def __init__(self, group: ProcessGroup):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(group)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), ParallelMLP(WIDTH, 4 * WIDTH, group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Tokens of (batch, length) to vectors of (batch, length, WIDTH), with learned positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device))


def stage_of(layers: int, pipe: ProcessGroup, tensor: ProcessGroup) -> nn.Sequential:
    """Build this rank's part of the model. Each layer has a seed of its own, so its values depend on no other."""
    makers = [Embedding, *[lambda: Block(tensor)] * layers, lambda: nn.Linear(WIDTH, VOCABULARY)]
    # As many blocks for each stage; the first has the embedding too, the last the output layer.
    per_stage = layers // pipe.size()
    first, last = pipe.rank() * per_stage + 1, (pipe.rank() + 1) * per_stage
    first -= pipe.rank() == 0
    last += pipe.rank() == pipe.size() - 1
    built = []
    for number in range(first, last + 1):
        torch.manual_seed(number)
        built.append(makers[number]())
    return nn.Sequential(*built)


def batch(number: int, size: int) -> Tensor:
    """Sequences that count up in steps of 1, 2 or 3: a model can predict each token but the first two."""
    generator = torch.Generator().manual_seed(number)
    start, stride = (torch.randint(low, high, (size, 1), generator=generator) for low, high in ((0, 16), (1, 4)))
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def mesh(data: int, pipe: int, tensor: int) -> dict[str, ProcessGroup]:
    """Make the group of each axis in which this rank is. ``back`` is a second group for the gradients of a pipeline."""
    if data * pipe * tensor != dist.get_world_size():
        raise SystemExit(f"--data {data} --pipe {pipe} --tensor {tensor} needs {data * pipe * tensor} ranks, "
                         f"and there are {dist.get_world_size()}.")  # fmt: skip
    ranks = torch.arange(data * pipe * tensor).view(data, pipe, tensor)
    axes = {"data": 0, "pipe": 1, "back": 1, "tensor": 2}
    lines = {name: ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist() for name, axis in axes.items()}
    return {name: dist.new_subgroups_by_enumeration(of_axis)[0] for name, of_axis in lines.items()}


def main(args: argparse.Namespace) -> None:
    groups = mesh(args.data, args.pipe, args.tensor)
    data, pipe = groups["data"], groups["pipe"]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if args.backend == "nccl" else torch.device("cpu")
    stage = stage_of(args.layers, pipe, groups["tensor"]).to(device, torch.float64 if args.float64 else torch.float32)
    model = DataParallelNaive(stage, data)  # one average a step, after the last micro-batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    is_first, is_last = pipe.rank() == 0, pipe.rank() == pipe.size() - 1
    for number in range(args.steps):
        # All ranks make the whole batch. Those with one place on the data axis take the same part of it.
        tokens = batch(number, args.batch_size).chunk(data.size())[data.rank()].to(device)
        ends = tokens[:, :-1] if is_first else None, tokens[:, 1:] if is_last else None
        loss = pipeline_step(pipe, model, *ends, loss_fn, args.microbatches, "1f1b", groups["back"])
        model.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            dist.all_reduce(loss, group=data)
            if data.rank() == groups["tensor"].rank() == 0:
                print(f"step {number:3}   loss {loss.item() / data.size():.15f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"data": 1, "pipe": 1, "tensor": 1, "layers": 4, "batch-size": 32, "microbatches": 4,
                          "steps": 50}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="under torchrun")
    args = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group(args.backend)
    else:
        import dtlib.backend  # noqa: F401  MPI's ranks, or one process

        dist.init_process_group("dtlib", init_method="dtlib://")
    main(args)
    dist.destroy_process_group()
