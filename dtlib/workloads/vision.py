"""Image classification: a perceptron and residual networks, on digits, MNIST or CIFAR-10."""

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
BATCH = 256  # images per batch of an evaluation


class Residual(nn.Module):
    """A residual block of two 3 x 3 convolutions: (n, inputs, h, w) to (n, outputs, h / stride, w / stride).

    GroupNorm normalises each image separately, so the result does not depend on how a batch is divided among ranks.
    With BatchNorm it would.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs),
        )  # fmt: skip
        same_shape = stride == 1 and inputs == outputs
        self.past = nn.Identity() if same_shape else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.past(x))


class Classes(nn.Linear):
    """The last layer: the mean over all pixels, then one score per class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(dim=(2, 3)))


def mlp(shape: tuple, classes: int) -> list[LayerSpec]:
    """Return the layers of a perceptron with 128 hidden units, known from tutorials as 784-128-10."""
    return [
        LayerSpec(nn.Flatten),
        LayerSpec(nn.Linear, torch.Size(shape).numel(), 128),
        LayerSpec(nn.ReLU),
        LayerSpec(nn.Linear, 128, classes),
    ]


def resnet(shape: tuple, classes: int, widths: tuple = (16, 32, 64), blocks: int = 1) -> list[LayerSpec]:
    """Return the layers of a residual network (K. He et al., arXiv:1512.03385).

    Each width after the first halves the image.
    """
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
    """Return the vision workload.

    Args:
        config: ``model`` is one of ``PRESETS``. ``data`` is a folder with MNIST or CIFAR-10, or None for the digits of
            scikit-learn, enlarged to 28 x 28. ``seed`` initialises the parameters.

    Raises:
        DtlibError: for an unknown key or model, and for a folder without such data or with damaged files.
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
    """Pairs of an image, (channels, height, width), float32 from 0 to 1, and its class, int64.

    Args:
        images: (images, channels, height, width), float32, or uint8 from 0 to 255.
        labels: (images,), int64.
        classes: the names of the classes.
    """

    def __init__(self, images: Tensor, labels: Tensor, classes: tuple[str, ...]):
        self.images, self.labels, self.classes = images, labels, classes

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        image = self.images[place]
        return (image.float() / 255 if image.dtype == torch.uint8 else image), self.labels[place]


def embedded() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[str, ...]]:
    """Return the digits: 1440 training images and 357 test images, (images, 1, 28, 28), and the class names."""
    halves = []
    for x, y in digits.split():
        images = x.view(-1, 1, 8, 8)
        halves.append((functional.interpolate(images, size=(28, 28), mode="bilinear"), y))
    return halves[0], halves[1], tuple("0123456789")


@torch.no_grad()
def confusion(model: nn.Module, data: Images, comm: Communicator) -> Tensor:
    """Return the confusion matrix over all ranks, (classes, classes), int64.

    Element (i, j) is the number of images of class i for which the model predicts class j.
    """
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
    """Return ``accuracy``, the fraction of images that are classified correctly; all ranks call it."""
    table = confusion(model, data, comm)
    return {"accuracy": table.trace().item() / table.sum().item()}
