"""The figures that several lessons share, each with its text (drawing.py)."""

from collections.abc import Sequence

import dtlib
from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import MARKERS, WIDTH, fits, in_short, shown, subplots, units
from dtlib.lab.tables import Table


@shown
def darts(points: Sequence[tuple]) -> tuple:
    """Points in the unit square, one colour and shape a rank; inside the quarter circle they are filled.

    ``points`` has a pair of arrays a rank: x and y, integers from 0 to 2**31 - 1.
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
    alt = f"Random points of {len(points)} ranks in a square, a colour and shape a rank, filled in the quarter circle."
    return figure, alt, Table(estimates, ("rank", "points", "inside", "estimate of pi"))


@shown
def errors(points: Sequence, absolute_errors: Sequence, standard_errors: Sequence) -> tuple:
    """The error of an estimate against its number of points: one dot a seed, and the standard error as a line.

    ``absolute_errors`` has a list of errors (one a seed) for each entry of ``points``.
    """
    import numpy as np

    figure, axes = subplots(height=4)
    for n, errors_of_seeds in zip(points, absolute_errors, strict=True):
        axes.scatter([n] * len(errors_of_seeds), errors_of_seeds, color=RANK_COLOURS[0], alpha=0.5, s=14)
    axes.plot(points, standard_errors, color="black", label="standard error")
    axes.set(xscale="log", yscale="log", xlabel="points", ylabel="distance from pi")
    units(axes.xaxis)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()
    rows = [
        (n, f"{np.sqrt(np.mean(np.square(e))):.1e}", f"{s:.1e}")
        for n, e, s in zip(points, absolute_errors, standard_errors, strict=True)
    ]
    alt = "Distance from pi against the number of points: dots around a line that falls, the standard error."
    return figure, alt, Table(rows, ("points", "error (root mean square over seeds)", "standard error"))


@shown
def ladder(rungs: dict) -> tuple:
    """Points per second of each rung, as bars on a logarithmic scale. ``rungs`` maps a name to points per second."""
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
    """Speed-up against the number of ranks, with the number of cores marked. ``seconds`` maps ranks to seconds."""
    ranks = list(seconds)
    gains = [seconds[1] / seconds[count] for count in ranks]
    figure, axes = subplots(height=4)
    axes.plot(ranks, ranks, color="grey", linestyle="--", label="as many times as ranks")
    axes.plot(ranks, gains, color=RANK_COLOURS[0], marker="o", label="measured")
    if cores <= max(ranks):
        axes.axvline(cores, color=RANK_COLOURS[1], linestyle=":", label=f"{cores} cores")
    axes.set(xlabel="ranks", ylabel="speed-up", xticks=ranks, ylim=(0, max(ranks) + 0.5))
    axes.legend()
    rows = [
        (count, f"{seconds[count]:.3f}", f"{gain:.2f}", f"{gain / count:.0%}")
        for count, gain in zip(ranks, gains, strict=True)
    ]
    alt = f"Speed-up against ranks: measured, beside a line of as many times as ranks; this computer has {cores} cores."
    return figure, alt, Table(rows, ("ranks", "seconds", "speed-up", "efficiency"))


@shown
def costs(measured: dict, model: dict | None = None, title: str = "") -> tuple:
    """Seconds against bytes, one colour and mark an algorithm; what the model says is a dashed line.

    ``measured`` and ``model`` map the name of an algorithm to a dict of bytes and seconds.
    """
    figure, axes = subplots(height=4.2)
    rows = []
    order = [name for name in ("naive", "tree", "recursive_doubling", "ring") if name in measured]
    for number, name in enumerate(order):
        seconds = measured[name]
        style: dict = {"color": RANK_COLOURS[number], "marker": MARKERS[number]}
        axes.plot(list(seconds), list(seconds.values()), label=f"{name}, measured", linestyle="-", **style)
        if model:
            theirs = [model[name][count] for count in seconds]
            axes.plot(list(seconds), theirs, color=RANK_COLOURS[number], linestyle="--")
        for count, took in seconds.items():
            by_model = (f"{1e3 * model[name][count]:.2f}", f"{took / model[name][count]:.2f}") if model else ()
            rows.append((name, count, f"{1e3 * took:.2f}", *by_model))
    if model:
        axes.plot([], [], color="grey", linestyle="--", label="the model, in the same colour")
    axes.set(xscale="log", yscale="log", title=title)
    units(axes.xaxis, "B")
    units(axes.yaxis, "s")
    axes.legend(loc="upper left")
    headers = ("algorithm", "bytes", "measured (ms)", "model (ms)", "measured / model")[: 3 + 2 * bool(model)]
    alt = f"{title or 'Seconds of an all-reduce'}: time against bytes, a line each for {', '.join(order)}."
    return figure, alt, Table(rows, headers, title)


@shown
def lines(series: dict, xlabel: str, ylabel: str, title: str = "", log: str = "xy", form: str = ",.3g") -> tuple:
    """One line, colour and mark for each entry of ``series``, which maps a name to a dict of x and y.

    ``log`` names the axes that are logarithmic; another one begins at 0.
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
        axes.yaxis.set_major_formatter("{x:g}")  # the label has a unit: no thousandths of it
    else:
        axes.set_ylim(0)
    axes.xaxis.minorticks_off()
    axes.set_xticks(xs, [f"{x:,g}" for x in xs])
    if len(series) > 1:
        axes.legend()
    rows = [(f"{x:,g}", *(format(points[x], form) if x in points else "" for points in series.values())) for x in xs]
    headers = (xlabel, *(f"{name}: {ylabel}" if len(series) > 1 else ylabel for name in series))
    alt = f"{title + ': ' if title else ''}{ylabel} against {xlabel}, a line each for {', '.join(series)}."
    return figure, alt, Table(rows, headers, title)


# Kinds of events differ by hatch as well as by shade.
_HATCHES = {"phase": "", "operation": "//", "wait": "--"}  # not dots: each would be a curve of its own
_STRENGTH = {"phase": 1.0, "operation": 0.6, "wait": 0.08}  # of the rank's colour: what is lost looks empty
MOST_ROWS = 24
OWN, LANE, NARROW = 0.36, 0.2, 0.11  # inches of a rank's row: what it does itself, a lane below it, one of many
MOST_LANES = 8  # what is under way beside as many others is drawn over the last of them


def _paler(colour: str, strength: float) -> tuple:
    """A colour mixed with white: where there is a hatch, an SVG forgets how opaque the colour below it is."""
    from matplotlib.colors import to_rgb

    return tuple(1 - strength * (1 - channel) for channel in to_rgb(colour))


@shown
def timeline(record: "dtlib.Timeline | str") -> tuple:
    """Time across, ranks down: what each rank computed, which operations it called, and where it waited.

    ``record`` is a ``dtlib.Timeline``, or the name of a trace on the ranks, which becomes the title. What was started
    with ``async_op=True`` is drawn below the rank's own bars, from start to end: where several are under way at once,
    each in a lane of its own. What never ended is drawn to the end and says so.
    """
    from matplotlib.patches import Patch

    name = record if isinstance(record, str) and record != "trace" else ""
    record = _timeline_of(record)
    scale, unit = (1, "s") if record.end >= 1 else (1e3, "ms")
    # What never ended gets room to be seen.
    right = max(1e-3, record.end * (1.3 if any(event.end is None for event in record.events) else 1.05))
    lanes = _lanes(record.events)
    deep = max(lanes, default=0) + 1
    lane = OWN if deep == 1 else LANE if deep < 4 else NARROW
    row = OWN + deep * lane + 0.03
    figure, axes = subplots(height=row * len(record.ranks) + 1.4)
    inches = 0.88 * WIDTH / right  # a second
    unnamed: set[str] = set()  # operations with bars that are too small for a name: it stands below
    for number, event in enumerate(record.events):
        end = right if event.end is None else event.end
        top, high = (0.03, OWN - 0.05) if event.lane == "main" else (OWN + lanes[number] * lane, lane - 0.02)
        top, high = record.ranks.index(event.rank) + top / row, high / row
        style: dict = {
            "facecolor": _paler(rank_colour(event.rank), _STRENGTH[event.kind]),
            "edgecolor": _paler(rank_colour(event.rank), 0.5) if event.kind == "wait" else "white",
            "hatch": _HATCHES[event.kind],
            "zorder": 2 - number / (number + 1),  # the first is in front
        }
        axes.broken_barh([(event.start * scale, (end - event.start) * scale)], (top, high), **style)
        labels = (event.name,) if event.end is not None else (f"{event.name} never ended", "never ended", "...")
        written = next(filter(lambda text: fits(text, inches * (end - event.start)), labels), None)
        if written and not (lane == NARROW and event.lane == "background"):
            label: dict = {"ha": "center", "va": "center", "bbox": {"facecolor": "white", "pad": 1, "lw": 0}}
            axes.text((event.start + end) / 2 * scale, top + high / 2, written, **label)
        elif event.kind == "operation":
            unnamed.add(event.name)
    axes.set(
        xlim=(0, right * scale), ylim=(len(record.ranks), 0), xlabel=f"time in {unit}",
        yticks=[i + 0.48 for i in range(len(record.ranks))], yticklabels=[f"rank {rank}" for rank in record.ranks],
        title=", ".join(filter(None, (name, "EMULATED network" if record.emulated else ""))),
    )  # fmt: skip
    operation = f"operation: {', '.join(sorted(unnamed))}" if 0 < len(unnamed) <= 2 else "operation"
    kinds = {"phase": "computes", "operation": operation, "wait": "waits for an asynchronous operation"}
    present = [kind for kind in kinds if any(event.kind == kind for event in record.events)]
    patches = [
        Patch(
            facecolor=_paler("0.3", _STRENGTH[kind]), edgecolor="0.6" if kind == "wait" else "white",
            hatch=_HATCHES[kind], label=kinds[kind],
        )
        for kind in present
    ]  # fmt: skip
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    rows, headers, align = (_every_event if len(record.events) <= MOST_ROWS else _sums_of_events)(record)
    emulated = "The network was slowed down on purpose: EMULATED." if record.emulated else ""
    did = f"what ranks {', '.join(map(str, record.ranks))} did over {record.end * scale:.3g} {unit}. {emulated}"
    alt = f"{name}: {did}".rstrip() if name else f"W{did[1:]}".rstrip()
    return figure, alt, Table(rows, headers, align=align)


def _lanes(events) -> list[int]:
    """Of what is in the background, the first lane of its rank that is free when it starts; 0 of all else."""
    until: dict[tuple[int, int], float] = {}  # when it is free again
    lanes = []
    for event in events:
        lane = 0
        if event.lane == "background":
            free = (lane for lane in range(MOST_LANES) if until.get((event.rank, lane), 0.0) <= event.start)
            lane = next(free, MOST_LANES - 1)
            until[event.rank, lane] = float("inf") if event.end is None else event.end
        lanes.append(lane)
    return lanes


def _timeline_of(record):
    from dtlib.lab.engines.names import values
    from dtlib.measure.trace import Timeline

    return Timeline(values(record)) if isinstance(record, str) else record


def _every_event(record):
    rows = [
        (
            event.rank, _in_short(event), event.where if len(event.where) <= 40 else f"{event.where[:37]}...",
            f"{1e3 * event.start:.2f}", "never" if event.end is None else f"{1e3 * event.end:.2f}",
            event.messages, event.bytes,
        )
        for event in record.events
    ]  # fmt: skip
    return rows, ("rank", "what", "line", "from (ms)", "to (ms)", "messages", "bytes sent"), "rllrrrr"


def _in_short(event) -> str:
    """The operation without shape and type: a table has to fit on a page."""
    return f"waits for {event.in_short}" if event.kind == "wait" else event.in_short


def _sums_of_events(record):
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
    return rows, ("rank", "what", "times", "together (ms)", "messages", "bytes sent"), "rlrrrr"
