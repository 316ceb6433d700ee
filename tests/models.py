"""Models with what real ones have and toys lack, how they are trained on ranks and alone, and how results compare."""

import gc
import math
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

EXACT = 1e-12  # the design's bound for float64


class Plain(nn.Module):
    """Two layers, one frozen bias, and a layer that is never used."""

    outputs = 3

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 3)
        self.unused = nn.Linear(4, 4)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

    @staticmethod
    def batch(count):
        return torch.randn(count, 6), torch.randint(0, 3, (count,))


class Convolutional(nn.Module):
    """Convolutions with batch normalisation; ``norm`` is the class of the latter."""

    outputs = 3

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3), norm(4), nn.ReLU())
        self.classify = nn.Linear(4, 3)

    def forward(self, x):
        return self.classify(self.features(x).mean((2, 3)))

    @staticmethod
    def batch(count):
        return torch.randn(count, 2, 8, 8), torch.randint(0, 3, (count,))


class Transformer(nn.Module):
    """A language model in small: the embedding is also the output layer (tied), and one layer is used twice."""

    outputs = 11

    def __init__(self, words=11, width=8):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = {"nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.layer = nn.TransformerEncoderLayer(width, **layer)
        self.output = nn.Linear(width, words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.layer(self.layer(self.embedding(x)))
        return self.output(hidden).flatten(0, 1)

    @staticmethod
    def batch(count):
        words = torch.randint(0, 11, (count, 6))
        return words[:, :-1], words[:, 1:].flatten()


class Chain(nn.Sequential):
    """Linear layers of different sizes, all of them trained: what plain classes take."""

    outputs, batch = 3, Plain.batch
    sizes = (6, 10), (10, 7), (7, 5), (5, 3)

    def __init__(self):
        super().__init__(*[layer for size in self.sizes for layer in (nn.Linear(*size), nn.Tanh())])


class Frozen(Chain):
    """The same with a frozen layer."""

    def __init__(self):
        super().__init__()
        self[0].requires_grad_(False)


class Recomputed(nn.Module):
    """One block whose activations are computed again, and one layer that is used twice, with changes in place."""

    outputs, batch = 3, Plain.batch

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return self.last(torch.relu_(self.again(torch.relu_(self.again(x)))))


MODELS = {kind.__name__.lower(): kind for kind in (Plain, Convolutional, Transformer, Chain, Frozen, Recomputed)}


def build(name: str, dtype=torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def batches(name: str, steps: int, count: int, dtype=torch.float64, seed: int = 1, cotangents: bool = False):
    """The same batches in every process: inputs, and targets or random cotangents of the outputs."""
    torch.manual_seed(seed)
    made = [MODELS[name].batch(count) for _ in range(steps)]
    if cotangents:
        made = [(x, torch.randn(len(y), MODELS[name].outputs)) for x, y in made]
    return [tuple(one.to(dtype) if one.is_floating_point() else one for one in batch) for batch in made]


def slice_of(batch, rank: int, size: int):
    """This rank's slice of a batch, in rank order; slices may differ by one sample."""
    x, y = batch
    per_sample = len(y) // len(x)
    first, last = len(x) * rank // size, len(x) * (rank + 1) // size
    return x[first:last], y[first * per_sample : last * per_sample]


def loss_of(model, batch):
    x, y = batch
    return (model(x) * y).sum(-1).mean() if y.is_floating_point() else nn.functional.cross_entropy(model(x), y)


def train_alone(model, optimizer, data, ranks=1, accumulate=1, clip=None):
    """Train in one process on whole batches. It computes the slices of ``ranks`` one after the other, because batch
    normalisation looks at each slice alone, and keeps the running statistics of the first."""
    for step, batch in enumerate(data):
        for rank in range(ranks):
            mine = slice_of(batch, rank, ranks)
            (loss_of(model, mine) * len(mine[0]) / len(batch[0])).backward()
            if rank == 0:
                kept = [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
        if (step + 1) % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


def train(model, optimizer, data, comm, accumulate=1, clip=None, after_backward=None):
    """Train on ranks, each on its slice of a batch, with the class's ``no_sync`` and ``clip_grad_norm_`` if it has
    them. Slices may differ in length, so a factor of the loss weights them."""
    clipped = next((one for one in (optimizer, model) if hasattr(one, "clip_grad_norm_")), None)
    for step, batch in enumerate(data):
        mine, last = slice_of(batch, comm.rank, comm.size), (step + 1) % accumulate == 0
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            (loss_of(model, mine) * comm.size * len(mine[0]) / len(batch[0])).backward()
        if last:
            if after_backward:
                after_backward()
            if clip:
                clipped.clip_grad_norm_(clip) if clipped else nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if hasattr(optimizer, "zero_grad"):
                optimizer.zero_grad()
    return model


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def adamw(model):
    # With the default eps, rounding noise on gradients of zero becomes steps of full size and hides any mistake.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-4)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def units(model) -> list:
    """Some blocks of a model, with parameters of odd sizes in each."""
    names = {"convolutional": ("features", "classify"), "transformer": ("layer",)}.get(type(model).__name__.lower())
    return [child for name, child in model.named_children() if not names or name in names]


def full_values(model, comm) -> dict:
    """A model's parameters by name, whole, whoever has sharded them."""
    from dtlib.gradients.shard_info import info_of  # a program without dtlib imports this file

    values = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if part := info_of(parameter).slice:  # of our fully_shard
            value = torch.cat(comm.all_gather_object(value)).view(part.shape)
        values[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return values


def apart(ours, theirs) -> float:
    """The largest difference between two tensors; infinite where one of them is no number."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    differences = (ours.detach().double() - theirs.detach().double()).abs()
    return float(differences.nan_to_num(math.inf).max()) if differences.numel() else 0.0


def all_apart(ours: dict, theirs: dict) -> float:
    """The largest difference between tensors of the same names."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(apart(ours[name], theirs[name]) for name in ours)


def difference_of_values(model, reference, comm) -> float:
    """The largest difference between the parameters of two models, however they are sharded."""
    return all_apart(full_values(model, comm), full_values(reference, comm))


def difference(model, reference, buffers: bool = True) -> float:
    """The largest difference between two models' parameters, and buffers, of the same names."""

    def named(module):
        tensors = module.state_dict() if buffers else dict(module.named_parameters())
        return {name.removeprefix("module."): value for name, value in tensors.items()}

    return all_apart(named(model), named(reference))


def seeded(make, dtype=torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().to(dtype)


@contextmanager
def without_collection():
    """Garbage in circles stays while bytes are counted: when it goes is chance."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
