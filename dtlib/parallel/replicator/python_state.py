"""What a step function reads of Python's world, which a captured graph takes as it was.

A graph knows ``2.0``, not that it was the value of ``temperature``. So what a step function can reach is looked at
before and after it is captured, and before each step that its graph makes.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType

import torch
from torch import nn

SIMPLE = (bool, int, float, complex, str, bytes, type(None))
DEPTH = 5  # of lists in objects in dictionaries ...; below it, identity alone
ELEMENTS = 10_000  # an array is compared by value up to so many


def python_state(function: Callable) -> dict[str, object]:
    """Values by name: those that ``function``, and the functions and methods that it calls by name, can read or change.

    Numbers, strings and small arrays by value, lists, dictionaries and sets likewise, and the attributes of modules and
    of other objects, as deep as ``DEPTH``; tensors by identity, and whether they require a gradient; everything else by
    identity. Beside them what torch itself reads: autocast, and the type of new tensors.
    """
    found: dict[str, object] = {
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
    }
    _look_at(getattr(function, "__name__", "step_fn"), function, found, set())
    return found


def changed(before: dict, after: dict) -> str | None:
    """The first name whose value differs, with both values; None if all are the same."""
    for name in [*before, *after]:
        if name not in before or name not in after or before[name] != after[name]:
            old, new = (_shown(state, name) for state in (before, after))
            return f"{name} ({old}, then {new})" if old != new else name
    return None


class _Same:
    """Equal to itself alone; holds what it stands for, as a number given by ``id`` may be given again."""

    def __init__(self, thing):
        self.thing = thing

    def __eq__(self, other):
        return isinstance(other, _Same) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]  # as Python has it for what is compared by value


def _look_at(name, value, found, seen, names=()) -> None:
    """``names``: those in the code that reaches ``value``, among which its methods are."""
    if id(value) in seen or isinstance(value, type | ModuleType | torch.optim.Optimizer):
        return
    if hasattr(value, "__func__"):  # a bound method
        _look_at(name, value.__func__, found, seen)
        _look_at(f"{name}.__self__", value.__self__, found, seen, value.__func__.__code__.co_names)
    elif isinstance(value, partial):
        found[name] = _summary((value.args, value.keywords))
        _look_at(f"{name}.func", value.func, found, seen)
    elif isinstance(value, FunctionType):
        if not _is_library(value):
            seen.add(id(value))
            if value.__defaults__ or value.__kwdefaults__:
                found[f"{name}'s defaults"] = _summary((value.__defaults__, value.__kwdefaults__))
            inside, names = _names_in(value)
            for inner, content in inside.items():
                _look_at(inner, content, found, seen, names)
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules(prefix=name):
            found.update({f"{path}.{attribute}": _summary(content) for attribute, content in vars(module).items()})
            _look_at_methods(path, module, {"forward", *names}, found, seen)
    elif hasattr(value, "__dict__") and not _is_library(type(value)):
        found.update({f"{name}.{attribute}": _summary(content) for attribute, content in vars(value).items()})
        _look_at_methods(name, value, {"__call__", *names}, found, seen)
    elif not callable(value):
        found[name] = _summary(value)


def _look_at_methods(name, value, names, found, seen) -> None:
    """The methods that are called by one of these names, and those that they call."""
    names = list(names)
    for method in names:
        function = getattr(type(value), method, None)
        if isinstance(function, FunctionType) and not _is_library(function) and id(function) not in seen:
            names += _names_in(function)[1]
            _look_at(f"{name}.{method}", function, found, seen)


def _is_library(value) -> bool:
    return (value.__module__ or "").partition(".")[0] in ("torch", "dtlib")


def _names_in(function) -> tuple[dict, set]:
    """What the names in a function's code stand for, outside of it; and all of them."""
    codes = [function.__code__]
    for code in codes:  # functions within it, too
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_names")]
    names = {name for code in codes for name in code.co_names}
    found = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != type(cell)():  # not assigned yet
            found[name] = cell.cell_contents
    return found, names


def _summary(value, depth: int = DEPTH):
    if isinstance(value, SIMPLE):
        return value
    if isinstance(value, torch.Tensor):
        return _Same(value), value.requires_grad
    if not depth:
        return _Same(value)
    if isinstance(value, dict):
        return {key: _summary(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), [_summary(item, depth - 1) for item in value]
    if hasattr(value, "tobytes") and getattr(value, "size", ELEMENTS + 1) <= ELEMENTS:
        return _Same(value), value.tobytes()
    if not hasattr(value, "__dict__") or callable(value) or isinstance(value, ModuleType) or _is_library(type(value)):
        return _Same(value)
    return _Same(value), {key: _summary(item, depth - 1) for key, item in vars(value).items()}


def _shown(state, name):
    value = state.get(name, "absent")
    return f"{value!r:.40}" if isinstance(value, SIMPLE) else "another content"
