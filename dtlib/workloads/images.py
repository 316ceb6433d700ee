"""Read images and labels from the original files of MNIST and CIFAR-10. Reading executes no code from the files."""

import gzip
import os
import zlib
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dtlib.errors import DtlibError

WHERE = (
    "MNIST is four files such as train-images-idx3-ubyte.gz, from https://ossci-datasets.s3.amazonaws.com/mnist/; "
    "CIFAR-10 is cifar-10-binary.tar.gz, unpacked, from https://www.cs.toronto.edu/~kriz/cifar.html."
)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_TRAIN = [f"data_batch_{number}.bin" for number in range(1, 6)]


def read_folder(folder: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[str, ...]]:
    """Return training images and labels, test images and labels, and the names of the classes.

    Images are (images, channels, height, width), uint8; labels are (images,), int64.

    Raises:
        DtlibError: if the folder has neither data set, or if a file is damaged or of another format.
    """
    top = Path(folder).expanduser()
    if not top.is_dir():
        raise DtlibError(f"There is no folder {folder!r}. {WHERE}")
    for place in (top, *sorted(each for each in top.rglob("*") if each.is_dir())):
        if _find(place, "train-images-idx3-ubyte", "train-images.idx3-ubyte"):
            return _mnist(place, "train"), _mnist(place, "t10k"), tuple("0123456789")
        if os.path.exists(place / CIFAR_TRAIN[0]):
            images, labels = (torch.cat(each) for each in zip(*(_cifar(place / n) for n in CIFAR_TRAIN), strict=True))
            return (images, labels), _cifar(place / "test_batch.bin"), CIFAR_CLASSES
    raise DtlibError(f"The folder {folder!r} contains neither MNIST nor CIFAR-10. {WHERE}")


def _find(place: Path, *names: str) -> Path | None:
    # Use os.path, because Path.exists raises an error in a folder without permission.
    paths = (place / (name + end) for name in names for end in ("", ".gz"))
    return next(filter(os.path.exists, paths), None)


def _there(path: Path) -> Path:
    if not path.exists():
        raise DtlibError(f"{path} is missing. {WHERE}")
    return path


def _mnist(place: Path, which: str) -> tuple[Tensor, Tensor]:
    paths = []
    for name in (f"{which}-images-idx3-ubyte", f"{which}-labels-idx1-ubyte"):
        paths.append(_find(place, name, name.replace("-idx", ".idx")) or _there(place / name))
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    if len(images) != len(labels):
        raise DtlibError(f"{paths[0]} has {len(images)} images, but {paths[1]} {len(labels)} labels: get both again.")
    if images.shape[1:] != (28, 28) or labels.max() > 9:
        raise DtlibError(
            f"{paths[0]} and {paths[1].name} have {len(images)} images of {' x '.join(map(str, images.shape[1:]))} "
            f"and labels up to {labels.max()}, but MNIST has 28 x 28 and ten classes. Download both again."
        )
    return images[:, None], labels.long()


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an IDX file of bytes, perhaps gzipped, as a tensor of ``dimensions`` dimensions, uint8.

    The file has the bytes 0, 0, type, number of dimensions, then the sizes as big-endian int32, then the data.

    Raises:
        DtlibError: if the file is truncated, has extra bytes, or is no IDX file of this number of dimensions.
    """
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise DtlibError(f"{path} is a broken gzip file ({error}): download it again.") from None
    head = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < head:
        raise DtlibError(f"{path} is not an IDX file of bytes in {dimensions} dimensions: download it again.")
    shape = np.frombuffer(content, ">i4", dimensions, offset=4).tolist()
    if len(content) != head + prod(shape) or min(shape) < 1:
        raise DtlibError(
            f"{path} should have {' x '.join(map(str, shape))} = {prod(shape)} bytes, but has {len(content) - head}: "
            "download it again."
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=head).view(shape)


def _cifar(path: Path) -> tuple[Tensor, Tensor]:
    """Read a file of rows: a label (one byte) and 3 x 32 x 32 pixels."""
    content = _there(path).read_bytes()
    if not content or len(content) % 3073:
        raise DtlibError(f"{path} has {len(content)} bytes, which are not whole rows of 3073: download it again.")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 3073)
    if rows[:, 0].max() > 9:
        raise DtlibError(f"{path} has labels up to {rows[:, 0].max()}, but CIFAR-10 has ten classes: get it again.")
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()
