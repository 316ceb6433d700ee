"""Predictions: compare a learner's guess with the answer, in one cell.

The answers are defined with the lessons (``dtlib/lessons/l*/predictions.py``). An answer that can be computed is
compared at once. A measured answer is compared below the cell that measures it:

    lab.predict("gathers-left", 3)            Noted: 3. ...
    %%px                                      the learner's run; this module sees that it assigns `gathers`
    ... gathers = plain_losses(...)           You predicted 3, and it came out as 3: right.

Without a guess, the next cell does not run but asks for a guess, once. "Run All" continues, because it starts the next
cell at once. An empty file ``.no-guess-first`` in the course's folder, or in one above it, switches this off.
"""

import symtable
import time
from difflib import get_close_matches
from functools import cache
from inspect import signature
from math import inf
from numbers import Number
from pathlib import Path

from IPython import get_ipython

from dtlib.errors import DtlibError
from dtlib.lab import course, lesson_files
from dtlib.lab.checks.exercise import Prediction
from dtlib.lab.checks.verdict_view import show_sentence
from dtlib.lab.engines.extension import magic_first
from dtlib.lab.hooks import report
from dtlib.lab.tables import fold
from dtlib.world import in_engine

ROUNDED = 0.1  # fraction of the answer by which a rounded guess may differ

_noted: dict[str, object] = {}  # name -> guess without an answer yet
_outcomes: dict[str, str] = {}  # name -> result, for the build of the notebooks
# "Run All" starts the next cell within this many seconds after a cell; a reader takes longer.
RUN_ALL_SECONDS = 1.0
GUESS_MISSING = (
    "This cell did not run: the prediction above has no guess yet. Type your guess there, or run this cell again."
)
NO_GUESS_FIRST = ".no-guess-first"
_unanswered: dict[str, float | None] = {}  # name -> when its cell ended; None while it runs; inf: do not ask
_asked: set[str] = set()  # names for which a cell was held back already


def predict(name: str, guess: object) -> None:
    """Compare a guess with the answer: at once, or below the cell that measures the answer.

    Args:
        name: the name of the prediction, as in the notebook.
        guess: a number, a text or a list; a dictionary of these for several questions; None for no guess yet. Without a
            guess the answer is not shown, neither now nor after the run.

    Raises:
        DtlibError: for an unknown name, or in a ``%%px`` cell.
    """
    if in_engine():
        raise DtlibError("lab.predict belongs in a cell without %%px, because you guess, and not each rank.")
    if name not in predictions():
        near = get_close_matches(str(name), predictions(), n=1, cutoff=0)[0]
        raise DtlibError(f"There is no prediction {name!r}: did you mean {near!r}?")
    prediction = predictions()[name]
    _noted.pop(name, None)
    _unanswered.pop(name, None)
    _outcomes[name] = "no guess"
    if any(value is None for value in _values(guess)):
        _ask(name)
    if all(value is None for value in _values(guess)):
        return
    if problem := next(filter(None, (_problem(value, prediction) for value in _values(guess))), None):
        print(problem)
        _outcomes[name] = "an answer of the wrong kind"
    elif measured_names(prediction):
        _noted[name] = guess
        report("guess", name=name, guess=guess, compared=False)
        _outcomes[name] = "not compared with any run"
        print(fold(f"Noted: {guess}. The next run shows whether you are right."))
        if shell := get_ipython():
            # IPython registers a callback only once.
            shell.events.register("post_run_cell", _after_cell)
    else:
        _compare(name, guess, prediction.got())


@cache
def predictions() -> dict[str, Prediction]:
    """Return the predictions of all lessons, by name."""
    found: dict[str, Prediction] = {}
    for _, file in lesson_files.found("predictions.py"):
        of_lesson = lesson_files.module_of(file).PREDICTIONS
        assert not found.keys() & of_lesson, f"two lessons have {sorted(found.keys() & of_lesson)}"
        found |= of_lesson
    return found


def measured_names(prediction: Prediction) -> list[str]:
    """Return the names that a run must define, empty for a computed answer; the first one shows that it ran."""
    return list(signature(prediction.got).parameters)


def assigns(source: str, name: str) -> bool:
    """Return whether a cell, without its magic, assigns ``name`` outside of functions."""
    try:
        names = symtable.symtable(source, "cell", "exec")
        return name in names.get_identifiers() and names.lookup(name).is_assigned()
    except SyntaxError:
        return False


def without_magic(source: str) -> str:
    """Return a cell without its %%px; comments may stand above the %%px."""
    first, *rest = magic_first(source.lstrip().splitlines(keepends=True)) or [""]
    return "".join(rest) if first.startswith("%%px") else source


def require_all_right() -> None:
    """Raise ``DtlibError`` unless every prediction of this notebook was right."""
    if missed := [f"{name}: {outcome}" for name, outcome in _outcomes.items() if outcome != "right"]:
        raise DtlibError(f"Not as predicted: {'; '.join(missed)}.")


def _values(guess) -> list:
    return list(guess.values()) if isinstance(guess, dict) else [guess]


def _ask(name: str) -> None:
    """Print the request for a guess, once per cell, and let the next cell ask for it too."""
    shell = get_ipython()
    if not (shell and _unanswered):
        print("Predict first: replace None by your guess, and run this cell again.")
    if shell:
        here = Path.cwd()
        switched_off = any((folder / NO_GUESS_FIRST).exists() for folder in (here, *here.parents))
        _unanswered[name] = inf if switched_off or name in _asked else None
        shell.events.register("pre_run_cell", _cell_begins)
        shell.events.register("post_run_cell", _cell_ends)
        if _skip_cell not in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.append(_skip_cell)


def _cell_begins(_) -> None:
    _unanswered.clear()


def _cell_ends(_) -> None:
    _unanswered.update({name: time.monotonic() for name, ended in _unanswered.items() if ended is None})


def _skip_cell(lines: list[str]) -> list[str]:
    """Replace a cell by a request for the missing guess; this is a cleanup transform of IPython.

    Kernels call it twice for each cell.
    """
    waiting = {name for name, ended in _unanswered.items() if ended and time.monotonic() - ended > RUN_ALL_SECONDS}
    if not waiting or "lab.predict(" in "".join(lines):
        return lines
    _asked.update(waiting)
    return [f"print({fold(GUESS_MISSING)!r})\n"]


def _problem(guess, prediction: Prediction) -> str | None:
    """Return why a guess has the wrong type, or None."""
    if guess is None:
        return None
    if prediction.choices:
        wanted = None if guess in prediction.choices else " or ".join(map(repr, prediction.choices))
    elif prediction.kind is Number:
        wanted = None if isinstance(guess, Number) and not isinstance(guess, bool) else "a number, without quotes"
        wanted = "a value for each name, as the cell has them" if wanted and isinstance(guess, list) else wanted
    else:
        wanted = None if isinstance(guess, prediction.kind) else _KINDS[prediction.kind]
    return wanted and f"Predict {wanted}: you wrote {guess!r}."


_KINDS: dict[type, str] = {str: "a text, in quotes", list: "a list, such as [0, 1]"}


def _after_cell(result) -> None:
    """Compare guesses whose answers this cell has defined, on the ranks if it ran there."""
    source = getattr(result.info, "raw_cell", None) or ""
    if not result.success or not _noted:
        return
    from dtlib.lab.engines.names import values

    code = without_magic(source)
    value_of = get_ipython().user_ns.__getitem__ if code == source else values
    code = get_ipython().transform_cell(code)
    for name, guess in list(_noted.items()):
        needed = measured_names(predictions()[name])
        if not assigns(code, needed[0]):
            continue
        try:
            got = predictions()[name].got(*map(value_of, needed))
        except Exception as problem:  # the learner may have changed the cell; keep the guess
            cause = f"{type(problem).__name__}: {problem}"
            print(fold(f"Your prediction of {name!r} is not judged yet, because the run gave no number ({cause})."))
            continue
        del _noted[name]
        _compare(name, guess, got)


def _compare(name: str, guess, got) -> None:
    prediction = predictions()[name]
    course.done(name)
    report("guess", name=name, guess=guess, compared=True)
    if isinstance(got, dict) and (not isinstance(guess, dict) or guess.keys() != got.keys()):
        print(fold(f"Predict a value for each of {', '.join(map(repr, got))}: you wrote {guess!r}."))
        _outcomes[name] = "an answer of the wrong kind"
        return
    answers = got if isinstance(got, dict) else {"": got}
    guesses = guess if isinstance(got, dict) else {"": guess}
    outcomes = []
    for key, one in guesses.items():
        if one is None:
            outcomes.append(False)
            continue
        outcomes.append(_is_right(one, answers[key], prediction))
        hint = prediction.hint.get(key, "") if isinstance(prediction.hint, dict) else prediction.hint
        begin = f"{key}: you" if key != "" else "You"
        said = f"{begin} predicted {one}, and it came out as {_shown(answers[key])}"
        show_sentence(outcomes[-1], f"{said}: right." if outcomes[-1] else f"{said}: not right. {hint}".rstrip())
    settled = all(outcomes) or prediction.of_this_computer
    _outcomes[name] = "right" if settled else f"{guess} was predicted, and it is {got}"


def _shown(got) -> str:
    """Return a float with four digits and without an exponent, such as 13,020."""
    if not isinstance(got, float):
        return " or ".join(sorted(got)) if isinstance(got, set) else f"{got}"
    return f"{got:.4g}" if abs(got) < 1e4 else f"{float(f'{got:.4g}'):,.0f}"


def _is_right(guess, got, prediction: Prediction) -> bool:
    if not all(isinstance(one, Number) for one in (got, guess)):
        return guess in got if isinstance(got, set) else guess == got
    near = max(prediction.within, prediction.tolerance * abs(got))
    return guess == got or abs(guess - got) <= near or _is_rounded(guess, got)


def _is_rounded(guess, got) -> bool:
    """Return whether a guess is the answer with fewer decimals, such as 9 for 8.571, and near enough (``ROUNDED``)."""
    decimals = len(f"{guess}".partition(".")[2])
    return abs(guess - got) <= ROUNDED * abs(got) and float(guess) == round(float(got), decimals)
