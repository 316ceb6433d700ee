"""Checks: what turns a cell into an exercise.

An exercise judges what the learner defined on the ranks, in two steps. First every rank observes what the answer
does there; then rank 0 looks at what all of them saw, without further messages, and tells all ranks its verdict:

    rank 0   observe(answer, comm) -> what it returned     \\
    rank 1   observe(answer, comm) -> an error              } all_gather -> judge([...]) on rank 0, told to all
    rank 2   observe(answer, comm) -> waited for rank 1    /

An exercise that needs no ranks is judged in the notebook, in the same two steps: observe(answer, None) -> judge([...]).
"""

import hashlib
import inspect
import re
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace

from dtlib.errors import DtlibError, WaitTimeout
from dtlib.lab import course, last_outputs
from dtlib.lab.checks.exercise import EXERCISES, Exercise, Problem, Score, Verdict, Wrong, homes, known, show
from dtlib.lab.checks.predictions import assigns, without_magic
from dtlib.lab.checks.solutions import source_of
from dtlib.lab.engines.live import ranks_in_words
from dtlib.lab.hooks import report
from dtlib.world import in_engine

WAIT_SECONDS = 5  # that a learner's function may wait for other ranks
TRIES = 2  # that have failed before a solution is offered
ON_ITS_OWN = "Call it in its own cell (for ranks, after %%px), with small values, and print what that line uses."
LEFT = "Your function has returned on this rank, but others still wait in it. Does it return early here?"
_tries: dict[str, tuple[str, int]] = {}  # exercise -> (fingerprint of the answer, how often it was judged)
_failed: Counter[str] = Counter()  # exercise -> how many answers were not right


def check(name: str) -> None:
    """Judge exercise ``name``, on all ranks if it needs them, and show the verdict.

    Works in a plain cell and in a ``%%px`` cell. A wrong answer is no error: fix it and check again; who
    checks the same answer again gets the next hint.

    Raises:
        DtlibError: for a name that is no exercise, or where there are no ranks to judge on.
    """
    name = known(name)
    if in_engine():
        from dtlib.world import init

        verdict = judge_on_this_rank(name)
        if init().rank:
            return
    else:
        exercise = EXERCISES[name]
        verdict = _judge_from_notebook(name) if exercise.needs_ranks else judge_here(name)
        verdict.note = _of_the_last_cell(exercise, verdict.mistake) or verdict.note  # which a notebook's kernel knows
    _tell(verdict)


def _tell(verdict: Verdict) -> None:
    """Plainer hints are for who checks the same answer again; another answer begins with the first one. Who has failed
    twice, with whatever answers, is offered a solution."""
    code, tries = _tries.get(verdict.exercise, (verdict.code, 0))
    if code != verdict.code:
        tries = 0
    report("verdict", exercise=verdict.exercise, mistake=verdict.mistake, says=verdict.without_code())
    if verdict.passed:
        course.done(verdict.exercise)
    if verdict.scored:
        course.scored(verdict.exercise, *verdict.scored, verdict.ranks)
    offer = not verdict.passed and _failed[verdict.exercise] >= TRIES and verdict.exercise in homes()
    show(verdict, tries, source_of(verdict.exercise) if offer else "")
    _failed[verdict.exercise] += not verdict.passed and verdict.mistake != "missing"
    _tries[verdict.exercise] = verdict.code, tries + 1


def _of_the_last_cell(exercise: Exercise, mistake: str) -> str:
    """A message, where the last cell that defines the name ended with an error, or ran where nobody judges."""
    name = exercise.name
    for number, code, failed in last_outputs.cells():
        if assigns(re.sub(r"^%px ", "", without_magic(code), flags=re.M), name):
            newest, on_ranks = f"Cell [{number}], the last that defines `{name}`,", "%px" in code
            if failed:
                return f"{newest} ended with an error{': this may still be an earlier one' * (mistake != 'missing')}."
            if exercise.needs_ranks and not on_ranks:
                return f"{newest} ran in the notebook, and that of the ranks is judged: start that cell with %%px."
            if on_ranks and not exercise.needs_ranks and "--local" not in code:
                return f"{newest} ran on the ranks, and that of the notebook is judged: remove %%px there."
            break
    return ""


def _judge_from_notebook(name: str) -> Verdict:
    from dtlib.lab.engines.engine_set import current

    answers = current().view.apply_async(_judge_for_notebook, name)
    while not answers.done():
        answers.wait(0.1)  # so that Stop gets through
    return Verdict(**answers.get()[0])


def _judge_for_notebook(name: str) -> dict:
    return asdict(judge_on_this_rank(name))


def judge_on_this_rank(name: str, namespace: dict | None = None, rounds: list | None = None) -> Verdict:
    """One rank's part in a verdict; all ranks call it, and all return the same.

    ``namespace`` is where the answer is looked up: IPython's, unless told otherwise. What all ranks observed
    is appended to ``rounds``, from which ``judge_rounds`` comes to the same verdict.
    """
    from dtlib.comm.watch.recorder import recording
    from dtlib.world import fresh_communicator, init

    world = init()
    namespace = _names_of_the_notebook() if namespace is None else namespace
    exercise = EXERCISES[name]
    rounds = [] if rounds is None else rounds
    # Fresh ones: what an earlier answer left behind must meet neither this one nor the verdict.
    for_answer = fresh_communicator(WAIT_SECONDS, f"check({name!r})", on_board=False)
    for_verdict = fresh_communicator(10 * WAIT_SECONDS, f"check({name!r})", on_board=False)
    for_answer.on_board = True
    with recording() as events:
        seen = _observe(exercise, namespace, world.rank, for_answer)
    rounds.append(for_verdict.all_gather_object(seen))
    verdict = _judged_on_rank_0(
        for_verdict, name, lambda: _verdict(name, rounds[0], _what_is_judged(exercise.name, namespace))
    )
    if any(event.algorithm == "mpi4py" for event in events):
        verdict.note = "What collectives of mpi4py send cannot be counted, so their values alone are judged."
    if verdict.rank:  # the answer as it is there
        line = first_line(exercise.name, namespace, f" on rank {world.rank}")
        verdict.judged = for_verdict.broadcast_object(line, verdict.rank)
    if not (verdict.passed and exercise.any_size and world.size > 2):
        return verdict
    # The last rank is alone, and comes along: an answer that talks to the whole world is wrong, and shall not wait.
    fewer = for_verdict.split(world.rank // (world.size - 1))
    fewer.time_limit = WAIT_SECONDS
    rounds.append(for_verdict.all_gather_object(_observe(exercise, namespace, fewer.rank, fewer)))
    judged = verdict.judged, verdict.code
    return _judged_on_rank_0(
        for_verdict, name, lambda: _with_a_rank_less(verdict, _verdict(name, rounds[1][:-1], judged))
    )


def _judged_on_rank_0(comm, name: str, judge: Callable[[], Verdict]) -> Verdict:
    """Judged once, told to all; where the judge itself fails, nobody waits for its verdict."""
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
    """The verdict on what all ranks observed, and on what all but the last one did where there was a second round.

    ``judged`` is the first line of the answer and its fingerprint.
    """
    verdict = _verdict(name, rounds[0], judged)
    return _with_a_rank_less(verdict, _verdict(name, rounds[1][:-1], judged)) if rounds[1:] else verdict


def _with_a_rank_less(verdict: Verdict, fewer: Verdict) -> Verdict:
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
    """The verdict on an exercise that needs no ranks; no engines have to run. ``rounds`` as above."""
    exercise = EXERCISES[name]
    namespace = _names_of_the_notebook() if namespace is None else namespace
    observations = [_observe(exercise, namespace, None, None)]
    if rounds is not None:
        rounds.append(observations)
    return _verdict(name, observations, _what_is_judged(exercise.name, namespace, ""))


def _what_is_judged(name: str, namespace: dict, where: str = " on rank 0") -> tuple[str, str]:
    """The first line of the answer, and its fingerprint."""
    return first_line(name, namespace, where), fingerprint(namespace.get(name))


def _verdict(name: str, observations: list, judged: tuple[str, str]) -> Verdict:
    exercise, (line, code) = EXERCISES[name], judged
    ranks = len(observations) if exercise.needs_ranks else 0
    problems = [seen for seen in observations if isinstance(seen, Problem)]
    picture = exercise.picture(observations) if exercise.picture and not problems else ""
    try:
        if problems:
            # A rank whose wait timed out is a consequence; what another rank did wrong is the cause.
            first = min(problems, key=lambda problem: (problem.mistake == "waited", LEFT not in problem.hints))
            raise Wrong(first.mistake, first.rank, first.expected, first.got, *first.hints)
        score = exercise.judge(observations)
    except Wrong as wrong:
        because = wrong.rank, wrong.mistake, wrong.expected, wrong.got, tuple(wrong.hints)
        return Verdict(name, line, ranks, *because, scored=_numbers(wrong.score), picture=picture, code=code)
    words = score.words if isinstance(score, Score) else score or ""
    return Verdict(name, line, ranks, score=words, scored=_numbers(score), picture=picture, code=code)


def _numbers(score) -> tuple:
    return (score.value, score.par, score.unit) if isinstance(score, Score) else ()


def _names_of_the_notebook() -> dict:
    from IPython import get_ipython

    return get_ipython().user_ns


def _observe(exercise: Exercise, namespace: dict, rank: int | None, comm):
    if exercise.name not in namespace:
        cell = "a %%px cell, on all ranks" if exercise.needs_ranks else "a cell without %%px"
        hint = f"Define `{exercise.name}` in {cell}."
        return Problem("missing", rank, f"`{exercise.name}`", "no such name", (hint,))
    answer = namespace[exercise.name]
    try:
        return exercise.observe(answer, comm)
    except _errors_of_waiting(comm) as error:
        hint = "Every rank must call the same operations in the same order: is one of yours inside an if?"
        hint = LEFT if _functions_of(answer) and _place(error, answer) is None else hint
        more = "Compare both ends: the call in which this rank waits, and the last line of the rank in the message."
        got = f"{error}"
        if not isinstance(error, DtlibError):
            got = f"MPI ended a call with an error ({error}): different calls on ranks, other sizes, or one gave up"
        ends = re.search(r" in (\S+) of (\(.*?\)).* last operation was \1 of (\(.*?\))", got)
        if hint != LEFT and (got != f"{error}" or (ends and ends[2] != ends[3])):
            hint = "Do all ranks call the same operation with tensors of the same size? Print its shape on each rank."
        return Problem("waited", rank, "ranks that call the same operations", got, (hint, more))
    except Exception as error:
        return Problem("raised", rank, "no error", *told(error, answer))


def _errors_of_waiting(comm) -> tuple:
    if comm is None:
        return ()  # and MPI stays out of a notebook's process
    from mpi4py import MPI

    return WaitTimeout, MPI.Exception


# What a learner has handed in: its first line, its text, and what its errors say; without ranks, torch or MPI.


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


def fingerprint(thing: object) -> str:
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


def told(error: BaseException, thing: object) -> tuple[str, tuple]:
    """What an error of an answer says, and hints that belong to its kind: where it happened, and what to look at."""
    got = ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    place = _place(error, thing)
    if place is None and isinstance(error, TypeError) and "argument" in f"{error}":
        asks = "It was not even called: do its parameters agree with the text, in number and in order?"
        return got, (asks, ON_ITS_OWN)
    return got, (f"{place or 'It happens in a function that your code calls'}. {_advice(error)}", ON_ITS_OWN)


def _place(error: BaseException, thing) -> str | None:
    """The innermost line of the answer itself that led to the error."""
    files = {function.__code__.co_filename for function in _functions_of(thing)}
    mine = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"It happens in line {mine[-1].lineno}, `{mine[-1].line}`" if mine else None


def _advice(error: BaseException) -> str:
    fits = [advice for signs, advice in _ADVICE if any(_has(error, sign) for sign in signs)]
    return fits[0] if fits else "What do its arguments hold there?"


def _has(error: BaseException, sign: type | str) -> bool:
    return sign in f"{error}" if isinstance(sign, str) else isinstance(error, sign)


# Kinds of an error, or words in its message, and what to look at: the first that fits.
_ADVICE: tuple = (
    ((NameError,), "That name is not known there: has its cell run, on this side (with %%px: on the ranks)?"),
    (("should return None",), "A function that must return nothing returns a value. A lambda always returns one."),
    (("incompatible function arguments",), "It needs arguments of other types: compare the call with the text."),
    (("non-iterator",), "__iter__ returns an iterator: iter(...), or it has a yield."),
    (("split_sizes",), "How many rows does each rank send to each other rank? Two lists contain the numbers."),
    (("NoneType", " None"), "Something is None there: who should have made it, or returned it?"),
    ((TimeoutError,), "What ends the loop there, and when?"),
    ((ZeroDivisionError,), "What is zero there, and in which case may it be?"),
    ((IndexError, KeyError), "What is looked up there, and what is there to find?"),
    (("empty sequence",), "What is empty there, and in which case can it be?"),
    ((ImportError,), "An imported module is not installed, or has another name."),
    (("shape", "size", "dimension", "elements", "bytes", "dtype", "float", "overflow"),
     "Print shape and dtype of the tensors in it."),
)  # fmt: skip
