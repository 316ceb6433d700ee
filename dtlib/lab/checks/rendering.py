"""A verdict as the learner reads it: a coloured block that also says in words, and with a sign, how it went."""

from html import escape

from dtlib.lab.checks.exercise import Verdict
from dtlib.lab.tables import fold

PASSED, NOT_YET = "#009E73", "#D55E00"  # of the ranks' palette (lab/colours.py), which all eyes can tell apart


def show(verdict: Verdict, attempt: int) -> None:
    """Display the block where there is a page for it, with the text as its twin; else print the text."""
    from IPython import get_ipython
    from IPython.display import display

    from dtlib.world.launch import in_engine

    text = fold(verdict.text(attempt))
    if in_engine() or getattr(get_ipython(), "kernel", None) is None:
        print(text)
    else:
        display({"text/plain": text, "text/html": html(verdict, attempt)}, raw=True)


def html(verdict: Verdict, attempt: int) -> str:
    """The text of a verdict as a block."""
    colour, sign = (PASSED, "&#10003;") if verdict.passed else (NOT_YET, "&#8635;")
    words, _, rest = verdict.outcome().partition(": ")
    rows = "".join(
        f'<tr><td style="text-align:left;vertical-align:top;opacity:.75">{name}</td>'
        f'<td style="text-align:left">{_pre(value)}</td></tr>'
        for name, value in verdict.details(attempt)
    )
    return (
        f'<div style="border-left:6px solid {colour};background:{colour}1A;padding:.4em .8em">'
        f'<div><b><span style="color:{colour}">{sign}</span> {words}:</b> {escape(rest)}</div>'
        + (f'<table style="margin:.3em 0">{rows}</table>' if rows else "")
        + (_pre(verdict.picture) if verdict.picture else "")
        + f'<div style="opacity:.75">{_pre(verdict.what_was_judged())}</div></div>'
    )


def _pre(text: str) -> str:
    return f'<pre style="margin:0;white-space:pre-wrap;background:none;color:inherit">{escape(text)}</pre>'
