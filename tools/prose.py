"""Count phrases that make prose hard to read: ``python -m tools.prose``, a part of ``make lint``.

It prints, for each part of the project, the phrases of ``PATTERNS`` per 1,000 words and the share of sentences with
more than 25 words. Then it lists phrases in lines that differ from the branch ``origin/main``. It exits with 1 if there
are any, or if a part has more phrases than ``LIMITS`` allow. A line with ``prose: ok`` in a comment may stay as it is.

    python -m tools.prose "free relative"    the sentences with such a phrase

The count is a thermometer, not a judge: a sentence without a hit can be bad, and a hit can be right.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.code_lines import DOCUMENTED, ROOT

LONG = 25  # words
ALLOWED = "prose: ok"
LIMITS = {"README": 3.0, "docs": 6.0, "lessons": 8.2, "code": 19.2}  # phrases per 1,000 words; they only fall
PATTERNS = {
    "free relative": r"\b(what|whatever) (\w+ ){0,4}?"
    r"(has|have|holds?|needs?|says?|gives?|takes?|keeps?|sends?|is left|comes?|goes|travels?)\b",
    "who/whoever": r"\b(whoever|of who|for who|who has|whose|those (that|who|of|which))\b",
    "anew": r"\b(anew|once more|so many|as many times|as much again|half as \w+ again)\b",
    "of which": r"\bof (which|whom|it|them)\b",
    "lay/share out": r"\b(lays?|laid|shared?|shares|hand(s|ed)?|look(s|ed)?) (out|after)\b",
    "come/go": r"\b(comes?|came|coming) (from|to|of|out|in|after|before|with|along|back|up)\b"
    r"|\bgo(es)? (on|along|together|between)\b|\bwent on\b",
    "tell/meet": r"\b(is|are|was|were|be) told\b|\btells? (it|them|others|whoever|apart)\b|\b(meets?|met)\b",
    "let go/hold to": r"\blets? (it|them|go)\b|\b(holds?|held) to\b|\bto be (had|found|seen)\b|\b(is|are) to be\b",
    "opens with a pronoun": r"((?<=[.!?] )|^)(?-i:That|It|Both|Those|Below|Of|Theirs|Ours|Else)\b(?! is\b)",
    "where-clause": r"\bwhere (it|they|that|there|somebody|nobody|one|all|none) (is|are|has|have|can|does|do|was)\b",
    "one after the other": r"\bone after the other\b|\bthe one (that|which|before|after|with)\b"
    r"|\bas it (is|was|would|comes)\b",
}
COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in PATTERNS.items()}
LESSONS = ("lecture", "exercises", "appendix", "puzzle")


def parts() -> dict[str, list[Path]]:
    """Part of the project -> its files."""
    sources = [path for path in sorted(ROOT.glob("dtlib/**/*.py")) if "course" not in path.parts]
    lessons = [path for path in sources if path.match("dtlib/lessons/*/*.py") and path.stem.endswith(LESSONS)]
    return {
        "README": [ROOT / "README.md"],
        "docs": [ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "notebooks/source/start.md"],
        "lessons": [*lessons, *sorted(ROOT.glob("notebooks/source/**/*.py"))],
        "code": [path for path in sources if path not in lessons and not path.stem.startswith("wrong_")],
    }


def blocks(path: Path, part: str) -> Iterator[tuple[int, str]]:
    """The first line and the text of each block of prose: a page, a cell of text, a docstring or a comment."""
    text = path.read_text(encoding="utf-8")
    if part == "lessons":
        for cell in re.finditer(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", text, re.M):
            if "[markdown]" in cell[1]:
                yield text.count("\n", 0, cell.start(2)) + 1, re.sub(r"^# ?", "", cell[2], flags=re.M)
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                yield node.body[0].lineno, ast.get_docstring(node) or ""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and len(token.string.split()) > 4 and "noqa" not in token.string:
                yield token.start[0], token.string.lstrip("# ")
    else:
        yield 1, text


def plain(text: str) -> str:
    """The words of Markdown without code, drawings, rules and addresses."""
    text = re.sub(r"```.*?```", " ", text, flags=re.S)
    text = re.sub(r"^\s{4,}.*$|^\|?[-| :]+\|?$", " ", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", text))
    return re.sub(r"[ \t]+", " ", re.sub(r"[*_#>|]", " ", text))


def sentences(text: str) -> Iterator[str]:
    """The sentences of a block, with three words at least."""
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] ", text):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", " ".join(paragraph.split())):
            if len(sentence.split()) > 2:
                yield sentence


def phrases(sentence: str) -> list[str]:
    """The kinds of phrases in a sentence, each as often as it is there."""
    return [kind for kind, pattern in COMPILED.items() for _ in pattern.finditer(sentence)]


def count(part: str, files: list[Path]) -> tuple[int, Counter, float]:
    """Words, phrases by kind, and the share of long sentences."""
    words, found, lengths = 0, Counter[str](), []
    for path in files:
        for _, text in blocks(path, part):
            for sentence in sentences(plain(text)):
                lengths.append(len(sentence.split()))
                found.update(phrases(sentence))
    words = sum(lengths)
    return words, found, sum(length > LONG for length in lengths) / max(1, len(lengths))


def changed_lines(path: Path, base: str = "origin/main") -> set[int]:
    """The numbers of the lines of a file that differ from ``base``; none where Git does not know ``base``."""
    command = ["git", "-C", str(ROOT), "diff", "--unified=0", "--no-color", base, "--", str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found: set[int] = set()
    for start, lines in re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", output, re.M):
        found.update(range(int(start), int(start) + int(lines or 1)))
    return found


def in_changes() -> Iterator[str]:
    """``file:line: kind: sentence`` of each phrase in a changed line."""
    for part, files in parts().items():
        for path in files:
            if changed := changed_lines(path):
                lines = path.read_text(encoding="utf-8").splitlines()
                for first, text in blocks(path, part):
                    for number, line in enumerate(text.splitlines(), first):
                        if number in changed and ALLOWED not in lines[number - 1]:
                            for kind in phrases(plain(line)):
                                yield f"{path.relative_to(ROOT)}:{number}: {kind}: {line.strip()}"


def main(kind: str = "") -> int:
    refused = []
    print(f"{'part':8}  words  phrases/1000  over {LONG} words")
    for part, files in parts().items():
        words, found, long = count(part, files)
        most = ", ".join(f"{name} {number}" for name, number in found.most_common(3))
        rate = 1000 * found.total() / words
        print(f"{part:8} {words:6,} {rate:13.1f} {long:14.1%}  {most}")
        if rate > LIMITS[part]:
            refused.append(f"{part}: {rate:.2f} phrases per 1,000 words, and {LIMITS[part]} are allowed")
        for path in files if kind else []:
            for first, text in blocks(path, part):
                for sentence in sentences(plain(text)):
                    if kind in phrases(sentence):
                        print(f"{path.relative_to(ROOT)}:{first}: {sentence}")
    refused += in_changes()
    if refused:
        print("\nRefused (write nouns and the field's verbs instead):", *refused, sep="\n")
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
