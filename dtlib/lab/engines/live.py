"""What a ``%%px`` cell shows while it runs: how far ranks are, whom they wait for, the latest lines of each; and the
curve of what they train, as a picture that grows.

It is for whoever watches, and goes away with the end of the cell, all but the curve: what is stored is the output in
rank order. Where nobody could answer a question either (nbval, a notebook that is executed by a program), nothing live
is shown.
"""

import time

from IPython import get_ipython
from IPython.display import clear_output, display

from dtlib.lab import hooks
from dtlib.lab.colours import RANK_COLOURS, rank_prefix
from dtlib.lab.drawing import STYLE, Picture, subplots
from dtlib.lab.foreign import AsyncResult, Client

FIRST_SECONDS = 0.5  # shorter cells show their output at the end only
EVERY_SECONDS = 0.2
PICTURE_SECONDS = 1.0  # a picture takes a tenth of that to draw
FORGET_SECONDS = 2.0  # what was waited for, once nobody waits
PROGRESS_SECONDS = 5.0  # until a line says what each rank is doing
MOST_LINES = 20  # of a rank
MOST_LINES_OF_ALL = 120  # where there are many ranks
LONGEST_LINE = 200


class LiveView:
    """``alone``: the cell shows nothing else, so that all of its output may be cleared; else the view is emptied."""

    def __init__(self, alone: bool):
        self.waited, self._waited_at = "", 0.0  # the last sentence about a wait, and when it was true
        self._alone = alone
        self._watched = getattr(getattr(get_ipython(), "kernel", None), "_allow_stdin", False)
        self._began = self._drawn = time.monotonic()
        self._display = self._picture = None
        self._curve: tuple | None = None
        self._pictured = -PICTURE_SECONDS
        self._text = self._reported = ""

    def show(self, ranks: list[int], running: list[bool], texts: list[str], reports: list[dict]) -> None:
        """Draw anew, if there is something new: for each rank whether it still runs, its output, what it reports."""
        now = time.monotonic()
        waiting = [rank for rank, report in zip(ranks, reports, strict=True) if report.get("waiting")]
        if waiting:
            sentence = next(filter(None, (report.get("waiting") for report in reports)))
            self.waited, self._waited_at = f"{ranks_in_words(waiting)} for {sentence}.", now
        elif now - self._waited_at > FORGET_SECONDS:  # not at once: Stop ends a wait before it ends the cell
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
            self._text, self._display = text, _shown_in(self._display, {"text/plain": text}, raw=True)
        self._note_curve(reports)
        if self._curve and now - self._pictured > PICTURE_SECONDS:
            self._picture = _shown_in(self._picture, _drawn(*self._curve))
            self._pictured = time.monotonic()

    def close(self) -> None:
        """Make room for what stays."""
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
        """Below what stays: the whole curve, if one was drawn."""
        if self._curve:
            self._note_curve(reports)
            display(_drawn(*self._curve))


def _shown_in(handle, content, **raw):
    """Show something in its place; returns the handle of the place."""
    if handle is None:
        return display(content, display_id=True, **raw)
    handle.update(content, **raw)
    return handle


def _drawn(curve: list[float], done: int, total: int, unit: str) -> Picture:
    """The loss so far; ``curve`` goes from the first to the last step."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure, axes = subplots(height=2.5)
        axes.plot([done * (at + 1) / len(curve) for at in range(len(curve))], curve, color=RANK_COLOURS[0])
        axes.set(xlim=(0, total), xlabel=unit, ylabel="loss")
        return Picture(figure, f"The loss of each step so far, after {done:,} of {total:,} {unit}.")


def _latest(rank: int, text: str, most: int):
    lines = text.removesuffix("\n").rsplit("\n", most - 1) if text else []
    if lines and (before := lines[0].count("\n")):
        lines[0] = f"... {before + 1:,} lines before these ..."
    return [f"{rank_prefix(rank)} {line[:LONGEST_LINE]}" for line in lines]


def _progress(ranks, running, reports) -> str:
    """``ranks 0, 2 in line 3: train(); rank 1 has finished``."""
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
    """Who waits for whom in which operation, without a line of the cell: ``ranks 0 and 1 wait for rank 2 (send)``."""
    waits = [report["waits"] for report in reports if report.get("waits")]
    others = sorted({rank for _, missing in waits for rank in missing} - set(waiting))
    operations = ", ".join(sorted({operation for operation, _ in waits}))
    whom = ranks_in_words(others) if others else "one another" if len(waiting) > 1 else "messages"
    who = f"{ranks_in_words(waiting)} wait{'s' * (len(waiting) == 1)} for {whom}"
    return f"{who} ({operations})" if operations else who


def whereabouts(cell: "AsyncResult | None", client: Client) -> dict[int, str]:
    """What ranks that are not idle do, while a notebook waits for this ``cell`` (an AsyncResult), or for none."""
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
    """``rank 2``, ``ranks 0 and 2``, ``ranks 0 to 3`` or ``ranks 0, 2, 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == 2:
        return f"ranks {ranks[0]} and {ranks[1]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))
