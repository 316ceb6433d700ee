"""The hang detective of lesson 03 and the schedule duel of lesson 07."""

import pytest

from dtlib.lab import course
from dtlib.lab.tables import WIDEST
from dtlib.lessons.l03 import detective
from dtlib.lessons.l07 import duel, explorer
from dtlib.schedule import one_f_one_b, zero_bubble_h1
from tests.cases import refuses
from tests.ranks import on_ranks


@pytest.mark.parametrize("steps,every,tensor", [(6, 2, 4), (9, 4, 8), (7, 3, 2)])
def test_every_case_hangs_and_ranks_tell_rank_and_line(steps, every, tensor):
    nobody, *said = (
        detective.where_ranks_stand(steps, every, tensor, bug) for bug in (None, *detective.bugs(steps, every))
    )
    assert not any(where for _, where in nobody), "without a bug nobody waits"
    assert all(any(where for _, where in each) for each in said)
    planted = {}
    for each, bug in zip(said, detective.bugs(steps, every), strict=True):
        planted.setdefault(tuple(each), set()).add(bug[:2])
    assert all(len(who) == 1 for who in planted.values())


def test_a_case_from_its_beginning_to_its_end(capsys, monkeypatch):
    scored = []
    monkeypatch.setattr(course, "scored", lambda *score: scored.append(score))
    cases = {detective.Case(f"learner {number}").text().partition("\n")[2] for number in range(8)}
    assert len(cases) == 8, "nobody has the same"
    case = detective.case("Ada  Lovelace")
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= WIDEST and shown.count("(its trace is lost)") == 10
    assert detective.Case("ada lovelace").bug == case.bug
    rank, line, _ = case.bug
    refuses("There is no rank 16", case.ask, 16)
    case.ask(rank)
    case.ask(rank, 1)
    case.ask(rank, 99)
    said = capsys.readouterr().out
    assert "has ended its collective number 1: tensor.all_reduce, line 5, step 0." in said
    assert "has not reached a collective number 99" in said and "(7 questions left)" in said
    case.accuse((rank + 1) % 16, line)
    case.accuse(rank, 5)
    case.accuse(rank, line)
    said = capsys.readouterr().out
    assert "Not this rank" in said and "another line" in said and "Solved with 3 questions" in said
    assert scored == [("hang-detective", 3, 10, "questions", 0)]
    case.accuse(rank, line)
    assert "closed" in capsys.readouterr().out
    for _ in range(12):
        case.ask(0)
    assert capsys.readouterr().out.count("You have asked 10 times") == 5


def as_line(name, schedule):
    return f"{name}: " + " | ".join(" ".join(str(action)[1:] for action in actions) for actions in schedule)


def test_lines_are_printed_pasted_and_ranked(capsys):
    duel.line("Ada", [" ".join(str(action)[1:] for action in actions) for actions in one_f_one_b(4, 8)])
    ada = capsys.readouterr().out
    assert " ".join(ada.split()) == as_line("Ada", one_f_one_b(4, 8))
    duel.line("Bob", "F0\nF0")
    assert "cannot take part yet. Expected: 4 lines, one per rank. Got: 2 lines." in capsys.readouterr().out
    four = "F0-3 B0-3 F4-7 B4-7"
    lines = "\n".join([
        "Ann: " + " | ".join([four] * 4), as_line("Zoe", zero_bubble_h1(4, 8)), as_line("Ada", one_f_one_b(4, 8)),
        "Max: " + " | ".join(["F0-7 B0-7"] * 4), "Una: " + " | ".join(["F1 F0 B1 B0 F2-3 B2-3 F4-7 B4-7"] * 4),
        "Joe: F0",
    ])  # fmt: skip
    assert duel.rank(lines).name == "Zoe"
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.index("Zoe 27") < shown.index("Ada 33") < shown.index("Ann 42") and "Zoe wins." in shown
    assert "Max does not take part. Expected: at most 4 activations on any rank. Got: 8." in shown
    assert "Una does not take part. Expected on rank 0: F of all micro-batches in increasing order" in shown
    dear = duel.rank(lines, message=1.0)
    of_1f1b = [explorer.simulate("1F1B", 4, 8, message=message).makespan for message in (0.0, 1.0)]
    assert of_1f1b[0] < dear.makespan <= of_1f1b[1]
    refuses("No order takes part", duel.rank, "Joe: F0")


@on_ranks(2)
def test_an_order_of_ones_own_runs_on_ranks(world):
    trace, peak = explorer.run(zero_bubble_h1(2, 3), world.size, 3, 1.0)
    kinds = [event.action[1] for event in trace.events if event.action is not None]
    assert sorted(kinds) == sorted("FIW" * 3) and peak >= 1
