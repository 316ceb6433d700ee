"""Sentences about outputs, held to them, so that no page stores an output beside words that it does not bear out.

In a notebook's source a cell tagged ``statement`` follows an output. Its first lines quote the prose, a comment each;
the rest asserts, by what the stored outputs above it say:

    # %% tags=["statement"]
    # "takes 25 times as long as Rabenseifner's"
    ring, _, rabenseifner = row("1,024", under="4 MB")
    assert round(ring / rabenseifner) == 25

It runs without a kernel: when a notebook is built, and on the stored one by a test. What an output does not print is
asserted by a ``claim`` (build.py), which quotes its sentence in the same way. What can only be looked at, such as the
shape of a curve, is on a list, ``notebooks/source/read_again.toml``, each with the hash of the output above it:

    python -m tools.statements           sentences whose output is not the one that was read, and that output
    python -m tools.statements --read    somebody has read them: note these outputs
"""

import hashlib
import re
import sys
import tomllib
from pathlib import Path

from nbformat import NotebookNode, read

STATEMENT = "statement"
LIST = Path("notebooks", "source", "read_again.toml")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_RANKS = re.compile(r"^ranks? [\d, to]+ \| ?", re.MULTILINE)


def quotes(source: str) -> list[str]:
    """What the first lines of a cell quote."""
    found = []
    for line in source.splitlines():
        if line.startswith("# "):
            found.append(_plain(line[2:].strip().strip('"')))
        elif not line.startswith("%%px"):
            break
    return found


def prose(cells: list[NotebookNode]) -> str:
    return _plain(" ".join(cell.source for cell in cells if cell.cell_type == "markdown"))


def _plain(text: str) -> str:
    return " ".join(re.sub(r"\]\([^)]*\)|[*`\[\]]", "", text).split())


def text_of(cell: NotebookNode) -> str:
    """The outputs of a cell, as a terminal would show them."""
    found = []
    for output in cell.get("outputs", []):
        if output["output_type"] == "error":
            found += output["traceback"]
        else:
            found.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return _COLOURS.sub("", "\n".join(found))


class Outputs:
    """Those above a statement, the nearest first: what a ``statement`` cell reads.

    ``under``: a text, of which the first output that has it is read alone.
    """

    def __init__(self, cells: list[NotebookNode]):
        self.texts = [_RANKS.sub("", text) for cell in reversed(cells) if (text := text_of(cell))]

    def _read(self, under: str) -> list[str]:
        return [text for text in self.texts if under in text][: 1 if under else None]

    def rows(self, label: str, under: str = "") -> list[list[float]]:
        """The numbers of each line that begins so, in the first output that has such a line; without the label's."""
        for text in self._read(under):
            lines = [line.strip() for line in text.splitlines()]
            after = [line[len(label) :] for line in lines if re.match(re.escape(label) + r"(\s|$)", line)]
            if found := [numbers for line in after if (numbers := _numbers(line))]:
                return found
        raise LookupError(f"no output above has a line that begins with {label!r}")

    def row(self, label: str, under: str = "") -> list[float]:
        return self.rows(label, under)[0]

    def found(self, pattern: str, under: str = "") -> list[float]:
        """The numbers in what a regular expression finds in the first output that has it; its words are one space
        apart."""
        for text in self._read(under):
            if match := re.search(pattern, " ".join(text.split())):
                return _numbers(" ".join(match.groups()) or match[0])
        raise LookupError(f"no output above has {pattern!r}")

    def count(self, pattern: str, under: str = "") -> int:
        """How often a regular expression matches in the first output in which it does."""
        return next((found for text in self._read(under) if (found := len(re.findall(pattern, text)))), 0)


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]


def problems(cells: list[NotebookNode]) -> list[str]:
    """Statements that do not hold, and those that quote what the prose does not say."""
    found, text = [], prose(cells)
    for at, cell in enumerate(cells):
        tags = cell.metadata.get("tags", [])
        if not {STATEMENT, "claim"} & set(tags):
            continue
        found += [f"the prose does not say: {quote}" for quote in quotes(cell.source) if quote not in text]
        if STATEMENT not in tags:
            continue
        above = Outputs(cells[:at])
        names = {"row": above.row, "rows": above.rows, "found": above.found, "count": above.count}
        try:
            exec(compile(cell.source, str(quotes(cell.source)), "exec"), names)
        except Exception as problem:
            values = {name: value for name, value in names.items() if isinstance(value, int | float | list)}
            said = f"{type(problem).__name__} {problem}\n{cell.source}\nwith {values}"
            found.append(said.replace("\n", "\n    "))
    return found


def listed(root: Path) -> list[dict]:
    """What is to be read again: ``notebook``, ``says`` and ``output``, the hash of the output above it."""
    return tomllib.loads((root / LIST).read_text(encoding="utf-8")).get("sentence", [])


def output_above(cells: list[NotebookNode], says: str) -> str:
    """The output of the last code cell above a sentence that has one."""
    for at, cell in enumerate(cells):
        if cell.cell_type == "markdown" and says in _plain(cell.source):
            return next((text for above in reversed(cells[:at]) if (text := text_of(above))), "")
    raise LookupError(f"no prose says: {says}")


def hash_of(text: str) -> str:
    text = re.sub(r", lines [\d, to]+", "", text)  # where in its file a source that is shown stands
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:12]


def main() -> None:
    from dtlib.lab import course

    root = course.folder()
    file = root / LIST
    text = file.read_text(encoding="utf-8")
    for sentence in listed(root):
        notebook = root / "notebooks" / "solutions" / f"{sentence['notebook']}.ipynb"
        cells = read(notebook, as_version=4).cells
        above = output_above(cells, sentence["says"])
        if hash_of(above) != sentence["output"]:
            print(f"{sentence['notebook']}: {sentence['says']}\n\n{above}\n{'-' * 95}")
            says = re.escape(f'says = "{sentence["says"]}"\n')
            text = re.sub(f"({says})output = .*", rf'\1output = "{hash_of(above)}"', text)
    if "--read" in sys.argv[1:]:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
