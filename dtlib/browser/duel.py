"""The room in which the schedules of a class compete: one order per line, with a message cost that a slider sets."""

from dtlib.browser.fields import Button, Slider, Text
from dtlib.browser.schedule import drawn
from dtlib.browser.svg import sentence
from dtlib.lab.tables import Table
from dtlib.lessons.l07 import duel

TITLE, LESSON = "Schedule duel", "07_schedule_puzzle_exercises"
SAYS = (
    "Everybody's order for the puzzle, a line each: a name, a colon, and the four ranks with | between them. At most 4 "
    "activations; F and B, or F, I and W. A message takes time here, and no par is known."
)
_FOUR, _TWO = "F0-3 B0-3 F4-7 B4-7", "F0-1 B0-1 F2-3 B2-3 F4-5 B4-5 F6-7 B6-7"
FORM = (
    Slider("message", "message / forward", 0.5, 0, 2, 0.25),
    Text("orders", "orders", f"Ann: {' | '.join([_FOUR] * 4)}\nBen: {' | '.join([_TWO] * 4)}"),
    Button("rank", "Rank them"),
)


def show(message: float, orders: str, pressed: str = "") -> str:
    """Return the ranking of all orders, with a picture of the winner, as HTML."""
    if not pressed:
        return sentence("Paste everybody's orders, then rank them.")
    everybody, refused = duel.ranked(orders, message)
    winner = next(each for each in everybody if each.name not in duel.LIBRARYS)
    table = Table(duel.rows_of(everybody), duel.HEADERS, f"A message takes {message:g}, simulated", align="lrrr")
    said = "".join(sentence(each, False) for each in refused) + sentence(f"{winner.name} wins.", True)
    return said + table._repr_html_() + drawn(winner.simulated(), winner.name)
