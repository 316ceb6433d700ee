"""The room that shows collectives one round at a time: the library's algorithms on SIMULATED ranks that take turns."""

from dtlib.browser.fields import Choice, Slider
from dtlib.browser.svg import Picture, rank_label, sentence
from dtlib.lab.colours import rank_colour
from dtlib.lessons.l03.steps import COLLECTIVES, rounds
from dtlib.theory import collectives

TITLE, LESSON = "Collectives, step by step", "03_collectives"
SAYS = (
    "A row is a rank, a column a place of its array; colours and numbers say whose values are in it, a frame what is "
    "sent in this round. Who sends what next? Say it, then move on. The library's own code runs, one round at a time; "
    "a rank sends one message a round, and receives one. SIMULATED: one process, taking turns."
)
FORM = (
    Choice(
        "steps", "collective", "all_reduce ring",
        {f"{operation} {algorithm}": f"{operation}, {algorithm}" for operation, algorithm in COLLECTIVES},
    ),
    Slider("ranks", "ranks", 4, 2, 8),
    Slider("round", "round", 0, 0, 14),
)  # fmt: skip
ROW, LEFT, CELL = 40, 76, 96


def show(steps: str, ranks: int, round: int) -> str:
    """Return the picture of one round, and the counts of messages and numbers, as HTML."""
    operation, algorithm = steps.split(" ")
    found, links = rounds(operation, algorithm, ranks)
    number = min(round, len(found) - 1)
    now, last = found[number], number == len(found) - 1
    title = f"{operation}, {algorithm}, on {ranks} ranks, " + ("the result" if last else f"round {number}")
    moves = "; ".join(f"rank {sent.source} sends {_what(sent)} to rank {sent.dest}" for sent in now.sent)
    alt = f"{title}. {moves or 'Nothing is under way any more'}. SIMULATED, one process, taking turns."
    picture = Picture(ROW * ranks + 22, alt, _text(now), width=LEFT + CELL * ranks + 90)
    for rank, places in enumerate(now.held):
        rank_label(picture, rank, rank * ROW + 25)
        for place, members in enumerate(places):
            _cell(picture, rank, place, members, ranks)
    for sent in now.sent:
        _sent(picture, sent)
    for place in range(ranks):
        picture.words(LEFT + CELL * (place + 0.5), ROW * ranks + 15, f"place {place}", "middle")
    return picture.html() + sentence(_counted(operation, algorithm, ranks, len(found) - 1, links))


def _cell(picture, rank, place, members, ranks) -> None:
    x, y = LEFT + place * CELL + 3, rank * ROW + 4
    picture.box(x, y, CELL - 6, ROW - 8)
    for at, member in enumerate(members):
        width = (CELL - 6) / len(members)
        picture.box(x + at * width, y, width, ROW - 8, rank_colour(member), 0.5)
    words = "all" if len(members) == ranks and ranks > 3 else "+".join(map(str, members))
    picture.words(x + CELL / 2 - 3, y + 21, words if len(words) < 12 else f"{len(members)} ranks", "middle")


def _sent(picture, sent) -> None:
    """Draw a frame around the elements that are sent, and the destination beside the row."""
    y = sent.source * ROW
    if sent.start is not None:
        picture.box(LEFT + sent.start * CELL + 2, y + 3, (sent.stop - sent.start) * CELL - 4, ROW - 6, frame=True)
    picture.words(picture.width - 84, y + 25, f"→ rank {sent.dest}", bold=True)


def _what(sent) -> str:
    if not sent.count:
        return "a message without numbers"
    if sent.start is None:
        return "its chunk" if sent.count == 1 else f"{sent.count} numbers"
    return f"place {sent.start}" if sent.count == 1 else f"places {sent.start} to {sent.stop - 1}"


def _text(now) -> str:
    going = {(sent.source, place) for sent in now.sent for place in range(sent.start or 0, sent.stop or 0)}
    rows = []
    for rank, places in enumerate(now.held):
        cells = ["+".join(map(str, members)) or "-" for members in places]
        cells = [f"[{cell}]" if (rank, place) in going else cell for place, cell in enumerate(cells)]
        rows.append(f"rank {rank}  " + "  ".join(cell.ljust(6) for cell in cells).rstrip())
    return "\n".join(rows)


def _counted(operation, algorithm, ranks, count, links) -> str:
    messages, numbers = (
        ", ".join(map(str, counts))
        for counts in zip(*((link.messages, link.bytes // 8) for link in links), strict=True)
    )
    return (
        f"{count} rounds; the ranks send {messages} messages and {numbers} numbers, of an array of {ranks}. The "
        f"formulas say {collectives.rounds(operation, algorithm, ranks)} rounds and "
        f"{collectives.messages(operation, algorithm, ranks)} messages in all."
    )
