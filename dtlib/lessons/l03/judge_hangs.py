"""Lesson 03: five planted hangs, a way to watch them, and the check of the explanations."""

import re
import time
from contextlib import contextmanager
from dataclasses import dataclass

from dtlib.lab.checks.exercise import Exercise, rows

SECONDS = 2


@dataclass(frozen=True)
class Hang:
    """A planted hang.

    ``culprits`` are pairs of a rank and a line of ``source`` (from 1); each pair is a right answer. ``others`` is the
    line in which the other ranks wait, if the culprit does not.
    """

    source: str
    culprits: tuple
    hints: tuple
    others: int = 0


def watch(hang, seconds: float = SECONDS):
    """Run ``hang(comm)`` on a communicator with a time limit of ``seconds``; all ranks call it.

    Prints the error that ends the wait, and returns the trace, for ``lab.pictures.timeline("trace")``.
    """
    from dtlib.measure.trace import trace
    from dtlib.world import fresh_communicator

    comm = fresh_communicator(30, "watch()")  # a long limit, because ranks may still be in the last hang
    comm.time_limit, comm.verify = seconds, True
    with print_error(pause=seconds / 2), trace() as record:
        hang(comm)
    return record


@contextmanager
def print_error(pause: float = 1.0):
    """Return a context that prints the message of an error instead of raising it, then pauses.

    The pause lets other ranks see the operation of this rank, instead of its end.
    """
    from dtlib.errors import DtlibError

    try:
        yield
        print("finished")
    except DtlibError as error:
        print(f"{type(error).__name__}: {error}")
        time.sleep(pause)


HANGS = {
    1: Hang(
        """
def hang_1(comm):
    settings = torch.zeros(2)
    if comm.rank != 2:
        comm.broadcast(settings, root=0)
    return settings
""",
        ((2, 3),),
        ("Which rank does the message name?", "All ranks must call broadcast. Which line skips the call on one rank?"),
        others=4,
    ),
    2: Hang(
        """
def hang_2(comm):
    gradient = torch.ones(4)
    batches = 3 if comm.rank == 1 else 4
    for _ in range(batches):
        comm.all_reduce(gradient)
""",
        ((1, 3), (1, 4)),
        ("How many bars does each rank have in the timeline?", "Which line sets the number of iterations of a rank?"),
        others=5,
    ),
    3: Hang(
        """
def hang_3(comm):
    mine, theirs = torch.ones(4), torch.zeros(4)
    if comm.rank < 2:
        other = 1 - comm.rank
        comm.recv(theirs, other)
        comm.send(mine, other)
""",
        ((0, 5), (1, 5)),
        ("Two ranks wait for each other: you may name either rank.", "In which line do both ranks wait?"),
    ),
    4: Hang(
        """
def hang_4(comm):
    batch = torch.ones(4)
    if comm.rank == 0:
        comm.send(batch, 1, tag=1)
    if comm.rank == 1:
        comm.recv(batch, 0, tag=2)
""",
        ((0, 4), (1, 6)),
        ("One rank has sent a message, and the other still waits. Does it wait for this message?",
         "Compare the tags. The line of rank 0 is its send, the line of rank 1 is its recv."),
    ),
    5: Hang(
        """
def hang_5(comm):
    percent = torch.zeros(1)
    try:
        percent += 100 // comm.rank
        comm.all_reduce(percent)
    except ZeroDivisionError:
        pass
""",
        ((0, 4), (0, 6), (0, 7)),
        ("Which rank does the message name? What happened there before?", "100 // 0 raises, and `except` hides it."),
        others=5,
    ),
}


def observe_hangs(explained, comm):
    """Return the answer as plain values."""
    if not isinstance(explained, dict):
        return f"{explained!r:.80}"
    return {key: _plain(value) for key, value in explained.items()}


def _plain(value):
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return tuple(each if isinstance(each, int) else f"{each}" for each in value)
    return f"{value!r:.80}"


def judge_hangs(observations) -> None:
    """Check for each hang that the answer names the missing rank, and its line as text or number."""
    explained = observations[0]
    wrong = rows(0)
    wrong("type", isinstance(explained, str), "a dict: {1: (rank, line), ...}", explained,
          'Write explained = {1: (0, "comm.barrier()"), 2: (1, 4)}.',
          "The five keys are the numbers of the hangs. Each value is a pair: a rank and a line.")
    for number, hang in HANGS.items():
        got = explained.get(number)
        wrong("quoted", str(number) in explained, f"{number}: (rank, line), where {number} is a number",
              f'"{number}", a text', "Write the hang's number without quotes.", f"For example {number}: (0, 4).")
        wrong("unexplained", got is None or got == "None", f"the cause of hang {number}", "nothing",
              f"explained[{number}] = (rank, line): run watch(hang_{number}). For which rank do the others wait?",
              *hang.hints)
        wrong("type", not isinstance(got, tuple), f"explained[{number}] = (rank, line)", got,
              "Write a pair: a rank, and a line's text or number.",
              f'For example {number}: (0, "comm.barrier()"), or {number}: (0, 4).')
        rank, line = got
        lines = [wanted for culprit, wanted in hang.culprits if culprit == rank]
        wrong("quoted", isinstance(rank, str), f"explained[{number}] = (rank, line), where the rank is a number",
              f"{rank!r}, a text", "Write the rank without quotes, as a number.", f"For example {number}: (0, 4).")
        wrong("rank", not lines, f"in hang {number} the rank for which the others wait", f"rank {rank}", *hang.hints)
        if not any(_same_line(line, wanted, hang) for wanted in lines):
            shown = f"line {line}" if isinstance(line, int) else f"`{line}`"
            counted = ("Count lines as the error message does: the line below %%px is line 1.",)
            counted *= isinstance(line, int) and line - 1 in lines
            wrong("where-others-wait", hang.others and _same_line(line, hang.others, hang),
                  f"in hang {number} the line that stops rank {rank}", f"{shown}, in which the others wait",
                  f"Rank {rank} is right. The other ranks wait in this line. Why does rank {rank} not reach it?",
                  *counted, hang.hints[-1])
            first = f"Rank {rank} is right, but this line does not stop it. Which line does?"
            hints = *(counted or (first,)), hang.hints[-1]
            wrong("line", True, f"in hang {number} the line that stops rank {rank}", shown, *hints)


def _same_line(line, wanted: int, hang) -> bool:
    """Return whether ``line`` is the wanted number, or text that is in this line and in no innocent line."""
    if isinstance(line, int):
        return line == wanted
    texts = [_squeezed(text) for text in hang.source.strip("\n").splitlines()]
    mine = _squeezed(re.sub(r"^line (?=\d+$)|^line \d+: ", "", line))
    if mine.isdigit():
        return int(mine) == wanted
    guilty = {wanted, *(w for _, w in hang.culprits if wanted != hang.others)}
    innocent = [text for number, text in enumerate(texts, 1) if number not in guilty]
    return len(mine) >= 4 and mine in texts[wanted - 1] and not any(mine in text for text in innocent)


def _squeezed(text: str) -> str:
    return re.sub(r"\s|#.*", "", text).replace("'", '"').strip("`").rstrip(":")


EXERCISES = {"hangs": Exercise("explained", observe_hangs, judge_hangs)}
