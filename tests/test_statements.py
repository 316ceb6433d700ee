"""What the prose says of outputs: bound to them, or on a list that is read again when one changes."""

import ast
from copy import copy
from functools import cache

import nbformat
import pytest

from dtlib.lab.checks import predictions
from dtlib.lab.lesson_files import notebooks
from tests.books import made, stored
from tests.cases import for_each, refuses
from tests.conftest import ROOT
from tests.test_predictions import guesses_in
from tests.tracks import pieces
from tools import notebooks as build
from tools import statements

pytestmark = pytest.mark.lint
SOURCES = build.sources(ROOT)
TRACKS = [source for track in build.TRACKS for source in build.tracks.sources(ROOT, track)]
OF_EACH = for_each(source=SOURCES)


def code(source, tags=()):
    return nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)})


def printed(text):
    cell = code("print()")
    cell.outputs = [nbformat.v4.new_output("stream", text=text)]
    return cell


def is_checked(cell):
    return bool(build.CHECKED & set(cell.metadata.get("tags", [])))


@cache
def with_outputs(source):
    """The cells of a solved notebook, statements among them, with stored outputs; None where it was not built since."""
    cells = [copy(cell) for cell in made(source, "solved", claims=True).cells]
    ran = [cell for cell in cells if cell.cell_type == "code" and not is_checked(cell)]
    cells_of = stored(source, "solved").cells if build.target(source, "solved").exists() else []
    shown = [cell for cell in cells_of if cell.cell_type == "code"]
    if [cell.source for cell in ran] != [cell.source for cell in shown]:
        return None
    for cell, of in zip(ran, shown, strict=True):
        cell.outputs = of.outputs
    return cells


@for_each(source=[*SOURCES, *TRACKS])
def test_stored_outputs_bear_out_what_the_prose_says(source):
    if (cells := with_outputs(source)) is None:
        pytest.skip("the source has changed, as another test says: run `make notebooks`")
    assert not statements.problems(cells)


@OF_EACH
def test_whatever_is_asserted_quotes_a_sentence(source):
    for cell in made(source, "solved", claims=True).cells:
        if is_checked(cell):
            assert statements.quotes(cell.source) and "assert " in cell.source, cell.source


def test_a_statement_reads_the_nearest_output_that_has_its_line():
    above = statements.Outputs([
        printed("All-reduce of 4 MB\n  ring     10.55  1e-2\n"),
        code("x = 1"),
        printed("rank 0 | ring  1,234 messages, -5 % of\nranks 1, 2 |     7 GPUs\nrank 0 | ring  2 x\nringing 3"),
        printed("nothing"),
    ])  # fmt: skip
    assert above.rows("ring") == [[1234, -5], [2]] and above.row("ring", under="4 MB") == [10.55, 0.01]
    assert above.found(r"-5 % of (\d+) GPUs") == [7]
    for missing in (lambda: above.row("tree"), lambda: above.row("ring", under="4 GB"), lambda: above.found("none")):
        refuses("no output above has", missing, error=LookupError)


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ('# "takes 25 times"\nassert round(row("ring")[0]) == 25', None),
        ('# "takes 25 times"\nassert round(row("ring")[0]) == 26', "AssertionError"),
        ('# "takes 26 times"\nassert round(row("ring")[0]) == 25', "the prose does not say: takes 26 times"),
        ('# "takes 25 times"\nassert row("tree")', "LookupError"),
    ],
)
def test_a_sentence_that_its_output_does_not_bear_out_is_a_problem(statement, problem):
    said = nbformat.v4.new_markdown_cell("The ring *takes\n25* times as long.")
    found = statements.problems([printed("ring  25.2"), code(statement, ["statement"]), said])
    assert len(found) == bool(problem) and all(problem in one for one in found)


def test_what_cannot_be_bound_is_read_again_when_its_output_changes():
    by_stem = notebooks()
    for sentence in statements.listed(ROOT):
        if cells := with_outputs(by_stem[sentence["notebook"]]):
            above = statements.output_above(cells, sentence["says"])
            assert above, f"no output above: {sentence['says']}"
            assert statements.hash_of(above) == sentence["output"], (
                f"an output of {sentence['notebook']} has changed, so read again: {sentence['says']!r} "
                "(python -m tools.statements shows both; then --read)"
            )


# What is shown above a prediction, and does not give it away: the smaller of two runs; a batch that is as large.
HALF_OF_IT = {"times-smaller": {"estimate"}}
BY_CHANCE = {"from-29-hours-to-72-seconds": {256}, "weights-on-rank-0": {16384}}


def shown_names(source: str) -> set[str]:
    """Names that a cell hands to what shows: print, a table, a figure."""
    found = set()
    for _, text in pieces(source):
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            if called == "print" or called.startswith(("figures.", "lab.table", "lab.pictures.")):
                found |= {name.id for name in ast.walk(call) if isinstance(name, ast.Name)}
                loops = [node for node in ast.walk(call) if isinstance(node, ast.comprehension)]
                found -= {name.id for loop in loops for name in ast.walk(loop.target) if isinstance(name, ast.Name)}
    return found


def given_away(cells) -> list[str]:
    """Predictions below an output that shows what they are made from, or that prints their value."""
    found, shown, printed_above = [], set(), ""
    for cell in cells:
        if cell.cell_type != "code" or is_checked(cell):
            continue
        for name, guess in guesses_in(cell.source).items() if "lab.predict" in cell.source else ():
            needed = set(predictions.measured_names(predictions.predictions()[name])) - HALF_OF_IT.get(name, set())
            found += [f"{name}: {one} is shown above" for one in sorted(needed & shown)]
            values = {value.value for value in getattr(guess, "values", [guess]) if isinstance(value, ast.Constant)}
            values -= BY_CHANCE.get(name, set())
            for value in values:
                digits = str(value).replace("_", "").strip("0.").replace(".", "")
                if type(value) in (int, float) and len(digits) > 2 and value in numbers_of(printed_above):
                    found.append(f"{name}: {value} stands in an output above")
        text = statements.text_of(cell)
        if "process id" not in text:  # the table of ranks
            printed_above += f"\n{text}"
        if text:
            shown |= shown_names(cell.source)
    return found


def numbers_of(text: str) -> set[float]:
    return set(statements._numbers(text))


@OF_EACH
def test_no_prediction_stands_below_an_output_that_has_its_value(source):
    if cells := with_outputs(source):
        assert not given_away(cells)


def test_a_prediction_below_its_value_is_noticed():
    seen, asked = printed("0.273"), code("lab.predict('of-four-schedules', {'smallest bubble': 'GPipe'})")
    for seen.source in ("print(four)", "figures.picture({name: found for name, found in four.items()})"):
        assert given_away([seen, asked]) == ["of-four-schedules: four is shown above"]
        assert not given_away([asked, seen])
    asked = code("lab.predict('amdahl', {'4 ranks': 3.08})")
    assert given_away([printed("3.08"), asked]) and not given_away([printed("3.081"), asked])
