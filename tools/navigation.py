"""The way through the course, made by the build: links at the head and foot of a notebook, minutes on the start page.

lecture 03     start page · <- 02 · 04 -> · its exercises · solved         exercises of 03    start page · lecture 03 ·
                                                                                              04 -> · solved
"""

import re
from pathlib import Path

from dtlib.lab.lesson_files import notebooks, title

_NUMBERS = {
    "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "fifteen": 15, "sixteen": 16, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40,
    "fifty": 50, "sixty": 60, "seventy": 70, "ninety": 90,
}  # fmt: skip
_TIME = r"([A-Za-z]+(?:-[a-z]+)?) (minute|hour)s?"
TUTOR = "Do you ask an AI? Tell it to read [AGENTS.md](../AGENTS.md) first."
ANEW = "Start again? `lab.fresh()` in a new cell gives this notebook as it was, and keeps yours beside it."


def name_of(source: Path) -> str:
    """The name of the notebook that is made from a source; a short track's source has the same name."""
    by_file = {file.parts[-2:]: name for name, file in notebooks().items()}
    return by_file.get(source.parts[-2:], source.stem)


def is_lecture(source: Path) -> bool:
    return not name_of(source).endswith("_exercises")


def number(source: Path) -> str:
    """``03``, or ``11b``."""
    return name_of(source).partition("_")[0]


def minutes(source: Path) -> int:
    """How long a notebook takes, by its own first cell: the first time that stands there; of exercises what they take
    ``in all``, or the sum of those in brackets, in steps of five."""
    text = " ".join(source.read_text(encoding="utf-8").split("# %%")[1].replace("\n# ", " ").split())
    if is_lecture(source):
        found = re.search(_TIME, text)
        assert found, f"{source} does not say how long it takes"
        return _minutes(*found.groups())
    if in_all := re.search(f"{_TIME} in all", text):
        return _minutes(*in_all.groups())
    return -(-minutes_of(text) // 5) * 5


def minutes_of(text: str) -> int:
    """The sum of the times in brackets, such as (five minutes), or (five minutes each: fifteen minutes)."""
    return sum(_minutes(*time) for time in re.findall(rf"\((?:[^():]*: )?{_TIME}\)", text))


def _minutes(number: str, unit: str) -> int:
    return sum(_NUMBERS[word] for word in number.lower().split("-")) * (60 if unit == "hour" else 1)


def links(source: Path, version: str, sources: list[Path]) -> str:
    """The links of one notebook, as a line of Markdown. They lead somewhere in JupyterLab and in the book."""
    lectures = [other for other in sources if is_lecture(other)]
    found = ["[Start page](../start.md)"]
    if is_lecture(source):
        here = lectures.index(source)
        before, after = lectures[:here][-1:], lectures[here + 1 :][:1]
        found += [f"[← {title(other)}]({name_of(other)}.ipynb)" for other in before]
        found += [f"[{title(other)} →]({name_of(other)}.ipynb)" for other in after]
        for other in sources:
            if number(other) == number(source) and not is_lecture(other):
                found.append(f"[{_name_of_exercises(other)}](../exercises/{name_of(other)}.ipynb)")
        there = "solutions" if version == "learner" else "lectures"
    else:
        mine = next(other for other in lectures if number(other) == number(source))
        following = [other for other in lectures if number(other) > number(source)][:1]
        found.append(f"[lecture {title(mine)}](../lectures/{name_of(mine)}.ipynb)")
        found += [f"[{title(other)} →](../lectures/{name_of(other)}.ipynb)" for other in following]
        there = "solutions" if version == "learner" else "exercises"
    found.append(f"[{'solved' if version == 'learner' else 'to work in'}](../{there}/{name_of(source)}.ipynb)")
    return " · ".join(found)


def track_links(source: Path, version: str, sources: list[Path]) -> str:
    """The same for a notebook of a short track."""
    here, others = sources.index(source), "../" if version == "solved" else ""
    found = [f"[Start page](../../{others}start.md)"]
    found += [f"[← {title(other)}]({other.stem}.ipynb)" for other in sources[:here][-1:]]
    found += [f"[{title(other)} →]({other.stem}.ipynb)" for other in sources[here + 1 :][:1]]
    found.append(f"[to work in](../{source.stem}.ipynb)" if others else f"[solved](solved/{source.stem}.ipynb)")
    return " · ".join(found)


def _name_of_exercises(source: Path) -> str:
    name = title(source)
    return "exercises" if name.endswith(": exercises") else name[3:4].lower() + name[4:]


def start_page(template: str, sources: list[Path]) -> str:
    """The start page: ``{minutes}`` becomes those of the notebook whose link stands before it."""
    by_name = {name_of(source): source for source in sources}
    parts = template.split("{minutes}")
    for at, part in enumerate(parts[:-1]):
        linked = re.findall(r"([^/(]+)\.ipynb\)", part)[-1]
        parts[at] += str(minutes(by_name[linked]))
    return "".join(parts)
