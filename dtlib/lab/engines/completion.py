"""Tab completion and ``?`` in cells that run on ranks: rank 0 answers, because the names exist there."""

import re

from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.tokenutil import token_at_cursor

from dtlib.lab.engines import on_ranks
from dtlib.lab.foreign import EngineSet

ANSWER_SECONDS = 0.3  # limit for a list of names; a busy rank 0 gives none

_QUESTION = re.compile(r"^(\s*)%px\s+(\S.*\?)\s*$")

_engines: "EngineSet | None" = None
_asked = None  # the last request to rank 0


def install(shell: InteractiveShell, engines: EngineSet) -> None:
    """Make these engines answer for ``%%px`` cells in this shell."""
    global _engines, _asked
    first_time, _engines, _asked = _engines is None, engines, None
    if not first_time:
        return
    shell.Completer.custom_matchers.append(_match_on_rank_0)
    shell.input_transformers_cleanup.append(_questions_to_ranks)
    kernel = getattr(shell, "kernel", None)
    if kernel is None:  # IPython in a terminal has no Shift+Tab
        return
    inspect_here = kernel.do_inspect

    def do_inspect(code, cursor_pos, detail_level=0, omit_sections=()):
        if _for_ranks(code, code.count("\n", 0, cursor_pos)) is not None:
            found = _ask(on_ranks.inspect, token_at_cursor(code, cursor_pos), detail_level)
            if found is not None:
                return {"status": "ok", "data": found, "metadata": {}, "found": bool(found)}
        return inspect_here(code, cursor_pos, detail_level, omit_sections)

    kernel.do_inspect = do_inspect


def _questions_to_ranks(lines: list[str]) -> list[str]:
    """Send ``%px name?`` to the ranks; IPython would look the name up in the notebook."""
    for number, line in enumerate(lines):
        if found := _QUESTION.match(line):
            lines[number] = f"{found[1]}get_ipython().run_line_magic('px', {found[2]!r})\n"
    return lines


@context_matcher(priority=1000)
def _match_on_rank_0(context):
    """Return the names on rank 0 that match, in the form of IPython's ``custom_matchers``."""
    nothing: dict = {"completions": []}
    start = _for_ranks(context.full_text, context.cursor_line)
    if start is None or context.cursor_position < start:
        return nothing
    line = context.full_text.split("\n")[context.cursor_line]
    answer = _ask(on_ranks.complete, line[start:], context.cursor_position - start)
    if answer is None or not context.token.endswith(answer[0]):
        return nothing
    fragment, names = answer
    found = [SimpleCompletion(name, type="rank 0") for name in names]
    return {"completions": found, "matched_fragment": fragment, "suppress": True}


def _for_ranks(cell: str, number: int) -> int | None:
    """Return the column at which code for ranks begins in a line of a cell; None if the line runs in the notebook."""
    lines = cell.split("\n")
    if number and lines[0].startswith("%%px"):
        return 0
    return lines[number].index("%px ") + 4 if lines[number].lstrip().startswith("%px ") else None


def _ask(question, *arguments):
    """Return rank 0's answer, or None if it does not answer in time.

    While an answer is pending, no further request is sent.
    """
    global _asked
    try:
        if _engines is None or (_asked is not None and not _asked.done()):
            return None
        _asked = _engines.client[0].apply_async(question, *arguments)
        _asked.wait(ANSWER_SECONDS)
        return _asked.get(0) if _asked.done() else None
    except Exception:  # a missing list of names must not raise an error
        return None
