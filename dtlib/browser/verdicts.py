"""Show the verdict of a lesson's judge."""

from collections.abc import Callable

from dtlib.browser.fields import put
from dtlib.browser.svg import sentence
from dtlib.lab.checks.exercise import Wrong


def verdict(name: str, judge: Callable[[], object], tried: str) -> str:
    """Return what ``judge()`` says as HTML. ``tried`` counts the tries: later ones get plainer hints.

    It is the text of the form's field ``attempt``.
    """
    try:
        score = judge()
    except Wrong as wrong:
        attempt = int(tried) if tried.isdigit() else 0
        where = "" if wrong.rank is None else f", on rank {wrong.rank}"
        hint = wrong.hints[min(attempt, len(wrong.hints) - 1)] if wrong.hints else ""
        said = f"Not yet: {name}{where}. Expected: {wrong.expected}. Got: {wrong.got}. Hint: {hint}"
        return put("attempt", attempt + 1) + sentence(said, False)
    return sentence(f"Passed: {name}. {getattr(score, 'words', score) or ''}", True)
