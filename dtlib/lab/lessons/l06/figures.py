"""The figures of lesson 06, each with its text, and who watches the units of stage 3."""

from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table
from dtlib.theory.zero import SCHEMES

STAGES = ("data parallelism", "stage 1", "stage 2", "stage 3")
# What memory is for: the lines of dtlib.memory() that it adds up, and how it is drawn.
KINDS = {
    "parameters": (("parameters",), RANK_COLOURS[0], ""),
    "gradients": (("gradients",), RANK_COLOURS[5], "//"),
    "optimizer": (("master_weights", "optimizer_states"), RANK_COLOURS[2], ".."),
    "padding, counters": (("padding", "step_counters"), RANK_COLOURS[6], ""),
}


@shown
def shards(ranks: int = 4):
    """Who keeps what: at each stage, a row a rank; what it keeps is filled, as wide as its bytes a parameter."""
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
        together = sum(width / ranks if sharded[kind] else width for kind, width in widths.items())
        rows.append((name, *cells, f"{together:g}"))
    _legend(figure, list(widths))
    alt = f"What each of {ranks} ranks keeps at each stage: filled where it keeps a slice, or all of it."
    title = f"Bytes a parameter on each of {ranks} ranks"
    return figure, alt, Table(rows, ("", *widths, "together"), title, align="lrrrr")


@shown
def bars(groups: dict, unit: str = "bytes", published: dict | None = None, title: str = ""):
    """Stacked bars of model states on one rank, several side by side for each stage.

    ``groups`` maps a stage to its bars, and a bar's name to lines as of ``dtlib.memory()`` or ``zero_bytes``; the
    second bar of each stage is paler. Padding and counters are too few to be seen: they are in the table.
    ``published`` maps a stage to a total, drawn as a black line.
    """
    figure, axes = subplots(height=4.6)
    names = list(next(iter(groups.values())))
    width, rows = 0.8 / len(names), []
    for at, (stage, stacks) in enumerate(groups.items()):
        for number, name in enumerate(names):
            place, bottom, row = at + (number - (len(names) - 1) / 2) * width, 0, []
            for lines, colour, hatch in KINDS.values():
                height = sum(stacks[name].get(line, 0) for line in lines)
                style = {"color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0, "alpha": 0.55 if number else 1}
                axes.bar(place, height, 0.9 * width, bottom, **style)
                bottom, row = bottom + height, [*row, height]
            axes.text(place, bottom, f" {name}", rotation=90, ha="center", va="bottom")
            rows.append([stage if not number else "", name, *(_in_unit(h, unit) for h in [*row, bottom])])
        if published:
            axes.plot([at - 0.45, at + 0.45], [published[stage]] * 2, color="black", lw=1.5)
            rows.append(["", "published", *[""] * len(KINDS), _in_unit(published[stage], unit)])
    axes.set(ylabel=unit, title=title, ylim=(0, 1.2 * axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(range(len(groups)), list(groups))
    _legend(figure, list(KINDS)[:3], "published" if published else None)
    alt = f"{title or 'Model states'}: stacked bars of {', '.join(list(KINDS)[:3])} for {', '.join(groups)}."
    return figure, alt, Table(rows, ("", "", *KINDS, f"together ({unit})"), title, align="ll" + "r" * (len(KINDS) + 1))


def _in_unit(value: float, unit: str) -> str:
    return f"{value:,}" if unit == "bytes" else f"{value:.2f}"


def _legend(figure, kinds, mark: str | None = None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=KINDS[k][1], hatch=KINDS[k][2], edgecolor="white", lw=0, label=k) for k in kinds]
    if mark:
        handles.append(Line2D([], [], color="black", label=mark))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def watch(model) -> list:
    """A list that fills while a model of ``fully_shard`` computes: ("gathered" or "freed", name of the unit)."""
    from dtlib.parallel.zero.sharded.places import unit_of

    events = []
    for name, module in model.named_modules():
        for flat in getattr(unit_of(module), "flats", ()):
            _watch(flat, name, events)
    return events


def _watch(flat, name: str, events: list) -> None:
    make_room, free = flat.make_room, flat.free

    def make_room_and_tell():
        events.append(("gathered", name))
        make_room()

    def free_and_tell():
        if not flat.is_free():
            events.append(("freed", name))
        free()

    flat.make_room, flat.free = make_room_and_tell, free_and_tell


@shown
def units(events: list, elements: dict, rank: int = 0):
    """When each unit was whole: units down, what happened across, in its order.

    ``events`` comes from ``watch``, with ("backward", "") where the backward pass begins; ``elements`` maps a unit's
    name to how many parameters it has.
    """
    names, whole, rows = list(elements), {}, []
    figure, axes = subplots(height=0.5 * len(names) + 1.3)
    for at, (what, name) in enumerate(events):
        if what == "gathered":
            whole[name] = at
        elif what == "freed":
            begun = whole.pop(name)
            axes.barh(names.index(name), at - begun, left=begun + 0.5, height=0.6, color=rank_colour(rank))
        else:
            axes.axvline(at + 0.5, color="black", linestyle="--")
            axes.text(at + 0.6, -0.55, "backward", va="bottom")
            axes.text(at + 0.4, -0.55, "forward", va="bottom", ha="right")
        rows.append((at + 1, f"{what} {name}", ", ".join(whole) or "none", f"{sum(map(elements.get, whole)):,}"))
    last = len(events)
    axes.set(xlabel="gathered and freed, in this order", xlim=(0.2, last + 0.8), xticks=range(1, last + 1))
    axes.set(ylim=(len(names) - 0.5, -0.55), yticks=range(len(names)), yticklabels=[f"unit {name}" for name in names])
    alt = f"When each of the units {', '.join(names)} was whole on rank {rank}, in the order of gathering and freeing."
    return figure, alt, Table(rows, ("", f"what, on rank {rank}", "whole then", "parameters whole"))
