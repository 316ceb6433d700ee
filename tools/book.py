"""The course to read without installing it: ``make book`` makes a static site of the executed notebooks.

Its pages need no server and no network: open build/book/index.html. Lectures are the solved ones, with their outputs;
exercises stand as learners get them, and their solutions beside them, so that the notebooks' links lead where they do
in JupyterLab. The slides, the glossary, the cheat sheet and the instructor's guide are part of it, and so is the web
page in which nothing has to be installed (dtlib/browser).
"""

import re
import shutil
import sys
from pathlib import Path

import nbformat
from sphinx.application import Sphinx

from dtlib.browser import build as browser
from dtlib.browser import rooms
from dtlib.errors import DtlibError
from dtlib.lab.checks.questions import quizzes
from tools import reference, slides

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "project": "dtlib",
    "author": "The dtlib authors",
    # The lessons write their formulas in plain letters. MathJax would put a script from a network on every page.
    "extensions": ["myst_nb", "sphinx.ext.imgmath", "sphinx.ext.autodoc", "sphinx.ext.napoleon"],
    "html_math_renderer": "imgmath",
    "root_doc": "start",
    "html_theme": "alabaster",
    "html_theme_options": {
        "page_width": "1200px",
        "body_max_width": "960px",
        "description": "Distributed deep learning on ranks of your own",
    },
    "html_sidebars": {"**": ["about.html", "navigation.html", "searchbox.html"]},
    "html_show_sphinx": False,
    "html_copy_source": False,
    "html_static_path": [str(ROOT / "docs" / "book_static")],
    "html_css_files": ["book.css"],  # columns of tables, and a dark page for who asks the browser for one
    "nb_execution_mode": "off",
    "nb_ipywidgets_js": {},  # widgets live in JupyterLab alone; their scripts would come from a network
    "autodoc_member_order": "bysource",
    "autodoc_typehints": "signature",
    "suppress_warnings": ["mystnb.unknown_mime_type", "myst.header", "ref.python"],
}
BESIDE = (
    "cheat_sheet.md", "glossary.md", "instructor/guide.md", "instructor/before.md", "instructor/wrong_answers.md",
    "instructor/discussions.md", "instructor/wall.md", "decision_chart.md", "planner.md", "laptop.md", "hub.md",
)  # fmt: skip
# What a page needs to be drawn. A link that is only followed when clicked may lead anywhere.
FETCHED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']((?:https?:)?//[^"']+)|"""
                     r"""<link\b(?![^>]*rel=["'](?:canonical|author|license))[^>]*\bhref=["']((?:https?:)?//[^"']+)|"""
                     r"""(?:@import|url\()\s*["']?((?:https?:)?//[^"')]+)""")  # fmt: skip


def lay_out(source: Path, page: bool = False) -> None:
    """The notebooks as a book has them: folders and names are those of the workshop. ``page``: lessons have links to
    their rooms in the web page, which stands in ``page/``."""
    notebooks = ROOT / "notebooks"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(notebooks / "exercises", source / "exercises", ignore=shutil.ignore_patterns(".*"))
    for kind in ("lectures", "solutions"):
        (source / kind).mkdir()
    for path in sorted((notebooks / "solutions").glob("*.ipynb")):
        solved = path.stem.endswith("_exercises")
        text = path.read_text(encoding="utf-8")
        if solved:  # so that a list of pages, such as what a search has found, tells it from the exercises themselves
            text = re.sub(r'"(# [^\n"\\]+)', r'"\1, solved', text, count=1)
        (source / ("solutions" if solved else "lectures") / path.name).write_text(text, encoding="utf-8")
    for path in [*(source / "lectures").glob("*.ipynb"), *(source / "exercises").glob("*.ipynb")] if page else ():
        _lead_to_the_page(path)
    shutil.copytree(notebooks / "workshop", source / "workshop", ignore=shutil.ignore_patterns(".*"))
    contents = "\n## Slides\n\n" + " · ".join(
        f'<a href="slides/{path.stem}.html">{path.stem.partition("_")[0]}</a>' for path in slides.sources()
    )
    contents += "\n\nWho teaches: [the guide](docs/instructor/guide.md). To look up: [glossary](docs/glossary.md), "
    contents += "[one page](docs/cheat_sheet.md), [reference](docs/reference.md).\n"
    for name in BESIDE:
        (source / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / "docs" / name).read_text(encoding="utf-8").replace("../notebooks/", "../")
        text = re.sub(r"\[([^\]]+)\]\([./]*/cluster_profiles/[^)]*\)", r"\1", text)  # which the book has not
        (source / "docs" / name).write_text(text, encoding="utf-8")
    for name in ("decision_chart.svg", "planner_rows.csv"):  # which those pages show, or lead to
        shutil.copy(ROOT / "docs" / name, source / "docs" / name)
    (source / "docs" / "reference.md").write_text(reference.page(), encoding="utf-8")
    pages = "\n".join(f"docs/{name.removesuffix('.md')}" for name in (*BESIDE, "reference.md"))
    contents += f"\n```{{toctree}}\n:hidden:\n:caption: Beside the course\n\n{pages}\n```\n"
    for kind in ("lectures", "exercises", "solutions"):
        pages = "\n".join(f"{kind}/{path.stem}" for path in sorted((source / kind).glob("*.ipynb")))
        contents += f"\n```{{toctree}}\n:hidden:\n:caption: {kind.capitalize()}\n\n{pages}\n```\n"
    pages = "\n".join(
        path.relative_to(source).with_suffix("").as_posix() for path in sorted((source / "workshop").rglob("*.*"))
    )
    contents += f"\n```{{toctree}}\n:hidden:\n:caption: Short tracks\n\n{pages}\n```\n"
    start = (notebooks / "start.md").read_text()
    if page:
        start = start.replace(
            "\n", '\n\n<a href="page/index.html">Try it in this browser</a>: nothing to install.\n', 1
        )
    (source / "start.md").write_text(start + contents)


def _lead_to_the_page(notebook: Path) -> None:
    """Put links to its rooms of the web page, and to its quiz there, below the first words of a notebook."""
    found = {name: rooms.room(name).TITLE for name in rooms.NAMES if notebook.stem == rooms.room(name).LESSON}
    number = notebook.stem.partition("_")[0]
    if number in quizzes() and notebook.parent.name == "lectures":
        found[f"quiz={number}"] = "the quiz"
    if found:
        links = ", ".join(f'<a href="../page/index.html#{state}">{title}</a>' for state, title in found.items())
        book = nbformat.read(notebook, as_version=4)
        book.cells[0].source += f"\n\nIn this browser, without ranks: {links}."
        nbformat.write(book, notebook)


def build(out: Path) -> None:
    """Write the site to ``out``; with the web page, where npm or a former build has Python for browsers."""
    source, page = out.parent / "book-source", None
    try:
        page = browser.write(out.parent / "book-page", course="../")
    except DtlibError as problem:
        print(f"The book has no web page to try things in: {problem}")
    lay_out(source, bool(page))
    shutil.rmtree(out, ignore_errors=True)
    Sphinx(source, None, out, out.parent / "book-doctrees", "html", confoverrides=SETTINGS, freshenv=True).build()
    slides.write(out / "slides")
    if page:
        folder, single = page
        shutil.copytree(folder, out / "page")
        shutil.copy(single, out / "page" / "in_one_file.html")
    (out / "index.html").write_text('<meta http-equiv="refresh" content="0; url=start.html">\n')


def fetched(out: Path) -> list[str]:
    """What pages of the site would fetch from a network, each with the page's name."""
    return [
        f"{path.relative_to(out)}: {next(filter(None, match))}"
        for path in sorted(out.rglob("*")) if path.suffix in (".html", ".css")
        for match in FETCHED.findall(path.read_text(encoding="utf-8"))
    ]  # fmt: skip


def main() -> None:
    out = ROOT / "build" / "book"
    build(out)
    if found := fetched(out):
        sys.exit("The book is not to need a network, but these are fetched from one:\n" + "\n".join(found))
    print(f"\nThe book is in {out.relative_to(ROOT)}: open index.html in a browser.")


if __name__ == "__main__":
    main()
