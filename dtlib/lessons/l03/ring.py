"""The ring all-reduce step by step: a slider, a picture of all steps, and a text equivalent.

The figures show the library's own generator, which runs in this process over a simulated network that delivers one step
at a time (steps.py).
"""

from dataclasses import dataclass

from dtlib.lab.colours import rank_colour
from dtlib.lab.drawing import show_widget, shown, subplots
from dtlib.lab.tables import Table
from dtlib.lessons.l03.steps import rounds


@dataclass(frozen=True)
class Step:
    """State of all ranks before a step, and the chunks that they send in it.

    ``held[rank][chunk]`` are the ranks whose values are summed in that chunk. ``sends[rank]`` is the chunk that the
    rank sends to its right neighbour, None after the last step.
    """

    number: int
    phase: str
    held: tuple
    sends: tuple

    @property
    def title(self) -> str:
        """Phase and number of the step."""
        return self.phase if self.sends[0] is None else f"step {self.number}: {self.phase}"


def steps(ranks: int) -> list[Step]:
    """Return the steps of a ring all-reduce, with one element per chunk; the last entry is the result."""
    found = []
    for number, each in enumerate(rounds("all_reduce", "ring", ranks)[0]):
        phase = "reduce-scatter" if number < ranks - 1 else "all-gather" if each.sent else "the result"
        sends = tuple(sent.start for sent in each.sent) or (None,) * ranks
        found.append(Step(number, phase, each.held, sends))
    return found


def explore(ranks: int = 4) -> None:
    """Show a slider over the steps. ``show_all`` draws the same without widgets."""
    import ipywidgets

    every = steps(ranks)
    slider = ipywidgets.IntSlider(value=0, min=0, max=len(every) - 1, description="step")
    output = ipywidgets.interactive_output(lambda step: show(every[step]), {"step": slider})
    show_widget(ipywidgets.VBox([slider, output]), "A slider over the steps of the ring; ring.show_all draws them all.")


@shown
def show(step: Step):
    """Draw one step, with its description in words."""
    figure, axes = subplots(height=3.8, width=7)
    _draw(axes, step)
    return figure, f"{step.title}. {_sentence(step)}", _table([step])


@shown
def show_all(ranks: int = 4):
    """Draw all steps side by side, with a table of them."""
    every = steps(ranks)
    lines = -(-len(every) // 2)
    columns = -(-len(every) // lines)
    figure, grid = subplots(lines, columns, height=2.3 * lines, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, step in zip(grid.flat, every, strict=False):
        _draw(axes, step, labels=False)
    alt = f"The ring all-reduce on {ranks} ranks, step by step: the values in each chunk, and the chunk that is sent."
    return (
        figure,
        alt,
        _table(every, "Which ranks are in which chunk; [ ] is sent to the right neighbour in this step."),
    )


def _table(every, title: str = "") -> Table:
    ranks = len(every[0].held)
    rows = [
        (step.title if rank == 0 else "", rank, *(_cell(step, rank, chunk) for chunk in range(ranks)))
        for step in every
        for rank in range(ranks)
    ]
    return Table(rows, ("", "rank", *(f"chunk {chunk}" for chunk in range(ranks))), title, align="lr" + "l" * ranks)


def _cell(step, rank, chunk) -> str:
    text = "+".join(map(str, step.held[rank][chunk]))
    return f"[{text}]" if step.sends[rank] == chunk else text


def _sentence(step) -> str:
    ranks = len(step.held)
    if step.sends[0] is None:
        return "Every rank has the sum of all ranks in every chunk."
    moves = [f"rank {rank} sends chunk {step.sends[rank]} to rank {(rank + 1) % ranks}" for rank in range(ranks)]
    adds = "adds it to its own chunk" if step.phase == "reduce-scatter" else "replaces its own chunk"
    return f"{'; '.join(moves)}. The receiver of a chunk {adds}."


def _draw(axes, step, labels: bool = True) -> None:
    """Draw ranks as rows and chunks as columns: colours show the summed ranks, and frames the sent chunks."""
    from matplotlib.patches import Rectangle

    ranks = len(step.held)
    for rank, chunks in enumerate(step.held):
        for chunk, members in enumerate(chunks):
            for place, member in enumerate(members):
                stripe = (chunk + 0.06 + 0.88 * place / len(members), rank + 0.1)
                axes.add_patch(Rectangle(stripe, 0.88 / len(members), 0.8, color=rank_colour(member), alpha=0.55, lw=0))
            going = step.sends[rank] == chunk
            text = "all" if len(members) == ranks else "+".join(map(str, members))
            weight = "bold" if going else "normal"
            axes.text(chunk + 0.5, rank + 0.5, text, ha="center", va="center", weight=weight)
            if going:
                axes.add_patch(
                    Rectangle((chunk + 0.04, rank + 0.08), 0.92, 0.84, fill=False, lw=2.2, edgecolor="black")
                )
    axes.set(xlim=(0, ranks), ylim=(ranks, 0), title=step.title)
    axes.set_axis_on()
    axes.set_xticks(
        [chunk + 0.5 for chunk in range(ranks)], [f"chunk {chunk}" if labels else chunk for chunk in range(ranks)]
    )
    axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
