import ast
import importlib
import inspect
import re

import pytest

from dtlib.lab import server, source_view
from dtlib.lab.lesson_files import notebooks
from tests.conftest import ROOT

LESSONS = {"04_data_parallel": "data", "06_zero": "zero", "07_pipelines": "pipeline", "08_tensor_and_hybrid": "tensor"}


@pytest.fixture
def shown(monkeypatch):
    """What is displayed: of each its text and its HTML."""
    displayed = []
    monkeypatch.setattr(source_view, "display", lambda data, raw: displayed.append(data))
    return displayed


@pytest.mark.parametrize("lesson, strategy", LESSONS.items())
def test_a_lesson_shows_its_plain_core_whole_and_in_order(lesson, strategy):
    plain = (ROOT / "dtlib" / "parallel" / strategy / "plain.py").read_text()
    written = [thing for thing in ast.parse(plain).body if isinstance(thing, ast.ClassDef | ast.FunctionDef)]
    lecture = notebooks()[lesson].read_text()
    shown = re.findall(r"plain\.([\w.]+)", " ".join(re.findall(r"lab\.read\((.*?)\)", lecture)))
    in_parts = {name.partition(".")[0] for name in shown if "." in name}  # classes shown by their methods
    assert shown == [name for thing in written for name in _names(thing, in_parts) if not name.startswith("check")]


def _names(thing, in_parts):
    parts = thing.body[1:] if thing.name in in_parts else []
    return [f"{thing.name}.{part.name}" for part in parts] or [thing.name]


@pytest.mark.parametrize("strategy", LESSONS.values())
def test_what_is_shown_is_what_runs(strategy, shown):
    plain = importlib.import_module(f"dtlib.parallel.{strategy}.plain")
    classes = [thing for thing in vars(plain).values() if inspect.isclass(thing) and thing.__module__ == plain.__name__]
    source_view.read(plain)
    source_view.read(*classes or [plain.step])
    source_view.read_end(plain)
    source = inspect.getsource(plain).replace("\\\\", "\\")  # as a docstring is read
    headings, texts = zip(*(data["text/plain"].split("\n\n", 1) for data in shown), strict=True)
    assert all(heading.startswith(f"dtlib/parallel/{strategy}/plain.py") for heading in headings)
    assert all(words(text) in words(source.replace("\n# ", "\n")) for text in texts[:1] + texts[-1:])
    numbers = re.findall(r"(\d+) to (\d+)", headings[1])
    lines = source.splitlines()
    code = [line for a, b in numbers for line in lines[int(a) - 1 : int(b)]]
    assert [line for line in texts[1].splitlines() if line] == [line for line in code if line]


def listings():
    """What lessons show with ``lab.read``, as far as they import it."""
    for source in notebooks().values():
        nodes = list(ast.walk(ast.parse(source.read_text())))
        imports = {
            (each.asname or each.name): node
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        for call in [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "lab.read"]:
            for shown in map(ast.unparse, call.args):
                if node := imports.get(shown.split(".")[0]):
                    exec(ast.unparse(node), names := {})
                    yield eval(shown, names)


def test_the_text_of_a_listing_is_the_same_code(shown):
    things = [thing for thing in listings() if not inspect.ismodule(thing)]
    for thing in things:
        source_view.read(thing)
        text = shown[-1]["text/plain"].split("\n\n", 1)[1]
        assert text == inspect.getsource(thing).strip("\n"), text
    assert len(things) > 40


def test_what_stands_below_a_decorator_is_shown_with_its_own_file(shown):
    source_view.read(importlib.import_module("dtlib.parallel.context.plain").RingAttention.backward)
    text = shown[0]["text/plain"]
    assert text.startswith("dtlib/parallel/context/plain.py, lines ") and "d_scores" in text


def test_code_has_the_colours_of_the_page_and_each_kind_has_one(shown):
    for strategy in LESSONS.values():
        plain = importlib.import_module(f"dtlib.parallel.{strategy}.plain")
        classes = [thing for thing in vars(plain).values() if inspect.isclass(thing)]
        source_view.read(*[each for each in classes if each.__module__ == plain.__name__] or [plain.step])
    scripts = ROOT / "notebooks" / "digits_serial.py", ROOT / "notebooks" / "digits_horovod.py"
    source_view.read_changes(*scripts)
    *_, changes = pages = [data["text/html"] for data in shown]
    assert changes.count('<span class="gi">+') == 16 and changes.count('<span class="gd">-') == 4
    html = "".join(pages)
    assert "color" not in html and 'class="highlight dtlib-code"' in html
    style = (server.SETTINGS / "custom" / "custom.css").read_text()
    line = server.command(ROOT, False, [])
    assert "--LabApp.custom_css=True" in line
    assert f"--ServerApp.tornado_settings=static_custom_path={server.SETTINGS / 'custom'}" in line
    assert "word-break: normal" in style, "a line is broken between words"
    of_code = "".join(line for line in style.splitlines() if ".dtlib-code" in line)
    assert of_code and not re.search(r"color: *(#|rgb|[a-z]+;)", of_code), "in which theme?"
    coloured = set(re.findall(r"[(, ]\.(\w+)", style.split("dtlib-code", 1)[1]))
    plain_text = {"n", "p", "w"}  # names, brackets, spaces
    assert set(re.findall(r'<span class="(\w+)"', html)) <= coloured | plain_text


def words(text):
    """Long lines go on below, so that spaces differ."""
    return " ".join(text.split())
