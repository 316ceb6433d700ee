"""Pictures: the same colour for the same rank everywhere, and a text for every figure."""

# Okabe and Ito's palette, which people with any colour vision can tell apart (jfly.uni-koeln.de/color, 2008);
# its yellow is left out, as it is too light for text.
RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


def rank_colour(rank: int) -> str:
    """The colour of a rank, as #RRGGBB."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def rank_badge(rank: int) -> str:
    """A rank's number beside a square of its colour, as HTML."""
    return f'<span style="color:{rank_colour(rank)}">&#9632;</span> {rank}'


def rank_prefix(rank: int) -> str:
    """``rank 0 |`` in the rank's colour, for a terminal or a notebook's output."""
    red, green, blue = (int(rank_colour(rank)[i : i + 2], 16) for i in (1, 3, 5))
    return f"\x1b[1;38;2;{red};{green};{blue}mrank {rank} |\x1b[0m"


# Marks differ by shape as well as by colour.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def darts(parts) -> None:
    """Points in the unit square, one colour and shape a rank; inside the quarter circle they are filled.

    ``parts`` has a pair of arrays a rank: x and y, integers from 0 to 2**31 - 1.
    """
    import matplotlib.pyplot as plt
    import numpy as np

    _, axes = plt.subplots(figsize=(6, 4.6))
    rows = []
    for rank, (x, y) in enumerate(parts):
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


def _print_table(rows, headers) -> None:
    """The same as text, for whoever does not see the picture."""
    from tabulate import tabulate

    print(tabulate(rows, headers, disable_numparse=True, stralign="right"))
