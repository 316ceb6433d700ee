"""The state of a learner who has joined a wall: events change it, and it is sent as a whole.

A learner's place is named in the course's words: a cell's id gives the title of the notebook, the section, and the
exercise that is checked there. No text of a learner's notebook is read. (Pure Python, except for the course's files.)
"""

import json
import re
from functools import cache
from numbers import Real

from dtlib.lab import course

ALIAS = 24  # characters at most
SAYS = 200  # characters of a sentence
SHORT = 60  # characters of a title or a guess
MOST = 200  # entries of each kind
# A learner without a cell for this time is idle. Longer pauses count as this much time for an exercise.
IDLE_SECONDS = 300
_CHECK = re.compile(r'^lab\.check\("([\w.-]+)"', re.M)


def applied(state: dict, now: float, kind: str, fields: dict, pid: int) -> None:
    """Change the state of a learner by one event. ``state["spent"]`` are seconds per exercise."""
    _spend(state, now)
    status, place = state.setdefault("status", ["works", "", now]), state.setdefault("place", ["", "", ""])
    stuck, mentioned = status[0] == "stuck", status[3] if len(status) > 3 else None
    if kind == "cell":
        if (there := place_of(fields["cell"])) is not None:
            place[:] = there
        if stuck or mentioned not in (None, place[2]):
            state["status"] = ["works", "", now]
        state["runs"] = pid
    elif kind in ("ended", "started"):
        state["runs"] = None
        if stuck and fields.get("fine", True):
            state["status"] = ["works", "", now]
    elif kind == "waits":
        if fields["says"]:
            state["status"] = ["stuck", fields["says"], status[2] if stuck else now]
        elif stuck:
            state["status"] = ["works", "", now]
    elif kind == "verdict":
        exercise, mistake, says = fields["exercise"], fields["mistake"], fields["says"][:SAYS]
        place[2] = exercise
        state["status"] = ["wrong" if mistake else "done", says, now, exercise]
        if mistake:
            wrong = state.setdefault("wrong", {})
            times = wrong.pop(f"{exercise}/{mistake}", [0])[0]
            wrong[f"{exercise}/{mistake}"] = [times + 1, says]
        elif exercise not in (passed := state.setdefault("passed", [])):
            passed.append(exercise)
    elif kind == "guess":
        guesses = state.setdefault("guesses", {})
        for key, value in fields["guess"].items() if isinstance(fields["guess"], dict) else [("", fields["guess"])]:
            name = f"{fields['name']}: {key}" if key != "" else fields["name"]
            before = guesses.get(name)
            if value is not None and not (before and before[1]):  # after a comparison the learner knows the value
                guesses[name] = [_plain(value), fields["compared"], now]
    elif kind == "quiz":
        # The first choice counts, as it does in the quiz.
        state.setdefault("quizzes", {}).setdefault(f"{fields['quiz']}/{fields['number']}", [fields["letter"], now])
    for known in (state.get(name, {}) for name in ("wrong", "guesses", "quizzes", "spent")):
        while len(known) > MOST:
            del known[next(iter(known))]


def message(state: dict, now: float) -> dict:
    """Return the message about a learner. Times are seconds before ``now``, because clocks of machines differ."""
    state = {**state, "spent": dict(state.get("spent", {}))}
    idle = 0 if state.get("runs") else now - state["last"]
    _spend(state, now)
    kind, says, since = state.get("status", ["works", "", now])[:3]
    guesses, quizzes = (
        {name: [*answer, round(now - when)] for name, (*answer, when) in state.get(answers, {}).items()}
        for answers in ("guesses", "quizzes")
    )
    return {
        "alias": state["alias"], "kind": kind, "says": says, "for": round(now - since), "idle": round(idle),
        "place": state.get("place", ["", "", ""]), "passed": len(state.get("passed", ())),
        "wrong": state.get("wrong", {}), "guesses": guesses, "quizzes": quizzes,
        "spent": {name: round(seconds) for name, seconds in state["spent"].items()},
    }  # fmt: skip


def _spend(state: dict, now: float) -> None:
    """Add the seconds since the last event to the learner's current exercise."""
    passed = now - state["last"]
    seconds = passed if state.get("runs") else min(passed, IDLE_SECONDS)
    if exercise := state.get("place", ["", "", ""])[2]:
        spent = state.setdefault("spent", {})
        spent[exercise] = spent.get(exercise, 0) + max(0, seconds)
    state["last"] = now


def place_of(cell: str | None) -> list[str] | None:
    """Return notebook, section and exercise of a cell of the course; None for a learner's own cell."""
    book, dash, _ = (cell or "").rpartition("-")
    return _places(book).get(cell) if cell and dash and re.fullmatch(r"\w[\w-]*", book) else None


@cache
def _places(book: str) -> dict[str, list[str]]:
    folder = course.SOURCE / "notebooks"
    path = next((path for path in sorted(folder.glob(f"*/**/{book}.ipynb")) if path.parent.name != "solutions"), None)
    found: dict[str, list[str]] = {}
    here: list[str] = []
    title, section, last = "", "", ""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if path else ():
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and (heading := re.match(r"(#+) (.+)", text)):
            here, last = [], ""
            if len(heading[1]) == 1:
                title = heading[2][:SHORT]
            else:
                section = heading[2][:SHORT]
        found[cell.get("id")] = [title, section, last]
        # All cells since the last heading or check belong to the exercise of the next check.
        here.append(cell.get("id"))
        if cell["cell_type"] == "code" and (asked := _CHECK.search(text)):
            last = asked[1]
            for name in here:
                found[name][2] = last
            here = []
    return found


def _plain(guess) -> float | str:
    is_number = isinstance(guess, Real) and not isinstance(guess, bool)
    if is_number and abs(guess) < 1e300:
        return int(guess) if guess == int(guess) and abs(guess) < 1e15 else float(guess)
    return f"{guess}"[:SHORT]
