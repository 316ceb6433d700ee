"""``lab.check(name)``: judge the answer that a learner has defined.

An exercise is judged in two steps. First every rank observes what the answer does there. Then rank 0 judges all
observations, without further messages, and broadcasts its verdict:

    rank 0   observe(answer, comm) -> what it returned     \\
    rank 1   observe(answer, comm) -> an error              } all_gather -> judge([...]) on rank 0, broadcast
    rank 2   observe(answer, comm) -> waited for rank 1    /

An exercise without ranks is judged in the notebook, in the same two steps: observe(answer, None) -> judge([...]).
docs/explanation/how_exercises_are_judged.md follows one check through the code.
"""

import hashlib
import inspect
import re
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from IPython import get_ipython

from dtlib.errors import DtlibError, WaitTimeout
from dtlib.lab import course, last_outputs
from dtlib.lab.checks.exercise import EXERCISES, Exercise, Score, Wrong, exercise_files, exercise_name
from dtlib.lab.checks.predictions import assigns, without_magic
from dtlib.lab.checks.solutions import source_of
from dtlib.lab.checks.verdict import Verdict
from dtlib.lab.checks.verdict_view import show
from dtlib.lab.engines.live_view import ranks_in_words
from dtlib.lab.hooks import report
from dtlib.world import fresh_communicator, in_engine, init

WAIT_SECONDS = 5  # limit for an answer that waits for other ranks
TRIES = 2  # failed tries before a solution is offered
CALL_ALONE = "Call it in its own cell (for ranks, after %%px), with small values, and print what that line uses."
LEFT = "Your function has returned on this rank, but other ranks wait in it. Does it return early on this rank?"
_tries: Counter[tuple[str, str]] = Counter()  # (exercise, fingerprint of the answer) -> number of tries
_failed: Counter[str] = Counter()  # exercise -> number of wrong answers


def check(name: str) -> None:
    """Judge exercise ``name``, on all ranks if it needs them, and show the verdict.

    Call it in a plain cell or in a ``%%px`` cell. A wrong answer raises no error: correct it and check again. Checking
    the same answer again shows the next hint.

    Raises:
        DtlibError: for a name that is no exercise, or without ranks to judge on.
    """
    name = exercise_name(name)
    if in_engine():
        verdict = judge_on_this_rank(name)
        if init().rank:
            return
    else:
        exercise = EXERCISES[name]
        verdict = _ask_ranks_for_verdict(name) if exercise.needs_ranks else judge_here(name)
        # Only the notebook's kernel knows which cells ran.
        verdict.note = _note_on_last_cell(exercise, verdict.mistake) or verdict.note
    _show_verdict(verdict)


def _show_verdict(verdict: Verdict) -> None:
    """Report, record and show a verdict.

    Checking the same answer again shows plainer hints; another answer starts with the first hint. After two wrong
    answers, a solution is offered.
    """
    answer = verdict.exercise, verdict.code
    report("verdict", exercise=verdict.exercise, mistake=verdict.mistake, says=verdict.without_code())
    if verdict.passed:
        course.done(verdict.exercise)
    if verdict.scored:
        course.scored(verdict.exercise, *verdict.scored, verdict.ranks)
    offer = not verdict.passed and _failed[verdict.exercise] >= TRIES and verdict.exercise in exercise_files()
    show(verdict, _tries[answer], source_of(verdict.exercise) if offer else "")
    _failed[verdict.exercise] += not verdict.passed and verdict.mistake != "missing"
    _tries[answer] += 1


def _note_on_last_cell(exercise: Exercise, mistake: str) -> str:
    """Return a message if the last cell that defines the name failed, or ran where it is not judged."""
    name = exercise.name
    for number, code, failed in last_outputs.cells():
        if assigns(re.sub(r"^%px ", "", without_magic(code), flags=re.M), name):
            newest, on_ranks = f"Cell [{number}], the last that defines `{name}`,", "%px" in code
            if failed:
                return f"{newest} ended with an error{', so an earlier one may be judged' * (mistake != 'missing')}."
            if exercise.needs_ranks and not on_ranks:
                return f"{newest} ran in the notebook, but `{name}` on the ranks is judged: start that cell with %%px."
            if on_ranks and not exercise.needs_ranks and "--local" not in code:
                return f"{newest} ran on the ranks, but `{name}` in the notebook is judged: remove %%px from it."
            break
    return ""


def _ask_ranks_for_verdict(name: str) -> Verdict:
    from dtlib.lab.engines.engine_set import current

    answers = current().view.apply_async(judge_on_this_rank, name)
    while not answers.done():
        answers.wait(0.1)  # short waits, so that Stop can interrupt
    return answers.get()[0]


def judge_on_this_rank(name: str, namespace: dict | None = None, rounds: list | None = None) -> Verdict:
    """Observe the answer on this rank, and return the common verdict; all ranks call this.

    ``namespace`` is where the answer is looked up, by default IPython's. The observations of all ranks are appended to
    ``rounds``; ``judge_rounds`` computes the same verdict from them.
    """
    from dtlib.comm.watch.recorder import recording

    world = init()
    namespace = get_ipython().user_ns if namespace is None else namespace
    exercise = EXERCISES[name]
    rounds = [] if rounds is None else rounds

    def judge() -> Verdict:
        return judge_rounds(name, rounds, _what_is_judged(exercise.name, namespace))

    # Fresh communicators: messages that an earlier answer left pending must not reach this answer or its verdict.
    for_answer, for_verdict = (fresh_communicator(10 * WAIT_SECONDS, f"check({name!r})", False) for _ in range(2))
    for_answer.on_board, for_answer.time_limit = True, WAIT_SECONDS
    with recording() as events:
        seen = _observe(exercise, namespace, world.rank, for_answer)
    rounds.append(for_verdict.all_gather_object(seen))
    verdict = _judged_on_rank_0(for_verdict, name, judge)
    # Judge again with one rank less. The last rank runs the answer alone, so that an answer that wrongly uses the
    # world's communicator fails at once instead of waiting.
    if verdict.passed and exercise.any_size and world.size > 2:
        fewer = for_verdict.split(world.rank // (world.size - 1))
        fewer.time_limit = WAIT_SECONDS
        rounds.append(for_verdict.all_gather_object(_observe(exercise, namespace, fewer.rank, fewer)))
        verdict = _judged_on_rank_0(for_verdict, name, judge)
    if any(event.algorithm == "mpi4py" for event in events):
        verdict.note = "Messages of mpi4py's collectives cannot be counted, so only the values are judged."
    # Show the answer's first line on the rank that the verdict names.
    if verdict.rank:
        line = first_line(exercise.name, namespace, f" on rank {world.rank}")
        verdict.judged = for_verdict.broadcast_object(line, verdict.rank)
    return verdict


def _judged_on_rank_0(comm, name: str, judge: Callable[[], Verdict]) -> Verdict:
    """Judge on rank 0 and broadcast the verdict; if the judge itself fails, raise on all ranks."""
    verdict = problem = None
    if comm.rank == 0:
        try:
            verdict = judge()
        except Exception as error:
            problem = error
    verdict, sentence = comm.broadcast_object((verdict, problem and f"{type(problem).__name__}: {problem}"))
    if sentence:
        raise DtlibError(
            f"The judge of {name!r} failed ({sentence}), so this says nothing about your answer."
        ) from problem
    return verdict


def judge_rounds(name: str, rounds: list, judged: tuple[str, str]) -> Verdict:
    """Return the verdict on the observations in ``rounds``, as ``judge_on_this_rank`` collects them.

    The first round has all ranks; a second one, if present, has one rank less. ``judged`` is the first line of the
    answer and its fingerprint.
    """
    verdict = _verdict(name, rounds[0], judged)
    if len(rounds) == 1:
        return verdict
    fewer = _verdict(name, rounds[1][:-1], judged)
    if fewer.passed:
        return verdict
    return replace(
        verdict, mistake="other-size", rank=fewer.rank, got=fewer.got, score="", scored=(),
        expected=(
            f"on {ranks_in_words([*range(fewer.ranks)])} alone, with a comm of size {fewer.ranks}: {fewer.expected}"
        ),
        hints=(
            f"It is right on {verdict.ranks} ranks, and wrong on {fewer.ranks}. Does it use a fixed number of ranks, "
            "the communicator of all ranks (world.comm), or a value from the call before?",
            "Use comm.rank and comm.size, and communicate with comm: world has all ranks, comm may have fewer.",
        ),
    )  # fmt: skip


def judge_here(name: str, namespace: dict | None = None, rounds: list | None = None) -> Verdict:
    """Return the verdict on an exercise without ranks; no engines are needed. ``rounds`` as above."""
    exercise = EXERCISES[name]
    namespace = get_ipython().user_ns if namespace is None else namespace
    rounds = [] if rounds is None else rounds
    rounds.append([_observe(exercise, namespace, None, None)])
    return judge_rounds(name, rounds, _what_is_judged(exercise.name, namespace, ""))


def _what_is_judged(name: str, namespace: dict, where: str = " on rank 0") -> tuple[str, str]:
    """Return the first line of the answer, and its fingerprint."""
    return first_line(name, namespace, where), fingerprint(namespace.get(name))


def _verdict(name: str, observations: list, judged: tuple[str, str]) -> Verdict:
    exercise, (line, code) = EXERCISES[name], judged
    ranks = len(observations) if exercise.needs_ranks else 0
    problems = [seen for seen in observations if isinstance(seen, Wrong)]
    picture = exercise.picture(observations) if exercise.picture and not problems else ""
    try:
        if problems:
            # A timed-out wait is a consequence. Report the mistake on another rank that caused it.
            raise min(problems, key=lambda problem: (problem.mistake == "waited", LEFT not in problem.hints))
        score = exercise.judge(observations)
    except Wrong as wrong:
        wrong.__traceback__ = None  # it refers to this frame, and so to the tensors of the answer
        because = wrong.rank, wrong.mistake, wrong.expected, wrong.got, wrong.hints
        return Verdict(name, line, ranks, *because, scored=(wrong.score or ())[:3], picture=picture, code=code)
    words, numbers = (score.words, score[:3]) if isinstance(score, Score) else (score or "", ())
    return Verdict(name, line, ranks, score=words, scored=numbers, picture=picture, code=code)


def _observe(exercise: Exercise, namespace: dict, rank: int | None, comm):
    if exercise.name not in namespace:
        cell = "a %%px cell, on all ranks" if exercise.needs_ranks else "a cell without %%px"
        hint = f"Define `{exercise.name}` in {cell}."
        return Wrong("missing", rank, f"`{exercise.name}`", "no such name", hint)
    answer = namespace[exercise.name]
    try:
        return exercise.observe(answer, comm)
    except _errors_of_waiting(comm) as error:
        hint = "Every rank must call the same operations in the same order: is one of yours inside an if?"
        hint = LEFT if _functions_of(answer) and _place(error, answer) is None else hint
        more = "Compare what this rank waits for with the last operation of the rank that the message names."
        got = f"{error}"
        if not isinstance(error, DtlibError):
            got = f"MPI ended a call with an error ({error}): calls or sizes differ, or a rank gave up"
        ends = re.search(r" in (\S+) of (\(.*?\)).* last operation was \1 of (\(.*?\))", got)
        if hint != LEFT and (got != f"{error}" or (ends and ends[2] != ends[3])):
            hint = "Do all ranks call the same operation with tensors of the same size? Print shapes on each rank."
        return Wrong("waited", rank, "ranks that call the same operations", got, hint, more)
    except Exception as error:
        got, hints = explain_error(error, answer)
        return Wrong("raised", rank, "no error", got, *hints)


def _errors_of_waiting(comm) -> tuple:
    if comm is None:
        return ()  # and the notebook's process does not import MPI
    from mpi4py import MPI

    return WaitTimeout, MPI.Exception


# The learner's answer: first line, fingerprint and errors. This part needs neither ranks nor torch nor MPI.


def first_line(name: str, namespace: dict, where: str = " on rank 0") -> str:
    """Return the line by which a learner recognises the judged answer."""
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
    """Return the first line of a class.

    A class that a cell defines has no source file, so inspect finds only its methods: search above the first one.
    """
    method = next(value for value in vars(kind).values() if inspect.isfunction(value))
    lines, _ = inspect.findsource(method)
    above = lines[: method.__code__.co_firstlineno]
    return next(line.rstrip() for line in reversed(above) if line.startswith(f"class {kind.__name__}"))


def fingerprint(thing: object) -> str:
    """Return a hash that is equal for two answers with equal code, or equal values."""
    try:
        text = "".join(inspect.getsource(function) for function in _functions_of(thing)) or repr(thing)
    except (OSError, TypeError):
        text = "".join(f"{function.__code__.co_code}{function.__code__.co_consts}" for function in _functions_of(thing))
    except Exception as error:  # the answer's repr fails
        text = type(error).__name__
    return hashlib.sha1(text.encode()).hexdigest()


def _functions_of(thing) -> list:
    if inspect.isfunction(thing):
        return [thing]
    methods = vars(thing).values() if inspect.isclass(thing) else vars(type(thing)).values() if callable(thing) else ()
    return [method for method in methods if inspect.isfunction(method)]


def explain_error(error: BaseException, thing: object) -> tuple[str, tuple]:
    """Return the message of an answer's error, and hints: where it happened, and what to look at."""
    got = ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    place = _place(error, thing)
    if place is None and isinstance(error, TypeError) and "argument" in f"{error}":
        asks = "It was not called: do its parameters match the text, in number and order?"
        return got, (asks, CALL_ALONE)
    return got, (f"{place or 'The error is raised inside a function that yours calls'}. {_advice(error)}", CALL_ALONE)


def _place(error: BaseException, thing) -> str | None:
    """Return the innermost line of the answer itself that led to the error."""
    files = {function.__code__.co_filename for function in _functions_of(thing)}
    mine = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"It happens in line {mine[-1].lineno}, `{mine[-1].line}`" if mine else None


def _advice(error: BaseException) -> str:
    fits = [advice for patterns, advice in _ADVICE if any(_matches(error, pattern) for pattern in patterns)]
    return fits[0] if fits else "Which values does that line use?"


def _matches(error: BaseException, pattern: type | str) -> bool:
    return pattern in f"{error}" if isinstance(pattern, str) else isinstance(error, pattern)


# (types of errors or words in the message, advice): the first that fits is shown.
_ADVICE: tuple = (
    ((NameError,), "That name is not known there. Has the cell that defines it run there (on the ranks: with %%px)?"),
    (("calls of the ranks differ",), "Do all ranks reach this line, or does it stand inside an if?"),
    (("should return None",), "A function that must return nothing returns a value. A lambda always returns one."),
    (("incompatible function arguments",), "It needs arguments of other types: compare the call with the text."),
    (("non-iterator",), "__iter__ must return an iterator: return iter(...), or use yield."),
    (("split_sizes",), "How many rows does each rank send to each other rank? Two lists contain the numbers."),
    (("NoneType", " None"), "A value is None there. Which line should have created or returned it?"),
    ((TimeoutError,), "What ends the loop there, and when?"),
    ((AttributeError,), "Has that object an attribute of this name? Compare the name with the text."),
    ((ZeroDivisionError, "empty sequence"), "What is zero or empty there, and in which case?"),
    ((IndexError, KeyError), "Which key or index is used there, and which ones exist?"),
    ((ImportError,), "An imported module is not installed, or has another name."),
    (("shape", "size", "dimension", "elements", "bytes", "dtype", "float", "overflow"),
     "Print shape and dtype of the tensors in it."),
)  # fmt: skip
