"""The decks of ``make slides``: short, without a network, nothing given away, and nothing that overflows a screen."""

import re

import nbformat
import pytest

from docs import slides
from tests.conftest import ROOT
from tests.test_browser import browser, page  # noqa: F401

LECTURES = slides.lectures()


@pytest.mark.parametrize("lecture", LECTURES, ids=lambda path: path.stem)
def test_a_deck_is_short_and_gives_no_answer_away(lecture):
    book = nbformat.read(lecture, as_version=4)
    deck = slides.deck(book)
    assert 4 <= len(deck) <= slides.SLIDES
    assert [slide.title for slide in deck if slide.words > slides.WORDS] == []
    assert [slide.title for slide in deck if len(slide.code.splitlines()) > slides.LINES] == []
    assert all(slide.text or slide.figure or slide.code for slide in deck)
    assert deck[0].text and deck[-1].title == "Summary" and "](" not in "".join(slide.text for slide in deck)
    answers = {cell.source for cell in book.cells if "solution" in cell.metadata.get("tags", [])}
    assert answers.isdisjoint(slide.code for slide in deck) and not any("lab.predict" in slide.code for slide in deck)
    figures = re.findall(r'<img alt="', str(book.cells)) and [slide for slide in deck if slide.figure]
    assert figures != [], "a lecture with figures has one on its slides"


def test_lesson_01_is_the_talk_and_has_a_slide_on_r():
    deck = slides.deck(nbformat.read(next(p for p in LECTURES if p.stem.startswith("01")), as_version=4))
    (in_r,) = [slide for slide in deck if slide.language == "r"]
    program = (ROOT / "notebooks" / "pi.R").read_text()
    lines = [line.strip() for line in in_r.code.splitlines() if not line.startswith("#")]
    assert len(lines) >= 5 and all(line in program for line in lines)
    assert len(deck) == slides.SLIDES, "twelve minutes, one a slide"


def test_sentences_are_whole_and_the_longest_decks_leave_out_the_least_telling():
    long = " ".join(["word"] * 50)
    assert slides._sentences("Title", [f"{long}.", "A [link](there.md) is read. Next!"]) == "A link is read. Next!"
    cells = [nbformat.v4.new_markdown_cell("# 99 Much\n\n**Questions.** One? Two?")]
    figure = {"text/html": '<img alt="a" src="data:image/svg+xml,x">'}
    for number in range(20):
        cells.append(nbformat.v4.new_markdown_cell(f"## Part {number}\n\nSaid."))
        output = nbformat.v4.new_output("display_data", figure if number % 2 else {})
        cells.append(nbformat.v4.new_code_cell("x = 1\ny = 2", outputs=[output]))
    cells.append(nbformat.v4.new_markdown_cell("## Summary\n\n- All.\n\n## References\n\n- None."))
    deck = slides.deck(nbformat.v4.new_notebook(cells=cells))
    assert len(deck) == slides.SLIDES and [slide.title for slide in deck if slide.figure] == [
        f"Part {number}" for number in range(1, 20, 2)
    ]


def test_decks_need_no_network_and_no_other_file(tmp_path):
    written = slides.write(tmp_path / "slides")
    assert [path.stem for path in written] == [path.stem for path in LECTURES]
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
            over = page.evaluate("""() => {
                const slide = document.querySelector("section.here"), found = [];
                if (slide.scrollWidth > 1280 || slide.scrollHeight > 720) found.push("the slide");
                for (const part of slide.querySelectorAll("*")) {
                    const box = part.getBoundingClientRect();
                    if (box.right > 1281 || box.bottom > 721 || box.left < 0 || box.top < 0) found.push(part.outerHTML);
                    if (part.tagName == "FIGURE" && box.height < 250) found.push("a figure of " + box.height);
                }
                return found.map(text => text.slice(0, 200));
            }""")
            assert not over, (path.name, number + 1, over)
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Home")
        assert page.locator("section.here footer").inner_text() == f"1 / {count}"
