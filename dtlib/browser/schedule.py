"""The room that draws pipeline schedules as they are simulated."""

from dtlib.browser.fields import Choice, Slider
from dtlib.browser.svg import WIDTH, Picture, letters_on, rank_label
from dtlib.lab.colours import rank_colour
from dtlib.schedule import Simulation, draw, formulas, gpipe, interleaved, one_f_one_b, simulate, zero_bubble_h1

TITLE, LESSON = "Schedules", "07_pipelines"
SAYS = (
    "A pipeline of ranks, a stage each, and a batch in micro-batches. Time goes to the right, in forward passes of a "
    "rank; what shows through is idle time, the bubble. Predict it, then move a slider."
)
CHUNKS = 2  # stages per rank in the interleaved order
# value: (name, function that returns the order, its name in the formulas, stages per rank)
ORDERS = {
    "gpipe": ("GPipe", gpipe, "gpipe", 1),
    "1f1b": ("1F1B", one_f_one_b, "one_f_one_b", 1),
    "interleaved": ("interleaved 1F1B", lambda p, m: interleaved(p, m, CHUNKS), "interleaved", CHUNKS),
    "zb-h1": ("ZB-H1", zero_bubble_h1, "zero_bubble_h1", 1),
}
FORM = (
    Choice("schedule", "schedule", "1f1b", {value: name for value, (name, *_) in ORDERS.items()}),
    Slider("ranks", "ranks", 4, 1, 8),
    Slider("microbatches", "micro-batches", 8, 1, 16),
    Slider("backward", "backward / forward", 2, 0.5, 4, 0.5),
    Slider("message", "message / forward", 0, 0, 2, 0.25),
)
OPACITY = {"F": 0.35, "B": 1.0, "I": 1.0, "W": 0.65}
KINDS = {"F": "pale: forward", "B": "full: backward", "I": "hatched: gradient of the input", "W": "W: of the weights"}
ROW, LEFT = 34, 76


def show(schedule: str, ranks: int, microbatches: int, backward: float, message: float) -> str:
    """Return the picture of a schedule, and its bubble by the formula, as HTML."""
    name, order, formula, chunks = ORDERS[schedule]
    found = simulate(order(ranks, microbatches), 1 / chunks, backward / chunks, message=message)
    said = f"{name} on {ranks} rank{'s' * (ranks > 1)}, {microbatches} micro-batches"
    by_formula = formulas.bubble(formula, ranks, microbatches, chunks)
    more = "" if message or backward != 2 else f" By the formula the bubble is {by_formula:.1%}."
    return drawn(found, said) + f"<p>{more}</p>"


def drawn(found: Simulation, title: str) -> str:
    """Return a simulation as a picture with its numbers; each box shows the number of a micro-batch."""
    peaks = ", ".join(map(str, found.peak_activations))
    kinds = [words for kind, words in KINDS.items() if any(action.kind == kind for action in found.end)]
    alt = (
        f"{title}: makespan {found.makespan:g}, bubble {found.bubble:.1%} of the makespan "
        f"({found.idle_over_ideal:.1%} of the ideal); activations held by rank: {peaks}. Colours are ranks; "
        f"{', '.join(kinds)}."
    )
    picture = Picture(ROW * len(found.schedule) + 26, alt, draw(found))
    scale = (WIDTH - LEFT - 8) / found.makespan
    for rank, actions in enumerate(found.schedule):
        y, colour = rank * ROW, rank_colour(rank)
        rank_label(picture, rank, y + 21)
        for action in actions:
            x, width = LEFT + found.start[action] * scale, (found.end[action] - found.start[action]) * scale
            opacity, title = OPACITY[action.kind], f"{action}: {found.start[action]:g} to {found.end[action]:g}"
            picture.box(x, y + 2, width - 1, ROW - 6, colour, opacity, hatch=action.kind == "I", title=title)
            if width > 9 * len(str(action.microbatch)) + 2 and action.kind != "I":
                fill = letters_on(colour) if opacity == 1 else "currentColor"
                picture.words(x + width / 2 - 0.5, y + 21, action.microbatch, "middle", fill)
    bottom = ROW * len(found.schedule) + 16
    picture.words(LEFT, bottom, "0", "middle")
    picture.words(WIDTH - 8, bottom, f"{found.makespan:g}", "end")
    return picture.html()
