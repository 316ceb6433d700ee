"""Lines of code of each package of dtlib: ``python -m tools.code_lines``.

A line of code has a token that is neither a comment nor a docstring: nobody saves lines by dropping words. Files that
lie directly in ``dtlib/`` count together, as ``top level``. ``CONTRIBUTING.md`` has the budgets.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """The number of lines of a Python source that have code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            found -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(found)


def by_package(folder: Path = ROOT / "dtlib") -> dict[str, int]:
    """Package, or ``top level`` -> lines of code."""
    found: Counter = Counter()
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder).parts
        if "course" not in place:  # a link to the notebooks
            found["top level" if len(place) == 1 else place[0]] += code_lines(path.read_text(encoding="utf-8"))
    return dict(found)


def budgets() -> dict[str, int]:
    """Package -> the most lines that it may have, from the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `?([\w ]+?)(?:/`|`)? \| ([\d,]+) \|", text, re.M)
    return {name: int(most.replace(",", "")) for name, most in rows}


if __name__ == "__main__":
    allowed, sizes = budgets(), by_package()
    for name, lines in sorted(sizes.items(), key=lambda row: -row[1]):
        print(f"{name:14} {lines:7,} of {allowed.get(name, 0):7,}")
    print(f"{'no lessons':14} {sum(sizes.values()) - sizes['lessons']:7,}")
