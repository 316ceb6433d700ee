"""Preprocessing: convert raw files to binary records once, before training, because decoding is slow."""

import io
import json
from collections.abc import Iterator

import numpy as np

IMAGE = (32, 32, 3)
WORDS = 16

# The record that training reads. It has a fixed length, and its fields are arrays without decoding.
RECORD = np.dtype([("image", "u1", IMAGE), ("label", "<i4"), ("text", "<u2", (WORDS,))])


def raw_samples(count: int, seed: int = 0) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield ``count`` synthetic samples in raw form: (JPEG, JSON, text), each as bytes."""
    from PIL import Image

    random = np.random.default_rng(seed)
    for number in range(count):
        coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        picture = io.BytesIO()
        Image.fromarray(coarse).resize(IMAGE[:2]).save(picture, "JPEG")
        label = json.dumps({"id": number, "label": int(coarse.mean() > 127)}).encode()
        yield picture.getvalue(), label, f"a picture with the number {number} of {count}".encode()


def record_of(picture: bytes, annotation: bytes, text: bytes) -> np.ndarray:
    """Convert a raw sample to a ``RECORD``: the decoded image, the label, and the hash of each word as a number."""
    from PIL import Image

    record = np.zeros((), RECORD)
    record["image"] = np.asarray(Image.open(io.BytesIO(picture)))
    record["label"] = json.loads(annotation)["label"]
    words = [_number_of(word) for word in text.split()[:WORDS]]
    record["text"][: len(words)] = words
    return record


def _number_of(word: bytes) -> int:
    """Return a hash from 1 to 65535; 0 is padding. Python's ``hash`` will not do: it differs between processes."""
    number = 0
    for byte in word:
        number = (31 * number + byte) % 65535
    return 1 + number
