import pytest

from dtlib.lessons.l03 import ring


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_the_ring_that_is_drawn_is_the_ring_that_runs(ranks):
    steps = ring.steps(ranks)
    everybody = tuple(range(ranks))
    assert len(steps) == 2 * (ranks - 1) + 1
    assert all(members == (rank,) for rank, chunks in enumerate(steps[0].held) for members in chunks)
    assert all(members == everybody for chunks in steps[-1].held for members in chunks)
    # After the reduce-scatter rank r has chunk r complete, and nothing else.
    for rank, chunks in enumerate(steps[ranks - 1].held):
        assert [chunk for chunk, members in enumerate(chunks) if members == everybody] == [rank]
    for step in steps[:-1]:
        assert [step.sends[rank] for rank in range(ranks)] == [(step.sends[0] + rank) % ranks for rank in range(ranks)]


def test_the_picture_has_its_text(capsys):
    ring.show_all(3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("The ring all-reduce on 3 ranks, step by step")
    assert "step 0: reduce-scatter 0 0 0 [0]" in [" ".join(line.split()) for line in lines]
    assert lines[-1].split() == ["2", *["0+1+2"] * 3]
