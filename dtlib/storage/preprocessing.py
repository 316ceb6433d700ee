"""From raw files to binary records: done once, before training, as decoding is what a loader can least afford."""

import io
import json
from collections.abc import Iterator

import numpy as np

IMAGE = (32, 32, 3)
WORDS = 16

# A record is what training reads: fixed in length, and its fields are arrays without a further look.
RECORD = np.dtype([("image", "u1", IMAGE), ("label", "<i4"), ("text", "<u2", (WORDS,))])


def raw_samples(count: int, seed: int = 0) -> Iterator[tuple[bytes, bytes, bytes]]:
    """``count`` made-up samples as they come from a camera and an annotator: (JPEG, JSON, text), all bytes."""
    from PIL import Image

    random = np.random.default_rng(seed)
    for number in range(count):
        coarse = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        picture = io.BytesIO()
        Image.fromarray(coarse).resize(IMAGE[:2]).save(picture, "JPEG")
        label = json.dumps({"id": number, "label": int(coarse.mean() > 127)}).encode()
        yield picture.getvalue(), label, f"a picture with the number {number} of {count}".encode()


def record_of(picture: bytes, annotation: bytes, text: bytes) -> np.ndarray:
    """One ``RECORD``: the image decoded, the label as a number, each word of the text as the number of its hash."""
    from PIL import Image

    record = np.zeros((), RECORD)
    record["image"] = np.asarray(Image.open(io.BytesIO(picture)))
    record["label"] = json.loads(annotation)["label"]
    words = [_number_of(word) for word in text.split()[:WORDS]]
    record["text"][: len(words)] = words
    return record


def _number_of(word: bytes) -> int:
    """1 to 65535; 0 is for where there is no word. Python's own hash is another one in every process."""
    number = 0
    for byte in word:
        number = (31 * number + byte) % 65535
    return 1 + number
