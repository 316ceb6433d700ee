"""Lesson 00 in a real browser: JupyterLab as `make lab` starts it, cell by cell, read off the page."""

import os
import re
import shutil
import subprocess
import sys
import time

import nbformat
import pytest

from dtlib.world.processes import Process, end_processes, with_descendants
from tests.conftest import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-quic", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
ANSWERS = {
    "sum_for_eight = None": "sum_for_eight = 28",
    "# your line here": "world.comm.all_reduce(total)",
}
FIRST_NOTEBOOK = "notebooks/lectures/00_start_here.ipynb"
HANGS = "# press Stop"  # the cell in which ranks wait until somebody stops them
SCREENSHOTS = os.environ.get("DTLIB_SCREENSHOTS")  # a folder that gets a picture after every cell


@pytest.fixture
def page():
    problem = None
    if CHROMIUM is None:
        problem = "there is no chromium on PATH"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        problem = "playwright is not installed: pip install -e '.[browser]'"
    if problem:
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser.new_page(viewport={"width": 1280, "height": 900})
        browser.close()


@pytest.fixture
def address(tmp_path):
    """Where JupyterLab answers, in a folder that was empty: it lays out the course there."""
    folder = tmp_path / "course"
    folder.mkdir()
    log = tmp_path / "lab.log"
    with open(log, "w") as output:
        # Open tabs are remembered from one day to the next: not those of whoever runs this test.
        command = ["dtlib", "lab", "--no-browser", "--", f"--LabApp.workspaces_dir={tmp_path}"]
        server = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=output, stderr=output)
    deadline = time.monotonic() + 60
    while not (found := re.search(r"http://(?:localhost|127\.0\.0\.1):\d+/\S*token=\w+", log.read_text())):
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    yield found.group()
    processes = with_descendants(Process.of(server.pid))
    end_processes(processes)
    server.wait()


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
            page.wait_for_function("c => c.innerText.includes('rank 2 ')", arg=cell.element_handle(), timeout=20_000)
            page.locator("[data-command='notebook:interrupt-kernel'], [title^='Interrupt the kernel']").first.click()
        page.wait_for_function("p => /\\[\\d+\\]/.test(p.innerText)", arg=prompt.element_handle(), timeout=60_000)
        errors = cell.locator("[data-mime-type='application/vnd.jupyter.stderr']")  # errors too are shown as this
        if HANGS in text:
            assert "Interrupted on ranks 0, 1, 3" in errors.first.inner_text()
        else:
            assert errors.count() == 0, errors.first.inner_text()


@pytest.mark.slow
def test_lesson_00_cell_by_cell(page, address):
    page.goto(address)
    page.locator(".jp-MarkdownViewer a", has_text="00 Start here").click(timeout=60_000)  # from the start page
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.wait_for_selector(".jp-NotebookPanel-toolbar >> text=Python 3", timeout=60_000)
    assert page.locator(".jp-Dialog").count() == 0, "nothing stands in front of the first lesson"
    # Cells are attached one after the other: wait for the last.
    count = len(nbformat.read(ROOT / FIRST_NOTEBOOK, as_version=4).cells)
    page.wait_for_selector(f":nth-match(.jp-Notebook .jp-Cell, {count})", state="attached", timeout=60_000)
    page.locator(".jp-Notebook .jp-Cell").first.click()
    for number in range(count):
        run_active_cell(page, number)
        if SCREENSHOTS:
            page.screenshot(path=f"{SCREENSHOTS}/{number:02d}.png")

    # Not the inner text: that leaves out what has scrolled away.
    text = "\n".join(page.locator(".jp-Notebook .jp-OutputArea-output").all_text_contents())
    assert re.search(r"rank 0 \| I am rank 0 of 4\nrank 1 \| I am rank 1 of 4", text)
    assert "You predicted 28, and it came out as 28: right." in text
    for rank in range(4):
        assert f"rank {rank} | tensor(6)" in text  # the reduced sum, on every rank
    assert "Passed: first-sum." in text
    assert len(re.findall(r"rank \d \| tensor\(6\)", text)) == 8  # once more, after the hang and dtlib.reset()
    assert re.search(r"rank 0 \| pi = 3\.14\d+, give or take 0\.0005", text)
    assert page.locator(".jp-Notebook .jp-OutputArea-output img").count() == 1  # the darts
