"""Lesson 03, a riddle: a hang of sixteen ranks, with a different case for each learner.

    case = detective.case("Ada Lovelace")     prints the program, and the rest of its timeline
    case.ask(5)                               prints what rank 5 did last; ten questions are allowed
    case.accuse(5, 6)                         says that line 6 made rank 5 skip a collective

Once, for one rank, one condition in the program has another result than on the other ranks. The hang that follows is
SIMULATED, call by call. A collective ends as soon as all ranks of its group call a collective of this group, even in
different steps, as in MPI. So ranks can be out of step for a while before any rank waits, and a waiting rank is seldom
the cause.
"""

import random
import textwrap
from collections import Counter

from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.tables import WIDEST, fold

RANKS, FEWEST, QUESTIONS, ACCUSATIONS = 16, 2, 10, 3
PROGRAM = """\
 1  for step in range({steps}):
 2      batch = next(batches, None)
 3      if batch is None: break
 4      if damaged(batch): continue
 5      tensor.all_reduce(hidden(batch))
 6      if loss_is_nan(): continue
 7      if has_gradients(): data.all_reduce(gradients)
 8      if step % {every} == {last} and disk_has_room(): world.barrier()"""
# Line of a condition -> lines of the collectives that a rank skips if this condition has the other result.
LEFT_OUT = {3: (5, 7, 8), 4: (5, 7, 8), 6: (7, 8), 7: (7,), 8: (8,)}
CALLS = {5: "tensor.all_reduce", 7: "data.all_reduce", 8: "world.barrier"}


def case(name: str) -> "Case":
    """Start the case for this name, and print it; the same name always gives the same case."""
    found = Case(name)
    print(found.text())
    return found


def calls(rank: int, steps: int, every: int, bug: tuple | None = None) -> list[tuple[int, int]]:
    """Return (step, line) of each collective that a rank calls; ``bug`` is the planted (rank, line, step)."""
    culprit, line, when = bug or (None, None, None)
    made = []
    for step in range(steps):
        left_out = LEFT_OUT[line] if (rank, step) == (culprit, when) else ()
        made += [(step, at) for at in CALLS if at not in left_out and (at != 8 or step % every == every - 1)]
        if left_out and line == 3:
            break
    return made


def ended(sequences: list[list], tensor: int) -> list[int]:
    """Return for each rank how many of its collectives have ended when no rank can continue.

    ``tensor`` is the size of the last axis of the ranks' mesh.
    """

    def group(rank, line):
        if line == 8:
            return range(RANKS)
        begin = rank - rank % tensor
        return range(begin, begin + tensor) if line == 5 else range(rank % tensor, RANKS, tensor)

    # A collective ends when the current call of every member of its group is that line. Repeat until none can end.
    done, goes_on = [0] * RANKS, True
    while goes_on:
        goes_on = False
        for rank in range(RANKS):
            if done[rank] == len(sequences[rank]):
                continue
            line = sequences[rank][done[rank]][1]
            members = group(rank, line)
            if all(done[r] < len(sequences[r]) and sequences[r][done[r]][1] == line for r in members):
                goes_on = True
                for member in members:
                    done[member] += 1
    return done


def bugs(steps: int, every: int) -> list[tuple]:
    """Return all (rank, line, step) that may be planted."""
    saves = [step for step in range(steps - 1) if step % every == every - 1]
    # Only in steps that save do lines 6 and 7 have different effects; otherwise no question could separate them.
    return [
        (rank, line, step) for rank in range(RANKS) for line in LEFT_OUT
        for step in (saves if line in (6, 8) else range(1, steps - 1))
    ]  # fmt: skip


def where_ranks_stand(steps: int, every: int, tensor: int, bug: tuple | None) -> list[tuple]:
    """Return for each rank the number of collectives that have ended, and where it waits.

    A rank waits in a (step, line), or the value is None if it has left the loop.
    """
    made = [calls(rank, steps, every, bug) for rank in range(RANKS)]
    return [(done, own[done] if done < len(own) else None) for done, own in zip(ended(made, tensor), made, strict=True)]


class Case:
    """A hang, with its remaining questions and accusations."""

    def __init__(self, name: str):
        draw = random.Random(f"hang detective: {' '.join(name.lower().split())}")
        self.name, self.questions, self.accusations, self.solved = name, 0, 0, False
        self._draw(draw)
        while not FEWEST <= self._questions_needed() <= QUESTIONS:
            self._draw(draw)

    def _draw(self, draw: random.Random) -> None:
        self.steps, self.every, self.tensor = draw.randint(6, 9), draw.choice((2, 3, 4)), draw.choice((2, 4, 8))
        line = draw.choice(list(LEFT_OUT))
        self.bug = draw.choice([bug for bug in bugs(self.steps, self.every) if bug[1] == line])
        self.sequences = [calls(rank, self.steps, self.every, self.bug) for rank in range(RANKS)]
        self.ended = ended(self.sequences, self.tensor)
        self.lost = set(draw.sample(range(RANKS), 10))  # ranks without a timeline

    def _questions_needed(self) -> int:
        """Return the number of questions a greedy player needs, who always asks the most informative one."""
        mesh = self.steps, self.every, self.tensor
        said = {bug: where_ranks_stand(*mesh, bug) for bug in bugs(self.steps, self.every)}
        kept = [rank for rank in range(RANKS) if rank not in self.lost]

        def rows(bug):
            return [(said[bug][rank][0], said[bug][rank][1] is None) for rank in kept]

        left, asked = [bug for bug in said if rows(bug) == rows(self.bug)], 0
        while len({bug[:2] for bug in left}) > 1:
            best = min(
                range(RANKS), key=lambda rank: sum(n * n for n in Counter(said[bug][rank] for bug in left).values())
            )
            left, asked = [bug for bug in left if said[bug][best] == said[self.bug][best]], asked + 1
        return asked

    def text(self) -> str:
        """Return the description of the case: rules, program and timeline."""
        program = PROGRAM.format(steps=self.steps, every=self.every, last=self.every - 1)
        rows = [f"rank {rank:2}  {self._row(rank)}" for rank in range(RANKS)]
        head, foot = (
            f"The case of {self.name}. {RANKS} ranks, SIMULATED: rank = {self.tensor} data + tensor. Ranks with the "
            "same data share `tensor`, ranks with the same tensor share `data`. All ranks ran this program, and hang:",
            "# is a collective that has ended, ? is where the rank waits. Once, one rank "
            f"took another branch than the others. Ask at most {QUESTIONS} times: case.ask(rank) shows what a rank "
            "did last, case.ask(rank, n) its n-th collective. Then call case.accuse(rank, line) with the rank, and "
            "with the line where it took another branch.",
        )
        return "\n\n".join([textwrap.fill(head, WIDEST), program, "\n".join(rows), textwrap.fill(foot, WIDEST)])

    def _row(self, rank: int) -> str:
        if rank in self.lost:
            return "(its trace is lost)"
        return "#" * self.ended[rank] + "?" * (self.ended[rank] < len(self.sequences[rank]))

    def ask(self, rank: int, number: int | None = None) -> None:
        """Print what a rank did last, or its ``number``-th collective, counted from 1."""
        if rank not in range(RANKS):
            raise DtlibError(f"There is no rank {rank}: ask one of 0 to {RANKS - 1}.")
        if self.questions == QUESTIONS:
            print(f"You have asked {QUESTIONS} times. Whom do you accuse?")
            return
        self.questions += 1
        print(f"{self.seen(rank, number)} ({QUESTIONS - self.questions} questions left)")

    def seen(self, rank: int, number: int | None = None) -> str:
        """Return the answer to a question as text."""
        at = self.ended[rank] if number is None else number - 1
        if number is None and at == len(self.sequences[rank]):
            return f"rank {rank} has left the loop, after {at} collectives."
        if not 0 <= at <= min(self.ended[rank], len(self.sequences[rank]) - 1):
            return f"rank {rank} has not reached a collective number {number}."
        step, line = self.sequences[rank][at]
        how = "waits in" if at == self.ended[rank] else "has ended"
        return f"rank {rank} {how} its collective number {at + 1}: {CALLS[line]}, line {line}, step {step}."

    def accuse(self, rank: int, line: int) -> None:
        """Print whether this rank and this line are the cause."""
        if self.solved or self.accusations == ACCUSATIONS:
            print("This case is closed: detective.case() with another name opens another one.")
            return
        self.accusations += 1
        self.solved = (rank, line) == self.bug[:2]
        if self.solved:
            how = f"in step {self.bug[2]} rank {rank} took another branch at line {line}"
            print(fold(f"Solved with {self.questions} questions: {how}."))
            course.scored("hang-detective", self.questions, QUESTIONS, "questions", 0)
        elif rank == self.bug[0]:
            print("It was this rank, but another line. Which collective did the other ranks call, and not this one?")
        else:
            print("Not this rank: it did what all ranks did. Which rank did it wait for?")
