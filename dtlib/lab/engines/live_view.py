"""The live view of a ``%%px`` cell while it runs: progress, missing ranks, latest lines, and a growing loss curve.

It disappears at the end of the cell, except for the curve; the stored output is in rank order. If no person watches
(nbval, or a notebook that a program executes), nothing live is shown.
"""

import time

from IPython import get_ipython
from IPython.display import DisplayHandle, clear_output, display

from dtlib.lab import hooks
from dtlib.lab.colours import RANK_COLOURS, ranks_prefix
from dtlib.lab.drawing import STYLE, Picture, subplots
from dtlib.lab.foreign import AsyncResult, Client

FIRST_SECONDS = 0.5  # shorter cells have no live view
EVERY_SECONDS = 0.2
PICTURE_SECONDS = 1.0  # drawing takes a tenth of this time
FORGET_SECONDS = 2.0  # seconds for which a finished wait is remembered
PROGRESS_SECONDS = 5.0  # seconds until a line shows what each rank does
MOST_LINES = 20  # per rank
MOST_LINES_OF_ALL = 120  # limit for many ranks
LONGEST_LINE = 200


def is_watched() -> bool:
    """Return whether a frontend can answer questions, so that there is a page."""
    return getattr(getattr(get_ipython(), "kernel", None), "_allow_stdin", False)


class LiveView:
    """The live view of one cell.

    ``alone``: the cell has no other output, so all of it may be cleared; otherwise only the view is emptied.
    """

    def __init__(self, alone: bool):
        self.waited, self._waited_at = "", 0.0  # last message about a wait, and its time
        self._alone = alone
        self._watched = is_watched()
        self._began = self._drawn = time.monotonic()
        self._display: DisplayHandle | None = None
        self._picture: DisplayHandle | None = None
        self._curve: tuple | None = None
        self._pictured = -PICTURE_SECONDS
        self._text = self._reported = ""

    def show(self, ranks: list[int], running: list[bool], texts: list[str], reports: list[dict]) -> None:
        """Redraw what has changed: for each rank, whether it runs, its output so far and its latest report."""
        now = time.monotonic()
        waiting = [rank for rank, report in zip(ranks, reports, strict=True) if report.get("waiting")]
        if waiting:
            sentence = next(filter(None, (report.get("waiting") for report in reports)))
            self.waited, self._waited_at = f"{ranks_in_words(waiting)} for {sentence}.", now
        elif now - self._waited_at > FORGET_SECONDS:  # delayed, because Stop ends a wait before it ends the cell
            self.waited = ""
        said = _waits_in_words(waiting, reports) if waiting else self._reported * bool(self.waited)
        if said != self._reported:
            hooks.report("waits", says=said)
            self._reported = said
        if not self._watched or now - self._began < FIRST_SECONDS or now - self._drawn < EVERY_SECONDS:
            return
        self._drawn = now
        most = min(MOST_LINES, max(2, MOST_LINES_OF_ALL // len(ranks)))
        lines = []
        if now - self._began > PROGRESS_SECONDS or any(report.get("progress") for report in reports):
            lines.append(f"{now - self._began:.0f} s: {_progress(ranks, running, reports)}")
        if waiting:
            lines.append(f"Waiting: {self.waited} Stop ends the wait.")
        for rank, text in zip(ranks, texts, strict=True):
            lines += _latest(rank, text, most)
        if (text := "\n".join(lines)) != self._text:
            self._text, self._display = text, shown_in(self._display, {"text/plain": text}, raw=True)
        self._note_curve(reports)
        if self._curve and now - self._pictured > PICTURE_SECONDS:
            self._picture = shown_in(self._picture, _drawn(*self._curve))
            self._pictured = time.monotonic()

    def close(self) -> None:
        """Remove the view, so that the final output takes its place."""
        if self._display is None:
            return
        if self._alone:
            clear_output(wait=True)
        else:
            for view in filter(None, (self._display, self._picture)):
                view.update({}, raw=True)
        self._display = self._picture = None

    def _note_curve(self, reports: list[dict]) -> None:
        for report in reports:
            if len(report.get("curve") or ()) > 1:
                self._curve = report["curve"], *report["progress"]

    def keep(self, reports: list[dict]) -> None:
        """Display the complete curve below the output, if one was drawn."""
        if self._curve:
            self._note_curve(reports)
            display(_drawn(*self._curve))


def shown_in(handle: DisplayHandle | None, content: object, **raw: bool) -> DisplayHandle | None:
    """Show content in the place of ``handle``, or in a new place; return the handle."""
    if handle is None:
        return display(content, display_id=True, **raw)
    handle.update(content, **raw)
    return handle


def _drawn(curve: list[float], done: int, total: int, unit: str) -> Picture:
    """Return a picture of the loss from the first step to the last so far."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure, axes = subplots(height=2.5)
        axes.plot([done * (at + 1) / len(curve) for at in range(len(curve))], curve, color=RANK_COLOURS[0])
        axes.set(xlim=(0, total), xlabel=unit, ylabel="loss")
        return Picture(figure, f"The loss of each step so far, after {done:,} of {total:,} {unit}.")


def _latest(rank: int, text: str, most: int):
    """Return the last lines of a rank, each with the rank's prefix."""
    lines = text.removesuffix("\n").rsplit("\n", most - 1) if text else []
    if lines and (before := lines[0].count("\n")):
        lines[0] = f"... {before + 1:,} lines before these ..."
    return [f"{ranks_prefix([rank], f'rank {rank}')} {line[:LONGEST_LINE]}" for line in lines]


def _progress(ranks, running, reports) -> str:
    """Return one line about all ranks, such as ``ranks 0, 2 in line 3: train(); rank 1 has finished``."""
    groups: dict[str, list[int]] = {}
    for rank, runs, report in zip(ranks, running, reports, strict=True):
        busy = f"in `{report['line']}`" if report.get("line") else "running"
        doing = "finished" if not runs else "waiting" if report.get("waiting") else busy
        groups.setdefault(doing, []).append(rank)
    said = [f"{ranks_in_words(who)} {doing}" for doing, who in groups.items()]
    for report in reports:
        if report.get("progress"):
            done, total, unit = report["progress"]
            said.append(f"{done:,} of {total:,} {unit} ({done / total:.0%})")
        if report.get("curve"):
            said.append(f"loss {report['curve'][-1]:.3g}, at first {report['curve'][0]:.3g}")
        if report.get("doing"):
            said.append(report["doing"])
    return "; ".join(said)


def _waits_in_words(waiting: list[int], reports: list[dict]) -> str:
    """Return which ranks wait for which, without code of the cell: ``ranks 0 and 1 wait for rank 2 (send)``."""
    waits = [report["waits"] for report in reports if report.get("waits")]
    others = sorted({rank for _, missing in waits for rank in missing} - set(waiting))
    operations = ", ".join(sorted({operation for operation, _ in waits}))
    whom = ranks_in_words(others) if others else "one another" if len(waiting) > 1 else "messages"
    who = f"{ranks_in_words(waiting)} wait{'s' * (len(waiting) == 1)} for {whom}"
    return f"{who} ({operations})" if operations else who


def rank_states(cell: "AsyncResult | None", client: Client) -> dict[int, str]:
    """Return what busy ranks do, by rank; ``cell`` is the AsyncResult of the running cell, or None."""
    outstanding = client.outstanding
    if cell is None:
        return {rank: "busy" for rank in client.ids} if outstanding else {}
    data = cell.data if isinstance(cell.data, list) else [cell.data]
    return {
        rank: _doing(report or {}) if str(message) in outstanding else "has finished, others have not"
        for rank, message, report in zip(cell._targets, cell.msg_ids, data, strict=True)
    }


def _doing(report: dict) -> str:
    line = f" in {report['line']}" if report.get("line") else ""
    if not report.get("waits"):
        return f"busy{line}"
    operation, missing = report["waits"]
    return f"waits for {ranks_in_words(missing) if missing else 'messages'} ({operation}){line}"


def ranks_in_words(ranks: list[int]) -> str:
    """Return ``rank 2``, ``ranks 0 and 2``, ``ranks 0 to 3`` or ``ranks 0, 2, 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == 2:
        return f"ranks {ranks[0]} and {ranks[1]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
