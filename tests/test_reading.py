import ast
import importlib
import inspect
import re

import pytest

from dtlib.lab import reading
from tests.conftest import ROOT

LESSONS = {
    "04_data_parallel": "data",
    "06_zero": "zero",
    "07_pipelines": "pipeline",
    "08_tensor_and_hybrid": "tensor",
}


@pytest.mark.parametrize("lesson, strategy", LESSONS.items())
def test_a_lesson_shows_its_plain_core_whole_and_in_order(lesson, strategy):
    plain = (ROOT / "dtlib" / "parallel" / strategy / "plain.py").read_text()
    written = [thing.name for thing in ast.parse(plain).body if isinstance(thing, ast.ClassDef | ast.FunctionDef)]
    lecture = (ROOT / "notebooks" / "source" / f"{lesson}.py").read_text()
    shown = re.findall(r"plain\.(\w+)", " ".join(re.findall(r"lab\.read\((.*?)\)", lecture)))
    assert shown == [name for name in written if not name.startswith("check")]
    assert "lab.read(plain)\n" in lecture and "lab.read_end(plain)\n" in lecture


@pytest.mark.parametrize("strategy", LESSONS.values())
def test_what_is_shown_is_what_runs(strategy, monkeypatch):
    shown = []
    monkeypatch.setattr(reading, "display", lambda data, raw: shown.append(data["text/plain"]))
    plain = importlib.import_module(f"dtlib.parallel.{strategy}.plain")
    classes = [thing for thing in vars(plain).values() if inspect.isclass(thing) and thing.__module__ == plain.__name__]
    reading.read(plain)
    reading.read(*classes or [plain.step])
    reading.read_end(plain)
    source = inspect.getsource(plain)
    assert all(text.startswith(f"dtlib/parallel/{strategy}/plain.py\n\n") for text in shown)
    assert all(line in source for text in shown[1:] for line in text.splitlines()[2:])
    assert shown[-1].splitlines()[-1] == source.splitlines()[-1].removeprefix("# ")
