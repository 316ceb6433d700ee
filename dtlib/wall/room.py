"""The state of all learners in a room: the latest message of each, and summaries of all (pure Python).

{learner's number: message}  ->  tiles | time by exercise | wrong answers | guesses | choices
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from dtlib.lab.checks.questions import quizzes
from dtlib.wall.learner_state import ALIAS, IDLE_SECONDS, MOST, SAYS, SHORT

KINDS = ("stuck", "wrong", "works", "done")  # sent by learners; `idle` and `away` are added here
AWAY_SECONDS = 20  # without a message
GONE_SECONDS = 3600
MOST_LEARNERS = 200
MOST_LEFT = 1000  # learners who left: their late messages are refused
MOST_ROWS = 5
MOST_BARS = 8


class Room:
    """The learners of a room. Callers pass the time as ``now``, in seconds."""

    def __init__(self):
        self.learners = {}  # number -> (message, when it arrived)
        self.left: deque = deque(maxlen=MOST_LEFT)  # learners' numbers

    def tell(self, number: str, message: dict, now: float) -> bool:
        """Replace a learner's message; return False if the room is full or the learner has left."""
        for gone in [each for each, (_, seen) in self.learners.items() if now - seen > GONE_SECONDS]:
            del self.learners[gone]
        if number in self.left or (number not in self.learners and len(self.learners) >= MOST_LEARNERS):
            return False
        self.learners[number] = message, now
        return True

    def leave(self, number: str) -> None:
        """Remove a learner; later messages of this learner are refused."""
        if number in self.learners:
            del self.learners[number]
            self.left.append(number)

    def shown(self, now: float) -> dict:
        """Return the content of the page, ready for JSON."""
        messages = [message for message, _ in self.learners.values()]
        tiles = [_tile(message, now - seen) for message, seen in self.learners.values()]
        return {
            "tiles": sorted(tiles, key=lambda tile: (tile["alias"].casefold(), tile["place"])),
            "times": _times(messages),
            "wrong": _wrong(messages),
            "guesses": self._latest("guesses", messages, _guesses),
            "quiz": self._latest("quizzes", messages, _choices),
        }

    def _latest(self, kind: str, messages: list[dict], show: Callable):
        """Return the summary of the question that was answered last, or None."""
        when = {
            name: seen - ago
            for message, seen in self.learners.values() for name, (*_, ago) in message[kind].items()
        }  # fmt: skip
        return show(max(when, key=when.__getitem__).partition(": ")[0], messages) if when else None


def _tile(message: dict, silent: float) -> dict:
    kind, since = message["kind"], message["for"] + silent
    if silent > AWAY_SECONDS:
        kind, since = "away", silent
    elif kind in ("works", "done") and message["idle"] + silent > IDLE_SECONDS:
        kind, since = "idle", message["idle"] + silent
    says = message["says"] if kind in ("stuck", "wrong") else ""
    return {
        "alias": message["alias"], "kind": kind, "for": round(since), "says": says, "place": message["place"],
        "passed": message["passed"],
    }  # fmt: skip


def _times(messages: list[dict]) -> list[list]:
    """Return rows of exercise, seconds of all learners, number of learners; most seconds first."""
    spent = defaultdict(list)
    for message in messages:
        for exercise, seconds in message["spent"].items():
            spent[exercise].append(seconds)
    rows = [[exercise, sum(all_of_them), len(all_of_them)] for exercise, all_of_them in spent.items()]
    return sorted(rows, key=lambda row: -row[1])[:MOST_ROWS]


def _wrong(messages: list[dict]) -> list[list]:
    """Return rows of exercise, sentence, number of learners with this wrong answer; most frequent first."""
    count: Counter[str] = Counter()
    says = {}
    for message in messages:
        for mistake, (_, sentence) in message["wrong"].items():
            count[mistake] += 1
            says[mistake] = sentence
    return [[name.rpartition("/")[0], says[name], number] for name, number in count.most_common(MOST_ROWS)]


def _guesses(name: str, messages: list[dict]) -> dict:
    """Return a histogram for each predicted value, and how many learners have seen the outcome."""
    found = defaultdict(list)
    for message in messages:
        for key, (guess, compared, _) in message["guesses"].items():
            if key.partition(": ")[0] == name:
                found[key].append((guess, compared))
    seen = max(sum(compared for _, compared in each) for each in found.values())
    bars = {key: histogram([guess for guess, _ in each]) for key, each in list(found.items())[:3]}
    return {"name": name, "compared": seen, "of": max(map(len, found.values())), "bars": bars}


def histogram(guesses: list[float | str]) -> list[list]:
    """Return label and count of each bar, in order: one value per bar, or neighbours together if there are many."""
    numbers = sorted({guess for guess in guesses if not isinstance(guess, str)})
    count = Counter(guesses)
    each = math.ceil(len(numbers) / MOST_BARS) if numbers else 1
    bars = []
    for at in range(0, len(numbers), each):
        part = numbers[at : at + each]
        ends = _in_digits(part[0]) + (f" to {_in_digits(part[-1])}" if len(part) > 1 else "")
        bars.append([ends, sum(count[number] for number in part)])
    words = [[word, number] for word, number in count.most_common() if isinstance(word, str)]
    return bars + words[:MOST_BARS]


def _in_digits(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) and abs(number) < 1e15 else f"{number:,.6g}"


def _choices(name: str, messages: list[dict]) -> dict:
    """Return a question's options, each with the number of learners who chose it first. The right one is not marked."""
    quiz, number = name.split("/")
    question = quizzes()[quiz].questions[int(number)]
    chosen = Counter(message["quizzes"][name][0] for message in messages if name in message["quizzes"])
    options = [[f"{letter}  {question.chosen(letter).says}", chosen[letter]] for letter in question.letters]
    return {"name": f"{quiz}, question {int(number) + 1}", "asks": question.asks, "options": options}


def checked(message: dict) -> dict:
    """Return the expected fields of a learner's message, and no others.

    Raises:
        ValueError: if a field is missing or malformed.
    """
    try:
        _needed(message["kind"] in KINDS and len(message["place"]) == 3)
        return {
            "alias": _text(message["alias"], ALIAS), "kind": message["kind"], "says": _text(message["says"], SAYS),
            "for": _number(message["for"]), "idle": _number(message["idle"]), "passed": _number(message["passed"]),
            "place": [_text(each, SHORT) for each in message["place"]],
            "wrong": _table(message["wrong"], lambda it: [_number(it[0]), _text(it[1], SAYS)]),
            "guesses": _table(message["guesses"], lambda it: [_guess(it[0]), it[1] is True, _number(it[2])]),
            "quizzes": {
                name: [it[0], _number(it[1])] for name, it in message["quizzes"].items() if _is_choice(name, it[0])
            },
            "spent": _table(message["spent"], _number),
        }  # fmt: skip
    except (LookupError, TypeError, AttributeError):
        raise ValueError("no message of a learner") from None


def _needed(fact: bool) -> None:
    if not fact:
        raise ValueError("no message of a learner")


def _table(value: dict, entry: Callable) -> dict:
    return {_text(name, 2 * SHORT): entry(each) for name, each in list(value.items())[:MOST]}


def _is_choice(name: str, letter: str) -> bool:
    quiz, _, number = name.partition("/")
    questions = quizzes()[quiz].questions if quiz in quizzes() else ()
    return number in map(str, range(len(questions))) and letter in tuple(questions[int(number)].letters)


def _text(value: str, most: int) -> str:
    """Return the text with unprintable characters replaced, because these can move or hide other characters."""
    _needed(isinstance(value, str))
    return "".join(letter if letter.isprintable() else " " for letter in value[:most])


def _number(value: float) -> float:
    _needed(type(value) in (int, float) and 0 <= value < 1e9)
    return value


def _guess(value: float | str) -> float | str:
    if isinstance(value, str):
        return _text(value, SHORT)
    _needed(type(value) in (int, float) and abs(value) < 1e300)
    return value
