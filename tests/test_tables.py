"""Tables and figures as HTML, and their text."""

import re
from urllib.parse import unquote

from dtlib.lab.drawing import POINTS, fits, shown, subplots
from dtlib.lab.tables import WIDEST, Table, fold
from tests.cases import for_each


def widest(text):
    return max(map(len, text.splitlines()))


def test_a_table_is_html_and_text():
    table = Table(
        [(0, "all_reduce", 1234567, 0.5, None), (1, "<recv>", 8, 0.25, "12 ms")], ("rank", "what", "n", "", "")
    )
    assert [line.split() for line in str(table).splitlines()[2:]] == [
        ["0", "all_reduce", "1,234,567", "0.5"], ["1", "<recv>", "8", "0.25", "12", "ms"],
    ]  # fmt: skip
    assert table.align == "rlrrr" and repr(table) == str(table)
    html = table._repr_html_()
    assert html.count("<tr>") == 3 and "&lt;recv&gt;" in html and "&#9632;</span> 1<" in html
    assert '<td style="text-align:right;white-space:nowrap">1,234,567</td>' in html
    assert str(Table([("a", 1.25)], floats=".1f", title="a title")).startswith("a title\n\n")
    assert str(Table([("a", None), ("b", "")])).split() == ["-", "a", "b", "-"], "an empty column"
    assert "<caption" in Table([("a", 1)], title="a title")._repr_html_()


@for_each(columns=[3, 12, 40])
def test_the_text_of_a_table_fits_on_a_page_and_no_number_is_broken(columns):
    numbers = [f"{10**12 + n:,}" for n in range(columns)]
    table = Table(
        [("a long sentence " * 9, *numbers)], ("words of several columns", *(f"h {n}" for n in range(columns)))
    )
    text = str(table)
    assert widest(text) <= WIDEST
    assert re.findall(r"\d[\d,]{10,}", text) == numbers
    assert " ".join(re.findall(r"\w+", text)).count("sentence") >= 9


def test_lines_are_folded_between_words():
    line = "rank 0 waits " * 20
    folded = fold(f"short\n  {line}")
    assert folded.startswith("short\n  rank 0") and widest(folded) <= WIDEST
    assert folded.split() == ["short", *line.split()] and folded.splitlines()[2].startswith("      ")
    assert fold("x" * 200) == "x" * 200 and fold("x y " * 5000) == "x y " * 5000
    assert fold("a b c", 3).splitlines() == ["a b", "    c"]


@shown
def drawn(label):
    figure, axes = subplots(height=2)
    axes.barh([0, 1], [1, 2], color="blue", hatch="//")
    axes.set(title=label, xlabel="0.12345")
    return figure, "Two bars, one <longer>.", Table([(0, 1)], ("rank", "n")), "and <words>"


def test_a_figure_has_alternative_text_large_letters_and_its_text_folded_away(capsys, monkeypatch):
    drawn("a title")
    assert capsys.readouterr().out.startswith("Two bars, one <longer>.\n\n  rank    n\n")
    pictures = []
    monkeypatch.setattr("IPython.display.display", pictures.append)
    drawn("a title")
    drawn("a title")
    html, again = (picture._repr_html_() for picture in pictures)
    assert html == again, "the same bytes again"
    assert 'alt="Two bars, one &lt;longer&gt;."' in html and "<pre>and &lt;words&gt;</pre></details></figure>" in html
    source = re.search(r'src="data:image/svg\+xml,([^"]*)"', html).group(1)
    svg = unquote(source)
    assert "#" not in source and "<" not in source and ">0.12345</text>" in svg and "a title" in svg
    assert set(re.findall(r"font(?:-size)?: ([\d.]+)px", svg)) == {str(POINTS)}


def test_a_label_is_drawn_where_it_fits():
    assert fits("all_reduce", 1.2) and not fits("all_reduce", 0.6)
