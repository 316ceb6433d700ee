"""Models that strategies are held against: with what real ones have that toys lack."""

import torch
from torch import nn


class Plain(nn.Module):
    """Two layers, one frozen bias, and a layer that is never used."""

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


MODELS = {"plain": Plain, "convolutional": Convolutional, "transformer": Transformer}


def build(name: str, dtype=torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def batches(name: str, steps: int, count: int, dtype=torch.float64, seed: int = 1):
    """The same batches wherever they are made."""
    torch.manual_seed(seed)
    made = [MODELS[name].batch(count) for _ in range(steps)]
    return [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in made]


def slice_of(batch, rank: int, size: int):
    """This rank's slice of a batch, in rank order; slices may differ by one sample."""
    x, y = batch
    per_sample = len(y) // len(x)
    first, last = len(x) * rank // size, len(x) * (rank + 1) // size
    return x[first:last], y[first * per_sample : last * per_sample]


def loss_of(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def adamw(model):
    # With the default eps, rounding noise on gradients of zero becomes steps of full size and hides any mistake.
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-4)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def full_values(model, comm) -> dict:
    """A model's parameters by name, whole, whoever has sharded them."""
    values = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if hasattr(parameter, "slice"):  # by our fully_shard
            value = torch.cat(comm.all_gather_object(value)).view(parameter.slice.shape)
        values[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return values


def difference_of_values(model, reference, comm) -> float:
    """The largest difference between the parameters of two models, however they are sharded."""
    ours, theirs = full_values(model, comm), full_values(reference, comm)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def difference(model, reference, buffers: bool = True) -> float:
    """The largest difference between two models' parameters, and buffers, of the same names."""

    def named(module):
        tensors = module.state_dict() if buffers else dict(module.named_parameters())
        return {name.removeprefix("module."): value for name, value in tensors.items()}

    ours, theirs = named(model), named(reference)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
