"""What a learner has handed in: its first line, its text, and what its errors say.

Nothing here needs ranks, torch or MPI: some answers are judged in the notebook itself.
"""

import hashlib
import inspect
import traceback

ON_ITS_OWN = "Call it in a cell of its own, with small values, and print what that line uses."


def first_line(name: str, namespace: dict, where: str = " on rank 0") -> str:
    """The line by which a learner recognises what was judged."""
    thing = namespace.get(name)
    if callable(thing):
        try:
            line = _first_line_of_class(thing) if inspect.isclass(thing) else inspect.getsource(thing).splitlines()[0]
            return line.strip()
        except (OSError, TypeError, StopIteration):
            return f"{name} (a {type(thing).__name__})"
    if isinstance(thing, str) and len(lines := thing.split("\n")) > 1:
        thing = f"{next(filter(str.strip, lines), '').strip()} ..."
    return f"{name} = {thing!r:.60}{where}" if name in namespace else f"{name} (not defined)"


def _first_line_of_class(kind) -> str:
    """Python keeps the lines of a cell for its functions and not for its classes: look above the first method."""
    method = next(value for value in vars(kind).values() if inspect.isfunction(value))
    lines, _ = inspect.findsource(method)
    above = lines[: method.__code__.co_firstlineno]
    return next(line.rstrip() for line in reversed(above) if line.startswith(f"class {kind.__name__}"))


def fingerprint(thing) -> str:
    """The same for two answers whose code, or value, is the same."""
    try:
        text = "".join(inspect.getsource(function) for function in _functions_of(thing)) or repr(thing)
    except (OSError, TypeError):
        text = "".join(f"{function.__code__.co_code}{function.__code__.co_consts}" for function in _functions_of(thing))
    except Exception as error:  # a thing of the learner's that cannot be told
        text = type(error).__name__
    return hashlib.sha1(text.encode()).hexdigest()


def _functions_of(thing) -> list:
    if inspect.isfunction(thing):
        return [thing]
    methods = vars(thing).values() if inspect.isclass(thing) else vars(type(thing)).values() if callable(thing) else ()
    return [method for method in methods if inspect.isfunction(method)]


def told(error: BaseException, thing) -> tuple[str, tuple]:
    """What an error of an answer says, and hints that belong to its kind: where it happened, and what to look at."""
    got = ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    place = _place(error, thing)
    if place is None and isinstance(error, TypeError) and "argument" in f"{error}":
        asks = "It was not even called: do its parameters agree with the text, in number and in order?"
        return got, (asks, ON_ITS_OWN)
    return got, (f"{place or 'It happens in what it calls'}. {_advice(error)}", ON_ITS_OWN)


def _place(error: BaseException, thing) -> str | None:
    """The innermost line of the answer itself that led to the error."""
    files = {function.__code__.co_filename for function in _functions_of(thing)}
    mine = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"It happens in line {mine[-1].lineno}, `{mine[-1].line}`" if mine else None


def _advice(error: BaseException) -> str:
    said = f"{error}"
    if isinstance(error, NameError):
        return "That name is not known there: has the cell that makes it run, on this side (with %%px: on the ranks)?"
    if "should return None" in said:
        return "A function that is to return nothing returns something: a lambda returns what it computes."
    if "NoneType" in said or " None" in said:
        return "Something is None there: who should have made it, or returned it?"
    if isinstance(error, ZeroDivisionError):
        return "What is zero there, and in which case may it be?"
    if isinstance(error, (IndexError, KeyError)):
        return "What is looked up there, and what is there to find?"
    if "empty sequence" in said:
        return "What is empty there, and in which case may it be?"
    if isinstance(error, ImportError):
        return "What is imported there is not installed, or has another name."
    if any(word in said for word in ("shape", "size", "dimension", "elements", "bytes", "dtype", "float", "overflow")):
        return "Print shape and dtype of the tensors in it, on every rank."
    return "What does it get, on each rank?"
