"""The decks of ``make slides``: short and whole, no answer before its question, no network, nothing that overflows."""

import ast
import re
import tomllib
from functools import cache

import pytest

from tests.conftest import ROOT
from tests.test_browser import browser, javascript, page  # noqa: F401
from tools import slides

SOURCES = slides.sources()
OF_EACH = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
POINTS = r"(?i)\b(here (is|are|it is|they are)|below|(this|the) (table|figure|picture|bars))\b"


@cache
def code_beside_the_lectures():
    files = [*(ROOT / "dtlib").rglob("*.py"), *(ROOT / "notebooks").glob("*.[Rp]*")]
    return without_breaks(" ".join(path.read_text() for path in files))


def without_breaks(text):
    return re.sub(r"\s+", " ", text.replace("\\n", " ").replace("\\'", "'"))


def parses(code):
    try:
        ast.parse("\n".join(line for line in code.replace(", ...}", "}").splitlines() if not line.startswith("%%")))
    except SyntaxError:
        return False
    return True


def missing(slide):
    """Why what is written on a slide does not stand on it; or None."""
    for block, after in zip(slide.blocks, [*slide.blocks[1:], None], strict=False):
        if block.kind == "code" and block.language == "python" and not parses(block.text):
            return f"its code is cut off at {block.text[-40:]!r}"
        if block.kind == "text" and block.text.endswith(":") and (after is None or after.kind == "text"):
            return f"nothing follows {block.text[-40:]!r}"
    if not slide.blocks:
        return "it is empty"
    if re.search(POINTS, slide.text) and not slide.shown:
        return "it points at something that is not shown"


def answers(book):
    """Name of a prediction -> the words and numbers of its true value, without those that say little."""
    found = {}
    for cell in book.cells:
        if cell.cell_type == "code" and "lab.predict(" in cell.source:
            for call in (node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)):
                name, value = map(ast.literal_eval, call.args) if len(call.args) == 2 else (None, None)
                if name:
                    values = list(value.values()) if isinstance(value, dict) else [value]
                    found[name] = [f"{v:,}" if isinstance(v, int) else str(v) for v in values]
    return found


def given_away(deck, values):
    """(title of a slide, answer) of each answer that stands on the slide that asks for it, or on one before."""
    found = []
    for at, slide in enumerate(deck):
        for value in (value for name in slide.asks for value in values[name]):
            if re.fullmatch(r"[\d,.]{2,}", value):  # one digit, or a word, says little
                seen = [block.text for before in deck[: at + 1] for block in before.blocks]
                seen = [text for text in seen if text != slide.blocks[-1].text]  # the question has its own numbers
                if re.search(rf"(?<![\d.,]){re.escape(value)}(?![\d%]|[.,]\d)", " ".join(seen)):
                    found.append((slide.title, value))
    return found


def asks_too_late(slide):
    """A slide that puts a question puts it last: what stands below a question answers it."""
    kinds = [(block.kind, "?" in block.text) for block in slide.blocks]
    asked = next((at for at, (kind, asks) in enumerate(kinds) if kind == "text" and asks), None)
    return asked is not None and (asked + 1 < len(kinds) or not slide.blocks[asked].text.rstrip("`").endswith("?"))


def test_there_is_a_deck_for_each_lecture():
    solved = {path.stem for path in (ROOT / "notebooks" / "solutions").glob("*.ipynb")}
    assert {source.stem for source in SOURCES} == {stem for stem in solved if not stem.endswith("_exercises")}


@OF_EACH
def test_a_deck_is_short_and_whole(source):
    deck = slides.deck(source)
    assert 4 <= len(deck) <= slides.SLIDES
    assert [slide.title for slide in deck if slide.words > slides.WORDS] == []
    assert [
        block.text
        for slide in deck
        for block in slide.blocks
        if len(block.text.splitlines()) > slides.LINES and block.kind == "code"
    ] == []
    assert {slide.title: missing(slide) for slide in deck if missing(slide)} == {}
    assert deck[0].title[:2] == source.name[:2] and deck[-1].title == "Summary" and "](" not in str(deck)
    figures = [slide for slide in deck if any(block.kind == "figure" for block in slide.blocks)]
    assert figures and [slide.title for slide in figures if "Point " not in slide.says] == [], "where does one look?"


@OF_EACH
def test_no_answer_stands_before_its_question(source):
    deck, values = slides.deck(source), answers(slides.lecture(source))
    assert [slide.title for slide in deck if "**Predict" in slide.text and not slide.asks] == []
    assert {ask for slide in deck for ask in slide.asks} <= set(values)
    assert [slide.title for slide in deck if slide.asks and not slide.says.removeprefix(slides.PAUSE)] == [], "answers"
    assert [slide.title for slide in deck if slide.asks and "(Wait" not in slide.says] == [], "a room needs a pause"
    assert given_away(deck, values) == []
    assert [slide.title for slide in deck[1:] if asks_too_late(slide)] == []


@OF_EACH
def test_code_on_a_slide_is_code_of_the_lecture(source):
    cells = [
        cell.source + str(cell.get("outputs", ""))
        for cell in slides.lecture(source).cells
        if "solution" not in cell.metadata.get("tags", [])
    ]
    known = f"{without_breaks(' '.join(cells))} {code_beside_the_lectures()}"
    lines = [
        line
        for slide in slides.deck(source)
        for block in slide.blocks
        if block.kind == "code"
        for line in block.text.splitlines()
    ]
    assert [line for line in lines if " ".join(line.split()) not in known] == []


def test_a_slide_that_misses_something_or_answers_too_early_is_refused():
    def slide(text, *blocks, asks=()):
        return slides.Slide("Title", [slides.Block("text", text, ""), *blocks], list(asks))

    figure = slides.Block("figure", "bars: 35 of them", "")
    assert (
        missing(slide("Here is the published table.")) and missing(slide("We measure:")) and missing(slides.Slide("A"))
    )
    assert missing(slide("A config", slides.Block("code", "config = {\n", "", "python")))
    assert not missing(slide("We measure:", figure)) and not missing(slide("Here is the table.", figure))
    assert asks_too_late(slide("How many?", figure)) and asks_too_late(slide("How many? It is 35."))
    assert not asks_too_late(slide("**Predict.** How many?"))
    values = {"how-many": ["35"]}
    assert given_away([slide("It is 35."), slide("How many?", asks=["how-many"])], values) == [("Title", "35")]
    assert given_away([slides.Slide("A", [figure, *slide("How many?").blocks], ["how-many"])], values)
    assert not given_away([slide("135, 35.5", asks=["how-many"]), slide("It is 35.")], values)


def test_lesson_01_is_a_talk_that_fits_the_minutes_of_both_tracks():
    deck = slides.deck(slides.SOURCES / "01_why_distribute.md")
    assert all(slide.says for slide in deck), "every slide has what is said"
    (in_r,) = [block for slide in deck for block in slide.blocks if "Rmpi" in block.text]
    assert len(in_r.text.splitlines()) >= 5
    minutes = sum(len(slide.says.split()) for slide in deck) / 130 + 0.4 * sum("?" in slide.text for slide in deck[1:])
    for track in ("two-hours", "half-day"):
        sheet = ROOT / "notebooks" / "source" / "tracks" / track / "run_sheet.toml"
        assert minutes <= tomllib.loads(sheet.read_text())["row"][0]["minutes"], minutes


def test_decks_need_no_network_and_no_other_file(tmp_path):
    written = slides.write(tmp_path / "slides")
    assert [path.stem for path in written] == [source.stem for source in SOURCES]
    links = re.compile(r'(?:src|href)="(?!data:|#)')
    assert not [path.name for path in written if links.search(path.read_text())]


@pytest.mark.slow
def test_no_slide_overflows_its_screen(page, tmp_path):  # noqa: F811
    page.set_viewport_size({"width": 1280, "height": 720})
    page.context.set_offline(True)
    for path in slides.write(tmp_path):
        page.goto(path.as_uri())
        count = page.locator("section").count()
        for number in range(count):
            assert page.locator("section.here footer").inner_text() == f"{number + 1} / {count}"
            over = page.evaluate(javascript("overflow"))
            assert not over, (path.name, number + 1, over)
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Home")
        assert page.locator("section.here footer").inner_text() == f"1 / {count}"
