"""Handwritten digits that come with scikit-learn (Alpaydin and Kaynak, UCI, 1998): small enough to train in seconds."""

TRAINING = 1440  # images; the number divides by 2, 3, 4, 5, 6 and 8 ranks


def load(dtype=None):
    """``(x, y), (x_test, y_test)``: 1440 images to train on and 357 to test with, shuffled once and for all.

    ``x`` has shape (images, 64) and values from 0 to 1, in float32 or in ``dtype``; ``y`` has the digits, as int64.
    """
    import torch

    from dtlib.workloads.digits import split

    return tuple((x.to(dtype or torch.float32), y) for x, y in split(TRAINING))


def net(hidden: int = 64, dtype=None):
    """64 pixels, a hidden layer, ten digits; initialised from torch's random numbers."""
    import torch
    from torch import nn

    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)).to(dtype or torch.float32)


def accuracy(model, test) -> float:
    """The fraction of ``test`` = (x, y) that a model gets right."""
    import torch

    x, y = test
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()
