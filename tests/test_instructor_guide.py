"""Pages for teachers: their listings run as they say, and generated pages agree with their sources."""

import contextlib
import re
import tempfile
import tomllib
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dtlib
import dtlib.theory.collectives
import dtlib.theory.scaling
import dtlib.theory.zero
from dtlib import lab, schedule, theory  # noqa: F401  the cheat sheet's formulas use the last two
from dtlib.comm.communicator import Communicator
from dtlib.lab.checks import judging
from dtlib.lab.checks.exercise import EXERCISES
from tests.cases import refuses
from tests.conftest import ROOT, said_by_ranks
from tests.ranks import on_ranks
from tools import glossary, instructor

GUIDE = (ROOT / "docs" / "how-to" / "write_your_own_exercise.md").read_text()
LISTINGS = {match[1]: match[2] for match in re.finditer(r"`(\w+\.py)`.*?```python\n(.*?)```", GUIDE, re.S)}


@on_ranks(3)
def test_an_exercise_of_one_file_is_judged_as_the_guide_says(world):
    def right(comm, number):
        return comm.all_reduce(torch.tensor(number), op="max").item()

    def mine(comm, number):
        return number

    def of_three(comm, number):
        return 3.0

    answers = (right, mine, of_three)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("largest.py").write_text(LISTINGS["largest.py"])
        verdicts = {answer: judging.judge_on_this_rank("largest.py", {"largest": answer}) for answer in answers}
        assert judging.judge_on_this_rank("largest.py", {}).mistake == "missing"
    assert verdicts[right].passed and verdicts[right].ranks == 3
    assert (verdicts[mine].mistake, verdicts[mine].rank) == ("own-number", 0) and len(verdicts[mine].hints) == 2
    assert verdicts[of_three].mistake == "other-size", "any_size=True, as the guide says"


def test_a_file_that_has_no_exercise_is_refused_and_offers_no_solution(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("x = 1")
    for name, sentence in (("none.py", "put the exercise in the"), ("empty.py", "EXERCISE = Exercise(")):
        refuses(re.escape(sentence), judging.check, name)
    own = LISTINGS["largest.py"].replace("any_size=True", "needs_ranks=False").replace("comm.rank", "0")
    (tmp_path / "here.py").write_text(
        own.replace("def observe(answer, comm):", "def observe(answer, comm):\n    comm = None")
    )
    monkeypatch.setattr(judging, "get_ipython", lambda: SimpleNamespace(user_ns={"largest": lambda comm, number: 7.0}))
    for _ in range(judging.TRIES + 2):  # after which the course's own offer a solution
        judging.check("here.py")
    assert capsys.readouterr().out.count("Not yet: here.py") == judging.TRIES + 2


def test_a_model_of_one_file_trains_as_the_guide_says(tmp_path):
    (tmp_path / "my_model.py").write_text(LISTINGS["my_model.py"])
    said = said_by_ranks(["my_model.py"], 2, cwd=tmp_path)
    assert said.count("loss ") == 1 and float(said.split()[1]) < 1


def test_questions_to_discuss_are_those_of_the_quizzes_and_lectures():
    assert instructor.DISCUSSIONS.read_text(encoding="utf-8") == instructor.discussions(), (
        "run python -m tools.instructor"
    )


def test_each_prompt_of_a_lecture_has_an_answer_for_the_instructor():
    answered = tomllib.loads(instructor.PROMPTS.read_text(encoding="utf-8"))["prompt"]
    asked = instructor.prompts()
    assert len(asked) >= 16, "of the lectures' own"
    assert {(row["lesson"], row["asks"]) for row in answered if row["lesson"][0].isdigit()} == set(asked)
    assert all(len(row["says"].split()) >= 30 for row in answered), "something to say"


def test_each_word_of_the_glossary_is_in_the_lesson_that_explains_it():
    page = glossary.FILE.read_text(encoding="utf-8")
    assert page == glossary.page(), "run python -m tools.glossary"
    for term, (_, number) in glossary.TERMS.items():
        text = re.sub(r"\n# |[-_\s]+", " ", glossary.lecture(number).read_text(encoding="utf-8")).lower()
        assert re.sub(r"[-_\s]+", " ", term).lower() in text, f"lesson {number} does not have {term!r}"


def test_the_cheat_sheet_names_what_there_is_and_computes_what_it_says():
    text = (ROOT / "docs" / "reference" / "cheat_sheet.md").read_text()
    assert len(text.split()) < 650, "one page"
    for name in re.findall(r"`(?:with )?(dtlib(?:\.\w+)+)", text):
        try:
            reduce(getattr, name.split(".")[1:], dtlib)
        except AttributeError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(__import__(module, fromlist=["_"]), attribute), name
    assert all(hasattr(lab, name) for name in re.findall(r"`lab\.(\w+)", text))
    assert all(hasattr(Communicator, name) for name in re.findall(r"`comm\.(\w+)\(", text))
    rows = re.findall(r"\| `([^`]+)` \| ([^|`]+) \|$", text, re.M)
    formulas = [(call, gives) for call, gives in rows if re.match(r"theory|schedule|sum|6 ", call)]
    assert len(formulas) == 10
    for call, gives in formulas:
        assert eval(call) == pytest.approx(eval(gives), rel=1e-9), call


def test_what_a_file_holds_is_an_exercise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "largest.py").write_text(LISTINGS["largest.py"])
    assert "largest.py" in EXERCISES and EXERCISES["largest.py"].any_size and "largest.py" not in list(EXERCISES)


def test_pages_and_dockerfile_have_the_pin_of_torch():
    (pin,) = re.findall(r"^(torch==\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    for name in ("Dockerfile", "docs/how-to/install.md", "docs/how-to/run_a_hub.md"):
        assert set(re.findall(r"torch==[\w.]+", (ROOT / name).read_text())) == {pin}, name
