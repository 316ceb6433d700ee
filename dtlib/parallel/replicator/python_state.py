"""What a step function reads of Python's world, which a captured graph takes as it was.

A graph knows ``2.0``, not that it was the value of ``temperature``. So what a step function can reach is looked at
before and after it is captured, and before each step that its graph makes.
"""

from types import FunctionType, ModuleType

import torch
from torch import nn

SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def python_state(function) -> dict[str, object]:
    """Values by name: those that ``function``, and the functions that it calls by name, can read or change.

    Numbers, strings and lists, dictionaries and sets of them by value; the attributes of modules and of other objects
    likewise, one level deep; everything else by identity.
    """
    found = {}
    _look_at(getattr(function, "__name__", "step_fn"), function, found, set())
    return found


def changed(before: dict, after: dict) -> str | None:
    """The first name whose value differs, with both values; None if all are the same."""
    for name in [*before, *after]:
        if name not in before or name not in after or before[name] != after[name]:
            old, new = (_shown(state, name) for state in (before, after))
            return f"{name} ({old}, then {new})" if old != new else name
    return None


def _look_at(name, value, found, seen) -> None:
    if id(value) in seen or isinstance(value, type | ModuleType | torch.optim.Optimizer):
        return
    if hasattr(value, "__func__"):  # a bound method
        _look_at(name, value.__func__, found, seen)
        _look_at(f"{name}.__self__", value.__self__, found, seen)
    elif isinstance(value, FunctionType):
        if (value.__module__ or "").partition(".")[0] not in ("torch", "dtlib"):
            seen.add(id(value))
            for inner, content in _names_in(value).items():
                _look_at(inner, content, found, seen)
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules(prefix=name):
            _look_into(path, vars(module), found)
    elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in ("torch", "dtlib"):
        _look_into(name, vars(value), found)
    elif not callable(value):
        found[name] = _summary(value)


def _names_in(function) -> dict:
    """What the names in a function's code stand for, outside of it."""
    codes = [function.__code__]
    for code in codes:  # functions within it, too
        codes += [constant for constant in code.co_consts if hasattr(constant, "co_names")]
    names = {name for code in codes for name in code.co_names}
    found = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != type(cell)():  # not assigned yet
            found[name] = cell.cell_contents
    return found


def _look_into(name, attributes, found) -> None:
    for attribute, value in attributes.items():
        found[f"{name}.{attribute}"] = _summary(value)


def _summary(value):
    if isinstance(value, dict):
        return {key: _by_value_or_identity(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), [_by_value_or_identity(item) for item in value]
    return _by_value_or_identity(value)


def _by_value_or_identity(value):
    return value if isinstance(value, SIMPLE) else ("identity", id(value))


def _shown(state, name):
    value = state.get(name, "absent")
    return f"{value!r:.40}" if isinstance(value, SIMPLE) else "another content"
