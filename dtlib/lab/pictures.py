"""Figures that several lessons share, each with its text version (drawing.py)."""

from collections.abc import Sequence

import dtlib
from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import MARKERS, WIDTH, fits, in_short, shown, subplots, units
from dtlib.lab.tables import Table


@shown
def darts(points: Sequence[tuple]) -> tuple:
    """Draw points in the unit square, with one colour and shape per rank; points in the quarter circle are filled.

    ``points`` has a pair of arrays for each rank: x and y, integers from 0 to 2**31 - 1.
    """
    import numpy as np

    figure, axes = subplots(height=5, width=7.8)
    rows = []
    for rank, (x, y) in enumerate(points):
        x, y = np.asarray(x) / 2**31, np.asarray(y) / 2**31
        inside = x * x + y * y < 1
        style: dict = {"marker": MARKERS[rank % len(MARKERS)], "edgecolors": rank_colour(rank), "s": 24}
        axes.scatter(x[inside], y[inside], c=rank_colour(rank), label=f"rank {rank}: {4 * inside.mean():.3f}", **style)
        axes.scatter(x[~inside], y[~inside], facecolors="none", **style)
        rows.append((rank, len(x), int(inside.sum())))
    arc = np.linspace(0, np.pi / 2, 200)
    rows.append(("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])))
    estimates = [(*row, f"{4 * row[2] / row[1]:.3f}") for row in rows]
    axes.plot(np.cos(arc), np.sin(arc), color="black", label=f"all together: {estimates[-1][-1]}")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title="Filled: inside the quarter circle")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, title="estimates of pi")
    alt = f"Random points of {len(points)} ranks in a square, a colour per rank, filled in the quarter circle."
    return figure, alt, Table(estimates, ("rank", "points", "inside", "estimate of pi"))


@shown
def errors(points: Sequence, absolute_errors: Sequence, standard_errors: Sequence) -> tuple:
    """Draw the error of an estimate against its number of points: one dot per seed, and the standard error as a line.

    ``absolute_errors`` has, for each entry of ``points``, a list with one error per seed.
    """
    import numpy as np

    figure, axes = subplots(height=4)
    axes.plot(points, absolute_errors, ".", color=RANK_COLOURS[0], alpha=0.5)
    axes.plot(points, standard_errors, color="black", label="standard error")
    axes.set(xscale="log", yscale="log", xlabel="points", ylabel="distance from pi")
    units(axes.xaxis)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()
    of_seeds = np.sqrt(np.mean(np.square(absolute_errors), axis=1))
    rows = [(n, f"{e:.1e}", f"{s:.1e}") for n, e, s in zip(points, of_seeds, standard_errors, strict=True)]
    alt = "Distance from pi against the number of points: dots around a line that falls, the standard error."
    return figure, alt, Table(rows, ("points", "error (root mean square over seeds)", "standard error"))


@shown
def ladder(rungs: dict) -> tuple:
    """Draw points per second as bars on a logarithmic scale; ``rungs`` maps a name to points per second."""
    names, speeds = list(rungs), list(rungs.values())
    figure, axes = subplots(height=0.42 * len(names) + 0.8)
    bars = axes.barh(names[::-1], speeds[::-1], color=RANK_COLOURS[0])
    axes.bar_label(bars, [f"{in_short(speed)}, {speed / speeds[0]:,.0f} times" for speed in speeds[::-1]], padding=4)
    axes.set(xscale="log", xlabel="points per second", xlim=(min(speeds) / 3, 100 * max(speeds)))
    units(axes.xaxis)
    rows = [(name, f"{speed:.2g}", f"{speed / speeds[0]:,.0f}") for name, speed in rungs.items()]
    alt = "Bars: points per second of each rung."
    return figure, alt, Table(rows, ("rung", "points per second", "times the first"))


@shown
def speed_up(seconds: dict, cores: int) -> tuple:
    """Draw speed-up against ranks, and mark the number of cores; ``seconds`` maps a number of ranks to seconds."""
    ranks = list(seconds)
    gains = [seconds[1] / seconds[count] for count in ranks]
    figure, axes = subplots(height=4)
    axes.plot(ranks, ranks, color="grey", linestyle="--", label="ideal: N times on N ranks")
    axes.plot(ranks, gains, color=RANK_COLOURS[0], marker="o", label="measured")
    if cores <= max(ranks):
        axes.axvline(cores, color=RANK_COLOURS[1], linestyle=":", label=f"{cores} cores")
    axes.set(xlabel="ranks", ylabel="speed-up", xticks=ranks, ylim=(0, max(ranks) + 0.5))
    axes.legend()
    rows = [(n, f"{seconds[n]:.3f}", f"{gain:.2f}", f"{gain / n:.0%}") for n, gain in zip(ranks, gains, strict=True)]
    alt = f"Speed-up against ranks: measured, and a line for the ideal; this computer has {cores} cores."
    return figure, alt, Table(rows, ("ranks", "seconds", "speed-up", "efficiency"))


@shown
def costs(measured: dict, model: dict, title: str = "") -> tuple:
    """Draw seconds against bytes, with one colour and mark per algorithm; dashed lines show the model.

    ``measured`` and ``model`` map the name of an algorithm to a dictionary from bytes to seconds.
    """
    figure, axes = subplots(height=4.2)
    rows = []
    order = [name for name in ("naive", "tree", "recursive_doubling", "ring") if name in measured]
    for number, name in enumerate(order):
        seconds = measured[name]
        style: dict = {"color": RANK_COLOURS[number], "marker": MARKERS[number]}
        axes.plot(list(seconds), list(seconds.values()), label=f"{name}, measured", linestyle="-", **style)
        axes.plot(list(seconds), [model[name][count] for count in seconds], color=RANK_COLOURS[number], linestyle="--")
        for count, took in seconds.items():
            said = model[name][count]
            rows.append((name, count, f"{1e3 * took:.2f}", f"{1e3 * said:.2f}", f"{took / said:.2f}"))
    axes.plot([], [], color="grey", linestyle="--", label="the model, in the same colour")
    axes.set(xscale="log", yscale="log", title=title)
    units(axes.xaxis, "B")
    units(axes.yaxis, "s")
    axes.legend(loc="upper left")
    headers = ("algorithm", "bytes", "measured (ms)", "model (ms)", "measured / model")
    alt = f"{title or 'Seconds of an all-reduce'}: time against bytes, one line for each of {', '.join(order)}."
    return figure, alt, Table(rows, headers, title)


@shown
def lines(series: dict, xlabel: str, ylabel: str, title: str = "", log: str = "xy", form: str = ",.3g") -> tuple:
    """Draw one line for each entry of ``series``, which maps a name to a dictionary from x to y.

    ``log`` names the logarithmic axes; a linear y axis begins at 0.
    """
    figure, axes = subplots(height=4)
    for number, (name, points) in enumerate(series.items()):
        style: dict = {"color": RANK_COLOURS[number], "marker": MARKERS[number]}
        axes.plot(list(points), list(points.values()), label=name, **style)
    xs = sorted({x for points in series.values() for x in points})
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    if "y" in log:
        units(axes.yaxis)
        axes.yaxis.set_major_formatter("{x:g}")  # plain numbers, because the label has a unit already
    else:
        axes.set_ylim(0)
    axes.xaxis.minorticks_off()
    axes.set_xticks(xs, [f"{x:,g}" for x in xs])
    if len(series) > 1:
        axes.legend()
    rows = [(f"{x:,g}", *(format(points[x], form) if x in points else "" for points in series.values())) for x in xs]
    headers = (xlabel, *(f"{name}: {ylabel}" if len(series) > 1 else ylabel for name in series))
    alt = f"{title + ': ' if title else ''}{ylabel} against {xlabel}, one line for each of {', '.join(series)}."
    return figure, alt, Table(rows, headers, title)


# Kinds of events differ in hatch and in shade. Reading is paler than computing, and waiting is almost white, because
# the rank computes nothing. No dotted hatch: each dot would be a separate curve in the SVG.
_HATCHES = {"phase": "", "reads": "xx", "operation": "//", "wait": "--"}
_STRENGTH = {"phase": 1.0, "reads": 0.25, "operation": 0.6, "wait": 0.08}  # strength of the rank's colour
MOST_ROWS = 24
# Heights in inches: a rank's own bars, a lane of asynchronous operations, and such a lane if there are many.
OWN, LANE, NARROW = 0.36, 0.2, 0.11
MOST_LANES = 8  # further overlapping operations are drawn in the last lane
# Colours of operations if only one rank is drawn.
OF_OPERATIONS = tuple(RANK_COLOURS[number] for number in (5, 2, 3, 1, 6))


def _paler(colour: str, strength: float) -> tuple:
    """Mix a colour with white; an SVG with a hatch ignores the opacity of the colour below."""
    from matplotlib.colors import to_rgb

    return tuple(1 - strength * (1 - channel) for channel in to_rgb(colour))


def _kind(event) -> str:
    return event.name if event.name in _HATCHES else event.kind


def _style(kind: str, colour: str) -> dict:
    edge = _paler(colour, 0.5) if kind == "wait" else "white"
    return {"facecolor": _paler(colour, _STRENGTH[kind]), "hatch": _HATCHES[kind], "edgecolor": edge}


@shown
def timeline(*traces: "dtlib.Timeline | str", rank: int | None = None, ends: dict | None = None) -> tuple:
    """Draw time to the right and ranks down: computation, operations and waits of each rank.

    A trace is a ``dtlib.Timeline``, or the name of a trace on the ranks, which becomes the title of its panel. Panels
    share the time axis. Operations with ``async_op=True`` are drawn below the rank's own bars, from start to end, in
    separate lanes where they overlap. Operations that never completed extend to the right edge.

    With ``rank``, the rows are the operations of this rank, and each operation has a colour. ``ends`` maps the name of
    a phase to a label: a line marks the end of the last phase with this name.
    """
    records = [_timeline_of(trace, rank) for trace in traces]
    events = [event for record in records for event in record.events]
    last = max(record.end for record in records)
    scale, unit = (1, "s") if last >= 1 else (1e3, "ms")
    # Leave space on the right for operations that never ended.
    right = max(1e-3, last * (1.5 if any(event.end is None for event in events) else 1.05))
    panels = [_rows(record, rank) for record in records]
    highs = [sum(high for *_, high in rows) for rows in panels]
    tall = sum(highs) + 0.4 * len(panels) + 0.9
    figure, grid = subplots(len(panels), height=tall, height_ratios=highs, sharex=True, squeeze=False)
    operations = sorted({event.name for event in events if event.kind == "operation"})
    # With one rank, row and colour identify the operation.
    colours = {} if rank is None else dict(zip(operations, OF_OPERATIONS, strict=False))
    alts, tables = [], []
    for axes, trace, record, rows in zip(grid[:, 0], traces, records, panels, strict=True):
        top, ticks = 0.0, []
        for _, bars, row in rows:
            ticks.append(top + (OWN if rank is None else row) / 2)
            for number, (event, below, high) in enumerate(bars):
                took = (right if event.end is None else event.end) - event.start
                coloured = event.kind == "operation" and event.name in colours
                look = ("phase", colours[event.name]) if coloured else (_kind(event), rank_colour(event.rank))
                style = {**_style(*look), "zorder": 2 - number / (number + 1)}  # earlier bars are in front
                axes.broken_barh([(event.start * scale, took * scale)], (top + below, high), **style)
                labels = _open(event, record) if event.end is None else (event.name, event.name.split()[-1])
                written = next((text for text in labels if fits(text, 0.85 * WIDTH * took / right)), None)
                if written and high > NARROW and (rank is None or event.kind == "phase"):
                    label: dict = {"ha": "center", "va": "center", "bbox": {"facecolor": "white", "pad": 1, "lw": 0}}
                    axes.text((event.start + took / 2) * scale, top + below + high / 2, written, **label)
            top += row
        name = trace if isinstance(trace, str) and trace != "trace" else ""
        axes.set_title(", ".join(filter(None, (name, "EMULATED network" if record.emulated else ""))), loc="left")
        axes.set(xlim=(0, right * scale), ylim=(top, 0))
        axes.set_yticks(ticks, [label for label, *_ in rows])
        hangs = rank is None and any(event.end is None for event in record.events)
        for tick, (_, bars, _) in zip(ticks, rows, strict=True):
            # All events of this rank have ended, while other ranks wait.
            if hangs and all(event.end is not None for event, *_ in bars):
                done = scale * max((event.end for event, *_ in bars), default=0)
                axes.annotate("finished", (done, tick), (5, 0), textcoords="offset points", va="center")
        for phase, label in (ends or {}).items():
            end = scale * max(event.end for event in record.events if event.name == phase)
            axes.axvline(end, color="black", linestyle="--", zorder=3)
            axes.annotate(label, (end, 1), xycoords=("data", "axes fraction"), va="bottom")
        who = f"{'ranks' if rank is None else 'rank'} {', '.join(map(str, record.ranks))}"
        alts.append(f"{name + ': w' if name else 'W'}hat {who} did over {record.end * scale:.3g} {unit}.")
        tables.append(_table(record, name if len(traces) > 1 else ""))
    grid[-1, 0].set_xlabel(f"time in {unit}")
    if rank is None:
        _legend(figure, {_kind(event) for event in events}, operations)
    alts += ["The network was slowed down on purpose: EMULATED."] * any(record.emulated for record in records)
    return figure, " ".join(alts), *tables


def _legend(figure, present: set, operations: list) -> None:
    from matplotlib.patches import Patch

    operation = f"operation: {', '.join(operations)}" if len(operations) <= 2 else "operation"
    wait = "waits for an asynchronous operation"
    labels = {"phase": "computes", "reads": "reads", "operation": operation, "wait": wait}
    patches = [Patch(label=labels[kind], **_style(kind, "0.3")) for kind in labels if kind in present]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)


def _rows(record, rank: int | None) -> list[tuple]:
    """Return (label, bars, height) for each row from top to bottom.

    A bar is (event, inches below the row's top, height in inches).
    """
    rows: dict[str, list] = {f"rank {each}": [] for each in record.ranks if rank is None}
    for event in record.events:
        name = {"phase": "phases", "wait": "waits"}.get(event.kind, event.name)
        rows.setdefault(f"rank {event.rank}" if rank is None else name, []).append(event)
    found = []
    for label, events in rows.items():
        own = OWN if rank is None else 0
        bars = [(event, 0.03, OWN - 0.05) for event in events if own and event.lane == "main"]
        drawn_events = [event for event in events if not own or event.lane == "background"]
        lanes = _lanes(drawn_events)
        deep = max(lanes, default=-1) + 1
        high = OWN if deep == 1 else LANE if deep < 4 else NARROW
        bars += [(event, own + lane * high, high - 0.02) for event, lane in zip(drawn_events, lanes, strict=True)]
        found.append((label, bars, own + deep * high + 0.05))
    return found


def _lanes(events) -> list[int]:
    """Return for each event the first lane that is free when it starts."""
    until, lanes = [0.0] * MOST_LANES, []  # until: when each lane is free again
    for event in events:
        free = (lane for lane in range(MOST_LANES) if until[lane] <= event.start)
        lanes.append(next(free, MOST_LANES - 1))
        until[lanes[-1]] = float("inf") if event.end is None else event.end
    return lanes


def _open(event, record) -> tuple[str, ...]:
    """Return labels for the bar of an event that never ended, the longest first."""
    until = record.until.get(event.rank)
    waited = "" if until is None else f" after {until - event.start:.1f} s"
    return f"{event.name} had not ended{waited}", f"{event.name} never ended", "never ended", "..."


def _timeline_of(trace, rank: int | None):
    """Return the timeline, or the part of one rank."""
    from copy import copy

    from dtlib.lab.engines.names import values
    from dtlib.measure.trace import Timeline

    record = copy(Timeline(values(trace)) if isinstance(trace, str) else trace)
    if rank is not None:
        record.ranks, record.events = [rank], [event for event in record.events if event.rank == rank]
    return record


def _table(record, title: str) -> Table:
    """Return a table with one row per event; for many events, or several traces, with sums."""
    if not title and len(record.events) <= MOST_ROWS:
        rows = [
            (
                event.rank, "waits for " * (event.kind == "wait") + event.in_short,
                event.where if len(event.where) <= 40 else f"{event.where[:37]}...",
                f"{1e3 * event.start:.2f}", "never" if event.end is None else f"{1e3 * event.end:.2f}",
                event.messages, event.bytes,
            )
            for event in record.events
        ]  # fmt: skip
        headers = ("rank", "what", "line", "from (ms)", "to (ms)", "messages", "bytes sent")
        return Table(rows, headers, title, align="rllrrrr")
    sums: dict = {}
    for event in record.events:
        entry = sums.setdefault((event.rank, event.kind, event.name), [0, 0.0, 0, 0])
        took = (event.end or record.end) - event.start
        for i, value in enumerate((1, took, event.messages, event.bytes)):
            entry[i] += value
    rows = [
        (rank, f"waits for {name}" if kind == "wait" else name, count, f"{1e3 * took:.2f}", messages, sent)
        for (rank, kind, name), (count, took, messages, sent) in sorted(sums.items())
    ]
    return Table(rows, ("rank", "what", "times", "together (ms)", "messages", "bytes sent"), title, align="rlrrrr")
