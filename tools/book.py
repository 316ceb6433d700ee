"""The documentation site, as an extension of Sphinx: ``make book``, or ``sphinx-build -n -W docs FOLDER``.

Before Sphinx reads docs/, this adds what the repository has elsewhere: the executed notebooks (docs/course) and the
generated pages (docs/generated). git ignores both folders. After the build it adds slides and the web page that needs
no installation. The pages need no server and no network: open index.html.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

from dtlib.browser import build as browser
from dtlib.browser import pages
from dtlib.errors import DtlibError
from dtlib.lab.checks.questions import quizzes
from tools import addresses, reference, slides

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COURSE, GENERATED = DOCS / "course", DOCS / "generated"
FILES = ("tools/data/planner_rows.csv", "tools/data/laptop_predicted.json")  # that pages offer to download
COPIED = {"CHANGELOG.md": "generated/changelog.md", "cluster_profiles/README.md": "generated/cluster_profiles.md"}
KINDS = {"lectures": "Lectures", "exercises": "Exercises", "solutions": "Exercises, solved", "workshop": "Short tracks"}
TRY = '<a href="{}">Try it in this browser</a>: nothing to install.'
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^()\s]+)\)")
# What a page needs to be drawn. A link that is only followed when clicked may lead anywhere.
FETCHED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']((?:https?:)?//[^"']+)|"""
                     r"""<link\b(?![^>]*rel=["'](?:canonical|author|license))[^>]*\bhref=["']((?:https?:)?//[^"']+)|"""
                     r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')]+)""")  # fmt: skip


def place_of(path: str) -> str | None:
    """Where the site has a file of the repository, relative to docs/; None if it is not in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in FILES:
        return f"generated/files/{Path(path).name}"
    if found := re.fullmatch(r"notebooks/(start\.md|(?:lectures|exercises|workshop)/.+)", path):
        return f"course/{found[1]}"
    if found := re.fullmatch(r"notebooks/solutions/(.+)", path):  # a solved lecture is shown in place of the lecture
        return f"course/{'solutions' if found[1].endswith('_exercises.ipynb') else 'lectures'}/{found[1]}"
    return COPIED.get(path)


def relinked(text: str, file: str, place: str) -> str:
    """The text of a file of the repository for its place in the site, with links that lead to places in the site."""

    def link(match: re.Match) -> str:
        words, target = match.groups()
        path, hash, anchor = target.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(file), path))
        if ":" in target or not path or not (ROOT / there).exists():
            return match[0]
        if found := place_of(there):
            return f"[{words}]({os.path.relpath(found, os.path.dirname(place))}{hash}{anchor})"
        home = addresses.repository()
        return f"[{words}]({home}/blob/main/{there}{hash}{anchor})" if home else words

    return LINK.sub(link, text)


def prepare(page: bool) -> None:
    """Write docs/course and docs/generated. ``page``: the site has the web page, so lessons link to it."""
    for folder in (COURSE, GENERATED):
        shutil.rmtree(folder, ignore_errors=True)
    notebooks = ROOT / "notebooks"
    sources = [*(notebooks / "solutions").glob("*.ipynb"), *(notebooks / "exercises").glob("*.ipynb")]
    sources += [path for path in (notebooks / "workshop").rglob("*.*") if path.suffix in (".ipynb", ".md")]
    for path in sorted(sources):
        if any(part.startswith(".") for part in path.relative_to(notebooks).parts):
            continue
        file = path.relative_to(ROOT).as_posix()
        text = relinked(path.read_text(encoding="utf-8"), file, _written(file))
        if place_of(file).startswith("course/solutions/"):  # so that a list of pages distinguishes it from the exercise
            text = re.sub(r'"(# [^\n"\\]+)', r'"\1, solved', text, count=1)
        _write(place_of(file), text)
    for path in [*(COURSE / "lectures").glob("*.ipynb"), *(COURSE / "exercises").glob("*.ipynb")] if page else ():
        _link_to_the_page(path)
    for kind, title in KINDS.items():
        pages = sorted(path.relative_to(COURSE / kind).with_suffix("") for path in (COURSE / kind).rglob("*.*"))
        listed = "\n".join(path.as_posix() for path in pages)
        _write(f"course/{kind}/index.md", f"# {title}\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n")
    start = relinked((notebooks / "start.md").read_text(encoding="utf-8"), "notebooks/start.md", "course/start.md")
    if page:
        start = start.replace("\n", f"\n\n{TRY.format('../page/index.html')}\n", 1)
    decks = " · ".join(
        f'<a href="../slides/{path.stem}.html">{path.stem.partition("_")[0]}</a>' for path in slides.sources()
    )
    _write("course/start.md", f"{start}\n## Slides\n\n{decks}\n")
    for path, place in COPIED.items():
        _write(place, relinked((ROOT / path).read_text(encoding="utf-8"), path, place))
    for path in FILES:
        (GENERATED / "files").mkdir(exist_ok=True)
        shutil.copy(ROOT / path, GENERATED / "files")
    for name, text in reference.pages().items():
        _write(f"generated/{name}.md", text)


def _written(file: str) -> str:
    place = place_of(file)
    assert place, f"{file} is not in the site"
    return place


def _write(place: str, text: str) -> None:
    (DOCS / place).parent.mkdir(parents=True, exist_ok=True)
    (DOCS / place).write_text(text, encoding="utf-8")


def _link_to_the_page(notebook: Path) -> None:
    """Put links to a notebook's rooms of the web page, and to its quiz there, below its first words."""
    found = {name: pages.room(name).TITLE for name in pages.NAMES if notebook.stem == pages.room(name).LESSON}
    number = notebook.stem.partition("_")[0]
    if number in quizzes() and notebook.parent.name == "lectures":
        found[f"quiz={number}"] = "the quiz"
    if found:
        links = ", ".join(f'<a href="../../page/index.html#{state}">{title}</a>' for state, title in found.items())
        book = nbformat.read(notebook, as_version=4)
        book.cells[0].source += f"\n\nIn this browser, without ranks: {links}."
        nbformat.write(book, notebook)


def source_of(place: str) -> str:
    """The file to edit for a page of the site, relative to the repository."""
    name = Path(place).stem
    if place.startswith("course/workshop/"):
        return f"notebooks/source/tracks/{place.split('/')[2]}"
    if place.startswith("course/"):
        from dtlib.lab.lesson_files import notebooks

        source = notebooks().get(name)
        return source.relative_to(ROOT).as_posix() if source else "notebooks/source/start.md"
    copied = {there: path for path, there in COPIED.items()}
    return copied.get(place, "tools/reference.py" if place.startswith("generated/") else f"docs/{place}")


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this once."""
    out, made = Path(app.outdir), {}

    def before(app: Any) -> None:
        try:
            made["page"] = browser.write(out.parent / f"{out.name}-page", course="../course/")
        except DtlibError as problem:
            print(f"The site has no web page to try things in: {problem}")
        prepare("page" in made)

    def read(app: Any, name: str, content: list[str]) -> None:
        path = DOCS / f"{name}.md"
        if path.exists() and not name.startswith(("course/", "generated/")):
            content[0] = relinked(content[0], f"docs/{name}.md", f"{name}.md")
        if name == "index" and made:
            content[0] = content[0].replace("\n\n|", f"\n\n{TRY.format('page/index.html')}\n\n|", 1)

    def context(app: Any, name: str, template: str, context: dict, doctree: Any) -> None:
        if home := addresses.repository():
            context["edited"] = lambda file: f"{home}/edit/main/{source_of(file)}"
            context |= {"edit_page_url_template": "{{ edited(file_name) }}", "edit_page_provider_name": "GitHub"}

    def after(app: Any, problem: Exception | None) -> None:
        if problem or app.builder.format != "html":
            return
        slides.write(out / "slides")
        if made:
            folder, single = made["page"]
            shutil.copytree(folder, out / "page", dirs_exist_ok=True)
            shutil.copy(single, out / "page" / "in_one_file.html")

    app.connect("builder-inited", before)
    app.connect("source-read", read)
    app.connect("html-page-context", context, priority=1)
    app.connect("build-finished", after)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def build(out: Path) -> None:
    """Write the site to ``out``. Each warning of Sphinx is an error."""
    shutil.rmtree(out, ignore_errors=True)
    options = ["-n", "-W", "--keep-going", "-q", "-E", "-d", str(out.parent / f"{out.name}-doctrees")]
    subprocess.run([sys.executable, "-m", "sphinx", *options, str(DOCS), str(out)], cwd=ROOT, check=True)


def fetched(out: Path) -> list[str]:
    """Files that pages of the site would fetch from a network, each with the page's name."""
    return [
        f"{path.relative_to(out)}: {next(filter(None, match))}"
        for path in sorted(out.rglob("*")) if path.suffix in (".html", ".css")
        for match in FETCHED.findall(path.read_text(encoding="utf-8"))
    ]  # fmt: skip


def main() -> None:
    out = ROOT / "build" / "book"
    build(out)
    if found := fetched(out):
        sys.exit("The site must not need a network, but fetches from one:\n" + "\n".join(found))
    print(f"\nThe site is in {out.relative_to(ROOT)}: open index.html in a browser.")


if __name__ == "__main__":
    main()
