"""The figures of lesson 13, each with a text equivalent."""

import math

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.drawing import shown, subplots
from dtlib.lab.tables import Table
from dtlib.lessons.l05 import intervals
from dtlib.lessons.l13 import race

# A method has the same colour with and without feedback.
STYLES = {
    "DDP": (0, "-"), "8 bits": (1, "-"), "top 1 %": (2, "-"), "top 1 %, no feedback": (2, ":"), "PowerSGD": (3, "-"),
    "PowerSGD, no feedback": (3, ":"), "local SGD, H = 8": (4, "-"), "DiLoCo, H = 8": (5, "-"),
}  # fmt: skip


def of_loss(losses) -> tuple[float, float, float]:
    """Return the geometric mean over seeds, with its interval."""
    return tuple(math.exp(value) for value in intervals.mean([math.log(max(loss, 1e-9)) for loss in losses]))


def against_ddp(results: dict, name: str) -> tuple[float, float, float] | None:
    """Return bytes relative to DDP on paired seeds, as mean and interval.

    None if a seed did not reach the target loss.
    """
    pairs = list(zip(results[name].until(), results["DDP"].until(), strict=True))
    if any(math.isinf(value) for pair in pairs for value in pair):
        return None
    ends = intervals.difference(*([math.log(value) for value in each] for each in zip(*pairs, strict=True)))
    return tuple(math.exp(end) for end in ends)


@shown
def losses(results: dict):
    """Draw loss against kB on the wire, both logarithmic: one line per method, with its interval as a band."""
    figure, axes = subplots(height=5.2)
    rows = []
    for name, (number, line) in STYLES.items():
        result, colour = results[name], RANK_COLOURS[number]
        points = [(kb, *of_loss(row)) for kb, row in zip(result.kilobytes, result.losses, strict=True) if kb]
        kilobytes, means, lows, highs = zip(*points, strict=True)
        axes.plot(kilobytes, means, color=colour, linestyle=line, linewidth=2, label=name)
        axes.fill_between(kilobytes, lows, highs, color=colour, alpha=0.2, lw=0)
        rows.append((name, f"{kilobytes[-1]:,.0f}", f"{means[-1]:.3f}", f"{lows[-1]:.3f} to {highs[-1]:.3f}"))
    axes.axhline(race.TARGET, color="grey", linestyle="--", linewidth=1, label=f"the race: {race.TARGET}")
    axes.set(xscale="log", yscale="log", xlabel="kB that a rank has sent", ylabel="training loss")
    axes.set_xticks([30, 100, 300, 1000, 3000, 10000], ["30", "100", "300", "1,000", "3,000", "10,000"])
    axes.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    axes.minorticks_off()
    axes.legend(loc="lower left", ncols=2)
    alt = (
        "Training loss against kB on the wire, one line with a band for each method; dashed: the loss of "
        f"{race.TARGET} that decides the race."
    )
    return figure, alt, Table(rows, ("method", "kB in total", "last loss", "interval"), align="lrrr")


@shown
def bytes_needed(results: dict):
    """Draw kB until the target loss, relative to DDP, with intervals.

    Methods that did not always reach the loss have no mark.
    """
    figure, axes = subplots(height=4)
    names = [name for name in STYLES if name != "DDP"]
    axes.axvline(1, color="grey", linestyle="--", linewidth=1)
    for place, name in enumerate(reversed(names)):
        found, colour = against_ddp(results, name), RANK_COLOURS[STYLES[name][0]]
        if found is None:
            there = sum(kb < math.inf for kb in results[name].until())
            axes.text(0.95, place, f"{there} of {len(race.SEEDS)} seeds reached it", va="center", ha="right")
            continue
        middle, low, high = found
        off = [[middle - low], [high - middle]]
        axes.errorbar(middle, place, xerr=off, color=colour, marker="o", markersize=8, capsize=4)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set(xscale="log", xlabel="bytes relative to DDP (left: fewer)", xlim=(0.03, 3))
    axes.set_xticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1", "3"])
    axes.minorticks_off()
    alt = "Bytes until the loss relative to DDP, on paired seeds, with intervals."
    return figure, alt, table(results)


def table(results: dict) -> Table:
    """Return a table of the results of each method."""
    rows = []
    for name in STYLES:
        result, found = results[name], against_ddp(results, name)
        reached = [kb for kb in result.until() if kb < math.inf]
        ratio = "-" if found is None else f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"
        mean = f"{sum(reached) / len(reached):,.0f}" if reached else "-"
        rows.append((name, f"{result.rate:g}", len(reached), mean, ratio))
    return Table(rows, ("method", "rate", "seeds that reached it", "kB", "relative to DDP (interval)"), align="lrrrr")
