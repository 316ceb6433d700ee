"""The figures of lesson 09, each with its text."""

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.pictures import _MARKERS, _print_table

_HATCHES = ("", "//", "..", "xx")


def utilisation(found: dict, title: str = "") -> None:
    """AU as bars: a group for each first name, a bar for each second; ``found`` maps both names to ``Utilisation``."""
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys(group for group, _ in found))
    bars = list(dict.fromkeys(bar for _, bar in found))
    width = 0.8 / len(bars)
    _, axes = plt.subplots(figsize=(7.5, 3.8))
    for number, bar in enumerate(bars):
        places = [at + (number - (len(bars) - 1) / 2) * width for at in range(len(groups))]
        heights = [100 * found[group, bar].au if (group, bar) in found else 0 for group in groups]
        style = {"color": RANK_COLOURS[number], "hatch": _HATCHES[number], "edgecolor": "white"}
        axes.bar(places, heights, width, label=bar, **style)
    axes.set_xticks(range(len(groups)), groups, fontsize=12)
    axes.set_ylabel("utilisation of the accelerator in %", fontsize=12)
    axes.set(ylim=(0, 105))
    axes.set_title(title, fontsize=12)
    axes.legend(fontsize=12, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    plt.show()
    rows = [
        (group, bar, f"{used.au:.0%}", f"{used.samples_a_second:,.0f}", f"{used.counters.get('bytes', 0):,}")
        for (group, bar), used in found.items()
    ]
    print(title)
    _print_table(rows, ("", "", "AU", "samples/s", "bytes read"))


def against_ranks(measured: dict, modelled: dict) -> None:
    """AU against ranks: measured, solid and filled; MODELLED, dashed and hollow. Both map ranks to a fraction."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 3.8))
    style = {"color": RANK_COLOURS[0], "marker": _MARKERS[0], "markersize": 8}
    axes.plot(list(measured), [100 * au for au in measured.values()], label="measured", **style)
    style = {"color": RANK_COLOURS[1], "marker": _MARKERS[1], "markersize": 8, "mfc": "white"}
    axes.plot(list(modelled), [100 * au for au in modelled.values()], "--", label="MODELLED", **style)
    ranks = sorted({*measured, *modelled})
    axes.set(xscale="log", ylim=(0, 105))
    axes.minorticks_off()
    axes.set_xticks(ranks, [f"{count}" for count in ranks])
    axes.set_xlabel("ranks that share the storage", fontsize=12)
    axes.set_ylabel("utilisation in %", fontsize=12)
    axes.legend(fontsize=12)
    plt.show()
    rows = [
        (n, f"{measured[n]:.0%}" if n in measured else "", f"{modelled[n]:.0%}" if n in modelled else "") for n in ranks
    ]
    _print_table(rows, ("ranks", "measured", "MODELLED"))
