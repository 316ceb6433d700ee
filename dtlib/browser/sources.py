"""Read cells from the lessons' sources."""

import re

from dtlib.lab import lesson_files


def cells(path: str) -> list[tuple[str, str]]:
    """Return (text after ``# %%``, cell) for each cell of a source such as ``l03/lecture.py``, without ``%%px``."""
    source = (lesson_files.FOLDER / path).read_text(encoding="utf-8")
    found = re.findall(r"(?ms)^# %%(?!px)([^\n]*)\n(.*?)(?=^# %%(?!px)|\Z)", source)
    return [(head, body.removeprefix("# %%px\n").strip()) for head, body in found]


def on_ranks(path: str) -> list[str]:
    """Return the cells that start with %%px, or have %px before their lines, as learners see them."""
    source = (lesson_files.FOLDER / path).read_text(encoding="utf-8")
    found = re.findall(r"(?ms)^# %%(?!px)([^\n]*)\n(# %%?px\b.*?)(?=^# %%(?!px)|\Z)", source)
    bodies = [body.removeprefix("# %%px\n").strip() for head, body in found if "solution" not in head]
    return [re.sub(r"(?m)^# (%px)\b", r"\1", body) for body in bodies]
