"""Each plain core trains a small model, on the ranks of a group: a row is a strategy, and gives the loss of each step.

python tests/plain_demos.py CORE FOLDER    as torchrun starts it, with gloo or NCCL: CORE is a row's name; the file
                                           plain.py is loaded from FOLDER/<strategy>/, and dtlib cannot be imported
"""

import importlib.util
import json
import os
import sys
from functools import partial

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

WIDTH, RATE, STEPS = 12, 0.01, 5


def perceptron(hidden):
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


def perceptrons(ranks, make=perceptron):
    torch.manual_seed(0)
    return nn.Sequential(*[make(4 * ranks) for _ in range(ranks)])


def data(ranks):
    return torch.randn(2, 4 * ranks, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def train(model, step, x, y, group=None):
    losses = []
    for _ in range(STEPS):
        (loss := mse_loss(model(x), y)).backward()
        step()
        model.zero_grad()
        losses.append(mean(loss.detach(), group) if group else loss.detach())
    return losses


def mean(tensor, group):
    dist.all_reduce(tensor := tensor.contiguous().clone(), group=group)
    return tensor / group.size()


def mine(x, group):
    return x.chunk(group.size())[group.rank()]


def alone(model, x, y):
    return train(model, sgd(model).step, x, y)


def data_parallel(name, plain, group, x, y):
    kind = getattr(plain, name)
    settings = {"bucket_cap_mb": 0.001} if "Buckets" in name else {}
    model = kind(perceptrons(group.size()).double(), group, **settings)
    optimizer = sgd(model)
    after = (lambda: (model.average_gradients(), optimizer.step())) if "Naive" in name else optimizer.step
    return train(model, after, mine(x, group), mine(y, group), group)


def sharded(name, plain, group, x, y):
    model = perceptrons(group.size()).double()
    zero = getattr(plain, name)(group, model, torch.optim.SGD, list(model), lr=RATE, momentum=0.9)
    return train(model, zero.step, mine(x, group), mine(y, group), group)


def pipelined(schedule, plain, group, x, y):
    stage, last = perceptrons(group.size()).double()[group.rank()], group.size() - 1
    optimizer, losses = sgd(stage), []
    ends = x if group.rank() == 0 else None, y if group.rank() == last else None
    for _ in range(STEPS):
        loss = plain.step(group, stage, *ends, mse_loss, 4, schedule)
        optimizer.step()
        optimizer.zero_grad()
        dist.broadcast(loss := torch.zeros((), dtype=x.dtype) if loss is None else loss, group_src=last, group=group)
        losses.append(loss)
    return losses


def tensor_parallel(plain, group, x, y):
    model = perceptrons(group.size(), lambda hidden: plain.ParallelMLP(WIDTH, hidden, group)).double()
    return train(model, sgd(model).step, x, y)


class Attention(nn.Module):
    """Causal, between all tokens, of which each rank has some; without ``share``, in one process."""

    def __init__(self, ranks, share=None):
        super().__init__()
        torch.manual_seed(0)
        heads = 2 * ranks
        self.heads, self.share = heads, share or partial(scaled_dot_product_attention, is_causal=True)
        self.first, self.last = nn.Linear(WIDTH, 6 * heads), nn.Linear(2 * heads, WIDTH)
        self.double()

    def forward(self, x):
        q, k, v = self.first(x).view(1, len(x), 3, self.heads, 2).permute(2, 0, 3, 1, 4)
        return self.last(self.share(q, k, v).transpose(1, 2).flatten(2)[0])


def context_parallel(name, plain, group, x, y):
    order = "contiguous" if name == "ulysses_attention" else "zigzag"

    def share(q, k, v):
        return getattr(plain, name)(q, k, v, group)

    def part(x):
        if order == "contiguous":
            return mine(x, group)
        return plain.my_tokens(x, group, dim=0)

    model = Attention(group.size(), share)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: mean(gradient, group))
    return train(model, sgd(model).step, part(x), part(y), group)


class Mixture(nn.Module):
    """Two experts a token, all in one process."""

    def __init__(self, ranks):
        super().__init__()
        self.experts, self.gate = perceptrons(ranks), nn.Linear(WIDTH, ranks, bias=False)
        self.double()

    def forward(self, x):
        logits, chosen = self.gate(x).topk(2)
        parts = [(logits.softmax(-1) * (chosen == e)).sum(-1, True) * f(x) for e, f in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


def expert_parallel(plain, group, x, y):
    whole = Mixture(group.size())
    model = plain.MixtureOfExperts(WIDTH, [whole.experts[group.rank()]], group, top=2).double()
    model.gate = whole.gate  # an expert's gradients are those of all ranks' tokens already
    model.gate.weight.register_hook(lambda gradient: mean(gradient, group))
    return train(model, sgd(model).step, mine(x, group), mine(y, group), group)


def local(name, plain, group, x, y):
    model = perceptrons(group.size()).double()
    outer = [torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)] if name == "DiLoCo" else []
    steps = getattr(plain, name)(group, model, sgd(model), *outer, sync_every=2)
    return train(model, steps.step, mine(x, group), mine(y, group), group)


class Bucket:
    """What torch's hooks get: all gradients in one flat tensor, of which they are views."""

    def __init__(self, model):
        self.of = list(model.parameters())
        self.flat = torch.cat([parameter.grad.flatten() for parameter in self.of])
        pieces = self.flat.split([parameter.numel() for parameter in self.of])
        self.pieces = [piece.view_as(parameter) for piece, parameter in zip(pieces, self.of, strict=True)]

    def buffer(self):
        return self.flat

    def gradients(self):
        return self.pieces

    def parameters(self):
        return self.of


def compressed(state, hook, plain, group, x, y):
    model = perceptrons(group.size()).double()
    optimizer, kept = sgd(model), getattr(plain, state)(group)

    def step():
        bucket = Bucket(model)
        flat = getattr(plain, hook)(kept, bucket).wait()
        pieces = flat.split([parameter.numel() for parameter in bucket.of])
        for parameter, piece in zip(bucket.of, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        optimizer.step()

    return train(model, step, mine(x, group), mine(y, group), group)


# A row a class or schedule: the folder of its plain core, its file, how it trains, and the model of one process that
# has the same losses; None for those that are another training.
DEMOS = {
    **{
        name: ("data", "plain", partial(data_parallel, name), perceptrons)
        for name in ("DataParallelNaive", "DataParallelHooks", "DataParallelBuckets")
    },
    **{name: ("zero", "plain", partial(sharded, name), perceptrons) for name in ("Stage1", "Stage2", "Stage3")},
    **{name: ("pipeline", "plain", partial(pipelined, name), perceptrons) for name in ("gpipe", "1f1b")},
    "ParallelMLP": ("tensor", "plain", tensor_parallel, perceptrons),
    "ring_attention": ("context", "plain", partial(context_parallel, "ring_attention"), Attention),
    "ulysses_attention": ("context", "plain_ulysses", partial(context_parallel, "ulysses_attention"), Attention),
    "MixtureOfExperts": ("expert", "plain", expert_parallel, Mixture),
    **{name: ("local", "plain", partial(local, name), None) for name in ("LocalSGD", "DiLoCo")},
    "top_k_hook": ("compression", "plain", partial(compressed, "TopKState", "top_k_hook"), None),
    "eight_bit_hook": ("compression", "plain", partial(compressed, "EightBitState", "eight_bit_hook"), None),
    "powerSGD_hook": ("compression", "plain", partial(compressed, "PowerSGDState", "powerSGD_hook"), None),
}


def losses_of(name, group, load):
    """Of one training: its losses on the ranks of ``group``; ``load(folder, file)`` gives the module of the core."""
    folder, file, run, _ = DEMOS[name]
    return [loss.item() for loss in run(load(folder, file), group, *data(group.size()))]


def losses_alone(name, ranks):
    model = DEMOS[name][-1]
    return model and [loss.item() for loss in alone(model(ranks).double(), *data(ranks))]


class _NoDtlib:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("dtlib", "mpi4py"):
            raise ModuleNotFoundError(f"{name} is not there")


def main(folder):
    """Train each on gloo, or on GPUs on NCCL, and print all losses as JSON, on rank 0."""
    sys.meta_path.insert(0, _NoDtlib())
    gpus = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if gpus else "gloo")

    def load(strategy, file):
        spec = importlib.util.spec_from_file_location(f"{strategy}_{file}", f"{folder}/{strategy}/{file}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    torch.set_num_threads(1)
    everyones = {name: losses_of(name, dist.group.WORLD, load) for name in DEMOS}
    if dist.get_rank() == 0:
        print(json.dumps(everyones))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
