"""The schedule puzzle of lesson 07: par is proven; right answers pass, wrong ones are rejected for their own reason."""

import itertools
import subprocess
import sys
from html import escape

import pytest

from dtlib.lab.checks.exercise import EXERCISES
from dtlib.lab.checks.judging import judge_here, judge_on_this_rank
from dtlib.lab.checks.verdict_view import html
from dtlib.lab.lesson_files import notebooks
from dtlib.lessons.l07 import judge_puzzle as puzzle
from dtlib.schedule import Action, formulas, gpipe, one_f_one_b, simulate, zero_bubble_h1
from tests.cases import for_each
from tests.lessons.l07 import wrong_puzzle
from tests.ranks import on_ranks


def shortest(p: int, m: int, activations: int) -> int:
    """The smallest makespan of p ranks and m micro-batches with F = 1 and B = 2, found by trying everything.

    Micro-batches are alike, so they may be numbered in the order in which a rank begins them: a state is how many F
    and how many B each rank has begun, and how long its last one still takes. From one moment to the next an idle
    rank begins an F, begins a B, or waits. The first moment at which all is done is the shortest there is.
    """
    states, seen = {tuple((0, 0, 0, "") for _ in range(p))}, set()
    for time in itertools.count():
        following = set()
        for state in states:
            # begun, less what is under way
            forwards = [f - (kind == "F") for f, _, _, kind in state]
            backwards = [b - (kind == "B") for _, b, _, kind in state]
            if backwards == [m] * p:
                return time
            moves = []
            for rank, (f, b, left, kind) in enumerate(state):
                if left:
                    moves.append([(f, b, left, kind)])
                    continue
                moves.append([(f, b, 0, "")])
                if f < m and f - b < activations and (rank == 0 or forwards[rank - 1] > f):
                    moves[-1].append((f + 1, b, 1, "F"))
                if b < forwards[rank] and (rank == p - 1 or backwards[rank + 1] > b):
                    moves[-1].append((f, b + 1, 2, "B"))
            for move in itertools.product(*moves):
                following.add(tuple((f, b, max(0, left - 1), kind if left > 1 else "") for f, b, left, kind in move))
        states = following - seen
        seen |= following


@pytest.mark.parametrize("p,m", [(2, 3), (3, 4), (3, 2), (4, 4)])
def test_the_search_finds_what_is_known(p, m):
    assert shortest(p, m, m) == simulate(gpipe(p, m)).makespan == formulas.makespan("gpipe", p, m)
    assert shortest(p, m, p) == simulate(one_f_one_b(p, m)).makespan
    assert shortest(p, m, 1) == 3 * p * m, "one at a time"


@for_each(level=[1, 2, 3])
def test_par_is_the_shortest_that_there_is(level):
    rules = puzzle.LEVELS[level]
    assert shortest(puzzle.STAGES, puzzle.MICROBATCHES, rules.activations) == rules.par


def test_what_the_puzzle_tells_of_other_limits_is_so():
    text = notebooks()["07_schedule_puzzle_exercises"].read_text()
    assert "With two it is 51" in text and shortest(4, 8, 2) == 51
    capped = [[Action(rank, kind, m) for kind, m in in_turns(ahead, 8)] for rank, ahead in enumerate((3, 3, 2, 1))]
    assert "takes 48" in text and simulate(capped).makespan == 48


def in_turns(ahead: int, m: int):
    """So many forward passes, then a backward and a forward pass in turn."""
    yield from (("F", i) for i in range(ahead))
    for i in range(m):
        yield "B", i
        if i + ahead < m:
            yield "F", i + ahead


def test_par_of_the_level_with_halves_is_the_shortest_that_there_is():
    """The last rank can begin after the p - 1 F of the ranks before it, and then has 3 m to do. ZB-H1 is no slower."""
    p, m, rules = puzzle.STAGES, puzzle.MICROBATCHES, puzzle.LEVELS[4]
    reached = simulate(zero_bubble_h1(p, m))
    assert p - 1 + 3 * m == rules.par == reached.makespan
    assert max(reached.peak_activations) <= rules.activations


@pytest.mark.parametrize("exercise,how", [(e, how) for e, answers in wrong_puzzle.RIGHT.items() for how in answers])
def test_right_puzzles_pass_however_they_are_written(exercise, how):
    name = EXERCISES[exercise].name
    verdict = judge_here(exercise, {name: wrong_puzzle.RIGHT[exercise][how]})
    assert verdict.passed, verdict.text()
    par = next(level.par for level in puzzle.LEVELS.values() if level.name == name)
    assert f"Makespan {par}, par {par}; bubble " in verdict.text()
    assert "rank 0  F0 F1" in verdict.text() and "ranks:" not in verdict.text()


@pytest.mark.parametrize("exercise,how", [(e, how) for e, answers in wrong_puzzle.PUZZLES.items() for how in answers])
def test_each_wrong_puzzle_is_rejected_for_its_own_reason(exercise, how):
    answer, mistake = wrong_puzzle.PUZZLES[exercise][how]
    verdict = judge_here(exercise, {EXERCISES[exercise].name: answer})
    assert verdict.mistake == mistake, verdict.text()
    assert len(verdict.hints) > 1 and all(verdict.hints)
    if mistake in ("missing-action", "twice"):
        assert not any(f"0{kind}" in verdict.text() for kind in "FBIW"), "a learner writes B1, not 0B1"
    assert ("rank 3  .." in verdict.text()) == (mistake in ("over-par", "too-many-activations", "other-kind")), (
        "what ranks could carry out is drawn"
    )


def test_a_drawing_can_be_pasted_and_changed():
    verdict = judge_here("schedule-puzzle-2", {"puzzle_2": wrong_puzzle.ONE_F_ONE_B})
    assert judge_here("schedule-puzzle-2", {"puzzle_2": str(verdict.picture)}).passed
    slow, _ = wrong_puzzle.PUZZLES["schedule-puzzle"]["one at a time"]
    verdict = judge_here("schedule-puzzle", {"puzzle": slow})
    drawn = str(verdict.picture)
    assert max(map(len, drawn.splitlines())) <= 110, "a long one goes on below"
    assert judge_here("schedule-puzzle", {"puzzle": drawn}).picture == verdict.picture
    assert drawn in verdict.text()
    page = html(verdict, 0)
    assert "<img alt=" in page and escape(drawn) in page.split("as text</summary>")[1], "a figure, text folded away"


def test_a_rank_in_another_order_is_named_before_the_last_one_is_asked_about():
    backward = "F0-7 B0-7"
    lines = [backward, backward, "F0-7 B7-0", backward]
    hint = judge_here("schedule-puzzle", {"puzzle": lines}).hints[0]
    assert hint.startswith("Rank 1 takes B in the order 0, 1, 2, 3, 4, 5, 6, 7, and rank 2 in the order 7, 6,")
    verdict = judge_here("schedule-puzzle", {"puzzle": ["F0-7 B7-0"] * 4})
    assert verdict.passed, "any order, if all have it"


def test_what_is_wrong_with_an_order_is_said_as_validate_says_it():
    circle, _ = wrong_puzzle.PUZZLES["schedule-puzzle"]["a circle"]
    text = judge_here("schedule-puzzle", {"puzzle": circle}).text()
    assert "Not yet: schedule-puzzle.\n" in text, "a circle is no single rank's"
    assert "rank 0 has come to 0B0 and waits for 1B0 of rank 1" in text
    text = judge_here("schedule-puzzle", {}).text()
    assert "Define `puzzle` in a cell without %%px." in text


def test_the_puzzle_is_checked_in_a_plain_cell_without_engines_torch_or_mpi():
    code = f"""
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.user_ns["puzzle"] = {wrong_puzzle.GPIPE!r}
from dtlib import lab
lab.check("schedule-puzzle")

class Unreadable:
    def __str__(self):
        raise ValueError("no text")

shell.user_ns["puzzle"] = [Unreadable()]
lab.check("schedule-puzzle")
print(sorted({{"torch", "mpi4py.MPI", "ipyparallel"}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Passed: schedule-puzzle. Makespan 33, par 33; bubble 27%; 8 activations." in ran.stdout, ran.stderr
    assert "ValueError: no text" in ran.stdout
    assert ran.stdout.endswith("[]\n")


@on_ranks(2)
def test_a_puzzle_that_is_defined_on_the_ranks_is_judged_there(world):
    verdict = judge_on_this_rank("schedule-puzzle", {"puzzle": wrong_puzzle.GPIPE})
    assert verdict.passed and "With few ranks" not in verdict.text()
    assert judge_on_this_rank("schedule-puzzle", {"puzzle": "F0"}).mistake == "ranks"


@for_each(version=["learner", "solved"])
def test_the_stubs_of_the_puzzle_are_wrong_and_their_solutions_right(version):
    from tests.books import made

    book = made(notebooks()["07_schedule_puzzle_exercises"], version)
    names = {}
    for cell in book.cells:
        if cell.cell_type == "code" and cell.source.startswith("puzzle"):
            exec(cell.source, names)
    for exercise in wrong_puzzle.RIGHT:
        assert judge_here(exercise, names).mistake == ("" if version == "solved" else "missing-action")
