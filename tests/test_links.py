"""Links inside the repository lead somewhere; those that lead out of it, and references, are well formed."""

import json
import re
from urllib.parse import unquote, urlsplit

import pytest

from dtlib.lab.lesson_files import notebooks
from tests.cases import for_each
from tests.conftest import ROOT

pytestmark = pytest.mark.lint
LEFT_OUT = {".venv", "build", "work", "wheelhouse", ".git", "node_modules", ".ipynb_checkpoints", ".pytest_cache"}
MADE = (("course",), ("generated",))  # what a build of the site adds to docs/
PAGES = [
    path for pattern in ("*.md", "docs/**/*.md", "cluster_profiles/*.md", "data/*.md", "notebooks/*.md",
                         "notebooks/*/*.ipynb", "benchmarks/*.md")
    for path in sorted(ROOT.glob(pattern))
    if not LEFT_OUT & set(path.relative_to(ROOT).parts) and path.relative_to(ROOT).parts[1:2] not in MADE
]  # fmt: skip
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")
ADDRESS = re.compile(r"https?://[^\s)>\]\"'`|]+")
# A year, an address, documentation, or words of its own.
SOURCE = re.compile(r'\b(1[89]|20)\d\d\b|[Dd]oc(s|ument)|https?:|\w\.(com|org)/|\d{4}\.\d{4}|"[^"]+"')
ARXIV = re.compile(r"arXiv:(\S+?)[,;.)]*(?=\s|$)")


def text_of(path) -> str:
    """The prose of a page: without listings."""
    if path.suffix != ".ipynb":
        return re.sub(r"```[\s\S]*?```|^    .*$", "", path.read_text(encoding="utf-8"), flags=re.M)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors_of(path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text_of(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text_of(path))):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        anchored = parts.fragment and target.suffix == ".md"
        if not target.exists() or (anchored and parts.fragment not in anchors_of(target)):
            found.append(link)
    return found


@for_each(path=PAGES)
def test_links_lead_somewhere_and_references_are_well_formed(path):
    assert broken(path) == []
    text = text_of(path)
    for address in ADDRESS.findall(text):
        parts = urlsplit(address.rstrip(".,;:"))
        assert re.fullmatch(r"[\w.-]+\.[a-z]{2,}(:\d+)?|localhost(:\d+)?|127\.0\.0\.1(:\d+)?", parts.netloc), address
    for number in ARXIV.findall(text):
        assert re.fullmatch(r"\d{4}\.\d{4,5}(v\d+)?", number), f"arXiv:{number}"


def test_a_link_that_leads_nowhere_is_noticed(tmp_path):
    (tmp_path / "there.md").write_text("# A heading, here\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md) [b](there.md#a-heading-here) [c](gone.md) [d](there.md#gone) `[e](code.md)`")
    assert broken(page) == ["gone.md", "there.md#gone"]


def test_every_lecture_ends_in_references_that_say_who_and_when():
    for name, path in notebooks().items():
        if name.endswith("_exercises") or name.startswith("00"):
            continue
        text = path.read_text(encoding="utf-8").replace("\n# ", "\n")
        assert "## References" in text, name
        references = re.findall(r"^- (.+(?:\n  .+)*)", text.rpartition("## References")[2], re.M)
        loose = [it for it in references if not SOURCE.search(it)]
        assert references and not loose, (name, loose)
