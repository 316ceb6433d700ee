"""The figures of lesson 05, each with a text equivalent."""

from dtlib.lab.colours import RANK_COLOURS
from dtlib.lab.drawing import MARKERS, shown, subplots
from dtlib.lab.tables import Table
from dtlib.lessons.l05 import intervals

# The order in all figures, because results of ranks have lost the order of their names.
RULES = ("no scaling", "square root", "linear", "linear, warm-up")
_LINES = (":", "-.", "-", "--")


@shown
def rates(schedules: dict):
    """Draw learning rate against step; ``schedules`` maps each of ``RULES`` to one rate per step."""
    figure, axes = subplots(height=4)
    rows = []
    for number, name in enumerate(RULES):
        series = [float(rate) for rate in schedules[name]]
        style = {"color": RANK_COLOURS[number], "linestyle": _LINES[number % len(_LINES)], "linewidth": 2}
        axes.plot(series, label=name, **style)
        rows.append((name, f"{series[0]:.3f}", f"{series[len(series) // 4]:.3f}", f"{series[-1]:.3f}"))
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    axes.legend(loc="center right")
    alt = f"Learning rate against step, one line for each rule: {', '.join(RULES)}."
    return figure, alt, Table(rows, ("rule", "first step", "after a quarter", "last step"))


@shown
def errors(runs: dict, base_batch: int):
    """Draw test error against batch for each rule: means with intervals, and a dot per seed.

    ``runs`` maps (batch, rule) to errors in %, one per seed. The result at ``base_batch`` is a grey band.
    """
    batches = sorted({batch for batch, _ in runs} - {base_batch})
    base, low, high = intervals.mean(next(v for (batch, _), v in runs.items() if batch == base_batch))
    rows = [(f"{base_batch} (1)", "any", f"{base:.1f}", f"{low:.1f} to {high:.1f}")]
    figure, axes = subplots(height=4.8)
    axes.axhspan(low, high, color="grey", alpha=0.4, lw=0, label=f"batch {base_batch}")
    for number, name in enumerate(RULES):
        places = [batch * 1.015 ** (number - (len(RULES) - 1) / 2) for batch in batches]  # so that marks do not overlap
        means, lows, highs = zip(*(intervals.mean(runs[batch, name]) for batch in batches), strict=True)
        colour, mark = RANK_COLOURS[number], MARKERS[number]
        seeds = [runs[batch, name] for batch in batches]
        axes.plot(places, seeds, ".", color=colour, alpha=0.25, markersize=6, markeredgewidth=0)
        off = [[abs(m - end) for m, end in zip(means, ends, strict=True)] for ends in (lows, highs)]
        style = {"color": colour, "marker": mark, "linestyle": _LINES[number], "capsize": 3, "markersize": 6}
        axes.errorbar(places, means, off, label=name, **style)
    for batch in batches:
        for name in RULES:
            middle, low, high = intervals.mean(runs[batch, name])
            first = f"{batch} ({batch // base_batch})" if name == RULES[0] else ""
            rows.append((first, name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}"))
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="test error in %", ylim=(1, 110))
    axes.set_yticks([2, 3, 5, 10, 20, 50, 100], ["2", "3", "5", "10", "20", "50", "100"])
    axes.set_xticks(batches, [f"{batch}\nk = {batch // base_batch}" for batch in batches])
    axes.minorticks_off()
    axes.legend(loc="upper left")
    alt = f"Test error against batch, one line for each rule, and a grey band: the error of batch {base_batch}."
    return figure, alt, Table(rows, ("batch (k)", "rule", "test error (%)", "interval of the mean"), align="llrr")


@shown
def failures(counts: dict):
    """Draw failure rates with their intervals; ``counts`` maps (batch, rule) to (failures, runs)."""
    names = [rule for rule in RULES if any(rule == other for _, other in counts)]
    batches = list(dict.fromkeys(batch for batch, _ in counts))
    figure, axes = subplots(height=4)
    rows = []
    for batch in batches:
        for number, name in enumerate(names):
            fraction, low, high = (100 * value for value in intervals.rate(*counts[batch, name]))
            rows.append((batch, name, "{} of {}".format(*counts[batch, name]), f"{low:.0f} to {high:.0f}"))
            place = batches.index(batch) + 0.16 * (number - (len(names) - 1) / 2)
            at = RULES.index(name)
            style = {"color": RANK_COLOURS[at], "marker": MARKERS[at], "capsize": 4, "markersize": 7}
            axes.errorbar(
                place, fraction, [[fraction - low], [high - fraction]], linestyle="none",
                label=name if batch == batches[0] else None, **style,
            )  # fmt: skip
    axes.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set(ylabel="runs that failed, in %", ylim=(-3, 103), xlim=(-0.5, len(batches) - 0.5))
    axes.legend(loc="upper left")
    alt = "The fraction of runs that failed, with its interval, for each batch and rule."
    return figure, alt, Table(rows, ("batch", "rule", "failed", "interval (%)"), align="rlrr")


@shown
def gap(results: dict):
    """Draw test error against sharpness: a dot per seed, and means with intervals.

    ``results`` maps a name to a dict with the series ``error`` (%) and ``sharpness``, one value per seed.
    """
    figure, axes = subplots(height=4.4)
    rows = []
    for number, (name, series) in enumerate(results.items()):
        style = {"color": RANK_COLOURS[number], "marker": MARKERS[number]}
        axes.scatter(series["sharpness"], series["error"], s=22, alpha=0.45, lw=0, **style)
        (x, *x_ends), (y, *y_ends) = (intervals.mean(series[what]) for what in ("sharpness", "error"))
        axes.errorbar(
            x, y, [[y - y_ends[0]], [y_ends[1] - y]], [[x - x_ends[0]], [x_ends[1] - x]],
            capsize=4, markersize=10, markeredgecolor="black", label=name, **style,
        )  # fmt: skip
        error, sharp = (f"{m:.1f} ({ends[0]:.1f} to {ends[1]:.1f})" for m, ends in ((y, y_ends), (x, x_ends)))
        rows.append((name, error, sharp, f"{intervals.mean(series['loss'])[0]:.3f}"))
    axes.set(xscale="log", xlabel="sharpness", ylabel="test error in %")
    axes.minorticks_off()
    ticks = [
        tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if axes.get_xlim()[0] < tick < axes.get_xlim()[1]
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.legend()
    alt = f"Test error against sharpness, one dot for each seed: {', '.join(results)}."
    return figure, alt, Table(rows, ("run", "test error (%)", "sharpness", "training loss"), align="lrrr")
