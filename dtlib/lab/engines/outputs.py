"""Show the output of a cell's ranks as it is stored: in rank order, and equal outputs once."""

import sys

from IPython.display import publish_display_data

from dtlib.lab.colours import ranks_prefix
from dtlib.lab.engines.live_view import ranks_in_words
from dtlib.lab.foreign import AsyncResult
from dtlib.lab.tables import WIDEST, fold

MOST_LINES = 1000  # per rank and cell


def show(result: AsyncResult, ranks: list[int]) -> bool:
    """Show the output of all ranks in rank order, equal outputs once; return False if there is none."""
    outputs = zip(
        as_list(result.stdout), as_list(result.stderr),
        result.outputs if len(ranks) > 1 else [result.outputs],  # each entry is a list
        as_list(result.execute_result), strict=True,
    )  # fmt: skip
    alike: dict[str, tuple] = {}
    for rank, (stdout, stderr, displayed, value) in zip(ranks, outputs, strict=True):
        shown = [(output["data"], output.get("metadata")) for output in displayed]
        last = (getattr(value, "data", None) or value["data"]) if value else {}
        if "text/html" in last:  # shown as a table
            shown, last = [*shown, (last, None)], {}
        said = stdout, stderr, shown, last.get("text/plain", "")
        if any(said):
            alike.setdefault(repr(said), (said, []))[1].append(rank)
    for (stdout, stderr, shown, last), who in alike.values():
        _print_lines(who, stdout, sys.stdout)
        _print_lines(who, stderr, sys.stderr)
        for data, metadata in shown:
            _print_lines(who, "shows:" if len(who) == 1 else "show:", sys.stdout)
            sys.stdout.flush()
            publish_display_data(data, metadata)
        _print_lines(who, last, sys.stdout)
    return bool(alike)


def _print_lines(who, text, file) -> None:
    lines = text.removesuffix("\n").split("\n") if text else []
    if len(lines) > MOST_LINES:
        left_out = f"... {len(lines) - MOST_LINES:,} lines are left out here ..."
        lines = [*lines[: MOST_LINES // 2], left_out, *lines[-MOST_LINES // 2 :]]
    if lines:
        words = ranks_in_words(who)
        folded = fold("\n".join(lines), WIDEST - len(words) - 3)
        print("\n".join(f"{ranks_prefix(who, words)} {line}" for line in folded.split("\n")), file=file)


def as_list(value: object) -> list:
    """Return a list with one entry per rank; ipyparallel unpacks the list of a single rank."""
    return value if isinstance(value, list) else [value]
