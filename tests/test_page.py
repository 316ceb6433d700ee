"""The course in a web page: what it computes is what CPython computes, and every way to break it ends in a sentence."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dtlib.browser import build, pages, ranks, sources
from dtlib.browser.simulated import tensors
from dtlib.browser.simulated.cells import Ranks
from dtlib.browser.svg import Picture
from dtlib.errors import DtlibError
from dtlib.lab.checks.questions import quizzes
from dtlib.lessons.l03 import steps
from dtlib.theory import collectives
from tests.cases import refuses
from tests.conftest import ROOT
from tests.test_browser import SECONDS, browser, javascript, new_page  # noqa: F401

pytestmark = pytest.mark.timeout(1800)

# What is asked of Python in the page and of this one. Integers and text are to be the same, floats to 1e-12.
FIGURES = """
import json
from dataclasses import asdict
from dtlib import schedule
from dtlib.lessons.l03 import steps
from dtlib.planner import DEVICES, MODELS, report
from dtlib.planner.command import plan_for
from dtlib.theory import zero

def schedules():
    for name in ("gpipe", "one_f_one_b", "zero_bubble_h1", "interleaved"):
        for p in range(1, 9):
            for m in range(1, 17):
                if name == "interleaved" and m % p:
                    continue
                made = getattr(schedule, name)(p, m, *[2] * (name == "interleaved"))
                found = schedule.simulate(made, 1.0, 2.3, message=0.3)
                yield name, p, m, str(made), found.makespan, found.bubble, found.peak_activations

def memory():
    for scheme in zero.SCHEMES:
        for parameters in (7, 1_000_003, 7_500_000_000, 10**13):
            for ranks in (1, 3, 64, 100_000):
                for stage in zero.STAGES:
                    held = zero.zero_bytes(parameters, ranks, stage, scheme)
                    sent = zero.zero_wire_elements(parameters, ranks, stage)
                    yield held, sent, zero.fewest_ranks(parameters, 80e9, stage, scheme)

def plans():
    for gpus in (1, 8, 48):
        found, tried = plan_for("llama3-8b", gpus, "h100")
        yield report.best_rows(found), report.map_rows(tried), [(e.seconds, e.memory.total, e.mfu) for e in tried]

def collectives():
    for operation, algorithm in steps.COLLECTIVES:
        for ranks in range(2, 9):
            found, links = steps.rounds(operation, algorithm, ranks)
            yield operation, algorithm, [asdict(each) for each in found], [(l.messages, l.bytes) for l in links]

figures = json.dumps({f.__name__: list(f()) for f in (schedules, memory, plans, collectives)})
"""


@pytest.fixture(scope="module")
def own_files(tmp_path_factory):
    """What the page has of dtlib, unpacked."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "dtlib.zip").write_bytes(build._own_files())
    with zipfile.ZipFile(folder / "dtlib.zip") as archive:
        archive.extractall(folder)
    return folder


NARROW = """
import importlib, sys
def narrow(*bounds):
    if any(abs(bound) >= 2**31 for bound in bounds):
        raise OverflowError("Python int too large to convert to C ssize_t")
    return range(*bounds)
for name in {modules}:
    importlib.import_module(name).range = narrow
"""
DRAW_ALL = (
    "import json; from dtlib.browser import pages; print(json.dumps({n: pages.answer(n, {}) for n in pages.NAMES}))"
)


def narrow():
    """A program that imports all modules of the page, and leaves them numbers of 32 bits for their ranges."""
    paths = [
        path.with_suffix("")
        for path in build.carried()
        if path.suffix == ".py" and path.stem not in ("lecture", "exercises")
    ]
    return NARROW.format(modules=[".".join(("dtlib", *path.parts)).removesuffix(".__init__") for path in paths])


def without_packages(folder, program):
    """What a Python without any package prints that has the files of the page alone."""
    command = [sys.executable, "-S", "-E", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


def test_rooms_need_the_files_of_the_page_alone_and_no_package(own_files):
    """Neither numpy nor torch nor MPI; and no number of more than 32 bits where a page has no room for it."""
    here = {name: pages.answer(name, {}) for name in pages.NAMES}
    assert not any("mistake of the page" in shown for shown in here.values()), here
    assert json.loads(without_packages(own_files, narrow() + DRAW_ALL)) == here


@pytest.mark.parametrize("operation,algorithm", steps.COLLECTIVES)
def test_collectives_take_the_rounds_and_messages_of_the_formulas(operation, algorithm):
    for size in range(1, 10):
        found, links = steps.rounds(operation, algorithm, size)
        assert len(found) - 1 == collectives.rounds(operation, algorithm, size)
        for rank, link in enumerate(links):
            assert link.messages == collectives.messages_of_rank(operation, algorithm, size, rank)
            assert link.bytes == 8 * collectives.elements_sent(operation, algorithm, size, rank, size)
        if operation == "all_reduce":
            everybody = tuple(range(size))
            assert found[-1].held == ((everybody,) * size,) * size


def test_what_cannot_be_is_said_in_a_sentence():
    assert "use 8 micro-batches" in pages.answer("schedule", {"schedule": "interleaved", "microbatches": "7"})
    assert "choose one of gpipe" in pages.answer("schedule", {"schedule": "other"})
    assert "from 1 to 8" in pages.answer("schedule", {"ranks": "99"}) and "There is no room" in pages.answer("x", {})
    for room, field, values, limits in (
        ("schedule", "ranks", ("2.5", "-1", "inf", "nan", "[2]", "", "9" * 400, "9" * 5000), "ranks is "),
        ("plan", "gpus", ("0", "1e9", "1.5", "-inf"), "GPUs is "),
        ("memory", "memory", ("much", "-1", "0", "nan", "9" * 400), "parameters, in billions is "),
    ):
        for value in values:
            said = pages.answer(room, {field: value})
            assert limits in said and "number from" in said and "mistake of the page" not in said, (value, said)


def test_memory_of_a_model_on_a_mesh_is_the_planners():
    from dtlib.planner import MODELS, Plan
    from dtlib.planner.memory import states

    shown = pages.answer("memory", {"model": "llama3-8b", "ranks": "8", "tensor": "2", "pipe": "4"})
    for stage in range(4):
        plan = Plan(data=8, tensor=2, pipe=4, batch=8, zero=stage, scheme="mixed_adam")
        held = states(MODELS["llama3-8b"], plan)
        cells = "".join(rf"<td[^>]*>{held[kind]:,}</td>" for kind in pages.room("memory").KINDS)
        assert re.search(rf"<td[^>]*>{stage}</td>{cells}", shown), (stage, held)
    assert "tensor is 3" in pages.answer("memory", {"model": "llama3-8b", "tensor": "3"})
    assert "7.5 billion" in pages.answer("memory", {}) and "1.875 billion" in pages.answer("memory", {"pipe": "4"})


def test_a_puzzle_that_is_judged_and_a_duel():
    for number, solved in enumerate(("F0-7 B0-7", "F0-3 B0-3 F4-7 B4-7"), start=1):
        order = "\n".join([solved] * 4)
        shown = pages.answer("puzzle", {"puzzle": str(number), "order": order, "pressed": "check"})
        assert ("Passed: level 1. Makespan 33, par 33" in shown) == (number == 1), shown
        assert shown.count("<rect") >= 64
    assert "F0 F1" in pages.room("puzzle").FORM[1].value and "wins" in pages.answer("duel", {"pressed": "rank"})


def test_exercises_are_the_lessons_with_their_judges():
    for name in pages.room("exercise")._named():
        text, stub = pages.room("exercise").task(name)
        lesson = pages.room("exercise")._named()[name][0]
        found = sources.cells(f"{lesson}/exercises.py")
        at = next(at for at, (_, body) in enumerate(found) if body.startswith(f'lab.check("{name}")'))
        assert "solution" in found[at - 1][0] and text and "%" not in stub.split()[0]
        plan_for = {"exercise": name, "pressed": "check"}
        assert f"Passed: {name}" in pages.answer("exercise", {**plan_for, "code": f"import math\n{found[at - 1][1]}"})
        assert "Not yet" in pages.answer("exercise", {**plan_for, "code": stub})
        assert "defines no" in pages.answer("exercise", {**plan_for, "code": "1"})
        assert "Nothing ran" in pages.answer("exercise", {**plan_for, "code": "("})


def test_letters_of_a_learner_stay_letters():
    picture = Picture(10, "<b>&", "<i>")
    picture.words(0, 0, "<script>")
    assert not {"<b>", "<i>", "<script>"} & set(picture.html().replace(">", "> ").split())
    assert "<img" not in pages.answer("duel", {"pressed": "rank", "orders": "<img src=x>: F0"})


def test_a_missing_npm_is_one_sentence(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "dtlib", "browser", str(tmp_path / "page")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("dtlib browser: npm is missing") and done.stderr.count("\n") == 1
    (tmp_path / f"pyodide-{build.PYODIDE}.tgz").write_bytes(b"something else")
    refuses("as it was published", build.write, tmp_path / "page")


def test_a_folder_with_anything_else_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_package", lambda beside: pytest.fail("it is refused before anything is fetched"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "index.html").write_text("my own page")
    (tmp_path / "single.html").write_text("my own page")
    for name in (".", "", "thesis", "../" + tmp_path.name, "single", "thesis/index.html"):
        refuses("is not changed", build.write, Path(name))
    assert (tmp_path / "thesis" / "index.html").read_text() == (tmp_path / "single.html").read_text() == "my own page"


# In a browser


@pytest.fixture(scope="module")
def page_files(tmp_path_factory):
    """The folder and the one file; npm's package is kept in build/ from one time to the next."""
    folder = ROOT / "build" / "browser"
    try:
        return build.write(folder)
    except DtlibError as problem:
        pytest.fail(str(problem)) if os.environ.get("CI") else pytest.skip(str(problem))


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def addresses(page_files):
    folder, single = page_files
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"folder": f"http://127.0.0.1:{server.server_port}/index.html", "file": single.as_uri()}
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["folder", pytest.param("file", marks=pytest.mark.nightly)])
def site(request, browser, addresses):  # noqa: F811
    """A page once Python is there. Whatever it asks of another host is refused, and noted."""
    address = addresses[request.param]
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    elsewhere, own = [], (address.rpartition("/")[0], "blob:", "data:")

    def serve(route):
        if route.request.url.startswith(own):
            return route.continue_()
        elsewhere.append(route.request.url)
        return route.abort()

    context.route("**/*", serve)
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS)
    page.goto(address)
    ready(page)
    page.address, page.kind = address, request.param
    yield page
    assert not elsewhere
    context.close()


def ready(page):
    page.wait_for_function("/^Ready|could not/.test(document.getElementById('status').textContent)")
    assert "could not" not in page.inner_text("#status")
    answered(page)


def answered(page):
    page.wait_for_function("document.querySelector('form:not([hidden]) .answer').getAttribute('aria-busy') == 'false'")


def go(page, state):
    page.evaluate("state => { location.hash = state }", state)
    answered(page)
    return page.inner_html("form:not([hidden]) .answer")


@pytest.mark.slow
def test_every_room_shows_what_it_shows_here_in_light_and_dark_and_on_a_phone(site, page_files):
    """Nothing is wider than the page."""
    folder, single = page_files
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 15e6
    assert single.stat().st_size < 10e6
    screenshots = os.environ.get("DTLIB_SCREENSHOTS")
    for name in pages.NAMES:
        go(site, name)
        assert site.evaluate(javascript("same_answer"), [name, pages.answer(name, {})]), name
        grounds = set()
        for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light")):
            site.set_viewport_size({"width": width, "height": 900})
            site.emulate_media(color_scheme=scheme)
            assert site.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
            grounds.add(site.evaluate("getComputedStyle(document.body).backgroundColor"))
            if screenshots:
                site.screenshot(path=f"{screenshots}/page-{name}-{width}-{scheme}.png", full_page=True)
        assert len(grounds) == 2, "light and dark"


@pytest.mark.slow
def test_the_page_computes_what_cpython_computes(browser, addresses):  # noqa: F811
    here = {}
    exec(FIGURES, here)
    page = new_page(browser)
    page.goto(addresses["folder"])
    there = page.evaluate(javascript("run_in_pyodide"), FIGURES)
    page.close()
    same(json.loads(there), json.loads(here["figures"]))


def same(there, here, where="figures"):
    assert type(there) is type(here), where
    if isinstance(here, float):
        assert abs(there - here) <= 1e-12 * abs(here), (where, there, here)
    elif isinstance(here, list | dict):
        assert len(there) == len(here), where
        for key in here if isinstance(here, dict) else range(len(here)):
            same(there[key], here[key], f"{where}[{key!r}]")
    else:
        assert there == here, (where, there, here)


# Simulated ranks

SWAP = "if rank < 2:\n    comm.recv(torch.zeros(3), 1 - rank)\n    comm.send(torch.ones(3), 1 - rank)"
ENDLESS = "while True:\n    pass"


def test_cells_of_lessons_00_and_03_run_on_simulated_ranks():
    said = {}
    for lesson in ranks.LESSONS:
        world = Ranks(4)
        for name, source in ranks.cells().items():
            if name.startswith(lesson):
                said[name] = world.run(source)
    assert len(said) == 16 and not any(outcome.problem for outcome in said.values())
    by_number = {name.partition(":")[0]: outcome for name, outcome in said.items()}
    assert by_number["00 cell 1"].said == [f"I am rank {rank} of 4" for rank in range(4)]
    assert by_number["00 cell 5"].said == ["tensor(6)"] * 4, "after the hang, and a reset"
    hang = (
        "rank 2 has finished its cell; "
        "its last operation was barrier (`line 1: world.comm.barrier()  # all four arrive`)"
    )
    assert [hang in failed for failed in by_number["00 cell 4"].failed] == [True, True, False, True]
    shown = world.ranks[3].names["shown"]
    assert [(name, before.tolist(), after.tolist()) for name, before, after in shown] == [
        ("broadcast from 0", [30], [0]), ("reduce to 0", [30], [30]), ("all_reduce", [30], [60]),
        ("all_gather", [30], [0, 10, 20, 30]), ("scatter from 0", [30, 31, 32, 33], [3]),
        ("reduce_scatter", [30, 31, 32, 33], [72]), ("all_to_all", [30, 31, 32, 33], [3, 13, 23, 33]),
    ]  # fmt: skip
    assert by_number["03 cell 4"].said == ["6 messages, 1,800,000 bytes; every element is 6"] * 4
    assert by_number["03 cell 3"].said[0] == "naive: sent 3 messages, 12,000 bytes\ntree: sent 2 messages, 8,000 bytes"
    assert by_number["03 cell 9"].said[2] == "finished", "only ranks 0 and 1 wait for one another"
    assert all("they wait for one another" in by_number["03 cell 9"].said[rank] for rank in (0, 1))
    assert all("ranks 1, 2, 3 call broadcast" in text for text in by_number["03 cell 8"].said)


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS["all_reduce"])
def test_a_simulated_all_reduce_adds_and_sends_what_the_real_one_does(algorithm):
    """In float32, as numpy adds; with the messages and elements of the formulas."""
    for size in range(2, 9):
        values = np.random.default_rng(size).normal(size=(size, 13)).astype(np.float32)
        world = Ranks(size)
        for rank, one in zip(world.ranks, values, strict=True):
            rank.names["mine"] = one.tolist()
        source = f"import torch\nx = torch.tensor(mine)\ncomm.all_reduce(x, algorithm={algorithm!r})\nprint(x.tolist())"
        found = world.run(source)
        assert not any(found.failed), found.failed
        results = [np.array(json.loads(said)) for said in found.said]
        assert all((result == results[0]).all() for result in results)
        np.testing.assert_allclose(results[0], values.sum(0, dtype=np.float64), rtol=1e-5, atol=1e-5)
        for event in found.events:
            assert event.messages == collectives.messages_of_rank("all_reduce", algorithm, size, event.rank)
            assert event.bytes == 4 * collectives.elements_sent("all_reduce", algorithm, size, event.rank, 13)
        assert len(found.messages) == collectives.messages("all_reduce", algorithm, size)


TORCHS = """
import torch
from torch import distributed as dist
import torch.distributed

total = torch.tensor([1.0 + rank])
dist.all_reduce(total, group=comm.group)
dist.all_reduce(total, op=torch.distributed.ReduceOp.AVG)
told = torch.tensor([rank])
dist.broadcast(told, src=2)
everyones = torch.zeros(3)
dist.all_gather_single(everyones, torch.tensor([1.0 * rank]), async_op=True).wait()
shard = torch.zeros(1)
dist.reduce_scatter_single(shard, everyones)
got = torch.zeros(1)
leaving = dist.isend(torch.tensor([1.0 * rank]), dst=(rank + 1) % 3)
dist.recv(got, group_src=(rank - 1) % 3)
leaving.wait()
print(total, told, everyones, shard, got, dist.get_rank(), dist.get_world_size(comm.group))
"""


def test_simulated_ranks_take_calls_of_torch_distributed():
    world = Ranks(3)
    outcome = world.run(TORCHS)
    assert outcome.failed == [""] * 3
    for rank, said in enumerate(outcome.said):
        found = f"tensor([6.]) tensor([2]) tensor([0., 1., 2.]) tensor([{3 * rank}.]) tensor([{(rank - 1) % 3}.])"
        assert said == f"{found} {rank} 3"
    outcome = world.run("dist.barrier() if rank else None")
    assert not outcome.failed[0] and all("rank 0 has finished its cell" in outcome.failed[rank] for rank in (1, 2))


def test_integers_wrap_around_and_floats_round_as_torchs_do():
    import torch

    made = tensors.tensor([2**62, 2**62, 3]) * 4
    assert made.tolist() == (torch.tensor([2**62, 2**62, 3]) * 4).tolist()
    for source in ("[0.1, 0.2]", "[1, 2]", "3", "2.5", "[1.0, 2.0]", "list(range(2000))"):
        assert repr(tensors.tensor(eval(source))) == repr(torch.tensor(eval(source))).replace("\n       ", "")
    assert (tensors.tensor([0.1, 7]) / 3).tolist() == (torch.tensor([0.1, 7]) / 3).tolist()


@pytest.mark.parametrize("source,sentence", [
    (SWAP, "they wait for one another: rank 0 in recv(from rank 1) of (3,) float32 (`line 2: "),
    ("if rank: comm.barrier()", "rank 0 has finished its cell"),
    ("if rank == 1: raise ValueError('no')\ncomm.barrier()", "cannot end: rank 1 raised ValueError: no"),
    ("x = (", "Nothing ran. Line 1: '(' was never closed"),
    ("for i in range(10**5): print(i)", "... and 99,800 more lines, which are not shown"),
    ("print('x' * 10**7)", "x" * 10_000),
    ("import numpy", "numpy is not in this page"),
    ("torch.rand(3)", "torch is a stand-in here and has no rand"),
    ("torch.zeros(2, 2)", "tensors of one dimension"),
    ("f = lambda: comm.barrier()", "an operation in a lambda cannot take turns in this page: write a def"),
    ("comm.split(0)", "comm.split is not simulated"),
    ("comm.all_reduce(3)", "all_reduce takes a tensor"),
    ("comm.all_reduce(torch.ones(rank + 1))", "The calls of the ranks differ"),
    ("comm.send(torch.ones(1), 7)", "the ranks of this communicator are 0 to 3"),
    ("(comm.send(torch.ones(2), 1) if rank == 0 else comm.recv(torch.ones(3), 0) if rank == 1 else 0)",
     "Rank 0 sends (2,) float32 in `line 1: "),
    ("def f(n): return f(n)\nf(0)", "RecursionError"),
    ("exit()", "SystemExit"),
])  # fmt: skip
def test_a_cell_that_goes_wrong_ends_with_a_sentence_and_the_next_one_runs(source, sentence):
    world = Ranks(4)
    found = world.run("import dtlib, torch\ntorch.ones(1)") and world.run(source)
    assert sentence in "\n".join([found.problem, *found.said, *found.failed]), found
    assert len(ranks.outcome(found)) < 200_000
    assert world.run("dtlib.reset()\nprint(comm.all_reduce(torch.tensor(rank)))").said == ["tensor(6)"] * 4


def test_functions_that_wait_are_awaited_wherever_they_are_called():
    source = """
import dtlib, torch
class Model:
    def average(self, x):
        return comm.all_reduce(x, op="mean")
def twice(x):
    return [helper(x) for _ in range(2)]
def helper(x):
    return Model().average(x.clone()).item()
print(sum(value for value in twice(torch.ones(1) * rank)), max(helper(torch.ones(1) * rank) for _ in range(3)))
handle = comm.all_reduce(torch.ones(2), async_op=True)
while not handle.done():
    pass
await handle.wait()
"""
    world = Ranks(4)
    assert world.run(source).said == ["3.0 1.5\ntensor([4., 4.])"] * 4
    assert world.run("print(helper(torch.ones(1)))").said == ["1.0"] * 4, "in a later cell, too"


def run_cell(page, source):
    page.fill("#ranks-code", source)
    page.click("#ranks button[value=run]")
    answered(page)
    return page.inner_text("#ranks .answer")


@pytest.mark.slow
def test_questions_are_answered_and_whatever_a_learner_runs_the_page_lives(site):
    go(site, "schedule=gpipe&ranks=3&microbatches=4")
    bars = (
        "[...document.querySelectorAll('#schedule svg rect')].filter(r => r.getBoundingClientRect().width > 12).length"
    )
    assert site.evaluate(bars) == 3 * 4 * 2
    site.fill("#schedule-microbatches", "5")
    answered(site)
    site.wait_for_function(f"{bars} == 30")
    assert site.url.endswith("#schedule=gpipe&ranks=3&microbatches=5")

    questions = quizzes()["00"].questions
    go(site, "quiz=00")
    for number, question in enumerate(questions):
        right = next(letter for letter in question.letters if question.chosen(letter).right)
        site.focus(f"#quiz-{number}{right}")
        site.keyboard.press("Enter")
        site.wait_for_selector(f"#quiz fieldset:nth-of-type({number + 1}) .right")
        assert site.evaluate("document.activeElement.id") == f"quiz-{number}{right}"
    assert site.locator("#quiz .answer > .said").inner_text() == "5 of 5 right at first choice."

    go(site, "puzzle")
    site.fill("#puzzle-order", "\n".join(["F0-7 B0-7"] * 4))
    site.keyboard.press("Control+Enter")
    site.wait_for_selector("#puzzle .right")
    assert "Makespan 33, par 33" in site.inner_text("#puzzle .right")
    site.reload()
    ready(site)
    assert site.input_value("#puzzle-order").startswith("F0-7 B0-7")

    go(site, "ranks")
    assert run_cell(site, ranks.FIRST).count("the sum is tensor(6)") == 4
    assert site.locator("#ranks svg rect").count() == 4 + 4 and site.locator("#ranks svg line[marker-end]").count() == 8
    assert "SIMULATED: one process" in site.inner_text("#ranks figcaption")
    site.click("#ranks button[value=check]")
    site.wait_for_selector("#ranks .right")
    assert "they wait for one another" in run_cell(site, SWAP)
    assert "Nothing ran. Line 1" in run_cell(site, "x = (")
    assert "999,800 more lines" in run_cell(site, "for i in range(10**6): print(i)")
    site.fill("#ranks-code", ENDLESS)
    site.click("#ranks button[value=run]")
    site.click("#stop")
    site.wait_for_selector("#ranks .not-yet")
    assert "Python was stopped. It starts anew" in site.inner_text("#ranks .answer")
    ready(site)
    assert run_cell(site, ranks.FIRST).count("the sum is tensor(6)") == 4
    assert "Python itself has ended" in run_cell(site, "import ctypes\nctypes.string_at(2**32 - 16, 8)")
    ready(site)
    site.select_option("#ranks-cell", index=4)
    site.click("#ranks button[value=take]")
    answered(site)
    assert site.input_value("#ranks-code").startswith("world.comm.barrier()  # all four arrive")
    site.reload()
    ready(site)
    assert site.input_value("#ranks-code").startswith("world.comm.barrier()  # all four arrive")


# Firefox, by WebDriver BiDi

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")


class Bidi:
    """A tab of Firefox; ``fetched`` are the addresses that it asked for."""

    def __init__(self, folder):
        import websocket

        command = [FIREFOX, "--headless", "--no-remote", "--profile", str(folder), "--remote-debugging-port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        line = next(line for line in self.process.stderr if "WebDriver BiDi listening" in line)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self._socket = websocket.create_connection(line.split()[-1] + "/session", timeout=SECONDS, suppress_origin=True)
        self._number, self.fetched = 0, []
        self.call("session.new", capabilities={})
        self.call("session.subscribe", events=["network.beforeRequestSent"])
        self.tab = self.call("browsingContext.getTree")["contexts"][0]["context"]

    def call(self, method, **params):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("method") == "network.beforeRequestSent":
                self.fetched.append(message["params"]["request"]["url"])
            if message.get("id") == self._number:
                assert message["type"] == "success", message
                return message["result"]

    def value(self, expression):
        target = {"context": self.tab}
        found = self.call("script.evaluate", expression=expression, target=target, awaitPromise=True)
        assert found["type"] == "success", found
        return found["result"].get("value")

    def until(self, expression):
        """Wait for it to be true."""
        poll = (
            f"(async () => {{ while (!({expression})) await new Promise(go => setTimeout(go, 100)); return true }})()"
        )
        assert self.value(poll)

    def close(self):
        self._socket.close()
        self.process.terminate()
        self.process.wait()


@pytest.mark.nightly
@pytest.mark.skipif(FIREFOX is None, reason="there is no Firefox on PATH")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_the_same_page_in_firefox(addresses, tmp_path, kind):
    shown = "document.querySelector('#{} .answer')"
    answered = f"{shown.format('{0}')}.getAttribute('aria-busy') == 'false'"
    firefox = Bidi(tmp_path)
    try:
        firefox.call("browsingContext.navigate", context=firefox.tab, url=addresses[kind], wait="none")
        firefox.until("document.getElementById('status')?.textContent.startsWith('Ready')")
        firefox.value("location.hash = 'schedule=gpipe&ranks=3&microbatches=4'")
        bars = (
            "[...document.querySelectorAll('#schedule rect')].filter(r => r.getBoundingClientRect().width > 12).length"
        )
        firefox.until(f"{bars} == 24")
        firefox.value("location.hash = 'quiz=00'")
        right = next(letter for letter in "abcdef" if quizzes()["00"].questions[0].chosen(letter).right)
        firefox.until(f"document.getElementById('quiz-0{right}') && {answered.format('quiz')}")
        firefox.value(f"document.getElementById('quiz-0{right}').click()")
        firefox.until("document.querySelector('#quiz fieldset .right')")
        firefox.value("location.hash = 'ranks'")
        firefox.until(answered.format("ranks"))
        firefox.value("document.querySelector('#ranks button[value=run]').click()")
        firefox.until(f"{shown.format('ranks')}.innerText.split('the sum is tensor(6)').length == 5")
        own = (addresses[kind].rpartition("/")[0], "blob:", "data:", "about:", "resource:", "chrome:", "moz-")
        assert [url for url in firefox.fetched if not url.startswith(own)] == []
    finally:
        firefox.close()


def test_a_first_sum_that_was_typed_after_another_check_is_refused():
    ranks.show("", 4, "", "0", pressed="anew")
    for line, verdict in (
        ("dist.all_reduce(total := torch.tensor(rank), op=dist.ReduceOp.MAX, group=comm.group)", "Not yet: first-sum"),
        ("total = 6", "how does this rank know the numbers of the other ranks?"),
        ("comm.all_reduce(total := torch.tensor(rank))", "Passed: first-sum."),
    ):
        ranks.show("", 4, f"import torch\nimport torch.distributed as dist\n{line}", "", pressed="run")
        assert verdict in ranks.show("", 4, "", "0", pressed="check"), line
