"""The lab in a real browser: JupyterLab as `make lab` starts it, read off the page."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from urllib.request import Request, urlopen

import nbformat
import pytest

from dtlib.lab.course import LEFT_BEHIND, RECORD
from dtlib.world.processes import Process, end_processes, with_descendants
from tests.conftest import ROOT, wait_until

pytestmark = pytest.mark.timeout(1800)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-quic", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
ANSWERS = {'"sum-for-eight", None': '"sum-for-eight", 28', "# your line here": "world.comm.all_reduce(total)"}
FIRST_NOTEBOOK = "notebooks/lectures/00_start_here.ipynb"
HANGS = "# press Stop"  # the cell in which ranks wait until somebody stops them
KILLS = "signal.SIGKILL"  # the cell in which one dies
SECONDS = 400  # that any wait may take; on a busy machine starts of ranks wait for each other
SETTINGS = {
    "apputils-extension/themes": {"adaptive-theme": True},  # assert_contrast chooses
    "completer-extension/manager": {"providerTimeout": 1000 * SECONDS},  # else what comes after a second is not shown
}
ADDRESS = re.compile(r"http://(?:localhost|127\.0\.0\.1):\d+/\S*token=\w+")
SCREENSHOTS = os.environ.get("DTLIB_SCREENSHOTS")  # a folder that gets a picture after every cell


def javascript(name: str) -> str:
    """What a page is asked: tests/javascript/NAME.js."""
    return (ROOT / "tests" / "javascript" / f"{name}.js").read_text()


def missing() -> str:
    """Why there can be no browser here, or ''."""
    if CHROMIUM is None:
        return "there is no chromium on PATH"
    return "" if find_spec("playwright") else "playwright is not installed: pip install -e '.[browser]'"


@pytest.fixture(scope="module")
def browser():
    if problem := missing():
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = new_page(browser, viewport={"width": 1280, "height": 900})
    yield page
    page.close()


def new_page(browser, **options):
    page = browser.new_page(**options)
    page.set_default_timeout(1000 * SECONDS)
    return page


@contextmanager
def jupyterlab(folder, settings, *options, more=(), dtlib=(sys.executable, "-m", "dtlib"), env=None):
    """The address at which JupyterLab answers, as ``dtlib lab`` starts it in a folder: the course is laid out there."""
    log = settings / "lab.log"
    for name, values in {**SETTINGS, **dict(more)}.items():
        file = settings / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with open(log, "w") as output:
        # Neither the open tabs nor the settings of whoever runs this test.
        command = [*dtlib, "lab", "--no-browser", "--", f"--LabApp.workspaces_dir={settings}"]
        command += [f"--LabApp.user_settings_dir={settings / 'settings'}", *options]
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
    try:
        wait_until(lambda: server.poll() is not None or ADDRESS.search(log.read_text()), SECONDS)
        assert server.poll() is None, log.read_text()
        yield ADDRESS.search(log.read_text()).group()
    finally:
        end_processes(with_descendants(Process.of(server.pid)))
        server.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of one JupyterLab for all tests, and the folder that it shows."""
    folder = tmp_path_factory.mktemp("course")
    with jupyterlab(folder, tmp_path_factory.mktemp("lab")) as address:
        yield address, folder


@pytest.fixture
def address(server):
    """That of the start page, without tabs of other tests. Kernels end with the test, and engines with them."""
    yield server[0].replace("?", "?reset&")
    for session in ask(server[0], "sessions"):
        ask(server[0], f"sessions/{session['id']}", "DELETE")


def ask(address: str, what: str, method: str = "GET"):
    """Jupyter's REST API."""
    with urlopen(Request(re.sub(r"/lab[^?]*", f"/api/{what}", address), method=method), timeout=SECONDS) as answer:
        return json.loads(answer.read() or "null")


@pytest.fixture
def course_folder(server, tmp_path):
    """A course of its own below that of the server, so that its engines are its own, too."""
    folder, left_out = server[1] / tmp_path.name, shutil.ignore_patterns(*LEFT_BEHIND, "solutions", "workshop")
    for name in ("cluster_profiles", "notebooks"):
        shutil.copytree(server[1] / name, folder / name, ignore=left_out)
    shutil.copy(server[1] / RECORD, folder)
    return folder


def run_active_cell(page, number: int) -> None:
    """Shift+Enter, after an answer was filled in if the cell asks for one; waits for the cell to finish."""
    cell = page.locator(".jp-Notebook .jp-Cell").nth(number)
    is_code = "jp-CodeCell" in cell.get_attribute("class")
    if is_code:
        text = cell.locator(".cm-content").inner_text()
        for blank, answer in ANSWERS.items():
            if blank in text:
                cell.locator(".cm-content").click()
                page.keyboard.press("Control+A")
                page.keyboard.insert_text(text.replace(blank, answer))
    page.keyboard.press("Shift+Enter")
    if is_code:
        prompt = cell.locator(".jp-InputPrompt")
        if HANGS in text:
            page.wait_for_function("c => c.innerText.includes('rank 2 ')", arg=cell.element_handle())
            page.locator("[data-command='notebook:interrupt-kernel'], [title^='Interrupt the kernel']").first.click()
        page.wait_for_function("p => /\\[\\d+\\]/.test(p.innerText)", arg=prompt.element_handle())
        errors = cell.locator("[data-mime-type='application/vnd.jupyter.stderr']")  # errors too are shown as this
        if HANGS in text:
            assert "Interrupted on ranks 0, 1, 3" in errors.first.inner_text()
        elif KILLS in text:
            assert "Rank 2 was ended by signal 9 (Killed)" in cell.inner_text()
        else:
            assert errors.count() == 0, errors.first.inner_text()


def open_notebook(page, address: str, folder, sources=()) -> int:
    """Open lesson 00 of this course, or a notebook of these cells in its place; click into the first cell, and say how
    many there are."""
    if sources:
        book = nbformat.read(ROOT / FIRST_NOTEBOOK, as_version=4)
        book.cells = [nbformat.v4.new_code_cell(source) for source in sources]
        nbformat.write(book, folder / FIRST_NOTEBOOK)
    page.goto(address.replace("notebooks/start.md?", f"{folder.name}/{FIRST_NOTEBOOK}?"))
    return wait_for_notebook(page, folder / FIRST_NOTEBOOK)


def wait_for_notebook(page, file) -> int:
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    wait_for_kernel(page)
    assert page.locator(".jp-Dialog").count() == 0, "nothing stands in front of the first lesson"
    # Cells are attached one after the other: wait for the last.
    count = len(nbformat.read(file, as_version=4).cells)
    page.wait_for_selector(f":nth-match(.jp-Notebook .jp-Cell, {count})", state="attached")
    page.locator(".jp-Notebook .jp-Cell").first.click()
    return count


def wait_for_kernel(page) -> None:
    """JupyterLab loses a cell that is run before its kernel is connected (jupyterlab/jupyterlab issue 8490)."""
    page.wait_for_selector("#jp-main-statusbar >> text=/^Python 3.* Idle$/")


def picture(page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


class Cell:
    """A cell of the open notebook that is run, and read off while it runs."""

    def __init__(self, page, number: int):
        self.page = page
        self.cell = page.locator(".jp-Notebook .jp-Cell").nth(number)
        page.keyboard.press("Shift+Enter")

    def text(self) -> str:
        return "\n".join(self.cell.locator(".jp-OutputArea-output").all_text_contents())

    def wait_for(self, words: str) -> str:
        """What the cell shows as soon as it shows these words."""
        condition = "([cell, words]) => cell.innerText.includes(words)"
        self.page.wait_for_function(condition, arg=[self.cell.element_handle(), words])
        return self.text()

    def wait(self) -> str:
        """What it shows in the end."""
        prompt = self.cell.locator(".jp-InputPrompt").element_handle()
        self.page.wait_for_function("p => /\\[\\d+\\]/.test(p.innerText)", arg=prompt)
        return self.text()


@pytest.mark.slow
def test_a_cell_on_ranks_as_a_learner_meets_it(page, address, course_folder, tmp_path):
    sources = [
        "%%px\n1",
        "from dtlib import lab; lab.engines(3)",
        "%%px\nimport dtlib, os, time, torch\nworld, lives_on_ranks = dtlib.init(), 1",
        "%%px\nfor step in range(3):\n    print('step', step)\n"
        f"    while not os.path.exists(f'{tmp_path}/{{step}}'): time.sleep(0.1)",
        "%%px\nif world.rank == 1: 1 / 0\nworld.comm.barrier()",
        "%%px\nprint(lives_on",
    ]
    open_notebook(page, address, course_folder, sources)
    assert "Run the first cell" in Cell(page, 0).wait()
    assert "process id" in Cell(page, 1).wait()
    Cell(page, 2).wait()

    # What ranks print appears meanwhile; in the end it is there once, as all say the same, and that alone is saved.
    steps = Cell(page, 3)
    shown = steps.wait_for("rank 0 | step 0")
    assert "step 1" not in shown
    (tmp_path / "0").touch()
    steps.wait_for("rank 2 | step 1")
    steps.wait_for("s: ranks 0 to 2 in `line 3: while not")
    picture(page, "live")
    for step in (1, 2):
        (tmp_path / f"{step}").touch()
    assert steps.wait() == "".join(f"ranks 0 to 2 | step {step}\n" for step in range(3))
    picture(page, "live-over")

    failing = Cell(page, 4)
    shown = failing.wait()
    assert "ZeroDivisionError: division by zero" in shown and "PeerFailed: barrier" in shown
    picture(page, "failed")

    # A name that lives on rank 0 is completed.
    editor = page.locator(".jp-Notebook .jp-Cell").nth(5).locator(".cm-content")
    editor.click()
    page.keyboard.press("Control+End")
    page.keyboard.press("Tab")
    page.wait_for_selector(".jp-Completer >> text=lives_on_ranks")
    picture(page, "completed")
    page.keyboard.press("Enter")
    page.wait_for_function("e => e.innerText.includes('lives_on_ranks')", arg=editor.element_handle())

    page.keyboard.press("Control+S")

    def saved():
        with suppress(nbformat.reader.NotJSONError):  # JupyterLab is writing it
            return nbformat.read(course_folder / FIRST_NOTEBOOK, as_version=4).cells[3].outputs

    wait_until(saved)
    assert [each.output_type for each in saved()] == ["stream"]


@pytest.mark.slow
def test_lesson_00_under_run_all(page, address, course_folder):
    """Nobody answers, and nobody presses Stop: it comes to its end, and the planted hang ends by itself."""
    open_notebook(page, address, course_folder)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator(".jp-Notebook .jp-OutputArea-output", has_text="give or take").first.wait_for()
    last = page.locator(".jp-Notebook .jp-CodeCell").last.element_handle()
    page.wait_for_function("c => /\\[\\d+\\]/.test(c.innerText)", arg=last)
    picture(page, "run-all")
    text = "\n".join(page.locator(".jp-Notebook .jp-OutputArea-output").all_text_contents())
    assert "rank 2 has finished its cell" in text
    assert re.search(r"rank 0 \| pi = 3\.14\d+, give or take 0\.0005", text)


@pytest.mark.slow
def test_lesson_00_cell_by_cell(page, address):
    """From the start page on."""
    page.goto(address)
    page.locator(".jp-MarkdownViewer a", has_text="00 Start here").click()
    count = wait_for_notebook(page, ROOT / FIRST_NOTEBOOK)
    for number in range(count):
        run_active_cell(page, number)
        picture(page, f"{number:02d}")

    # Not the inner text: that leaves out what has scrolled away.
    text = "\n".join(page.locator(".jp-Notebook .jp-OutputArea-output").all_text_contents())
    assert re.search(r"rank 0 \| I am rank 0 of 4\nrank 1 \| I am rank 1 of 4", text)
    assert "You predicted 28, and it came out as 28: right." in text
    assert "Passed: first-sum." in text
    # The reduced sum, on every rank; once more after the hang and dtlib.reset(), and on new ranks after a death.
    assert len(re.findall(r"ranks 0 to 3 \| tensor\(6\)", text)) == 3
    assert re.search(r"rank 0 \| pi = 3\.14\d+, give or take 0\.0005", text)
    assert page.locator(".jp-Notebook .jp-OutputArea-output img").count() == 1  # the darts


@pytest.mark.nightly
def test_a_tracks_notebook_from_the_first_cell_to_the_last(page, address):
    """Under Run All, from the start page: nobody answers, and it comes to its end without an error."""
    page.goto(address)
    page.locator(".jp-MarkdownViewer a", has_text="four ranks and a sum").click()
    page.locator(".jp-Notebook a", has_text="B Average").first.click()
    notebook = page.locator(".jp-NotebookPanel", has=page.locator("h1", has_text="B Average"))
    count = len(nbformat.read(ROOT / "notebooks/workshop/two-hours/B_average.ipynb", as_version=4).cells)
    notebook.locator(".jp-Cell").nth(count - 1).wait_for(state="attached")
    wait_for_kernel(page)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    last = notebook.locator(".jp-CodeCell").last.element_handle()
    page.wait_for_function("c => /\\[\\d+\\]/.test(c.innerText)", arg=last)
    picture(page, "track")
    text = "\n".join(notebook.locator(".jp-OutputArea-output").all_text_contents())
    assert "Not yet: hook-fix" in text and "Error" not in text
    assert notebook.locator(".jp-OutputArea-output img").count() >= 2  # the ring, and the time lines


@pytest.mark.slow
def test_the_start_page_leads_to_every_lesson_and_counts_what_is_done(page, tmp_path):
    """In a clone, of which git sees no change afterwards."""
    if subprocess.run(["git", "clone", "-q", "--shared", ROOT, tmp_path / "clone"]).returncode:
        pytest.skip("not in a git checkout")
    with jupyterlab(tmp_path / "clone", tmp_path) as address:
        page.goto(address)
        map_of_lessons = page.locator(".jp-MarkdownViewer table")
        map_of_lessons.locator("a").first.wait_for()
        linked = {link.get_attribute("href").split("?")[0] for link in map_of_lessons.locator("a").all()}
        for kind in ("lectures", "exercises"):
            books = [path.name for path in (ROOT / "notebooks" / kind).glob("*.ipynb")]
            assert not [name for name in books if not any(link.endswith(f"{kind}/{name}") for link in linked)]
        assert "exercises 1 of" not in map_of_lessons.inner_text()
        picture(page, "start")

        # One click to the exercises of a lesson far down.
        map_of_lessons.locator("tr", has_text="09 Feeding").locator("a", has_text="predict").click()
        notebook = page.locator(".jp-Notebook")
        wait_for_kernel(page)
        notebook.locator(".jp-MarkdownCell a", has_text="lecture 09 Feeding").first.wait_for()
        for words in ("from dtlib import lab", "def my_samples", 'lab.check("shard-fix")'):
            cell = notebook.locator(".jp-CodeCell", has_text=words).first
            cell.locator(".cm-content").click()
            if "def" in words:
                page.keyboard.press("Control+A")
                page.keyboard.insert_text(MY_SAMPLES)
            page.keyboard.press("Control+Enter")
            prompt = cell.locator(".jp-InputPrompt").element_handle()
            page.wait_for_function("p => /\\[\\d+\\]/.test(p.innerText)", arg=prompt)
        assert "Passed: shard-fix." in cell.inner_text()
        page.keyboard.press("Control+S")
        page.wait_for_function("() => !document.querySelector('.jp-NotebookPanel.jp-mod-dirty')")

        # Two clicks to any other lesson: to the start page, and on.
        notebook.locator("a", has_text="Start page").first.click()
        map_of_lessons.wait_for(state="visible")
        page.get_by_role("menuitem", name="File", exact=True).click()
        page.get_by_role("menuitem", name="Reload Markdown File from Disk").click()
        row = map_of_lessons.locator("tr", has_text="09 Feeding")
        row.locator("text=exercises 1 of").wait_for()
        picture(page, "start-with-ticks")
        map_of_lessons.locator("a", has_text="11b Faults").click()
        page.locator(".jp-Notebook h1", has_text="11b Faults").wait_for()
    saved = tmp_path / "clone" / "work" / "notebooks" / "exercises" / "09_data_input_exercises.ipynb"
    assert "order[comm.rank :: comm.size]" in saved.read_text()
    status = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path / "clone", capture_output=True, text=True)
    assert status.stdout == "", "opening and saving notebooks changed the repository"


@pytest.mark.slow
def test_reset_in_the_panel_ends_a_wait(page, address, course_folder):
    sources = [
        "from dtlib import lab; lab.engines(3); lab.panel()",
        "%%px\nimport dtlib, time; world = dtlib.init()",
        "%%px\nif world.rank == 2: time.sleep(300)\nworld.comm.barrier()",
        "%px print(world.comm.all_gather_object(world.rank))",
    ]
    open_notebook(page, address, course_folder, sources)
    Cell(page, 0).wait()
    Cell(page, 1).wait()
    panel = page.locator("#jp-right-stack")
    panel.locator("text=idle").first.wait_for()
    waiting = Cell(page, 2)
    panel.locator("text=waits for rank 2 (barrier)").first.wait_for()
    picture(page, "panel")
    panel.get_by_role("button", name="Reset").click()
    shown = waiting.wait()
    assert "Interrupted on ranks 0 to 2." in shown and "Reset was pressed: the ranks are back in step." in shown
    panel.locator("text=the ranks are in step").wait_for()
    picture(page, "panel-reset")
    assert_contrast(page)
    page.locator(".jp-Notebook .jp-Cell").nth(3).locator(".cm-content").click()
    assert "ranks 0 to 2 | [0, 1, 2]" in Cell(page, 3).wait()
    page.keyboard.press("Control+S")
    page.wait_for_function("() => !document.querySelector('.jp-NotebookPanel.jp-mod-dirty')")
    saved = course_folder / FIRST_NOTEBOOK
    wait_until(lambda: "[0, 1, 2]" in saved.read_text())
    assert not re.search("widget|GB", saved.read_text()), "nothing of the panel is saved"


@pytest.mark.slow
def test_what_a_cell_showed_while_its_page_was_closed_is_shown_again(page, address, course_folder, tmp_path):
    sources = [
        "from dtlib import lab; lab.engines(2)",
        "%%px\nimport os, time\nfor step in range(4):\n    print('step', step)\n"
        f"    while step == 1 and not os.path.exists('{tmp_path}/closed'): time.sleep(0.1)",
        "lab.last(2)",
    ]
    open_notebook(page, address, course_folder, sources)
    Cell(page, 0).wait()
    page.keyboard.press("Control+S")
    Cell(page, 1).wait_for("step 0")
    other = new_page(page.context.browser)
    page.close(run_before_unload=False)

    def states():
        return {kernel["execution_state"] for kernel in ask(address, "kernels")}

    assert "busy" in states()
    (tmp_path / "closed").touch()
    wait_until(lambda: states() == {"idle"})  # the cell ends, and nobody looks
    open_notebook(other, address, course_folder)
    assert "step 3" not in other.locator(".jp-Notebook").inner_text(), "the page has lost it"
    other.locator(".jp-Notebook .jp-Cell").nth(2).locator(".cm-content").click()
    shown = Cell(other, 2).wait()
    assert "ranks 0 and 1 | step 0" in shown and "ranks 0 and 1 | step 3" in shown, shown
    picture(other, "last")
    other.close()


MY_SAMPLES = """%%px
import torch
def my_samples(comm, count):
    order = comm.broadcast(torch.randperm(count))
    return order[comm.rank :: comm.size].tolist()"""
FAULTS = "from dtlib.lessons.l11b import fault_lab; fault_lab.fault_lab(3)"


@pytest.mark.nightly
def test_a_button_kills_a_rank_and_the_curve_goes_on(page, address, course_folder):
    """Lesson 11b's lab: by each of the recoveries, of which the curves stay."""
    open_notebook(page, address, course_folder, [FAULTS])
    lab = Cell(page, 0).cell
    lab.locator("select").wait_for()
    names = {
        "commit": ("commit and restore in memory", "Rank 1 has died: 2 ranks are left, and go on."),
        "shrink": ("shrink and continue", "Rank 1 has died: 2 ranks are left, and go on."),
        "checkpoint": (
            "restart all ranks from the checkpoint",
            "It starts again on 3 ranks, from the last checkpoint.",
        ),
    }
    for short, (name, sentence) in names.items():
        lab.locator("select").select_option(label=name)
        lab.get_by_role("button", name="start a training").click()
        button = lab.get_by_role("button", name="kill rank 1")
        page.wait_for_function("b => !b.disabled", arg=button.element_handle())
        button.click()
        lab.locator(f"text={sentence}").wait_for()
        lab.locator("text=The training has ended, after step 60 of 60.").wait_for()
        lab.locator(f"td:text-is('{name}')").last.wait_for()
        lab.scroll_into_view_if_needed()
        picture(page, f"faults-{short}")
    rows = [row.split("\t") for row in lab.locator("table").last.inner_text().splitlines()[1:]]
    ranks = {row[0]: row[2] for row in rows}
    assert [ranks[name] for name, _ in names.values()] == ["3 -> 2", "3 -> 2", "3 -> 3"]
    assert all(float(row[1]) > 0 for row in rows), "seconds from the kill to the next completed step"


TORCHS_DDP = """%%px
import os, torch, dtlib.backend
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("dtlib", init_method="dtlib://")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(3, 2))
x = torch.ones(4, 3)
print(dist.get_world_size())
"""
LEAVES_EARLY = """%%px
for step in range(4):
    if rank == 1 and step == 2: break
    model(x).sum().backward()
"""
ANEW = """%%px
model = DistributedDataParallel(model.module)
model(x).sum().backward()
print(dist.get_rank() + 10)
"""


KILLED = """%%px
if rank: os.kill(os.getpid(), 9)
model(x).sum().backward()
"""


@pytest.mark.slow
def test_torchs_ddp_is_stopped_and_goes_on(page, address, course_folder):
    sources = [
        "from dtlib import lab; lab.engines(2)", TORCHS_DDP, LEAVES_EARLY, "%px dtlib.reset()", "%px model(x)", ANEW,
        KILLED,
    ]  # fmt: skip
    open_notebook(page, address, course_folder, sources)
    Cell(page, 0).wait()
    assert Cell(page, 1).wait() == "ranks 0 and 1 | 2\n"

    waiting = Cell(page, 2)
    shown = waiting.wait_for("rank 1 has finished its cell")
    assert re.search(r"rank 0.* in all_reduce.*: rank 1 has finished its cell", shown), shown
    picture(page, "ddp-waits")
    page.locator("[data-command='notebook:interrupt-kernel'], [title^='Interrupt the kernel']").first.click()
    shown = " ".join(waiting.wait().split())
    assert "line 3: model(x).sum().backward()" in shown and "Interrupted on rank" in shown, shown
    picture(page, "ddp-stopped")

    Cell(page, 3).wait()
    assert "wrap the model again" in Cell(page, 4).wait()
    shown = Cell(page, 5).wait()
    assert "rank 0 | 10" in shown and "rank 1 | 11" in shown, shown
    shown = Cell(page, 6).wait()
    assert "Rank 1 was ended by signal 9 (Killed)" in shown, shown
    picture(page, "ddp-killed")


LECTURES = [
    path.stem for path in sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb")) if "exercises" not in path.stem
]
LOOK = javascript("layout")


# The notebook reaches to the side bar, all of its figures are decoded, and nothing has moved since the last look.
LAID_OUT = javascript("laid_out")


# Texts of our outputs that are hard to read: a ratio of luminances below 4.5 (WCAG 2.2, AA). Signs that stand beside
# their word, such as the square of a rank, are none. ``figures`` are laid
# out one by one, as what is behind a label counts.
CONTRAST = javascript("contrast")


# The theme's style sheets are there, the page shows itself again, and no colour is on its way to another.
THEMED = javascript("themed")


def assert_contrast(page, figures: bool = False) -> None:
    """In the dark theme and in the light one."""
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        light = f"{scheme == 'light'}".lower()
        page.wait_for_function(THEMED, arg=light)
        looked, low = page.evaluate(CONTRAST, figures and scheme == "light")  # a figure is the same in both
        assert looked > 10 and not low, (scheme, low)


# A kernel that has started writes its language into the notebook, which would ask whether to save that.
INSTEAD = javascript("open_instead")


@pytest.fixture(scope="module")
def page_to_read(browser, tmp_path_factory):
    """One page for all lectures: their outputs are looked at, and nothing is run. Reads a notebook."""
    folder, base = tmp_path_factory.mktemp("course"), tmp_path_factory.mktemp("lab")
    all_cells = {"notebook-extension/tracker": {"windowingMode": "none"}}
    with jupyterlab(folder, base, "--LabApp.expose_app_in_browser=True", more=all_cells) as address:
        page = new_page(browser)
        page.goto(address)
        page.locator(".jp-MarkdownViewer table").first.wait_for()

        def read(file):
            page.evaluate(INSTEAD, file)
            count = len(nbformat.read(ROOT / file, as_version=4).cells)
            page.wait_for_selector(f":nth-match(.jp-Notebook .jp-Cell, {count})", state="attached")
            return page

        yield read
        page.close()


@pytest.mark.parametrize(
    "lecture",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("00_start_here", "06_zero") else pytest.mark.nightly)
        for name in LECTURES
    ],
)
def test_what_a_lecture_has_stored_can_be_read(page_to_read, lecture):
    """Nothing is wider than its place, figures have text that is large enough, and words for who does not see them; and
    texts stand out from what is behind them."""
    page = page_to_read(f"notebooks/solutions/{lecture}.ipynb")
    for width in (1280, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(LAID_OUT, arg=width, polling=100)
        assert page.locator(".jp-Notebook").count() == 1
        assert page.locator(".jp-Notebook .jp-OutputArea-output").count() > 10
        assert not page.evaluate(LOOK)
        picture(page, f"{lecture}-{width}")
    assert_contrast(page, figures=True)


@pytest.mark.slow
def test_a_quiz_by_keyboard_alone(page, address, course_folder):
    from dtlib.lab.checks.questions import quizzes

    open_notebook(page, address, course_folder, ['from dtlib import lab; lab.quiz("00")', "lab.scores()"])
    page.keyboard.press("Shift+Enter")
    buttons = page.locator(".jp-Notebook .jp-Cell").first.locator("button.widget-button")
    buttons.first.wait_for()
    picture(page, "quiz")
    questions = quizzes()["00"].questions
    assert buttons.count() == sum(len(question.options) for question in questions)
    page.keyboard.press("Escape")
    focused = "() => document.activeElement.innerText.trim() + ' ' + document.activeElement.title"
    for number, question in enumerate(questions):
        right = next(letter for letter in question.letters if question.chosen(letter).right)
        for _ in range(200):  # Tab, until the button is reached; no mouse
            if page.evaluate(focused) == f"{right} {right}: {question.chosen(right).says}":
                break
            page.keyboard.press("Shift+Tab" if number == 0 else "Tab")
        else:
            pytest.fail(f"Tab does not reach {right} of question {number + 1}")
        page.keyboard.press("Enter" if number % 2 else "Space")
        explained = question.chosen(right).because.replace("`", "")
        page.locator(".jp-Notebook", has_text=explained).first.wait_for()
    page.locator("text=5 of 5 right at first choice.").first.wait_for()
    picture(page, "quiz-answered")
    assert_contrast(page)
    assert buttons.count() == 20 and page.locator(".jp-Notebook .jp-Cell").count() == 2, "no key was the notebook's"


@pytest.mark.slow
def test_an_exercise_as_a_learner_meets_it(page, address, course_folder):
    """Not solved, wrong, solved; and what is done."""
    cell = "%%px\nimport dtlib, torch\nworld = dtlib.init()\ntotal = torch.tensor(world.rank)\n"
    sources = ["from dtlib import lab; lab.engines(3)", 'lab.check("first-sum")']
    for answer in ("", "world.comm.all_reduce(total, op='max')\n", "world.comm.all_reduce(total)\n"):
        sources += [cell + answer, 'lab.check("first-sum")']
    open_notebook(page, address, course_folder, [*sources, "lab.progress()"])
    shown = [Cell(page, number).wait() for number in range(len(sources) + 1)]
    picture(page, "exercise")
    assert_contrast(page)
    missing, unsolved, wrong, solved = (shown[number] for number in (1, 3, 5, 7))
    assert "Not yet: first-sum" in missing and "%%px" in missing
    assert "Not yet: first-sum" in unsolved and "This rank still has its own number: who adds them?" in unsolved
    assert "Not yet: first-sum" in wrong and "Which operation adds instead of copying?" in wrong
    assert "Passed: first-sum" in solved
    assert "00 Start here" in shown[-1] and re.search(r"1 of \d", shown[-1]) and "Next: predict" in shown[-1]
    assert "lecture 1 of" in (course_folder / "notebooks" / "start.md").read_text()
