"""Show a verdict, or one sentence, as a coloured block that also says the outcome with words and a sign."""

from html import escape

from dtlib.lab.checks.verdict import Verdict
from dtlib.lab.tables import fold

PASSED, NOT_YET = "#009E73", "#D55E00"  # colours of the ranks' palette, safe for any colour vision


def show(verdict: Verdict, attempt: int, solution: str = "") -> None:
    """Display a verdict as a block in a notebook; print its text elsewhere.

    ``solution`` is folded in the block; the text says how to see it.
    """
    text = verdict.text(attempt)
    if solution:
        text += f'\n  solution: lab.solution("{verdict.exercise}") shows one.'
    _show(text, lambda: html(verdict, attempt, solution))


def show_sentence(right: bool, text: str) -> None:
    """Display one sentence as a coloured block in a notebook; print it elsewhere."""
    _show(text, lambda: f"{_block(right)} {escape(text)}</div>")


def _show(text: str, html) -> None:
    from IPython import get_ipython
    from IPython.display import display

    from dtlib.world import in_engine

    if in_engine():
        print(text)  # the notebook folds the output of ranks (engines/outputs.py)
    elif getattr(get_ipython(), "kernel", None) is None:
        print(fold(text))
    else:
        display({"text/plain": fold(text), "text/html": html()}, raw=True)


def html(verdict: Verdict, attempt: int, solution: str = "") -> str:
    """Return a verdict as an HTML block."""
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
        + (picture._repr_html_() if hasattr(picture, "_repr_html_") else _pre(str(picture)) if picture else "")
        + (f"<details><summary>Show a solution</summary>{_pre(solution)}</details>" if solution else "")
        + f'<div style="opacity:.75">{_pre(verdict.judged_code())}</div></div>'
    )


def _block(right: bool) -> str:
    """Return the start of a block: its colour, and a sign for readers who cannot see the colour."""
    colour, sign = (PASSED, "&#10003;") if right else (NOT_YET, "&#8635;")
    return f'<div style="border-left:6px solid {colour};background:{colour}1A;padding:.4em .8em"><b>{sign}</b>'


def _pre(text: str) -> str:
    style = "margin:0;white-space:pre-wrap;word-break:normal;background:none;color:inherit"
    return f'<pre style="{style}">{escape(text)}</pre>'
