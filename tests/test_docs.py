"""README, CONTRIBUTING and docs/: short, complete, and true where they can be run."""

import importlib.util
import re

import pytest

from dtlib import cli
from tests.cases import for_each
from tests.conftest import ROOT, said_by_ranks
from tests.test_links import PAGES
from tests.test_repository import tracked_texts
from tools import addresses, book, reference

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
SHELVES = ("tutorial", "how-to", "reference", "explanation")
WRITTEN = [page for page in PAGES if page.suffix == ".md" and not page.name.startswith("CHANGELOG")]
lint = pytest.mark.lint


@lint
def test_readme_and_contributing_are_short_and_a_command_stands_at_the_top():
    assert len(README.split()) <= 800 and len(README) < 5600
    assert len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 1300
    first_screen, _, _ = README.partition("You need")
    assert "make lab" in first_screen and "make test" in first_screen
    assert len(README.partition("    cd dtlib")[0].split()) <= 60


@lint
@for_each(page=WRITTEN)
def test_commands_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.M)) | {".venv/tests"}
    named = re.findall(r"(?:`|^    |&& )make (?:[A-Z]+=\S+ )*([a-z.][\w./-]*)", text, re.M)
    assert set(named) <= targets, set(named) - targets
    programs = {name for name in re.findall(r"(?:`|^    |bin/)dtlib ([a-z]+)", text, re.M)}
    assert programs <= set(cli._COMMANDS), programs - set(cli._COMMANDS)
    modules = set(re.findall(r"python -m ((?:tools|tests|benchmarks)[\w.]*)", text))
    assert not [name for name in modules if name != "tools.NAME" and importlib.util.find_spec(name) is None]


@lint
def test_the_reference_says_what_each_target_of_make_does():
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert set(reference.TARGETS) == set(phony.split())


@lint
def test_each_page_is_on_its_shelf():
    for shelf in SHELVES:
        index = (ROOT / "docs" / shelf / "index.md").read_text()
        pages = {path.relative_to(ROOT / "docs" / shelf).with_suffix("").as_posix() for path in
                 (ROOT / "docs" / shelf).rglob("*.md")} - {"index"}  # fmt: skip
        toctrees = "\n".join(re.findall(r"```\{toctree\}(.*?)```", index, re.S)).split()
        assert pages <= set(toctrees), f"{shelf}: {pages - set(toctrees)} is in no toctree of its index.md"
        missing = [page for page in pages if f"({page}.md" not in index]
        assert not missing, f"{shelf}/index.md has no link to {missing}"
    assert not [path for path in (ROOT / "docs").glob("*.md") if path.name != "index.md"]


@lint
def test_addresses_stand_in_one_place():
    assert addresses.readme(README, addresses.urls()) == README, "run python -m tools.addresses"
    known = {"Repository": "https://example.org/r", "Documentation": "https://example.org/d/"}
    assert "](https://example.org/d/page/index.html)" in addresses.readme(README, known)
    placeholders = re.compile("<this" r" repository>|\bOW" r"NER\b")
    found = [name for name, text in tracked_texts() if not name.endswith(".csv") and placeholders.search(text)]
    assert not found, found


@lint
def test_links_of_a_page_lead_to_places_in_the_site(monkeypatch):
    monkeypatch.setattr(addresses, "repository", lambda: "https://example.org/r")
    text = "[a](../../notebooks/solutions/02_pi.ipynb) [b](../../CHANGELOG.md#x) [c](../../LICENSE) [d](run_a_hub.md)"
    assert book.relinked(text, "docs/how-to/install.md", "how-to/install.md") == (
        "[a](../course/lectures/02_pi.ipynb) [b](../generated/changelog.md#x) "
        "[c](https://example.org/r/blob/main/LICENSE) [d](run_a_hub.md)"
    )
    monkeypatch.setattr(addresses, "repository", lambda: "")
    assert book.relinked("[c](LICENSE)", "README.md", "x.md") == "c"
    assert book.source_of("course/lectures/02_pi.ipynb") == "dtlib/lessons/l02/lecture.py"
    assert book.source_of("how-to/install.md") == "docs/how-to/install.md"


@lint
def test_each_folder_says_in_one_sentence_what_it_is_for():
    silent = [path for path in reference.folders() if not reference._first(path) and path.parents[1].name != "lessons"]
    assert not silent, silent
    assert "| `dtlib/lessons/l02/` | Lesson 02 " in reference.packages()


def output_of(block: str, ranks: int, folder) -> list[str]:
    (folder / "script.py").write_text(block.removeprefix("%%px\n"))
    return said_by_ranks(["script.py"], ranks, cwd=folder).splitlines()


def test_the_first_cell_of_the_readme_prints_what_stands_below_it(tmp_path):
    cell, *others = BLOCKS
    assert cell.startswith("%%px") and len(others) == 2
    printed = re.findall(r"^    rank \d \| (.+)$", README, re.M)
    assert sorted(output_of(cell, 4, tmp_path)) == printed and len(printed) == 4


@pytest.mark.parametrize("block", BLOCKS[1:], ids=["backend", "library"])
def test_the_other_blocks_of_the_readme_run_on_ranks(tmp_path, block):
    script = f"{block}\nassert model(torch.zeros(1, 8)).shape == (1, 1)\nprint('fine')\n"
    assert output_of(script, 2, tmp_path).count("fine") == 2
