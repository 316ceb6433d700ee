"""scikit-learn's handwritten digits, and many small networks that are trained on them at the same time.

A figure with confidence intervals needs hundreds of training runs. One small network alone would spend most of the time
in overhead. So networks with the same batch size are trained together: parameters have one more dimension in front, and
a layer of all networks is one ``baddbmm``. The loss is the sum of the networks' losses. Networks share no parameters,
so each parameter's gradient is that of its own network's loss:

    weights (networks, in, out)      x (networks, batch, in)      loss = loss of network 0 + loss of network 1 + ...

A network's seed decides its training images, its initial parameters, and the order of the images. Two runs with the
same seed differ only in the setting under study (*paired* seeds). A run with larger batches uses the same images in the
same order, in fewer steps.
"""

import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

WIDTHS = (64, 64, 64, 10)
MOMENTUM = 0.9
CHECK_EVERY = 20  # steps


@cache
def load() -> tuple[Tensor, Tensor]:
    """Return all 1797 images, (1797, 64) floats from 0 to 1, and their labels, (1797,) integers from 0 to 9.

    E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998. The file is read from scikit-learn's folder
    without importing scikit-learn, which would take seconds on every rank.
    """
    spec = find_spec("sklearn")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    rows = torch.from_numpy(np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=","))
    return (rows[:, :64] / 16).float(), rows[:, 64].long()


def split(train: int = 1440) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return ``(x, y), (x_test, y_test)``: the first ``train`` images for training, the others for the test.

    The images are in a fixed random order. 1440 is divisible by 2, 3, 4, 5, 6 and 8 ranks.
    """
    images, labels = load()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, rest = order[:train], order[train:]
    return (images[first], labels[first]), (images[rest], labels[rest])


@dataclass
class Task:
    """The data and initial parameters of one network.

    ``train`` and ``test`` are indices of images in ``load()``. ``labels`` are the training labels of ``train``, perhaps
    with noise. ``start`` are the initial parameters. ``order`` are the indices into ``train`` in the order of training.
    """

    train: Tensor
    test: Tensor
    labels: Tensor
    start: list[Tensor]
    order: Tensor


def task(seed: int, train: int = 1280, epochs: int = 20, noise: float = 0.0) -> Task:
    """Create the task of a seed.

    Args:
        seed: decides everything that is random.
        train: the number of training images; the others are for the test.
        epochs: passes over the training images.
        noise: the fraction of training labels that are replaced by another digit.
    """
    chance = torch.Generator().manual_seed(seed)
    labels = load()[1]
    places = torch.randperm(len(labels), generator=chance)
    learn, test = places[:train], places[train:]
    noisy = labels[learn].clone()
    wrong = math.floor(noise * train)  # the images are in random order, so change the first labels
    noisy[:wrong] = (noisy[:wrong] + torch.randint(1, 10, (wrong,), generator=chance)) % 10
    order = torch.cat([torch.randperm(train, generator=chance) for _ in range(epochs)])
    return Task(learn, test, noisy, _start(chance), order)


def _start(chance: torch.Generator) -> list[Tensor]:
    """Return weights (in, out) and biases (1, out), uniform up to 1 / sqrt(in), like ``nn.Linear``."""
    start = []
    for inputs, outputs in pairwise(WIDTHS):
        bound = inputs**-0.5
        for shape in ((inputs, outputs), (1, outputs)):
            start.append((2 * torch.rand(shape, generator=chance) - 1) * bound)
    return start


def forward(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Return scores, (networks, batch, 10), of images, (networks, batch, 64)."""
    *hidden, last = zip(parameters[::2], parameters[1::2], strict=True)
    for weight, bias in hidden:
        x = torch.baddbmm(bias, x, weight).relu()
    return torch.baddbmm(last[1], x, last[0])


def losses(parameters: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of each network, (networks,)."""
    scores = forward(parameters, x)
    return functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def train(tasks: list[Task], batch: int, rates: Tensor, until: float = 0.0) -> list[Tensor]:
    """Train one network for each task, all at the same time, by SGD with momentum; return the stacked parameters.

    Args:
        tasks: one per network.
        batch: images per step.
        rates: (steps, networks), the learning rate of each network in each step. There are at most as many steps as
            whole batches in ``order``.
        until: training of a network stops when its loss over all training images is at most this; checked every
            ``CHECK_EVERY`` steps.

    A network may diverge: then its parameters are infinite or NaN. The other networks are not affected.
    """
    images = load()[0]
    parameters = [torch.stack(together).requires_grad_() for together in zip(*(t.start for t in tasks), strict=True)]
    momenta = [torch.zeros_like(parameter) for parameter in parameters]
    train, labels, order = (torch.stack([getattr(t, name) for t in tasks]) for name in ("train", "labels", "order"))
    active = torch.ones(len(tasks))  # 0 for networks that are not trained any more
    for step, rate in enumerate(rates):
        if until and step % CHECK_EVERY == 0:
            with torch.no_grad():
                active *= ~(train_losses(parameters, tasks) <= until)
            if not active.any():
                break
        seen = order[:, step * batch : (step + 1) * batch]
        loss = losses(parameters, images[train.gather(1, seen)], labels.gather(1, seen))
        gradients = torch.autograd.grad(loss.sum(), parameters)
        with torch.no_grad():
            for parameter, momentum, gradient in zip(parameters, momenta, gradients, strict=True):
                momentum.mul_(MOMENTUM).add_(gradient)
                parameter -= (rate * active)[:, None, None] * momentum
    return [parameter.detach() for parameter in parameters]


def test_errors(parameters: list[Tensor], tasks: list[Task]) -> Tensor:
    """Return the error rate of each network on its test images, (networks,); about 0.9 if it has diverged."""
    images, labels = load()
    test = torch.stack([t.test for t in tasks])
    return (forward(parameters, images[test]).argmax(2) != labels[test]).double().mean(1)


def train_losses(parameters: list[Tensor], tasks: list[Task]) -> Tensor:
    """Return the loss of each network over all its training images, (networks,)."""
    images = load()[0]
    train, labels = (torch.stack([getattr(t, name) for t in tasks]) for name in ("train", "labels"))
    return losses(parameters, images[train], labels)


def sharpness(parameters: list[Tensor], tasks: list[Task], rounds: int = 50) -> Tensor:
    """Return the largest eigenvalue of the Hessian of each network's training loss, (networks,).

    Power iteration: start with a random direction v. Then ``rounds`` times replace v by H v, scaled to length 1. H v is
    the derivative of (gradient . v), so H itself, one number for each pair of parameters, is never computed.
    """
    parameters = [parameter.clone().requires_grad_() for parameter in parameters]
    gradients = torch.autograd.grad(train_losses(parameters, tasks).sum(), parameters, create_graph=True)
    chance = torch.Generator().manual_seed(0)
    v = _unit([torch.randn(parameter[0].shape, generator=chance).expand_as(parameter) for parameter in parameters])
    largest = torch.zeros(())
    for _ in range(rounds):
        h_v = torch.autograd.grad(gradients, parameters, v, retain_graph=True)
        largest = sum(((a * b).flatten(1).sum(1) for a, b in zip(v, h_v, strict=True)), torch.zeros(()))
        v = _unit(h_v)
    return largest


def _unit(vectors) -> list[Tensor]:
    """Scale the vector of each network, over all its parameters, to length 1."""
    lengths = sum(vector.square().flatten(1).sum(1) for vector in vectors).sqrt().clamp(min=1e-30)
    return [vector / lengths[:, None, None] for vector in vectors]
