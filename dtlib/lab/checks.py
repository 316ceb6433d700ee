"""Predictions and checks: what turns a cell into an exercise.

An exercise judges what the learner defined on the ranks, in two steps. First every rank observes what the answer
does there; then all ranks look at all observations and come to the same verdict, without further messages:

    rank 0   observe(answer, comm) -> what it returned     \
    rank 1   observe(answer, comm) -> an error              } all_gather -> judge([...]) -> the verdict, on every rank
    rank 2   observe(answer, comm) -> waited for rank 1    /

An exercise that needs no ranks is judged in the notebook, in the same two steps: observe(answer, None) -> judge([...]).
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from numbers import Number

from dtlib.errors import DtlibError, WaitTimeout
from dtlib.lab.answers import fingerprint, first_line, told
from dtlib.launch import in_engine

WAIT_SECONDS = 5  # that a learner's function may wait for other ranks
_tries = {}  # exercise -> (fingerprint of the answer, how often it was judged)


class Wrong(Exception):
    """An answer that is not right: on which rank, what was expected, what came, and hints from vague to plain.

    ``mistake`` names the mistake; the tests prove that each planted wrong answer is recognised as its own.
    """

    def __init__(self, mistake: str, rank: int, expected: str, came: str, *hints: str):
        super().__init__(mistake)
        self.mistake, self.rank, self.expected, self.came, self.hints = mistake, rank, expected, came, hints


@dataclass(frozen=True)
class Exercise:
    """``name`` is what the learner defines; ``observe(answer, comm)`` runs on every rank and returns something that
    pickles; ``judge(observations)`` gets those of all ranks, in rank order, and raises ``Wrong``; where there is a
    score, it returns that as text. ``picture(observations)`` draws as text what was handed in, right or wrong.
    ``needs_ranks=False``: the answer is defined in the notebook itself and judged there, with no communicator.
    ``any_size=True``: an answer that is right is judged once more with a rank less, where no number of ranks that is
    written into it is right."""

    name: str
    observe: Callable
    judge: Callable
    picture: Callable | None = None
    needs_ranks: bool = True
    any_size: bool = False


@dataclass
class Verdict:
    """What all ranks agree on: ``rank`` is the lowest on which something was wrong, None if all is well, or where it is
    nobody's in particular. ``ranks`` is on how many it was judged: 0 for an exercise that needs none."""

    exercise: str
    judged: str
    ranks: int
    rank: int | None = None
    mistake: str = ""
    expected: str = ""
    came: str = ""
    hints: tuple = ()
    score: str = ""  # where one can do better than pass
    picture: str = ""
    code: str = ""  # the same for the same answer

    @property
    def passed(self) -> bool:
        return not self.mistake

    def text(self, attempt: int = 0) -> str:
        """What the learner reads; later attempts get plainer hints."""
        where = f"Judged on {self.ranks} ranks" if self.ranks else "Judged"
        judged = f"{where}: {self.judged}" + (f"\n\n{self.picture}\n" if self.picture else "")
        if self.passed and 0 < self.ranks < 3:
            few = " So few ranks hide mistakes: check it with lab.engines(3) too."
            return f"{judged}\nPassed: {self.exercise}.{few}{self._score()}"
        if self.passed:
            return f"{judged}\nPassed: {self.exercise}.{self._score()}"
        place = "" if self.rank is None else f", on rank {self.rank}"
        lines = [judged, f"Not yet: {self.exercise}{place}."]
        lines += [f"  expected: {self.expected}", f"  came:     {self.came}"]
        if self.hints:
            lines.append(f"  hint:     {self.hints[min(attempt, len(self.hints) - 1)]}")
        return "\n".join(lines)

    def _score(self) -> str:
        return f" {self.score}" if self.score else ""


def check(name: str) -> None:
    """Judge exercise ``name``, on all ranks if it needs them, and print the verdict.

    Works in a plain cell and in a ``%%px`` cell. A wrong answer is no error: mend it and check again; who
    checks the same answer again gets the next hint.

    Raises:
        DtlibError: for a name that is no exercise, or where there are no ranks to judge on.
    """
    from dtlib.lab.exercises import EXERCISES

    if name not in EXERCISES:
        raise DtlibError(f"There is no exercise {name!r}: choose one of {', '.join(sorted(EXERCISES))}.")
    if in_engine():
        from dtlib.world import init

        verdict = judge_on_this_rank(name)
        if init().rank == 0:
            _tell(verdict)
    elif EXERCISES[name].needs_ranks:
        _tell(_judge_from_notebook(name))
    else:
        _tell(judge_here(name))


def _tell(verdict: Verdict) -> None:
    """Plainer hints are for who checks the same answer again; another answer begins with the first one."""
    code, tries = _tries.get(verdict.exercise, (verdict.code, 0))
    if code != verdict.code:
        tries = 0
    print(verdict.text(tries))
    _tries[verdict.exercise] = verdict.code, tries + 1


def _judge_from_notebook(name: str) -> Verdict:
    from IPython import get_ipython

    from dtlib.lab.engine_set import current
    from dtlib.lab.exercises import EXERCISES

    answers = current().view.apply_async(_judge_for_notebook, name)
    while not answers.done():
        answers.wait(0.1)  # so that Stop gets through
    verdict = Verdict(**answers.get()[0])
    shell = get_ipython()
    wanted = EXERCISES[name].name
    if verdict.mistake == "missing" and shell is not None and wanted in shell.user_ns:
        verdict.hints = (f"`{wanted}` is defined in the notebook: start its cell with %%px and run it again.",)
    return verdict


def _judge_for_notebook(name: str) -> dict:
    return asdict(judge_on_this_rank(name))


def judge_on_this_rank(name: str, namespace: dict | None = None) -> Verdict:
    """One rank's part in a verdict; all ranks call it, and all return the same.

    ``namespace`` is where the answer is looked up: IPython's, unless told otherwise.
    """
    from dtlib.lab.exercises import EXERCISES
    from dtlib.world import fresh_communicator, init

    world = init()
    namespace = _names_of_the_notebook() if namespace is None else namespace
    exercise = EXERCISES[name]
    # Fresh ones: what an earlier answer left behind must meet neither this one nor the verdict.
    for_answer = fresh_communicator(WAIT_SECONDS, f"check({name!r})", on_board=False)
    for_verdict = fresh_communicator(10 * WAIT_SECONDS, f"check({name!r})", on_board=False)
    for_answer.on_board = True
    observations = for_verdict.all_gather_object(_observe(exercise, namespace, world.rank, for_answer))
    judged = for_verdict.broadcast_object(_what_is_judged(exercise.name, namespace))
    verdict = _verdict(name, observations, judged, world.size if exercise.needs_ranks else 0)
    if not (verdict.passed and exercise.any_size and world.size > 2):
        return verdict
    # The last rank is alone, and comes along: an answer that talks to the whole world is wrong, and shall not wait.
    fewer = for_verdict.split(world.rank // (world.size - 1))
    fewer.time_limit = WAIT_SECONDS
    observations = for_verdict.all_gather_object(_observe(exercise, namespace, fewer.rank, fewer))[:-1]
    return _with_a_rank_less(verdict, _verdict(name, observations, judged, len(observations)))


def _with_a_rank_less(verdict: "Verdict", fewer: "Verdict") -> "Verdict":
    if fewer.passed:
        return verdict
    return replace(
        verdict, mistake="other-size", rank=fewer.rank, came=fewer.came, score="",
        expected=f"on ranks 0 to {fewer.ranks - 1} alone, with a comm of size {fewer.ranks}: {fewer.expected}",
        hints=(
            f"On {verdict.ranks} ranks it is right, on {fewer.ranks} it is not: is a number of ranks written into it?",
            "Ask comm.rank and comm.size, and talk through comm: world is all ranks, and comm may be fewer.",
        ),
    )  # fmt: skip


def judge_here(name: str, namespace: dict | None = None) -> Verdict:
    """The verdict on an exercise that needs no ranks; no engines have to run."""
    from dtlib.lab.exercises import EXERCISES

    exercise = EXERCISES[name]
    namespace = _names_of_the_notebook() if namespace is None else namespace
    observation = _observe(exercise, namespace, None, None)
    return _verdict(name, [observation], _what_is_judged(exercise.name, namespace, ""), ranks=0)


def _what_is_judged(name: str, namespace: dict, where: str = " on rank 0") -> tuple[str, str]:
    """The first line of the answer, and its fingerprint."""
    return first_line(name, namespace, where), fingerprint(namespace.get(name))


def _verdict(name: str, observations: list, judged: tuple[str, str], ranks: int) -> Verdict:
    from dtlib.lab.exercises import EXERCISES

    exercise, (line, code) = EXERCISES[name], judged
    problems = [seen for seen in observations if isinstance(seen, Problem)]
    picture = exercise.picture(observations) if exercise.picture and not problems else ""
    try:
        if problems:
            # A rank that waited in vain is a consequence; what another rank did wrong is the cause.
            first = min(problems, key=lambda problem: problem.mistake == "waited")
            raise Wrong(first.mistake, first.rank, first.expected, first.came, *first.hints)
        score = exercise.judge(observations)
    except Wrong as wrong:
        because = wrong.rank, wrong.mistake, wrong.expected, wrong.came, tuple(wrong.hints)
        return Verdict(name, line, ranks, *because, picture=picture, code=code)
    return Verdict(name, line, ranks, score=score or "", picture=picture, code=code)


def _names_of_the_notebook() -> dict:
    from IPython import get_ipython

    return get_ipython().user_ns


@dataclass
class Problem:
    """Why there is nothing to observe on a rank; the fields are the arguments of ``Wrong``."""

    mistake: str
    rank: int | None
    expected: str
    came: str
    hints: tuple


def _observe(exercise: Exercise, namespace: dict, rank: int | None, comm):
    if exercise.name not in namespace:
        cell = "a %%px cell, on all ranks" if exercise.needs_ranks else "a cell without %%px"
        hint = f"Define `{exercise.name}` in {cell}."
        return Problem("missing", rank, f"`{exercise.name}`", "no such name", (hint,))
    try:
        return exercise.observe(namespace[exercise.name], comm)
    except _errors_of_waiting(comm) as error:
        hint = "Every rank must call the same verbs in the same order: is one of yours inside an if?"
        return Problem("waited", rank, "ranks that call the same verbs", str(error), (hint,))
    except Exception as error:
        return Problem("raised", rank, "no error", *told(error, namespace[exercise.name]))


def _errors_of_waiting(comm) -> tuple:
    if comm is None:
        return ()  # and MPI stays out of a notebook's process
    from mpi4py import MPI

    return WaitTimeout, MPI.Exception


def predict(guess, came, tolerance: float = 0.0, hint: str = "") -> None:
    """Compare a prediction with what came.

    Args:
        guess: the prediction, a number or any value; None if it has not been made.
        came: what the run gave.
        tolerance: how far off a numeric guess may be to count as right, as a share of ``came``.
        hint: what to think about if it was wrong.
    """
    shown = f"{came:.4g}" if isinstance(came, float) else f"{came}"
    if guess is None:
        print("Predict first: replace None by your guess, run that cell, then this one.")
    elif isinstance(came, Number) and not isinstance(guess, Number):
        print(f"Predict a number, without quotes: you wrote {guess!r}.")
    elif guess == came or (tolerance and abs(guess - came) <= tolerance * abs(came)):
        print(f"You predicted {guess}, and it came out as {shown}: right.")
    else:
        print(f"You predicted {guess}, and it came out as {shown}. {hint}".rstrip())


def values(name: str) -> list:
    """What ``name`` is on each rank, in rank order."""
    from ipyparallel.error import CompositeError, RemoteError

    from dtlib.lab.engine_set import current

    try:
        return current().view.pull(name, block=True)
    except (CompositeError, RemoteError) as error:
        reason = error.elist[0][1] if isinstance(error, CompositeError) else f"{error.ename}: {error.evalue}"
        raise DtlibError(f"{name} cannot be brought here from the ranks ({str(reason).splitlines()[0]}).") from None


def push(**named) -> None:
    """Give values to all ranks: ``lab.push(file="points.bin")`` makes the name ``file`` known there."""
    from dtlib.lab.engine_set import current

    current().view.push(named, block=True)
