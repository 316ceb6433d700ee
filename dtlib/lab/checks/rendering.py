"""Right or not yet, as the learner reads it: a coloured block that also says in words, and with a sign, which."""

from html import escape

from dtlib.lab.checks.exercise import Verdict
from dtlib.lab.tables import fold

PASSED, NOT_YET = "#009E73", "#D55E00"  # of the ranks' palette (lab/colours.py), which all eyes can tell apart


def show(verdict: Verdict, attempt: int, solution: str = "") -> None:
    """Display the block where there is a page for it, with the text as its twin; else print the text. A ``solution`` is
    folded away in the block; the text says how to see it."""
    text = verdict.text(attempt)
    if solution:
        text += f'\n  solution: lab.solution("{verdict.exercise}") shows one.'
    _show(text, lambda: html(verdict, attempt, solution))


def show_sentence(right: bool, text: str) -> None:
    """The same for a sentence."""
    _show(text, lambda: f"{_block(right)} {escape(text)}</div>")


def _show(text: str, html) -> None:
    from IPython import get_ipython
    from IPython.display import display

    from dtlib.world.launch import in_engine

    text = fold(text)
    if in_engine() or getattr(get_ipython(), "kernel", None) is None:
        print(text)
    else:
        display({"text/plain": text, "text/html": html()}, raw=True)


def html(verdict: Verdict, attempt: int, solution: str = "") -> str:
    """The text of a verdict as a block."""
    words, _, rest = verdict.outcome().partition(": ")
    rows = "".join(
        f'<tr><td style="text-align:left;vertical-align:top;opacity:.75">{name}</td>'
        f'<td style="text-align:left">{_pre(value)}</td></tr>'
        for name, value in verdict.details(attempt)
    )
    picture = verdict.picture
    return (
        f"{_block(verdict.passed)} <b>{words}:</b> {escape(rest)}"
        + (f'<table style="margin:.3em 0">{rows}</table>' if rows else "")
        + (picture._repr_html_() if hasattr(picture, "_repr_html_") else _pre(picture) if picture else "")
        + (f"<details><summary>Show a solution</summary>{_pre(solution)}</details>" if solution else "")
        + f'<div style="opacity:.75">{_pre(verdict.what_was_judged())}</div></div>'
    )


def _block(right: bool) -> str:
    """How a block begins: its colour, and a sign for who does not see that."""
    colour, sign = (PASSED, "&#10003;") if right else (NOT_YET, "&#8635;")
    return f'<div style="border-left:6px solid {colour};background:{colour}1A;padding:.4em .8em"><b>{sign}</b>'


def _pre(text: str) -> str:
    style = "margin:0;white-space:pre-wrap;word-break:normal;background:none;color:inherit"
    return f'<pre style="{style}">{escape(text)}</pre>'
