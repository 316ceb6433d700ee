"""The documentation site: built as readers build it, complete, without a network, readable on a phone and on paper."""

import importlib.util
import os
import re
import subprocess
import sys
from urllib.parse import unquote

import pytest

from tests.conftest import ROOT
from tests.test_browser import browser, new_page  # noqa: F401
from tools import book

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
OUTSIDE = ("data", "http", "https")  # how a figure inside a page begins, and an address
PRINTED = (  # for teachers: at most two sheets each
    "how-to/teach_a_class.html", "how-to/prepare_the_day_before.html", "course/workshop/two-hours/run_sheet.html",
    "course/workshop/half-day/run_sheet.html",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site by ``sphinx-build -n -W``, which is what ``make book`` runs."""
    for module in ("myst_nb", "sphinx_book_theme"):
        if importlib.util.find_spec(module) is None:
            problem = f"{module} is not installed: pip install -e '.[book]'"
            pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", str(ROOT / "docs"), str(out)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out


@pytest.fixture(scope="module")
def pages(site):
    """The site's own pages, without slides and the web page: path -> HTML."""
    found = {path: path.read_text(encoding="utf-8") for path in sorted(site.rglob("*.html"))}
    return {
        path: text
        for path, text in found.items()
        if not {"page", "slides", "_static"} & set(path.relative_to(site).parts)
    }


def test_the_site_needs_no_network(site):
    assert book.fetched(site) == []
    (site / "new.html").write_text('<script async src="https://cdn.example.org/x.js"></script>')
    assert book.fetched(site) == ["new.html: https://cdn.example.org/x.js"]
    (site / "new.html").unlink()


def test_links_of_the_site_lead_somewhere(site, pages):
    assert "<img" in pages[site / "course/lectures/02_pi.html"]
    if (site / "page").exists() or os.environ.get("CI"):  # the web page, which lessons lead to, and which leads back
        assert 'href="../../page/index.html#schedule"' in pages[site / "course/lectures/07_pipelines.html"]
        assert 'href="page/index.html"' in pages[site / "index.html"]
        assert 'href="../course/lectures/07_pipelines.html"' in (site / "page/index.html").read_text()
    broken = [
        f"{page.relative_to(site)}: {link}"
        for page, text in pages.items()
        for link in re.findall(r'(?:href|src)="([^"#?:]+)', text)
        if link not in OUTSIDE and not (page.parent / unquote(link)).exists()
    ]
    assert not broken


def test_every_page_is_in_the_sidebar(site, pages):
    start = pages[site / "index.html"]
    sidebar = start[start.index('<nav class="bd-links') : start.index("</nav>", start.index('<nav class="bd-links'))]
    listed = {(site / link).resolve() for link in re.findall(r'href="([^"#:]+)', sidebar)}
    left_out = [page.relative_to(site).as_posix() for page in pages if page.resolve() not in listed]
    assert set(left_out) <= {"index.html", "genindex.html", "search.html", "py-modindex.html"}, left_out


def test_what_teachers_print_has_two_sheets(site, browser):  # noqa: F811
    page = new_page(browser)
    for name in PRINTED:
        page.goto((site / name).as_uri())
        printed = page.pdf(format="A4", margin=dict.fromkeys(("top", "bottom", "left", "right"), "15mm"))
        sheets = len(re.findall(rb"/Type\s*/Page\b", printed))
        assert 1 <= sheets <= 2, f"{name} has {sheets} sheets"
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_its_window(site, browser, width, scheme):  # noqa: F811
    page = new_page(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for name in ("index", "how-to/install", "reference/cheat_sheet", "generated/api", "course/lectures/07_pipelines"):
        page.goto((site / f"{name}.html").as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 1, f"{name} is {wide} pixels wider than the window"
        ground, letters = page.evaluate("""() => [
            getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector("article")).color
        ]""")
        lightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ground, letters)]
        assert (lightness[0] < lightness[1]) == (scheme == "dark"), (ground, letters)
    page.close()
