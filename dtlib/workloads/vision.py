"""Images to classes: the network of the tutorials and a small residual one, on digits, MNIST or CIFAR-10."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from dtlib.parallel.pipeline.layers import LayerSpec
from dtlib.workloads import digits
from dtlib.workloads.images import read_folder
from dtlib.workloads.workload import Chain, Workload, chosen, settings

if TYPE_CHECKING:
    from dtlib.comm import Communicator


DEFAULTS = {"model": "mlp", "data": None, "seed": 0}
BATCH = 256  # images at a time in an evaluation


class Residual(nn.Module):
    """Two 3 x 3 convolutions and what goes past them: (n, inputs, h, w) to (n, outputs, h / stride, w / stride).

    GroupNorm looks at one image at a time, so that batches may be cut over ranks in any way; BatchNorm would not.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs),
        )  # fmt: skip
        alike = stride == 1 and inputs == outputs
        self.past = nn.Identity() if alike else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.past(x))


class Classes(nn.Linear):
    """The mean over all places of an image, and a score a class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(dim=(2, 3)))


def mlp(shape: tuple, classes: int) -> list[LayerSpec]:
    """The 784-128-10 network of the tutorials, for images of 28 x 28."""
    return [
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Linear, torch.Size(shape).numel(), 128),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.Linear, 128, classes),
    ]


def resnet(shape: tuple, classes: int, widths: tuple = (16, 32, 64), blocks: int = 1) -> list[LayerSpec]:
    """A residual net; each width after the first halves the image. K. He et al., arXiv:1512.03385."""
    layers, before = [LayerSpec(nn.Conv2d, shape[0], widths[0], 3, padding=1)], widths[0]
    for width in widths:
        for block in range(blocks):
            first = width != widths[0] and block == 0
            layers.append(LayerSpec(Residual, before, width, 2 if first else 1))
            before = width
    return [*layers, LayerSpec(Classes, before, classes)]


PRESETS = {
    "mlp": mlp,
    "resnet": resnet,
    "resnet-20": lambda shape, classes: resnet(shape, classes, blocks=3),
    "resnet-wide": lambda shape, classes: resnet(shape, classes, (64, 128, 256, 512), blocks=2),
}


def workload(config: dict) -> Workload:
    """The vision workload.

    Args:
        config: ``model``, one of ``PRESETS``; ``data``, a folder with MNIST or CIFAR-10 in it, or None for the digits
            that come with scikit-learn, enlarged to 28 x 28; ``seed``.

    Raises:
        DtlibError: for an unknown key or model, and for a folder without such data or with broken files.
    """
    config = settings(config, DEFAULTS, "vision")
    layers = chosen(PRESETS, config["model"], "vision")
    train, test, names = embedded() if config["data"] is None else read_folder(config["data"])
    train, test = (Images(images, labels, names) for images, labels in (train, test))
    specs = layers(tuple(train.images.shape[1:]), len(names))
    return Workload(
        name="vision", model=Chain(specs, config["seed"]), layers=specs, seed=config["seed"], train=train, test=test,
        collate=None, loss_fn=functional.cross_entropy, evaluate=lambda model, comm: evaluate(model, test, comm),
    )  # fmt: skip


class Images(Dataset):
    """Pairs of an image, (channels, height, width) from 0 to 1 in float32, and its class, int64.

    Args:
        images: (images, channels, height, width), float32, or uint8 from 0 to 255.
        labels: (images,), int64.
        classes: their names.
    """

    def __init__(self, images: Tensor, labels: Tensor, classes: tuple[str, ...]):
        self.images, self.labels, self.classes = images, labels, classes

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        image = self.images[place]
        return (image.float() / 255 if image.dtype == torch.uint8 else image), self.labels[place]


def embedded() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[str, ...]]:
    """The digits: 1440 images to train on and 357 to test with, (images, 1, 28, 28)."""
    halves = []
    for x, y in digits.split():
        images = x.view(-1, 1, 8, 8)
        halves.append((functional.interpolate(images, size=(28, 28), mode="bilinear"), y))
    return halves[0], halves[1], tuple("0123456789")


@torch.no_grad()
def confusion(model: nn.Module, data: Images, comm: Communicator) -> Tensor:
    """How many images of class i (row) were taken for class j (column): (classes, classes), int64, over all ranks."""
    device, was, classes = next(model.parameters()).device, model.training, len(data.classes)
    table = torch.zeros(classes**2, dtype=torch.int64)
    model.eval()
    for places in torch.arange(comm.rank, len(data), comm.size).split(BATCH):
        x, y = data[places]
        guesses = model(x.to(device)).argmax(1).cpu()
        table += torch.bincount(y * classes + guesses, minlength=classes**2)
    model.train(was)
    return comm.all_reduce(table).view(classes, classes)


def evaluate(model: nn.Module, data: Images, comm: Communicator) -> dict:
    """``accuracy``: the fraction of the images that the model gets right."""
    table = confusion(model, data, comm)
    return {"accuracy": table.trace().item() / table.sum().item()}
