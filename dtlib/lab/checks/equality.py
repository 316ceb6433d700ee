"""Compare values in float64, for judges: equal, equal except for omitted digits, or small enough in bytes."""

import math
from collections.abc import Iterable

from dtlib.lab.foreign import Tensor

NUMBER = 8  # bytes of a float64
MARGIN = 32 * NUMBER  # bytes for step counters and flags


def same(got: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have equal shapes, and values within 1e-8 (relative) or 1e-10 (absolute)."""
    import torch

    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-8, atol=1e-10)


def factors(got: Tensor, *parts: Tensor) -> list | None:
    """Return the numbers by which ``parts``, of equal shape, add up to ``got``; None if there are none."""
    import torch

    columns = torch.stack([part.expand_as(got).flatten() for part in parts], 1)
    numbers = torch.linalg.lstsq(columns, got.flatten()).solution
    return numbers.tolist() if same(columns @ numbers, got.flatten()) else None


def number(value: object) -> float | str:
    """Return ``value`` as a float, or as text if it is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{value!r:.60}"


def whole_numbers(values: Iterable) -> list[int] | str:
    """Return ``values`` as a list of integers, or as text if they are no integers."""
    try:
        return [int(value) for value in values]
    except (TypeError, ValueError):
        return f"{values!r:.60}"


def as_tensor(values: object) -> Tensor:
    """Return lists that a rank has sent as a float64 tensor."""
    import torch

    return torch.as_tensor(values, dtype=torch.float64)


def rounded(got: float, wanted: float) -> bool:
    """Return whether ``got`` is ``wanted`` with fewer digits, in all or after the decimal point."""
    shorter = [float(f"{wanted:.{digits}{kind}}") for digits in range(12) for kind in "ef"]
    if abs(wanted) > 1:
        shorter += [math.floor(wanted), math.ceil(wanted)]
    near = abs(got - wanted) < max(0.05 * abs(wanted), abs(wanted) > 1)
    return near and got != wanted and any(math.isclose(got, each) for each in shorter)
