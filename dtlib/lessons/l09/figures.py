"""The figures of lesson 09, each with a text equivalent."""

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table

_HATCHES = ("", "//", "\\\\", "xx")


@shown
def utilisation(found: dict, title: str = ""):
    """Draw accelerator utilisation (AU) as grouped bars.

    ``found`` maps (group, bar) to ``Utilisation``.
    """
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
