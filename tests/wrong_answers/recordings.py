"""What ranks observed of a wrong answer, in files: JSON, packed, one an exercise; reading it runs no code.

What JSON has no word for is an object with one entry that names its kind: {"tuple": [...]}, {"dict": [[key, value]]},
{"tensor": [dtype, shape, bytes in base64]}, {"Problem": {...}}.
"""

import base64
import json
import lzma
import re
from pathlib import Path

import numpy as np
import torch

from dtlib.lab.checks.exercise import Wrong, exercise_files
from tests.conftest import ROOT

FIELDS = ("mistake", "rank", "expected", "got", "hints")


def file_of(exercise: str) -> Path:
    """In the folder of its lesson among the tests."""
    return ROOT / "tests" / "lessons" / exercise_files()[exercise].parent.name / "recorded" / f"{exercise}.json.xz"


def read(exercise: str) -> dict:
    """Of each answer to an exercise that is recorded: ``rounds``, what was ``judged``, and the ``verdict``."""
    path = file_of(exercise)
    return json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}


def names(exercise: str) -> set[str]:
    """The answers to an exercise that are recorded; what was observed of them, tens of megabytes, is not parsed."""
    path = file_of(exercise)
    text = lzma.decompress(path.read_bytes()).decode() if path.exists() else ""
    return {json.loads(name) for name in re.findall(r'("[^"]*"):\{"rounds":', text)}


def write(exercise: str, recorded: dict) -> None:
    text = json.dumps(dict(sorted(recorded.items())), separators=(",", ":"))
    file_of(exercise).parent.mkdir(exist_ok=True)
    file_of(exercise).write_bytes(lzma.compress(text.encode()))


def encoded(thing):
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return thing
    if isinstance(thing, list):
        return [encoded(each) for each in thing]
    if isinstance(thing, tuple):
        return {"tuple": [encoded(each) for each in thing]}
    if isinstance(thing, dict):
        return {"dict": [[encoded(key), encoded(value)] for key, value in thing.items()]}
    if isinstance(thing, torch.Tensor):
        array = thing.detach().contiguous().numpy()
        return {"tensor": _packed(array)}
    if isinstance(thing, np.ndarray):
        return {"array": _packed(thing)}
    if isinstance(thing, Wrong):
        return {"Problem": {field: encoded(getattr(thing, field)) for field in FIELDS}}
    raise TypeError(f"a recording has no word for a {type(thing).__name__}: {thing!r:.80}")


def decoded(thing):
    if isinstance(thing, list):
        return [decoded(each) for each in thing]
    if not isinstance(thing, dict):
        return thing
    [(kind, content)] = thing.items()
    if kind == "tuple":
        return tuple(decoded(each) for each in content)
    if kind == "dict":
        return {decoded(key): decoded(value) for key, value in content}
    if kind == "tensor":
        return torch.from_numpy(_unpacked(content))
    if kind == "array":
        return _unpacked(content)
    assert kind == "Problem", kind
    *fields, hints = (decoded(content[field]) for field in FIELDS)
    return Wrong(*fields, *hints)


def _packed(array: np.ndarray) -> list:
    return [array.dtype.name, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _unpacked(content) -> np.ndarray:
    dtype, shape, data = content
    return np.frombuffer(bytearray(base64.b64decode(data)), dtype).reshape(shape)
