"""The room that runs a learner's cell on ranks that take turns: SIMULATED, in one process."""

from functools import cache

from dtlib.browser.fields import Button, Choice, Hidden, Slider, Text, put
from dtlib.browser.simulated.cells import Outcome, Ranks
from dtlib.browser.simulated.tensors import CONSTRUCTORS, Tensor
from dtlib.browser.sources import on_ranks
from dtlib.browser.svg import WIDTH, Picture, letters_on, rank_label, sentence
from dtlib.browser.verdicts import verdict
from dtlib.lab.colours import rank_colour
from dtlib.lessons.l00.judge_sum import collectives_for, judge_total

TITLE, LESSON = "Simulated ranks", "00_start_here"
LABEL = "SIMULATED: one process, taking turns; messages and bytes are counted, times mean nothing"
SAYS = (
    f"Your lines run on every rank, as below %%px in a notebook. {LABEL}. `rank`, `world` and `comm` are there; torch "
    f"is a stand-in with {', '.join(CONSTRUCTORS)}. `await` is put before each operation, so that others get their "
    "turns. A rank that can never go on says whom it waits for."
)
# Cells of the lessons with one of these words need more than the page has, and are left out.
UNSUPPORTED = ("pi.", "emulate_network", "np.", "os.kill", "slow.", "signal")
LESSONS = {"00": "l00/lecture.py", "03": "l03/lecture.py"}
FIRST = """import dtlib, torch

world = dtlib.init()
total = torch.tensor(world.rank)
world.comm.all_reduce(total)
print("I am rank", world.rank, "and the sum is", total)"""
MOST_ROUNDS = 40  # rounds of the network in the picture
ROW, LEFT = 46, 76


@cache
def cells() -> dict[str, str]:
    """Return the lessons' cells that run in this page, by title."""
    found = {}
    for lesson, path in LESSONS.items():
        bodies = [body for body in on_ranks(path) if not any(word in body for word in UNSUPPORTED)]
        for number, body in enumerate(bodies, start=1):
            found[f"{lesson} cell {number}: {body.removeprefix('%px ').partition(chr(10))[0][:44]}"] = body
    return found


FORM = (
    Choice("cell", "a cell of lesson 00 or 03", "", {"": "your own", **{name: name for name in cells()}}),
    Button("take", "Take it"),
    Slider("ranks", "ranks", 4, 1, 8),
    Text("code", "your cell", FIRST, 12),
    Button("run", "Run on all ranks"),
    Button("check", "Check first-sum"),
    Button("anew", "New ranks"),
    Hidden("attempt", "0"),
)
_now: dict[str, Ranks] = {}


def show(cell: str, ranks: int, code: str, attempt: str, pressed: str = "") -> str:
    """Return the output of a cell, the verdict, or a message, as HTML; ``pressed`` names the button."""
    if pressed == "take":
        return (
            put("code", cells()[cell]) + sentence("Here it is: run it.") if cell else sentence("Choose a cell first.")
        )
    if pressed == "anew" or _now.get("ranks", Ranks(1)).size != ranks:
        _now["ranks"] = Ranks(ranks)
    if pressed == "check":
        return _checked(_now["ranks"], attempt)
    if pressed == "run":
        return outcome(_now["ranks"].run(code))
    return sentence(f"{ranks} new ranks. {LABEL}.")


def outcome(found: Outcome) -> str:
    """Return the output of a cell on each rank, and the trace of its messages, as HTML."""
    if found.problem:
        return sentence(found.problem, False)
    lines = []
    for rank, (said, failed) in enumerate(zip(found.said, found.failed, strict=True)):
        text = "\n".join(filter(None, (said, failed)))
        if text:
            lines.append(f'<div class="rank" style="border-color:{rank_colour(rank)}">{_escaped(rank, text)}</div>')
    shown = "".join(lines) or sentence("No rank printed anything.")
    put_before = ", ".join(map(str, found.awaited))
    note = f"<p><small><code>await</code> was put into line {put_before}.</small></p>" if found.awaited else ""
    stuck = sentence("No rank could go on: each that waits has said for whom.", False) if found.stuck else ""
    return stuck + shown + note + _trace(found)


def _escaped(rank: int, text: str) -> str:
    from html import escape

    return f"<b>rank {rank}</b><pre>{escape(text)}</pre>"


def _trace(found: Outcome) -> str:
    """Draw ranks from top to bottom, rounds to the right, operations as bars and messages as arrows."""
    if not found.events:
        return ""
    size, rounds = len(found.said), min(found.rounds, MOST_ROUNDS)
    bytes_sent = sum(event.bytes for event in found.events)
    cut = f" The first {MOST_ROUNDS} of {found.rounds} rounds are drawn." if rounds < found.rounds else ""
    alt = (
        f"Trace of {size} ranks: {len(found.messages)} messages arrived, {bytes_sent:,} bytes were sent. Bars are "
        f"operations, arrows messages, steps to the right rounds of the network.{cut} {LABEL}."
    )
    text = "\n".join(
        f"rank {event.rank}  rounds {event.start} to {'never' if event.end is None else event.end}  {event.what}: "
        f"{event.messages} messages, {event.bytes:,} bytes"
        for event in found.events[:200]
    )
    picture = Picture(ROW * size + 24, alt, text)
    scale = (WIDTH - LEFT - 10) / max(1, rounds)
    for rank in range(size):
        rank_label(picture, rank, rank * ROW + 24)
    for event in found.events:
        if event.start > rounds:
            continue
        colour, end = rank_colour(event.rank), rounds if event.end is None else min(event.end, rounds)
        x, width = LEFT + event.start * scale, max(5, (end - event.start) * scale - 2)
        picture.box(x, event.rank * ROW + 10, width, 22, colour, 1 if event.end is not None else 0.35, title=event.what)
        if width > 9 * len(event.name):
            fill = letters_on(colour) if event.end is not None else "currentColor"
            picture.words(x + width / 2, event.rank * ROW + 26, event.name, "middle", fill)
    for message in found.messages:
        if message.number < rounds:
            x, down = LEFT + message.number * scale, 1 if message.dest > message.source else -1
            start, end = (message.source * ROW + 21 + 11 * down, message.dest * ROW + 21 - 11 * down)
            picture.line(x + scale * 0.1, start, x + scale * 0.85, end, arrow=True)
    picture.words(LEFT, ROW * size + 16, "SIMULATED", bold=True)
    picture.words(WIDTH - 10, ROW * size + 16, f"round {rounds}", "end")
    return picture.html()


def _checked(ranks: Ranks, attempt: str) -> str:
    """Return the verdict of lesson 00's judge on the variable ``total`` of all ranks."""
    observed = []
    for each in ranks.ranks:
        value = each.names.get("total")
        value = value.tolist() if isinstance(value, Tensor) else value
        whole = isinstance(value, int | float) and not isinstance(value, bool) and int(value) == value
        shown = int(value) if isinstance(value, int | float) and whole else repr(value)[:80]
        observed.append((shown, collectives_for(shown, each.world.comm)))
    return verdict("first-sum", lambda: judge_total(observed), attempt)
