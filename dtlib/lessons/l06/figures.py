"""The figures of lesson 06, each with a text equivalent, and a recorder of stage 3's units."""

import time

from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table
from dtlib.theory.zero import SCHEMES

STAGES = ("data parallelism", "stage 1", "stage 2", "stage 3")
# Kind of memory -> (lines of dtlib.memory() that are added, colour, hatch).
KINDS = {
    "parameters": (("parameters",), RANK_COLOURS[0], ""),
    "gradients": (("gradients",), RANK_COLOURS[5], "//"),
    "optimizer": (("master_weights", "optimizer_states"), RANK_COLOURS[2], "\\\\"),
    "other tensors": ((), "0.8", ""),  # the rest of the peak
}


@shown
def shards(ranks: int = 4):
    """Draw which states each rank stores in each stage; a filled box is as wide as its bytes per parameter."""
    scheme = SCHEMES["mixed_adam"]
    widths = {"parameters": scheme.parameters, "gradients": scheme.gradients, "optimizer": scheme.optimizer}
    figure, panels = subplots(1, len(STAGES), height=0.42 * ranks + 1.2, sharey=True)
    rows = []
    for stage, (name, axes) in enumerate(zip(STAGES, panels, strict=True)):
        sharded = dict(zip(widths, (stage >= 3, stage >= 2, stage >= 1), strict=True))
        for rank in range(ranks):
            left = 0
            for kind, width in widths.items():
                start, held = (left + rank * width / ranks, width / ranks) if sharded[kind] else (left, width)
                _, colour, hatch = KINDS[kind]
                style = {"height": 0.7, "align": "center"}
                axes.barh(rank, held, left=start, color=colour, hatch=hatch, edgecolor="white", lw=0, **style)
                axes.barh(rank, width, left=left, fill=False, edgecolor="grey", lw=0.8, **style)
                left += width + 0.4
        axes.set(title=name, ylim=(ranks - 0.5, -0.5), xticks=[], yticks=range(ranks))
        axes.set_yticklabels([f"rank {rank}" for rank in range(ranks)])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        cells = [f"{width} / {ranks}" if sharded[kind] else f"{width}" for kind, width in widths.items()]
        rows.append((name, *cells))
    _legend(figure, list(widths))
    alt = f"What each of {ranks} ranks keeps at each stage: the filled part of a bar is on the rank."
    title = f"Bytes per parameter on each of {ranks} ranks"
    return figure, alt, Table(rows, ("", *widths), title, align="lrrr")


@shown
def bars(groups: dict, unit: str = "bytes", published: dict | None = None, title: str = ""):
    """Draw the model states of one rank as a stacked bar for each stage.

    ``groups`` maps a stage to lines as of ``dtlib.memory()`` or ``zero_bytes``. If they have a ``peak``, the bar ends
    there, and memory other than states is pale. The total is above the bar. ``published`` maps a stage to a published
    total, drawn as a black line.
    """
    figure, axes = subplots(height=4.2)
    rows = []
    for at, (stage, lines) in enumerate(groups.items()):
        counts = [sum(lines.get(line, 0) for line in kind) for kind, *_ in KINDS.values()]
        counts[-1] = max(0, lines.get("peak", 0) - sum(counts[:-1]))
        for number, (_, colour, hatch) in enumerate(KINDS.values()):
            style = {"color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0}
            bar = axes.bar(at, counts[number], 0.6, sum(counts[:number]), **style)
        cells = [_in_unit(count, unit) for count in (*counts, sum(counts))]
        axes.bar_label(bar, [f"{cells[-1]} {unit}"], padding=2)
        rows.append((stage, *cells))
        if published:
            axes.plot([at - 0.45, at + 0.45], [published[stage]] * 2, color="black", lw=1.5)
            rows.append(("published", *[""] * len(KINDS), _in_unit(published[stage], unit)))
    axes.set(ylabel=unit, title=title)
    axes.set_ylim(0, 1.12 * axes.dataLim.y1)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(range(len(groups)), list(groups))
    drawn = list(KINDS)[: 4 if "peak" in lines else 3]
    _legend(figure, drawn, "published" if published else None)
    alt = f"{title or 'Model states'}: stacked bars of {', '.join(drawn)} for {', '.join(groups)}."
    return figure, alt, Table(rows, ("", *KINDS, f"total ({unit})"), title, align="l" + "r" * (len(KINDS) + 1))


def _in_unit(value: float, unit: str) -> str:
    return f"{value:,}" if unit == "bytes" else f"{value:.1f}"


def _legend(figure, kinds, mark: str | None = None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=KINDS[k][1], hatch=KINDS[k][2], edgecolor="white", lw=0, label=k) for k in kinds]
    if mark:
        handles.append(Line2D([], [], color="black", label=mark))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def watch(model) -> list:
    """Return a list to which a model of ``fully_shard`` appends events.

    An event is ("gathered" or "freed", name of the unit, seconds).
    """
    from dtlib.parallel.zero.sharded.unit import unit_of

    events = []
    for name, module in model.named_modules():
        for flat in getattr(unit_of(module), "flats", ()):
            _watch(flat, name, events)
    note(events, "forward")
    return events


def note(events: list, what: str, name: str = "") -> None:
    """Append an event: "forward", "backward" or "end" of a step, or an event of a unit."""
    events.append((what, name, time.perf_counter()))


def _watch(flat, name: str, events: list) -> None:
    make_room, free = flat.make_room, flat.free

    def make_room_and_tell():
        note(events, "gathered", name)
        make_room()

    def free_and_tell():
        if not flat.is_free():
            note(events, "freed", name)
        free()

    flat.make_room, flat.free = make_room_and_tell, free_and_tell


@shown
def units(events: list, elements: dict, itemsize: int, ranks: int, rank: int = 0):
    """Draw the bytes of parameters on a rank during a step: its shards, and whole units above them.

    ``events`` is from ``watch``; ``elements`` maps the name of a unit to its number of parameters of ``itemsize``
    bytes.
    """
    shards = sum(elements.values()) * itemsize // ranks
    whole, times, alive, rows = [], [], [], []
    figure, axes = subplots(height=3.6)
    for what, name, seconds in events:
        whole = {"gathered": [*whole, name], "freed": [one for one in whole if one != name]}.get(what, whole)
        times.append(1e3 * (seconds - events[0][2]))
        alive.append(shards + sum(elements[one] for one in whole) * itemsize)
        if what == "gathered":
            axes.annotate(f"unit {name}", (times[-1], alive[-1]), (2, 3), textcoords="offset points")
        elif what in ("forward", "backward"):
            axes.axvline(times[-1], color="black", linestyle="--")
            axes.annotate(f"  {what}", (times[-1], 0.97), xycoords=("data", "axes fraction"), va="top")
        rows.append((f"{what} {name}".strip(), ", ".join(whole) or "none", alive[-1]))
    everything = sum(elements.values()) * itemsize
    axes.fill_between(times, alive, step="post", color=rank_colour(rank), alpha=0.45, lw=0)
    axes.fill_between(times, [shards] * len(times), color=rank_colour(rank), lw=0, label="shards")
    axes.axhline(everything, color="grey", linestyle=":", label="the full model")
    axes.set(xlabel="milliseconds", ylabel="bytes of parameters", xlim=(0, times[-1]), ylim=(0, 1.35 * everything))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    alt = f"Live bytes of parameters on rank {rank} during a step: its shards, and above them gathered units."
    return figure, alt, Table(rows, ("", "gathered units", f"live bytes on rank {rank}"), align="llr")
