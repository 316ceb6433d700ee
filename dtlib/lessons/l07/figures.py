"""The figures of lesson 07, each with a text equivalent: simulated and measured schedules."""

from dtlib.lab.colours import ink, rank_colour
from dtlib.lab.drawing import WIDTH, shown, subplots, text_width
from dtlib.lab.tables import WIDEST, Table
from dtlib.schedule import Action, Simulation, draw

# Kind of action -> (hatch, shade, name in the legend).
KINDS = {
    "F": ("", 0.35, "forward"),
    "B": ("", 1.0, "backward"),
    "I": ("///", 1.0, "backward: gradient of the input"),
    "W": ("---", 0.65, "backward: gradients of the weights"),
}


def measured(timeline, unit: float = 1.0) -> Simulation:
    """Return a measured step in the form of a simulation, with times in units of ``unit`` seconds.

    ``timeline`` has the events of ranks 0, 1, ... of one pipeline. The phase of an action begins with waits for its
    inputs, which do not count:

        phase 1F0   |---------------------|
        waits        |----|  |---|               for the header, for the tensor
        computes                 |--------|
    """
    phases = [event for event in timeline.events if event.action is not None]
    schedule, start, end = [[] for _ in {event.rank for event in phases}], {}, {}
    # An action starts to compute when the last wait in its phase has ended.
    for phase in phases:
        action = Action(*phase.action)
        waited = [
            event.end for event in timeline.events
            if event.kind == "wait" and event.rank == phase.rank and phase.start <= event.start < phase.end
        ]  # fmt: skip
        schedule[phase.rank].append(action)
        start[action], end[action] = max([phase.start, *waited]), phase.end
    begin = min(start.values())

    def moved(times):
        return {action: (time - begin) / unit for action, time in times.items()}

    return Simulation(schedule, moved(start), moved(end))


@shown
def picture(panels: dict):
    """Draw one panel per schedule, with time from left to right and ranks as rows; grey is idle time, the bubble.

    ``panels`` maps titles to simulations, from the simulator or from ``measured``, in forward passes. A number is a
    micro-batch. If a rank has several stages, later stages are paler.
    """
    longest = max(simulation.makespan for simulation in panels.values())
    rows = [len(simulation.schedule) for simulation in panels.values()]
    high = 0.36 * sum(rows) + 0.5 * len(rows) + 1
    figure, grid = subplots(len(panels), height=high, sharex=True, squeeze=False, height_ratios=rows)
    for axes, (title, simulation) in zip(grid[:, 0], panels.items(), strict=True):
        draw_schedule(axes, simulation, longest)
        axes.set_title(f"{title}: bubble {simulation.bubble:.1%} of the makespan", loc="left")
    grid[-1, 0].set(xlabel="time in forward passes", xlim=(0, 1.01 * longest))
    _legend(grid[-1, 0], panels.values())
    texts = [f"{title}:\n{_as_text(simulation)}" for title, simulation in panels.items()]
    alt = f"A row for each rank: the micro-batch that it computes at each time, for {'; '.join(panels)}."
    return figure, alt, *texts, summary(panels)


def _as_text(simulation) -> str:
    """Return the schedule as text, with one column per forward pass or half of one, in pieces that fit on a page."""
    shortest = min(simulation.end[action] - simulation.start[action] for action in simulation.end)
    return draw(simulation, 0.5 if shortest < 0.75 else 1.0, WIDEST)


def summary(panels: dict) -> Table:
    """Return a table of makespan, both bubbles and peak activations of each rank, for each entry of ``panels``."""
    rows = [
        (title, f"{found.makespan:.1f}", f"{found.bubble:.1%}", f"{found.idle_over_ideal:.1%}",
         " ".join(map(str, found.peak_activations)))
        for title, found in panels.items()
    ]  # fmt: skip
    return Table(rows, ("", "makespan", "idle / makespan", "idle / ideal", "activations by rank"), align="lrrrr")


def draw_schedule(axes, simulation, longest: float) -> None:
    """Draw a simulation into ``axes``; ``longest`` is the makespan that fills the width."""
    from matplotlib.colors import to_rgb

    ranks = len(simulation.schedule)
    for rank, actions in enumerate(simulation.schedule):
        axes.barh(rank, simulation.makespan, height=0.84, color="#e4e4e4", lw=0)
        for action in actions:
            hatch, alpha, _ = KINDS[action.kind]
            begin, took = simulation.start[action], simulation.end[action] - simulation.start[action]
            paler = 0.5 if action.stage >= ranks else 1
            style = {"hatch": hatch, "edgecolor": "white", "lw": 0.8}
            # Mixed with white instead of transparent, because there is grey below.
            shade = [1 - alpha * paler * (1 - part) for part in to_rgb(rank_colour(rank))]
            axes.barh(rank, took, left=begin, height=0.84, color=shade, **style)
            if text_width(action.microbatch) + 0.02 < 0.88 * WIDTH * took / longest:
                box = {"facecolor": shade, "pad": 0.5, "lw": 0} if hatch else None
                middle = begin + took / 2, rank
                axes.text(*middle, action.microbatch, ha="center", va="center_baseline", color=ink(*shade), bbox=box)
    axes.set(ylim=(ranks - 0.5, -0.5), yticks=range(ranks), yticklabels=[f"rank {rank}" for rank in range(ranks)])
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _legend(axes, simulations) -> None:
    from matplotlib.patches import Patch

    present = {action.kind for simulation in simulations for action in simulation.end}
    style = {"edgecolor": "white", "lw": 0}
    handles = [
        Patch(facecolor="#555555", hatch=hatch, alpha=alpha, label=name, **style)
        for kind, (hatch, alpha, name) in KINDS.items() if kind in present
    ]  # fmt: skip
    handles.append(Patch(facecolor="#e4e4e4", label="idle", **style))
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False)


@shown
def in_flight(panels: dict):
    """Draw each rank's stored activations over time: one panel per simulation, one line per rank."""
    most = max(max(simulation.peak_activations) for simulation in panels.values())
    figure, grid = subplots(1, len(panels), height=3.4, sharey=True, squeeze=False)
    for axes, (title, simulation) in zip(grid[0], panels.items(), strict=True):
        for rank, actions in enumerate(simulation.schedule):
            times, counts = _held(simulation, actions)
            style = {"color": rank_colour(rank), "linestyle": ("-", "--", "-.", ":")[rank % 4], "lw": 1.8}
            shift = 0.05 * rank  # so that lines do not hide each other
            axes.step(times, [count + shift for count in counts], where="post", label=f"rank {rank}", **style)
        axes.set(title=title, xlabel="time in forward passes", ylim=(0, most + 0.6), yticks=range(0, most + 1, 2))
    grid[0, 0].set_ylabel("micro-batches held")
    grid[0, -1].legend(frameon=False)
    rows = [(title, *simulation.peak_activations) for title, simulation in panels.items()]
    ranks = max(len(row) for row in rows) - 1
    alt = f"How many micro-batches each rank holds, over time, for {', '.join(panels)}."
    return figure, alt, Table(rows, ("most at a time", *(f"rank {rank}" for rank in range(ranks))))


def _held(simulation, actions) -> tuple[list, list]:
    """Return the times at which the number of activations changes, and the numbers from then on."""
    times, counts = [0.0], [0]
    for action in actions:
        if action.kind == "I":
            continue
        times.append(simulation.start[action] if action.kind == "F" else simulation.end[action])
        counts.append(counts[-1] + (1 if action.kind == "F" else -1))
    return [*times, simulation.makespan], [*counts, counts[-1]]
