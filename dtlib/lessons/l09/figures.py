"""The figures of lesson 09, each with its text."""

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.drawing import MARKERS, shown, subplots
from dtlib.lab.tables import Table

_HATCHES = ("", "//", "\\\\", "xx")


@shown
def utilisation(found: dict, title: str = ""):
    """AU as bars: a group for each first name, a bar for each second; ``found`` maps both names to ``Utilisation``."""
    groups = list(dict.fromkeys(group for group, _ in found))
    bars = list(dict.fromkeys(bar for _, bar in found))
    width = 0.8 / len(bars)
    figure, axes = subplots(height=3.8)
    for number, bar in enumerate(bars):
        places = [at + (number - (len(bars) - 1) / 2) * width for at in range(len(groups))]
        heights = [100 * found[group, bar].au if (group, bar) in found else 0 for group in groups]
        style = {"color": RANK_COLOURS[number], "hatch": _HATCHES[number], "edgecolor": "white"}
        axes.bar(places, heights, width, label=bar, **style)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("utilisation of the accelerator in %")
    axes.set(ylim=(0, 105))
    axes.set_title(title)
    axes.legend(fontsize=12, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    rows = [
        (group, bar, f"{used.au:.0%}", f"{used.samples_a_second:,.0f}", f"{used.counters.get('bytes', 0):,}")
        for (group, bar), used in found.items()
    ]
    alt = f"{title or 'Utilisation of the accelerator'}: bars of {', '.join(bars)} for {', '.join(groups)}."
    return figure, alt, Table(rows, ("", "", "AU", "samples/s", "bytes read"), title)


@shown
def against_ranks(measured: dict, modelled: dict):
    """AU against ranks: measured, solid and filled; MODELLED, dashed and hollow. Both map ranks to a fraction."""
    figure, axes = subplots(height=3.8)
    style = {"color": RANK_COLOURS[0], "marker": MARKERS[0], "markersize": 8}
    axes.plot(list(measured), [100 * au for au in measured.values()], label="measured", **style)
    style = {"color": RANK_COLOURS[1], "marker": MARKERS[1], "markersize": 8, "mfc": "white"}
    axes.plot(list(modelled), [100 * au for au in modelled.values()], "--", label="MODELLED", **style)
    ranks = sorted({*measured, *modelled})
    axes.set(xscale="log", ylim=(0, 105))
    axes.minorticks_off()
    axes.set_xticks(ranks, [f"{count}" for count in ranks])
    axes.set_xlabel("ranks that share the storage")
    axes.set_ylabel("utilisation in %")
    axes.legend()
    rows = [
        (n, f"{measured[n]:.0%}" if n in measured else "", f"{modelled[n]:.0%}" if n in modelled else "") for n in ranks
    ]
    alt = "Utilisation against ranks that share the storage: measured on a few, MODELLED beyond."
    return figure, alt, Table(rows, ("ranks", "measured", "MODELLED"))
