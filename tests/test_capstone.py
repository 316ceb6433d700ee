"""Lesson 14: what its brief predicts of each mesh is what ranks hold and send, to the byte."""

from unittest.mock import patch

from dtlib.lab.checks.judging import judge_on_this_rank
from dtlib.lessons.l14 import brief
from dtlib.planner.exact import of_decoder
from tests.ranks import on_ranks


@on_ranks(4, slow=(4,))
def test_ranks_hold_and_send_what_the_brief_predicts(world):
    wrong = []
    for name, plan in brief.MESHES.items():
        found = brief.measured(plan, steps=5, limit=False, link=False)
        mine = of_decoder(brief.MODEL, plan, world.rank, brief.BUCKET)
        held, sent = sum(mine["held"].values()), sum(mine["sent"].values())
        if (found["held"][world.rank], found["sent"]) != (held, sent):
            wrong.append((name, found["held"][world.rank], held, found["sent"], mine["sent"]))
    assert not wrong, wrong


@on_ranks(4, slow=(4,))
def test_a_race_has_a_brief_of_its_own(world):
    """The lesson suggests to halve the latency: whoever does it in a %%px cell changes no score."""
    with patch.multiple(brief, LATENCY=0.0, BANDWIDTH=1e12, LIMIT=10**9):
        for plan, mistake in (({"data": 4}, "over-the-limit"), ({"tensor": 4, "micro_batch": 16}, "over-par")):
            verdict = judge_on_this_rank("capstone-race", {"my_plan": lambda plan=plan: plan})
            assert verdict.mistake == mistake, verdict.text()
