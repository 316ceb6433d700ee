"""Lesson 14: what its brief predicts of each mesh is what ranks hold and send, to the byte."""

from dtlib.lessons.l14 import brief
from dtlib.planner.exact import of_decoder
from tests.ranks import on_ranks


@on_ranks(4, slow=(4,))
def test_ranks_hold_and_send_what_the_brief_predicts(world):
    wrong = []
    for name, plan in brief.MESHES.items():
        found = brief.measured(plan, steps=3, limit=False, link=False)
        mine = of_decoder(brief.MODEL, plan, world.rank, brief.BUCKET)
        held, sent = sum(mine["held"].values()), sum(mine["sent"].values())
        if (found["held"][world.rank], found["sent"]) != (held, sent):
            wrong.append((name, found["held"][world.rank], held, found["sent"], mine["sent"]))
    assert not wrong, wrong
