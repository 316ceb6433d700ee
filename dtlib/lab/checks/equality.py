"""When values are the same, or the same but for digits left out, and bytes few enough, for judges of float64."""

import math
from collections.abc import Iterable

from dtlib.lab.foreign import Tensor

NUMBER = 8  # bytes of a float64
SPARE = 32 * NUMBER  # step counters, flags


def same(got: Tensor, expected: Tensor) -> bool:
    import torch

    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-8, atol=1e-10)


def factors(got: Tensor, *parts: Tensor) -> list | None:
    """The numbers by which these parts, of the same shape, add up to what was found; None where none do."""
    import torch

    columns = torch.stack([part.expand_as(got).flatten() for part in parts], 1)
    numbers = torch.linalg.lstsq(columns, got.flatten()).solution
    return numbers.tolist() if same(columns @ numbers, got.flatten()) else None


def number(value: object) -> float | str:
    """A float, or text where it is none."""
    try:
        return float(value)  # type: ignore[arg-type]  # or it raises
    except (TypeError, ValueError):
        return f"{value!r:.60}"


def whole_numbers(values: Iterable) -> list[int] | str:
    """A list of whole numbers, or text where it is none."""
    try:
        return [int(value) for value in values]
    except (TypeError, ValueError):
        return f"{values!r:.60}"


def as_tensor(values: object) -> Tensor:
    """What travelled from a rank as lists, in float64."""
    import torch

    return torch.as_tensor(values, dtype=torch.float64)


def rounded(got: float, wanted: float) -> bool:
    """Whether one number is the other with fewer digits, in all or behind the point."""
    shorter = [float(f"{wanted:.{digits}{kind}}") for digits in range(12) for kind in "ef"]
    if abs(wanted) > 1:
        shorter += [math.floor(wanted), math.ceil(wanted)]
    near = abs(got - wanted) < max(0.05 * abs(wanted), abs(wanted) > 1)
    return near and got != wanted and any(math.isclose(got, each) for each in shorter)
