"""Predictions: what a guess is told, when it is compared, and that no learner's notebook gives an answer away."""

import ast
from importlib import import_module
from types import SimpleNamespace

import nbformat
import pytest

from dtlib.errors import DtlibError
from dtlib.lab.checks import predictions, verdict_view
from dtlib.lab.checks.exercise import Prediction
from dtlib.lab.checks.predictions import assigns, measured_names, predict, require_all_right
from dtlib.lab.lesson_files import notebooks
from tests.books import made, stored
from tests.cases import for_each, refuses
from tests.conftest import ROOT
from tools import notebooks as build

SOURCES = build.sources(ROOT)
PLANTED = {
    "percent": Prediction(got=lambda: {8: 27.27, 32: 8.571, 128: 2.29}, tolerance=0.01),
    "ten": Prediction(got=lambda: 10.0, tolerance=0.1, hint="Two hands."),
    "which": Prediction(got=lambda: "rows", choices=("rows", "columns"), hint="A summand."),
    "group": Prediction(got=lambda: [1, 3], kind=list),
    "rounds": Prediction(got=lambda: {4: 2, 6: 4}, hint={6: "And 2 more."}),
    "count": Prediction(got=lambda found: sum(found), within=1, hint="One a rank."),
    "demand": Prediction(got=lambda: 13_016.5, tolerance=0.1),
    "speed": Prediction(got=lambda: 1.4, of_this_computer=True),
    "times": Prediction(got=lambda after, before: after / before),
}


class Shell:
    """As much of IPython as predictions ask for: names, a cleanup of cells, and callbacks before and after one."""

    def __init__(self):
        self.user_ns, self.execution_count, self.input_transformers_cleanup = {}, 0, []
        self.callbacks = {"pre_run_cell": [], "post_run_cell": []}
        self.events = SimpleNamespace(register=self.register)
        self.lab = SimpleNamespace(predict=predict)

    def register(self, event, callback):
        if callback not in self.callbacks[event]:
            self.callbacks[event].append(callback)

    def transform_cell(self, source):
        lines = source.splitlines(keepends=True)
        for transformer in self.input_transformers_cleanup:
            lines = transformer(lines)
        return "".join(lines)

    def run(self, source, success=True):
        self.execution_count += 1
        self.transform_cell(source)  # as ipykernel does, to see whether the cell is asynchronous
        code = self.transform_cell(source)
        for callback in self.callbacks["pre_run_cell"]:
            callback(None)
        if not code.startswith("%%px"):
            exec(code, {"predict": predict, "lab": self.lab}, self.user_ns)
        for callback in self.callbacks["post_run_cell"]:
            callback(SimpleNamespace(success=success, info=SimpleNamespace(raw_cell=source)))


@pytest.fixture
def shell(monkeypatch):
    shell = Shell()
    monkeypatch.setattr(predictions, "get_ipython", lambda: shell)
    monkeypatch.setattr(predictions, "predictions", lambda: PLANTED)
    monkeypatch.setattr(predictions, "_noted", {})
    monkeypatch.setattr(predictions, "_outcomes", {})
    monkeypatch.setattr(predictions, "_unanswered", {})
    monkeypatch.setattr(predictions, "_asked", set())
    monkeypatch.setattr(predictions, "RUN_ALL_SECONDS", 3600)  # as in "Run All", however slow this machine is
    return shell


@pytest.mark.parametrize("name,guess,words", [
    ("ten", None, "Predict first"), ("ten", 10, "You predicted 10, and it came out as 10: right."),
    ("ten", 9.5, "right"), ("demand", 13_000, "came out as 13,020: right."), ("speed", 1.4, "came out as 1.4:"),
    ("ten", 12, "came out as 10: not right. Two hands."),
    ("ten", "10", "Predict a number, without quotes: you wrote '10'."),
    ("ten", True, "a number, without quotes"), ("which", "rows", "right"), ("which", "columns", "A summand."),
    ("which", "row", "Predict 'rows' or 'columns': you wrote 'row'."), ("group", [1, 3], "right"),
    ("group", 1, "Predict a list, such as [0, 1]: you wrote 1."),
    ("rounds", {4: 2, 6: 2}, "6: you predicted 2, and it came out as 4: not right. And 2 more."),
    ("rounds", 4, "for each of 4, 6: you wrote 4"), ("rounds", {4: 2}, "for each of 4, 6"),
    ("rounds", {4: None, 6: None}, "Predict first"), ("rounds", {4: None, 6: "4"}, "without quotes"),
])  # fmt: skip
def test_what_a_guess_is_told_at_once(shell, capsys, name, guess, words):
    predict(name, guess)
    said = capsys.readouterr().out
    assert words in said
    assert "not right" in said or "Two hands" not in said, "a hint is for who was wrong"
    values = guess.values() if isinstance(guess, dict) else [guess]
    assert None not in values or "got" not in said, "without a guess nothing is revealed"


def test_a_guess_that_is_rounded_correctly_is_right_unless_that_loses_much(shell, capsys):
    predict("percent", {8: 27, 32: 9, 128: 2})
    assert [line.split(": ")[-1] for line in capsys.readouterr().out.splitlines()] == ["right.", "right.", "not right."]
    predict("percent", {8: 27.3, 32: 8, 128: 2.3})
    assert [line.split(": ")[-1] for line in capsys.readouterr().out.splitlines()] == ["right.", "not right.", "right."]


def test_an_outcome_has_a_sign_and_a_colour_where_there_is_a_page(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=True))
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    verdict_view.show_sentence(True, "You predicted 3 < 4: right.")
    verdict_view.show_sentence(False, "You predicted 3: not right.")
    right, wrong = (data["text/html"] for data in shown)
    assert verdict_view.PASSED in right and "&#10003;" in right and "3 &lt; 4: right." in right
    assert verdict_view.NOT_YET in wrong and "&#10003;" not in wrong and "not right." in wrong
    assert shown[0]["text/plain"] == "You predicted 3 < 4: right."


def test_a_name_that_no_lesson_has_and_a_cell_on_the_ranks_are_refused(shell, monkeypatch):
    refuses("There is no prediction 'roundz': did you mean 'rounds'", predict, "roundz", 1)
    monkeypatch.setattr(predictions, "in_engine", lambda: True)
    refuses("without %%px", predict, "ten", 10)


def test_a_guess_is_compared_below_the_cell_that_brings_the_figure(shell, capsys, monkeypatch):
    monkeypatch.setattr(import_module("dtlib.lab.engines.names"), "values", lambda name: {"found": [1, 1, 1]}[name])
    said = lambda: capsys.readouterr().out  # noqa: E731
    shell.run("predict('count', 5)")
    assert said() == "Noted: 5. The next run shows whether you are right.\n"
    refuses("count: not compared with any run", require_all_right)
    shell.run("%%px\ndef f():\n    found = [1]\nprint(found)")  # another's name, and a use of it
    shell.run("%%px\nfound = [1]", success=False)
    assert said() == ""
    shell.run("%%px\nfound, other = [1], 2")  # of the ranks
    assert said() == "You predicted 5, and it came out as 3: not right. One a rank.\n"
    refuses("count: 5 was predicted, and it is 3", require_all_right)
    shell.run("%%px\nfound = [1]")
    assert said() == "", "a guess is compared once"
    shell.run("predict('count', 2)")
    shell.run("found = 4")
    assert "is not judged yet, because the run gave no number (TypeError" in said()
    shell.run("found = [1, 2]")  # of the notebook
    assert said() == "You predicted 2, and it came out as 3: right.\n"
    shell.run("predict('times', 4)")
    shell.run("before = 2")
    assert said().startswith("Noted: 4.")
    shell.run("after = 8")
    assert said() == "You predicted 4, and it came out as 4: right.\n"
    predict("speed", 2)
    assert "came out as 1.4: not right." in said()
    require_all_right()  # a speed of this computer is no mistake of a solution


def test_without_a_guess_a_run_reveals_nothing(shell, capsys):
    shell.run("predict('count', 3)")
    shell.run("predict('count', None)\npredict('ten', None)")  # taken back
    assert capsys.readouterr().out.count("Predict first: replace None by your guess, and run this cell again.") == 1
    shell.run("found = [1, 1, 1]")
    assert capsys.readouterr().out == ""
    refuses("count: no guess; ten: no guess", require_all_right)


def test_the_next_cell_asks_for_a_guess_once(shell, capsys, monkeypatch):
    monkeypatch.setattr(predictions, "RUN_ALL_SECONDS", 0)  # a reader
    shell.run("lab.predict('count', None)")
    shell.run("%%px\nfound = [1]")
    shell.run("found = [1, 1, 1]")  # again
    assert "found" in shell.user_ns and capsys.readouterr().out.count("This cell did not run") == 1
    shell.run("lab.predict('count', None)")
    shell.run("found = []")
    assert shell.user_ns["found"] == [], "asked once"
    shell.run("lab.predict('ten', None)")
    shell.run("lab.predict('ten', 10)")
    shell.run("found = None")
    assert shell.user_ns["found"] is None, "the guess came"


def test_run_all_goes_on_without_guesses(shell, capsys):
    shell.run("lab.predict('ten', None)")
    shell.run("found = 1")
    assert shell.user_ns["found"] == 1 and "This cell did not run" not in capsys.readouterr().out


def test_no_guess_is_asked_for_where_an_instructor_says_so(shell, tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "RUN_ALL_SECONDS", 0)
    (tmp_path / predictions.NO_GUESS_FIRST).touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    shell.run("lab.predict('ten', None)")
    shell.run("found = 1")
    assert shell.user_ns["found"] == 1


def code_of(source, version, track=None):
    cells = [cell for cell in made(source, version).cells if cell.cell_type == "code"]
    return [cell.source for cell in cells if track is None or track in cell.metadata.get("tags", [])]


def without_magic(cell):
    lines = cell.partition("\n")[2] if cell.startswith("%%px") else cell
    return "\n".join(line for line in lines.splitlines() if not line.startswith("%"))


def guesses_in(cell):
    """Name -> syntax of the guess, for each prediction of a cell."""
    calls = [node for node in ast.walk(ast.parse(without_magic(cell))) if isinstance(node, ast.Call)]
    found = [call for call in calls if ast.unparse(call.func) == "lab.predict"]
    assert all(len(call.args) == 2 and not call.keywords for call in found), cell
    return {call.args[0].value: call.args[1] for call in found}


def is_open(guess):
    values = guess.values if isinstance(guess, ast.Dict) else [guess]
    return all(isinstance(value, ast.Constant) and value.value is None for value in values)


def hints_of(prediction):
    return [
        hint for hint in (prediction.hint.values() if isinstance(prediction.hint, dict) else [prediction.hint]) if hint
    ]


@pytest.mark.lint
@for_each(source=SOURCES)
def test_no_answer_or_hint_stands_in_a_learners_notebook(source):
    known, cells = predictions.predictions(), code_of(source, "learner")
    text = " ".join(" ".join(cell.source.replace("\n", " ") for cell in made(source, "learner").cells).split())
    asked = {name: guess for cell in cells for name, guess in guesses_in(cell).items()}
    solved = {name: guess for cell in code_of(source, "solved") for name, guess in guesses_in(cell).items()}
    assert asked.keys() == solved.keys() <= known.keys()
    for name, guess in asked.items():
        assert is_open(guess), f"{name} has a guess in the learner's notebook"
        assert not is_open(solved[name]), f"{name} has none in the solution"
        assert hints_of(known[name]), f"{name} has no hint"
        for hint in hints_of(known[name]):
            assert hint not in text, f"{name}: the notebook says its hint: {hint}"
    names = {name for each in asked for name in measured_names(known[each])}
    lists = {ast.unparse(node) for guess in solved.values() for node in ast.walk(guess) if isinstance(node, ast.List)}
    for cell in cells:
        for node in ast.walk(ast.parse(without_magic(cell))):
            assert not (isinstance(node, ast.List) and ast.unparse(node) in lists), f"the answer stands in {cell}"
            if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
                sides = [node.test.left, *node.test.comparators]
                measured = any(isinstance(side, ast.Name) and side.id in names for side in sides)
                literal = any(isinstance(side, (ast.Constant, ast.List, ast.Tuple)) for side in sides)
                assert not (measured and literal), f"the answer stands in {ast.unparse(node)}"


@pytest.mark.parametrize("track", [None, *build.TRACKS])
@pytest.mark.lint
@for_each(source=SOURCES)
def test_one_cell_below_the_question_brings_the_figure(source, track):
    cells = code_of(source, "solved", track)
    for at, cell in enumerate(cells):
        for name in guesses_in(cell):
            if needed := measured_names(predictions.predictions()[name]):
                brings = [number for number, other in enumerate(cells) if assigns(without_magic(other), needed[0])]
                assert len(brings) == 1 and brings[0] > at, f"{name}: `{needed[0]}` is assigned in cells {brings}"


@pytest.mark.lint
def test_every_prediction_is_asked_for_once():
    asked = [name for source in SOURCES for cell in code_of(source, "learner") for name in guesses_in(cell)]
    assert sorted(asked) == sorted(predictions.predictions())


def test_what_is_computed_is_what_the_solution_says():
    for source in SOURCES:
        for cell in code_of(source, "solved"):
            for name, guess in guesses_in(cell).items():
                prediction = predictions.predictions()[name]
                try:
                    guess = ast.literal_eval(guess)
                except ValueError:
                    continue  # made of names; the build judges it
                if not measured_names(prediction):
                    predictions._compare(name, guess, prediction.got())
                    assert predictions._outcomes[name] == "right", predictions._outcomes[name]


@pytest.mark.lint
@for_each(source=SOURCES)
def test_every_outcome_stands_in_the_stored_solution(source):
    """A page that was stored before the cell that brings it was there shows none, and has all else."""
    shown, expected = "", []
    for cell in stored(source, "solved").cells:
        outputs = cell.get("outputs", [])
        texts = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
        shown += " ".join(" ".join(text.split()) for text in texts)
        for guess in guesses_in(cell.source).values() if cell.cell_type == "code" else ():
            try:
                guess = ast.literal_eval(guess)
            except ValueError:
                continue  # made of names
            for one in guess.values() if isinstance(guess, dict) else [guess]:
                expected.append(f"predicted {one}, and it came out as")
    assert [words for words in expected if shown.count(words) < expected.count(words)] == []


def test_the_build_refuses_what_was_not_predicted_and_what_its_output_does_not_bear_out(tmp_path):
    from nbclient.exceptions import CellExecutionError

    def built(guess, *others):
        cell = nbformat.v4.new_code_cell(f"from dtlib import lab\nlab.predict('sum-for-eight', {guess})")
        book = nbformat.v4.new_notebook(cells=[cell, *others])
        build.execute(book, tmp_path, refuse=True)

    def tagged(source, tag):
        return nbformat.v4.new_code_cell(source, metadata={"tags": [tag]})

    refuses("Not as predicted: sum-for-eight", built, 27, error=CellExecutionError)
    statement = '# "28 times"\nassert found(r"came out as (\\d+): right") == [29]'
    with pytest.raises(DtlibError, match="the prose does not say: 28 times") as refused:
        built(28, tagged("assert lab", "claim"), tagged(statement, "statement"))
    assert "AssertionError" in str(refused.value)


def test_what_the_text_claims_of_a_run_is_asserted_at_the_build_alone():
    source = notebooks()["02_pi"]
    plain, checked = (made(source, "solved", claims) for claims in (False, True))
    kept = [cell for cell in checked.cells if not build.CHECKED & set(cell.metadata.get("tags", []))]
    assert [(cell.id, cell.source) for cell in kept] == [(cell.id, cell.source) for cell in plain.cells]
    assert len(checked.cells) > len(kept)
