"""Pictures of README and docs, taken from the running lab in a browser: ``python -m tools.pictures [NAME ...]``.

Copies the course to a temporary folder, starts JupyterLab there, and runs the cells of a lesson that a picture needs.
``hang`` is also a moving picture: the cell waits, the message appears, and Stop ends the wait.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

import nbformat
from PIL import Image
from playwright.sync_api import sync_playwright

from dtlib.lab import course
from dtlib.world.processes import Process, end_processes, with_descendants

HERE = Path(__file__).parents[1] / "docs" / "pictures"
FLAGS = [
    *("--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-quic", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
ADDRESS = re.compile(r"(http://(?:localhost|127\.0\.0\.1):\d+)/\S*\?token=(\w+)")
LONGEST = 90_000  # milliseconds, for whatever a page waits for
# Of each picture: its notebook, what the cells that it needs have in them, a button to press once they have run, and
# words in its last cell that are waited for where that cell does not end by itself.
PICTURES = {
    "lesson_00": ("00_start_here", ("lab.engines(", "I am rank", "points_numpy", "pictures.darts"), None, None),
    "hang": ("00_start_here", ("lab.engines(", "I am rank", "# press Stop"), None, "rank 2 has finished its cell"),
    "check": ("00_start_here", ("lab.engines(", "I am rank", "# your line here", "lab.check("), None, None),
    "lesson_07": (
        "07_pipelines", ("lab.engines(", "digits, explorer", "explorer.explore()"), "run it on the engines", None,
    ),
}  # fmt: skip
LOW = {"hang": 560, "check": 700}  # pixels of height, in place of 900
BUSY = "runs on the engines"  # what that button says meanwhile


STOP = "[data-command='notebook:interrupt-kernel'], [title^='Interrupt the kernel']"
MIDDLE = "cell => cell.scrollIntoView({block: cell.offsetHeight > innerHeight - 150 ? 'start' : 'center'})"
SHORTEST_FRAME, LONGEST_FRAME, LAST_FRAME = 1200, 2500, 5000  # milliseconds


class Film:
    """A moving picture of the part of a page that an element covers: a frame for each change."""

    def __init__(self, page, element):
        self.page, self.element, self.frames = page, element, []  # [picture, milliseconds]

    def look(self) -> None:
        """Add a frame, or make the last one longer if nothing has changed."""
        began = time.monotonic()
        shot = Image.open(BytesIO(self.element.screenshot())).convert("RGB")
        self.page.wait_for_timeout(200)
        took = 1000 * (time.monotonic() - began)
        if self.frames and self.frames[-1][0].tobytes() == shot.tobytes():
            self.frames[-1][1] += took
        else:
            self.frames.append([shot, took])

    def save(self, path: Path) -> None:
        width, height = self.frames[0][0].size
        both = Image.new("RGB", (width, 2 * height))  # the colours of all: more than the last frame has
        for place, frame in ((0, 0), (height, -1)):
            both.paste(self.frames[frame][0], (0, place))
        colours = both.quantize(128)
        pictures = [shot.quantize(palette=colours, dither=Image.Dither.NONE) for shot, _ in self.frames]
        lasts = [round(min(max(took, SHORTEST_FRAME), LONGEST_FRAME)) for _, took in self.frames]
        lasts[-1] = LAST_FRAME
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=lasts, loop=0, optimize=True)


def with_few_cells(path: Path, needed: tuple[str, ...]) -> None:
    """Leave in a notebook its title and the cells that a picture needs, each with the heading it stands under."""
    book = nbformat.read(path, as_version=4)
    kept, heading = [book.cells[0]], None
    for cell in book.cells[1:]:
        if cell.cell_type == "markdown":
            heading = cell if cell.source.startswith("#") else heading
        elif any(words in cell.source for words in needed):
            kept += [heading] * (heading is not None) + [cell]
            heading = None
    book.cells = kept
    nbformat.write(book, path)


def take(page, address: str, token: str, name: str, folder: Path) -> None:
    notebook, needed, button, words = PICTURES[name]
    page.set_viewport_size({"width": 1100, "height": LOW.get(name, 900)})
    path = f"notebooks/lectures/{name}.ipynb"
    shutil.copy(course.SOURCE / f"notebooks/lectures/{notebook}.ipynb", folder / path)
    with_few_cells(folder / path, needed)
    page.goto(f"{address}/lab/tree/{path}?reset&token={token}")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=LONGEST)
    # JupyterLab loses a cell that is run before its kernel is connected.
    page.wait_for_selector("#jp-main-statusbar >> text=/^Python 3.* Idle$/", timeout=LONGEST)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator(".lm-Menu-item[data-command='runmenu:run-all']").click()
    last = page.locator(".jp-Notebook .jp-CodeCell").last
    if words:
        cell = last.element_handle()
        before = page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").nth(-2).element_handle()
        page.wait_for_function("p => /\\[\\d+\\]/.test(p.innerText)", arg=before, timeout=LONGEST)
        page.keyboard.press("Control+B")
        last.evaluate(MIDDLE)
        film, end = Film(page, page.locator(".jp-NotebookPanel")), time.monotonic() + LONGEST / 1000
        while words not in cell.inner_text() and time.monotonic() < end:
            film.look()
        page.wait_for_function("([c, w]) => c.innerText.includes(w)", arg=[cell, words], timeout=LONGEST)
        for _ in range(6):
            film.look()
    else:
        prompt = last.locator(".jp-InputPrompt").element_handle()
        page.wait_for_function("p => /\\[\\d+\\]/.test(p.innerText)", arg=prompt, timeout=LONGEST)
    if button:
        page.get_by_role("button", name=button).click()
        page.get_by_role("button", name=BUSY).wait_for(timeout=LONGEST)
        page.get_by_role("button", name=button).wait_for(timeout=LONGEST)
    page.wait_for_timeout(2000)  # what comes last is drawn
    if button:  # and wide figures: room for them in place of the list of files
        page.keyboard.press("Control+B")
    last.evaluate(MIDDLE)
    page.wait_for_timeout(500)
    page.screenshot(path=HERE / f"{name}.png")
    if words:
        page.locator(STOP).first.evaluate("button => button.style.outline = '3px solid #D55E00'")
        film.look()
        page.locator(STOP).first.click()
        while "[*]" in last.locator(".jp-InputPrompt").inner_text() and time.monotonic() < end:
            film.look()
        page.wait_for_timeout(500)
        film.look()
        film.save(HERE / f"{name}.gif")
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.locator(".lm-Menu-item[data-command='kernelmenu:shutdown']").click()


def main() -> None:
    names = sys.argv[1:] or list(PICTURES)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name) / "course"
        course.copy_files(folder)
        log = Path(name) / "lab.log"
        command = [sys.executable, "-m", "dtlib", "lab", "--no-browser", "--", f"--LabApp.workspaces_dir={name}"]
        with open(log, "w") as output:
            server = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
        try:
            while not (found := re.search(ADDRESS, log.read_text())):
                if server.poll() is not None:
                    sys.exit(log.read_text())
                time.sleep(0.1)
            chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page(viewport={"width": 1100, "height": 900})
            for name in names:
                take(page, *found.groups(), name, folder)
                print(HERE / f"{name}.png")
            browser.close()
        finally:
            end_processes(with_descendants(Process.of(server.pid)))
            server.wait()


if __name__ == "__main__":
    main()
