"""Pictures, and a text for every one of them."""

from dtlib.lab.colours import RANK_COLOURS, rank_colour

# Marks differ by shape as well as by colour.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def darts(points) -> None:
    """Points in the unit square, one colour and shape a rank; inside the quarter circle they are filled.

    ``points`` has a pair of arrays a rank: x and y, integers from 0 to 2**31 - 1.
    """
    import matplotlib.pyplot as plt
    import numpy as np

    _, axes = plt.subplots(figsize=(6, 4.6))
    rows = []
    for rank, (x, y) in enumerate(points):
        x, y = np.asarray(x) / 2**31, np.asarray(y) / 2**31
        inside = x * x + y * y < 1
        style = {"marker": _MARKERS[rank % len(_MARKERS)], "edgecolors": rank_colour(rank), "s": 22}
        axes.scatter(x[inside], y[inside], c=rank_colour(rank), label=f"rank {rank}", **style)
        axes.scatter(x[~inside], y[~inside], facecolors="none", **style)
        rows.append((rank, len(x), int(inside.sum())))
    arc = np.linspace(0, np.pi / 2, 200)
    axes.plot(np.cos(arc), np.sin(arc), color="black")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title="Filled: inside the quarter circle")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    plt.show()
    rows.append(("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])))
    _print_table([(*row, f"{4 * row[2] / row[1]:.3f}") for row in rows], ("rank", "points", "inside", "estimate of pi"))


def errors(points, absolute_errors, standard_errors) -> None:
    """The error of an estimate against its number of points: one dot a seed, and the standard error as a line.

    ``absolute_errors`` has a list of errors (one a seed) for each entry of ``points``.
    """
    import matplotlib.pyplot as plt
    import numpy as np

    _, axes = plt.subplots(figsize=(6, 4))
    for n, errors_of_seeds in zip(points, absolute_errors, strict=True):
        axes.scatter([n] * len(errors_of_seeds), errors_of_seeds, color=RANK_COLOURS[0], alpha=0.5, s=14)
    axes.plot(points, standard_errors, color="black", label="standard error")
    axes.set(xscale="log", yscale="log", xlabel="points", ylabel="distance from pi")
    axes.legend()
    plt.show()
    rows = [
        (f"{n:,}", f"{np.sqrt(np.mean(np.square(e))):.1e}", f"{s:.1e}")
        for n, e, s in zip(points, absolute_errors, standard_errors, strict=True)
    ]
    _print_table(rows, ("points", "error (root mean square over seeds)", "standard error"))


def ladder(rungs: dict) -> None:
    """Points per second of each rung, as bars on a logarithmic scale. ``rungs`` maps a name to points per second."""
    import matplotlib.pyplot as plt

    names, speeds = list(rungs), list(rungs.values())
    _, axes = plt.subplots(figsize=(6, 0.5 * len(names) + 1))
    axes.barh(names[::-1], speeds[::-1], color=RANK_COLOURS[0])
    axes.set(xscale="log", xlabel="points per second")
    plt.show()
    _print_table(
        [(name, f"{speed:.2g}", f"{speed / speeds[0]:,.0f}") for name, speed in rungs.items()],
        ("rung", "points per second", "times the first"),
    )


def speed_up(seconds: dict, cores: int) -> None:
    """Speed-up against the number of ranks, with the number of cores marked. ``seconds`` maps ranks to seconds."""
    import matplotlib.pyplot as plt

    ranks = list(seconds)
    gains = [seconds[1] / seconds[count] for count in ranks]
    _, axes = plt.subplots(figsize=(6, 4))
    axes.plot(ranks, ranks, color="grey", linestyle="--", label="as many times as ranks")
    axes.plot(ranks, gains, color=RANK_COLOURS[0], marker="o", label="measured")
    if cores <= max(ranks):
        axes.axvline(cores, color=RANK_COLOURS[1], linestyle=":", label=f"{cores} cores")
    axes.set(xlabel="ranks", ylabel="speed-up", xticks=ranks, ylim=(0, max(ranks) + 0.5))
    axes.legend()
    plt.show()
    rows = [
        (count, f"{seconds[count]:.3f}", f"{gain:.2f}", f"{gain / count:.0%}")
        for count, gain in zip(ranks, gains, strict=True)
    ]
    _print_table(rows, ("ranks", "seconds", "speed-up", "efficiency"))


def costs(measured: dict, model: dict | None = None, title: str = "") -> None:
    """Seconds against bytes, one colour and mark an algorithm; what the model says is a dashed line.

    ``measured`` and ``model`` map the name of an algorithm to a dict of bytes and seconds.
    """
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(6.5, 4))
    rows = []
    order = [name for name in ("naive", "tree", "recursive_doubling", "ring") if name in measured]
    for number, name in enumerate(order):
        seconds = measured[name]
        style = {"color": RANK_COLOURS[number], "marker": _MARKERS[number]}
        axes.plot(list(seconds), list(seconds.values()), label=f"{name}, measured", linestyle="-", **style)
        if model:
            theirs = [model[name][count] for count in seconds]
            axes.plot(list(seconds), theirs, color=RANK_COLOURS[number], linestyle="--")
        for count, took in seconds.items():
            by_model = (f"{1e3 * model[name][count]:.2f}", f"{took / model[name][count]:.2f}") if model else ()
            rows.append((name, f"{count:,}", f"{1e3 * took:.2f}", *by_model))
    if model:
        axes.plot([], [], color="grey", linestyle="--", label="the model, in the same colour")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds", title=title)
    axes.legend(fontsize=8)
    plt.show()
    print(title)
    _print_table(rows, ("algorithm", "bytes", "measured (ms)", "model (ms)", "measured / model")[: 3 + 2 * bool(model)])


def lines(series: dict, xlabel: str, ylabel: str, title: str = "", log: str = "xy", form: str = ",.3g") -> None:
    """One line, colour and mark for each entry of ``series``, which maps a name to a dict of x and y.

    ``log`` names the axes that are logarithmic; another one begins at 0.
    """
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(6.5, 4))
    for number, (name, points) in enumerate(series.items()):
        style = {"color": RANK_COLOURS[number], "marker": _MARKERS[number]}
        axes.plot(list(points), list(points.values()), label=name, **style)
    xs = sorted({x for points in series.values() for x in points})
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    if "y" not in log:
        axes.set_ylim(0)
    axes.xaxis.minorticks_off()
    axes.set_xticks(xs, [f"{x:,g}" for x in xs])
    if len(series) > 1:
        axes.legend(fontsize=8)
    plt.show()
    if title:
        print(title)
    rows = [(f"{x:,g}", *(format(points[x], form) if x in points else "" for points in series.values())) for x in xs]
    _print_table(rows, (xlabel, *(f"{name}: {ylabel}" if len(series) > 1 else ylabel for name in series)))


# Kinds of events differ by hatch as well as by shade.
_HATCHES = {"phase": "", "operation": "//", "wait": ".."}
MOST_ROWS = 24
LONGEST_LINE = 48  # of code, in a table


def timeline(record) -> None:
    """Time across, ranks down: what each rank computed, which operations it called, and where it waited.

    ``record`` is a ``dtlib.Timeline``, or the name of a trace on the ranks: ``lab.pictures.timeline("trace")``. What
    was started with ``async_op=True`` has a lane of its own below the rank's. What never ended is drawn to
    the end with a jagged edge, and the table below says so.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    record = _timeline_of(record)
    scale, unit = (1, "s") if record.end >= 1 else (1e3, "ms")
    # What never ended gets room to be seen.
    right = max(1e-3, record.end * (1.3 if any(event.end is None for event in record.events) else 1.05))
    _, axes = plt.subplots(figsize=(9, 0.7 * len(record.ranks) + 1.2))
    taken = {}  # until when the lane of a rank is taken: an operation in the background may still wait for its turn
    for number, event in enumerate(record.events):
        end = right if event.end is None else event.end
        lane = event.rank, event.lane, event.kind
        begin = max(event.start, taken.get(lane, 0.0)) if event.lane == "background" else event.start
        taken[lane] = max(end, taken.get(lane, 0.0))
        top = record.ranks.index(event.rank) + (0.42 if event.lane == "background" else 0.05)
        style = {
            "facecolor": "white" if event.kind == "wait" else rank_colour(event.rank),
            "alpha": 0.45 if event.kind == "phase" else 1.0,
            "edgecolor": rank_colour(event.rank) if event.kind == "wait" else "white",
            "hatch": _HATCHES[event.kind],
            "zorder": 2 - number / (number + 1),  # who came first is in front
        }
        axes.broken_barh([(event.start * scale, (end - event.start) * scale)], (top, 0.34), **style)
        if event.end is None:
            axes.text(right * scale, top + 0.17, " never ended", va="center", fontsize=8)
        elif end - begin > 0.08 * right:
            middle = (begin + end) / 2 * scale
            label = {"ha": "center", "va": "center", "fontsize": 8, "color": "black"}
            axes.text(middle, top + 0.17, event.name, bbox={"facecolor": "white", "pad": 1, "lw": 0}, **label)
    axes.set(
        xlim=(0, right * scale), ylim=(len(record.ranks), 0), xlabel=f"time in {unit}",
        yticks=[i + 0.4 for i in range(len(record.ranks))], yticklabels=[f"rank {rank}" for rank in record.ranks],
        title="EMULATED network" if record.emulated else "",
    )  # fmt: skip
    kinds = {"phase": "computes", "operation": "operation", "wait": "waits for an asynchronous operation"}
    shown = [kind for kind in kinds if any(event.kind == kind for event in record.events)]
    patches = [Patch(facecolor="white", edgecolor="black", hatch=_HATCHES[kind], label=kinds[kind]) for kind in shown]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, -0.25), ncols=3, frameon=False, fontsize=8)
    plt.show()
    if record.emulated:
        print("The network was slowed down on purpose: EMULATED.")
    _print_table(*(_every_event(record) if len(record.events) <= MOST_ROWS else _sums_of_events(record)))


def _timeline_of(record):
    from dtlib.lab.engines.names import values
    from dtlib.measure.trace import Timeline

    return Timeline(values(record)) if isinstance(record, str) else record


def _every_event(record):
    rows = [
        (
            event.rank, _in_short(event), event.where[:LONGEST_LINE],
            f"{1e3 * event.start:.2f}", "never" if event.end is None else f"{1e3 * event.end:.2f}",
            event.messages, f"{event.bytes:,}",
        )
        for event in record.events
    ]  # fmt: skip
    return rows, ("rank", "what", "line", "from (ms)", "to (ms)", "messages", "bytes sent")


def _in_short(event) -> str:
    """The operation without shape and type: a table has to fit on a page."""
    return f"waits for {event.in_short}" if event.kind == "wait" else event.in_short


def _sums_of_events(record):
    sums = {}
    for event in record.events:
        entry = sums.setdefault((event.rank, event.kind, event.name), [0, 0.0, 0, 0])
        took = (event.end or record.end) - event.start
        for i, value in enumerate((1, took, event.messages, event.bytes)):
            entry[i] += value
    rows = [
        (rank, f"waits for {name}" if kind == "wait" else name, count, f"{1e3 * took:.2f}", messages, f"{sent:,}")
        for (rank, kind, name), (count, took, messages, sent) in sorted(sums.items())
    ]
    return rows, ("rank", "what", "times", "together (ms)", "messages", "bytes sent")


def _print_table(rows, headers) -> None:
    """The same as text, for whoever does not see the picture."""
    from tabulate import tabulate

    print(tabulate(rows, headers, disable_numparse=True, stralign="right"))
