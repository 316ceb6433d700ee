"""The figures of lesson 11, each with a text equivalent; measurements are solid, models dashed and hollow."""

import json
from pathlib import Path
from statistics import median

from dtlib.lab.colours import RANK_COLOURS, ink, rank_colour
from dtlib.lab.drawing import MARKERS, shown, subplots
from dtlib.lab.tables import Table

# From an A100 (2020) to a B200 (2024), as NVIDIA's data sheets have them: HBM 2.0, 3.35 (H100), 4.8 (H200) and 8 TB/s;
# NVLink 600, 900 and 1,800 GB/s, both directions together; PCIe 4 and 5, 16 lanes, one direction. Networks to 800 Gb/s.
LINKS = (
    ("memory of an accelerator", "2,000 to 8,000 GB/s"),
    ("accelerators of one machine (NVLink), both ways", "600 to 1,800 GB/s"),
    ("accelerator and host (PCIe), one way", "32 to 64 GB/s"),
    ("machine and machine (InfiniBand, Ethernet)", "1 to 100 GB/s per link"),
)


@shown
def machine():
    """Draw two machines of four accelerators with their links; thicker links have more bandwidth."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import FancyBboxPatch

    figure, axes = subplots(height=3.9)
    box = {"boxstyle": "round,pad=0.02,rounding_size=0.12", "lw": 1.5}
    for node, left in enumerate((0, 6.4)):
        axes.add_patch(FancyBboxPatch((left, 0), 5.2, 4.3, fc="0.96", ec="0.5", **box))
        axes.text(left + 2.6, 4.05, f"machine {node}", ha="center", va="center", weight="bold")
        axes.text(left + 2.6, 3.5, "NVLink: 600 to 1,800 GB/s", ha="center", va="center")
        axes.text(left + 2.6, 1.73, "PCIe: 32 to 64 GB/s", ha="center", va="center", bbox={"fc": "0.96", "ec": "none"})
        for number in range(4):
            rank, x = 4 * node + number, left + 0.25 + 1.25 * number
            axes.add_patch(FancyBboxPatch((x, 2.2), 0.9, 1.0, fc=rank_colour(rank), ec="white", zorder=3, **box))
            colour = ink(*to_rgb(rank_colour(rank)))
            axes.text(x + 0.45, 2.7, f"{rank}", ha="center", va="center", color=colour, weight="bold", zorder=4)
            axes.plot([x + 0.45, x + 0.45], [1.3, 2.2], color="0.45", lw=2.5, zorder=1)
            if number:
                axes.plot([x - 0.35, x], [2.7, 2.7], color="0.1", lw=9, zorder=2, solid_capstyle="butt")
        axes.add_patch(FancyBboxPatch((left + 0.25, 0.4), 4.65, 0.85, fc="white", ec="0.4", **box))
        axes.text(left + 2.6, 0.83, "host: cores, memory, disk", ha="center", va="center")
    axes.plot([5.2, 6.4], [0.83, 0.83], color="0.45", lw=1.2)
    axes.text(5.8, 1.05, "network: 1 to 100 GB/s", ha="center", va="bottom", rotation=90)
    axes.set(xlim=(-0.15, 11.75), ylim=(-0.15, 4.5), aspect="equal")
    axes.axis("off")
    alt = "Two machines of four accelerators: thick wires inside a machine, thin ones to its host and beyond."
    return figure, alt, Table(LINKS, ("between", "bytes per second (orders of magnitude)"))


def gpu_job() -> str:
    """Return a commented batch script for two machines of four GPUs."""
    return Path(__file__).with_name("gpu_job.sh").read_text(encoding="utf-8")


def slow_network() -> dict[str, dict[str, tuple]]:
    """Return seconds on two distant hosts, by operation and method, with intervals of ratios.

    The ratio is to the first method. Measured by benchmarks/slow_network.py.
    """
    from dtlib.lab import course

    found = {}
    for row in json.loads((course.folder() / "data" / "slow_network.json").read_text()):
        what, how = row["case"].split(": ")
        first = found.setdefault(what, {row["peer"]: (row["peer_seconds"], 1.0, 1.0)})
        first[how] = row["ours_seconds"], row["low"], row["high"]
    return found


def milliseconds_of(measured: dict, what: str) -> tuple[list, tuple]:
    """Return rows and headers of a table of methods (rows) and operations (columns).

    ``what`` is the beginning of the operations' names. In brackets is the interval of the ratio to the first method.
    """
    columns = [name for name in measured if name.startswith(what)]
    peer, rows = next(iter(measured[columns[0]])), []
    for how in measured[columns[0]]:
        cells = [measured[name][how] for name in columns]
        rows.append((how, *(f"{1e3 * took:.0f} [{low:.2f}-{high:.2f}]" for took, low, high in cells)))
    return rows, ("", *(f"{name}: ms [ratio to {peer}]" for name in columns))


@shown
def scaling(strong: dict, weak: dict, cores: int):
    """Draw the efficiency of strong and of weak scaling, as medians of paired runs with their range.

    Both arguments map ranks to seconds of runs.
    """
    found = {
        "strong: the same work": {n: _ratios(strong, n, 1 / n) for n in strong},
        "weak: as much work per rank": {n: _ratios(weak, n, 1) for n in weak},
    }
    figure, axes = subplots(height=4)
    for number, (name, points) in enumerate(found.items()):
        middle = [100 * median(some) for some in points.values()]
        ranges = [[100 * abs(end(some) - median(some)) for some in points.values()] for end in (min, max)]
        shifted = [n + 0.04 * (2 * number - 1) for n in points]
        axes.errorbar(
            shifted, middle, ranges, color=RANK_COLOURS[number], marker=MARKERS[number], capsize=4, label=name
        )
    axes.axvline(cores, color="grey", linestyle=":", label=f"{cores} cores")
    axes.set(xlabel="ranks", ylabel="efficiency in %", xticks=list(strong))
    axes.set_ylim(0, max(115, axes.get_ylim()[1]))
    axes.legend()
    rows = []
    for n in strong:
        cells = [
            (f"{median(runs[n]):.3f}", _in_percent(points[n]))
            for runs, points in zip((strong, weak), found.values(), strict=True)
        ]
        rows.append((n, *cells[0], *cells[1]))
    alt = f"Efficiency against ranks, for strong and for weak scaling, on a computer with {cores} cores."
    return figure, alt, Table(rows, ("ranks", "strong: seconds", "efficiency", "weak: seconds", "efficiency"))


def _ratios(runs: dict[int, list[float]], n: int, ideal: float) -> list[float]:
    """Return ideal over measured seconds, run by run."""
    return [ideal * alone / took for alone, took in zip(runs[1], runs[n], strict=True)]


def _in_percent(some: list[float]) -> str:
    return f"{median(some):.0%} [{min(some):.0%}-{max(some):.0%}]"


@shown
def beyond(measured: dict, model, most: int, title: str):
    """Draw speed-up: measured (``measured`` maps ranks to seconds), and by ``model(ranks)`` up to ``most`` ranks."""
    gains = {n: measured[1] / seconds for n, seconds in measured.items()}
    powers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    figure, axes = subplots(height=4)
    axes.plot(powers, powers, color="grey", linestyle=":", label="ideal: N times on N ranks")
    _modelled(axes, powers, [model(n) for n in powers], 1, "model")
    axes.plot(list(gains), list(gains.values()), color=RANK_COLOURS[0], marker="o", markersize=8, label="measured")
    _powers_of_two(axes, powers)
    axes.set(yscale="log", xlabel="ranks", ylabel="speed-up", title=title, ylim=(0.8, 1.5 * max(model(most), 4)))
    _plain_numbers(axes)
    axes.legend()
    rows = [(n, f"{gains[n]:.2f}" if n in gains else "", f"{model(n):.2f}") for n in sorted({*powers, *gains})]
    alt = f"{title}: speed-up against ranks, measured on {', '.join(map(str, gains))}, and a dashed line of the model."
    return figure, alt, Table(rows, ("ranks", "measured", "model"), title)


@shown
def modelled(series: dict, ylabel: str, title: str, form: str = ".0%", log: bool = False):
    """Draw curves of models only, dashed and hollow; ``series`` maps a name to a dict of ranks and values."""
    powers = list(next(iter(series.values())))
    figure, axes = subplots(height=4)
    for number, (name, points) in enumerate(series.items()):
        _modelled(axes, powers, list(points.values()), number, f"{name} (model)")
    _powers_of_two(axes, powers)
    axes.set(xlabel="ranks", ylabel=ylabel, title=title, yscale="log" if log else "linear")
    if log:
        _plain_numbers(axes)
    else:
        axes.set_ylim(0, None)
    axes.legend()
    rows = [(n, *(format(points[n], form) for points in series.values())) for n in powers]
    alt = f"{title}: {ylabel} against ranks, by a model, one dashed line for each of {', '.join(series)}."
    return figure, alt, Table(rows, ("ranks", *series), title)


def _plain_numbers(axes) -> None:
    """Label a logarithmic axis with 1, 2, 5 and 10 instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _modelled(axes, xs, ys, number: int, name: str) -> None:
    style = {"color": RANK_COLOURS[number], "marker": MARKERS[number], "linestyle": "--", "markerfacecolor": "white"}
    axes.plot(xs, ys, label=name, **style)


def _powers_of_two(axes, powers) -> None:
    labelled = powers[:: 1 + len(powers) // 7]
    axes.set_xscale("log", base=2)
    axes.set_xticks(labelled, [f"{n:,}" for n in labelled])
