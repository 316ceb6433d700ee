"""The short tracks fit their hours: counts, computed minutes, and nothing in them that points outside."""

import ast
import re

import pytest

from tests.books import made, stored
from tests.cases import for_each
from tests.conftest import ROOT
from tests.tracks import missing, pieces
from tools import navigation, tracks
from tools import notebooks as build

pytestmark = pytest.mark.lint
#           code cells, words, lines of code
AT_MOST = {"two-hours": (55, 2400, 400), "half-day": (105, 4800, 900)}
MINUTES = {"two-hours": 120, "half-day": 240}
NOTEBOOKS = [source for track in tracks.TRACKS for source in tracks.sources(ROOT, track)]
OF_EACH = for_each(source=NOTEBOOKS)
OF_TRACK = for_each(track=tracks.TRACKS)


@for_each(source=NOTEBOOKS, version=["learner", "solved"])
def test_a_track_is_what_its_sources_say(source, version):
    expected = [(cell.id, cell.cell_type, cell.source) for cell in made(source, version).cells]
    found = [(cell.id, cell.cell_type, cell.source) for cell in stored(source, version).cells]
    assert found == expected, f"run `make workshop TRACK={source.parent.name}`"


@OF_EACH
def test_its_names_are_defined_within_it(source):
    cells = [cell.source for cell in tracks.code(made(source, "solved").cells)]
    assert not missing(cells, cells)


@OF_EACH
def test_a_cell_can_be_run_again_after_the_last(source):
    """No import takes a name from another one, of which cells above make use."""
    taken = {}
    for cell in tracks.code(made(source, "solved").cells):
        for sides, code in pieces(cell.source):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    for alias in node.names:
                        of = ".".join(filter(None, (getattr(node, "module", None), alias.name)))
                        for side in sides:
                            assert taken.setdefault((side, alias.asname or alias.name), of) == of, cell.source


@OF_EACH
def test_it_points_to_nothing_outside(source):
    """Links lead to pages for afterwards; but no sentence leans on what a learner of the track has not read."""
    prose = [cell.source for cell in made(source, "learner").cells if cell.cell_type == "markdown"]
    for text in prose[:-1]:  # the last has the links
        assert not re.search(r"\blesson \d\d\b(?!\]\()", text), text


@OF_TRACK
def test_it_is_no_larger_than_its_time(track):
    books = [stored(source, "solved").cells for source in tracks.sources(ROOT, track)]
    learners = [stored(source, "learner").cells for source in tracks.sources(ROOT, track)]
    found = (
        sum(len(tracks.code(cells)) for cells in learners),
        sum(tracks.words(cells) for cells in learners),
        sum(tracks.lines(cells) for cells in books),
    )
    assert all(count <= most for count, most in zip(found, AT_MOST[track], strict=True)), (found, AT_MOST[track])


@OF_TRACK
def test_the_run_sheet_gives_each_notebook_its_minutes(track):
    rows = tracks.run_sheet(ROOT, track)
    assert sum(row["minutes"] for row in rows) <= MINUTES[track] + 1
    given = {row["notebook"]: row["minutes"] for row in rows if "notebook" in row}
    assert list(given) == [source.stem for source in tracks.sources(ROOT, track)]
    for source in tracks.sources(ROOT, track):
        needed = tracks.minutes(stored(source, "solved").cells, stored(source, "learner").cells)
        assert needed <= given[source.stem], f"{source.stem} takes {needed:.1f} minutes"
        assert navigation.minutes(source) == given[source.stem]
    assert all(row["say"] and row["late"] for row in rows)


def test_a_lecture_and_a_course_of_five_days_take_no_longer_than_is_said():
    """Their minutes by the same count, and the hours of the guide for those who teach."""
    stated = {navigation.name_of(source): navigation.minutes(source) for source in build.sources(ROOT)}
    for source in filter(navigation.is_lecture, build.sources(ROOT)):
        needed = tracks.minutes(stored(source, "solved").cells, stored(source, "learner").cells)
        assert needed <= stated[navigation.name_of(source)], f"{source} takes {needed:.0f} minutes"
    guide = (ROOT / "docs" / "how-to" / "teach_a_class.md").read_text()
    row = re.search(r"\| five days \| all but (.+): (\d+) hours, in days of six", guide)
    left_out = tuple(f"{lesson}_" for lesson in re.findall(r"\d\db?", row[1]))
    of_five_days = sum(minutes for name, minutes in stated.items() if not name.startswith(left_out))
    assert round(of_five_days / 60) == int(row[2]) and of_five_days + 5 * 20 <= 5 * 6 * 60, of_five_days
    for source in build.sources(ROOT):
        if navigation.name_of(source).startswith(("04b_", "07b_", "08b_")):
            assert "optional" in source.read_text()[:300], f"{source} does not say that it is optional"


@OF_TRACK
def test_a_track_has_a_break_and_ends_in_a_quiz_of_its_own(track):
    rows, ask = tracks.run_sheet(ROOT, track), f'lab.quiz("{track}")'
    assert any(row["what"] == "Break" and row["minutes"] >= 5 for row in rows)
    assert [ask in row["what"] for row in rows].count(True) == 1
    *others, last = (source.read_text(encoding="utf-8") for source in tracks.sources(ROOT, track))
    assert last.count(ask) == 1 and not any("lab.quiz" in text for text in others)
