"""A stand-in for torch: tensors with zero or one dimension, made by tensor, zeros, ones, full and arange."""

import builtins
import operator
from collections.abc import Iterator, Sequence
from math import isfinite
from types import EllipsisType, ModuleType
from typing import TypeAlias, Union

from dtlib.comm.numbers import CODES, Numbers
from dtlib.errors import MissingName

CONSTRUCTORS = ("tensor", "zeros", "ones", "full", "arange")
TYPES = tuple(f"torch.{name}" for name in CODES)
MANY = 1000  # a tensor with more elements prints only EDGE elements at each end, as in torch
EDGE = 3
Number: TypeAlias = int | float
Values: TypeAlias = Union["Tensor", list, tuple, range, Number]


class Tensor:
    """A tensor with the elements ``flat``; ``shape`` is () or (elements,). Slices are views."""

    def __init__(self, flat: Numbers, shape: tuple):
        self.flat, self.shape = flat, shape

    dtype = property(lambda self: f"torch.{self.flat.dtype}")
    nbytes = property(lambda self: self.flat.nbytes)

    def tolist(self) -> list[Number] | Number:
        return list(self.flat) if self.shape else self.flat[0]

    def item(self) -> Number:
        if len(self.flat) != 1:
            raise RuntimeError(f"a tensor of {len(self.flat)} elements has no item()")
        return self.flat[0]

    def numel(self) -> int:
        return len(self.flat)

    def clone(self) -> "Tensor":
        return Tensor(self.flat.copy(), self.shape)

    def float(self) -> "Tensor":
        return Tensor(Numbers(self.flat, "float32"), self.shape)

    def sum(self) -> "Tensor":
        dtype = self.flat.dtype if self.flat.dtype.startswith("float") else "int64"
        return Tensor(Numbers([sum(self.flat)], dtype), ())

    def mean(self) -> "Tensor":
        return self.sum() / len(self.flat)  # type: ignore[operator, return-value]  # added below

    def max(self) -> "Tensor":
        return Tensor(Numbers([max(self.flat)], self.flat.dtype), ())

    def min(self) -> "Tensor":
        return Tensor(Numbers([min(self.flat)], self.flat.dtype), ())

    def copy_(self, other: Values) -> "Tensor":
        self.flat[...] = _spread(other, len(self.flat))
        return self

    fill_ = copy_

    def zero_(self) -> "Tensor":
        return self.copy_(0)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return len(self.flat)

    def __iter__(self) -> Iterator["Tensor"]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, at: int | slice) -> "Tensor":
        if isinstance(at, slice):
            part = self.flat[at]
            return Tensor(part, (len(part),))
        return Tensor(self.flat[at : at + 1 or None], ())

    def __setitem__(self, at: int | slice | EllipsisType, values: Values) -> None:
        part = self.flat if at is Ellipsis else self.flat[at if isinstance(at, slice) else slice(at, at + 1 or None)]
        part[...] = _spread(values, len(part))

    def __float__(self) -> builtins.float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if how else str(self)

    def __repr__(self) -> str:
        whole = all(isfinite(value) and value == int(value) for value in self.flat)
        integers = not self.flat.dtype.startswith("float")
        said = [str(v) if integers else f"{v:.0f}." if whole else f"{v:.4f}" for v in self.flat]
        if len(said) > MANY:
            said = [*said[:EDGE], *said[-EDGE:]]
        said = [each.rjust(max(map(len, said))) for each in said]
        if len(self.flat) > MANY:
            said.insert(EDGE, " ...")
        dtype = "" if self.flat.dtype in ("float32", "int64") else f", dtype={self.dtype}"
        listed = f"[{', '.join(said)}]" if self.shape else said[0]
        return f"tensor({listed}{dtype})"


def _result(act, one, other) -> Tensor:
    """Return ``act`` of two tensors or numbers, element by element, in torch's result dtype."""
    shape = next((each.shape for each in (one, other) if isinstance(each, Tensor) and each.shape), ())
    count = shape[0] if shape else 1
    values = [act(a, b) for a, b in zip(_spread(one, count), _spread(other, count), strict=True)]
    kinds = [each.flat.dtype for each in (one, other) if isinstance(each, Tensor)]
    real = [kind for kind in kinds if kind.startswith("float")]
    if values and isinstance(values[0], float):
        kind = max(real, key=lambda name: name == "float64") if real else "float32"
    else:
        kind = max(kinds, key=lambda name: name == "int64")
    return Tensor(Numbers(values, kind), shape)


def _spread(values, count: int) -> list:
    if isinstance(values, Tensor):
        values = list(values.flat) if values.shape else [values.flat[0]] * count
    values = list(values) if hasattr(values, "__iter__") else [values] * count
    if len(values) != count:
        raise RuntimeError(f"The size of tensor a ({count}) must match the size of tensor b ({len(values)})")
    return values


def _arithmetic() -> None:
    """Add operators to ``Tensor``: forward, reflected, in place, and comparisons."""
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        act = getattr(operator, name)

        def forward(self, other, act=act):
            return _result(act, self, other)

        def backward(self, other, act=act):
            return _result(act, other, self)

        def in_place(self, other, act=act):
            return self.copy_(_result(act, self, other))

        setattr(Tensor, f"__{name}__", forward)
        setattr(Tensor, f"__r{name}__", backward)
        setattr(Tensor, f"__i{name}__", in_place)
        setattr(Tensor, {"truediv": "div_", "floordiv": "floor_divide_"}.get(name, f"{name}_"), in_place)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        act = getattr(operator, name)

        def compared(self, other, act=act):
            found = [act(a, b) for a, b in zip(self.flat, _spread(other, len(self.flat)), strict=True)]
            return found if self.shape else found[0]

        setattr(Tensor, f"__{name}__", compared)
    setattr(Tensor, "__neg__", lambda self: self * -1)  # noqa: B010 (as the others)
    setattr(Tensor, "__hash__", object.__hash__)  # noqa: B010


_arithmetic()


def tensor(values: Values, dtype: str | None = None) -> Tensor:
    """Return a tensor of a number or a flat list."""
    if isinstance(values, Tensor):
        return values.clone()
    several = values if (listed := isinstance(values, list | tuple | range)) else [values]
    flat = [value.item() if isinstance(value, Tensor) else value for value in several]
    if any(isinstance(value, list | tuple) for value in flat):
        raise MissingName("The stand-in for torch has tensors of one dimension: pass a flat list.")
    inferred = "int64" if flat and all(isinstance(value, int) for value in flat) else "float32"
    return Tensor(Numbers(flat, _type(dtype, inferred)), (len(flat),) if listed else ())


def full(size: int | Sequence[int], fill_value: Number, dtype: str | None = None) -> Tensor:
    """Return a tensor of ``size`` equal elements."""
    count = _count([size])
    return Tensor(Numbers([fill_value] * count, _type(dtype, "int64" if isinstance(fill_value, int) else "float32")),
                  (count,))  # fmt: skip


def zeros(*size: int | Sequence[int], dtype: str | None = None) -> Tensor:
    """Return a tensor of zeros, by default in float32."""
    return full(_count(size), 0, dtype or "torch.float32")


def ones(*size: int | Sequence[int], dtype: str | None = None) -> Tensor:
    """Return a tensor of ones, by default in float32."""
    return full(_count(size), 1, dtype or "torch.float32")


def arange(*bounds: int, dtype: str | None = None) -> Tensor:
    """Return a tensor of the numbers of ``range(*bounds)``."""
    return tensor(list(range(*bounds)), dtype)


def _count(size) -> int:
    size = tuple(size[0]) if size and isinstance(size[0], list | tuple) else tuple(size)
    if len(size) != 1:
        raise MissingName(f"The stand-in for torch has tensors of one dimension, and this one is to have {size}.")
    return int(size[0])


def _type(dtype, inferred: str) -> str:
    name = str(dtype or inferred).removeprefix("torch.")
    if name not in CODES:
        raise MissingName(f"The stand-in for torch has no {name}: it has {', '.join(CODES)}.")
    return name


def fake_module() -> ModuleType:
    """Return the module that ``import torch`` finds."""
    module = ModuleType("torch", "A stand-in: " + ", ".join(CONSTRUCTORS))
    for name in CONSTRUCTORS:
        setattr(module, name, globals()[name])
    for name in TYPES:
        setattr(module, name.removeprefix("torch."), name)
    vars(module).update(Tensor=Tensor)

    def missing(name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingName(f"torch is a stand-in here and has no {name}: it has {', '.join(CONSTRUCTORS)}.")

    vars(module).update(__getattr__=missing)
    return module
