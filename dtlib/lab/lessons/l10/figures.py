"""The figures of lesson 10, each with its text."""

from dtlib.lab.colours import RANK_COLOURS, rank_colour
from dtlib.lab.pictures import _print_table

STYLES = ("-", "--", ":", "-.")


def curves(results: dict, title: str = "") -> None:
    """The loss of each step, a line a run. ``results`` maps a name to what ``train`` returned."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 3.6))
    for number, (name, result) in enumerate(results.items()):
        losses = result["losses"]
        style = {"color": RANK_COLOURS[number], "linestyle": STYLES[number % len(STYLES)], "lw": 4 - number}
        axes.plot(range(1, len(losses) + 1), losses, label=name, **style)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend(frameon=False)
    plt.show()
    rows = [
        (name, result["steps"], *(f"{result['losses'][at]:.4f}" for at in (0, len(result["losses"]) // 2, -1)))
        for name, result in results.items()
    ]
    _print_table(rows, ("run", "steps", "loss at first", "in the middle", "at last"))


def runs(results: dict) -> None:
    """Three panels side by side: loss at the end, seconds a step, megabytes of model states of each rank."""
    import matplotlib.pyplot as plt

    names = list(results)
    seconds = {name: 1e3 * result["seconds"] / len(result["losses"]) for name, result in results.items()}
    figure, (loss, time, memory) = plt.subplots(1, 3, figsize=(10, 3.2))
    loss.bar(names, [result["loss"] for result in results.values()], color=RANK_COLOURS[0])
    time.bar(names, list(seconds.values()), color=RANK_COLOURS[2])
    for at, result in enumerate(results.values()):
        held = result["bytes_per_rank"]
        width = 0.8 / len(held)
        for rank, count in enumerate(held):
            place = at + (rank - (len(held) - 1) / 2) * width
            memory.bar(
                place, count / 1e6, 0.9 * width, color=rank_colour(rank), label=f"rank {rank}" if not at else None
            )
    memory.set_xticks(range(len(names)), names)
    memory.legend(frameon=False)
    for axes, what in ((loss, "loss at the end"), (time, "ms a step"), (memory, "MB a rank")):
        axes.set_title(what)
    figure.tight_layout()
    plt.show()
    rows = [
        (name, f"{result['loss']:.6f}", f"{seconds[name]:.1f}", *(f"{held:,}" for held in result["bytes_per_rank"]))
        for name, result in results.items()
    ]
    ranks = len(next(iter(results.values()))["bytes_per_rank"])
    _print_table(rows, ("run", "loss", "ms a step", *(f"bytes of rank {rank}" for rank in range(ranks))))
