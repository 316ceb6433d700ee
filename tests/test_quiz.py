"""Quizzes: that they are fair, what a choice is told, and that nothing is told without one; progress and scores."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from dtlib import lab
from dtlib.errors import DtlibError
from dtlib.lab import course
from dtlib.lab.checks import judging, progress, questions, quiz
from dtlib.lab.checks.exercise import Score
from dtlib.lab.checks.verdict import Verdict
from dtlib.lab.lesson_files import notebooks
from dtlib.lab.tables import WIDEST
from dtlib.lessons.l07.judge_puzzle import EXERCISES as PUZZLES
from tests.cases import for_each, refuses
from tests.conftest import ROOT

QUIZZES = questions.quizzes()
QUESTIONS = [question for each in QUIZZES.values() for question in each.questions]
LESSONS = ["00", "01", "02", "03", "04", "04b", "05", "06", "07", "07b", "08", "08b"]
LESSONS += ["09", "10", "11", "11b", "12", "12b", "13", "14"]
TRACKS = ["half-day", "two-hours"]


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.setattr(quiz, "_first", {})


@pytest.fixture
def learners_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    course.open_folder()
    return tmp_path


def right_letters(name):
    return "".join(next(x for x in q.letters if q.chosen(x).right) for q in QUIZZES[name].questions)


def wrong_letters(name):
    return "".join(next(x for x in q.letters if not q.chosen(x).right) for q in QUIZZES[name].questions)


@for_each(name=QUIZZES)
def test_a_quiz_is_whole(name):
    found = QUIZZES[name]
    assert 4 <= len({question.asks for question in found.questions}) == len(found.questions) <= 6
    for question in found.questions:
        says = [option.says for option in question.options]
        assert len(set(says)) == len(says) == 4 and sum(option.right for option in question.options) == 1
        assert all(len(option.because.split()) >= 2 for option in question.options), f"{question.asks}: explain each"
    if name in LESSONS:
        assert 5 <= len(found.discuss.split()) <= 40 and len(found.answer.split()) >= 30
    widest = max(found.text().splitlines(), key=len)
    assert len(widest) <= WIDEST, widest


def test_there_is_a_quiz_for_each_lesson_and_the_same_topics_before_and_after():
    assert list(QUIZZES) == [*LESSONS, "after", "before", *TRACKS]
    assert all(len(QUIZZES[track].questions) == 6 for track in TRACKS)
    before, after = ([q.asks.partition(". ")[0] for q in QUIZZES[name].questions] for name in ("before", "after"))
    assert before == after and len(set(before)) == 6
    assert not {q.asks for q in QUIZZES["before"].questions} & {q.asks for q in QUIZZES["after"].questions}


@for_each(name=LESSONS)
def test_the_stored_quiz_is_the_one_of_the_source(name):
    stored = [
        "".join(output.get("data", {}).get("text/plain") or output.get("text", ""))
        for path in (ROOT / "notebooks" / "solutions").glob(f"{name}_*.ipynb")
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if "lab.quiz(" in "".join(cell["source"])
        for output in cell["outputs"]
    ]
    assert len(stored) == 1
    assert stored[0].split() == QUIZZES[name].text().split(), f"build lecture {name} again: python -m tools.notebooks"


def test_neither_letter_nor_length_nor_a_word_gives_an_answer_away():
    letters, longest, shortest, telltale = Counter(), 0, 0, Counter()
    for question in QUESTIONS:
        lengths = sorted(len(option.says) for option in question.options)
        for letter in question.letters:
            option = question.chosen(letter)
            telltale[option.right] += bool(re.search(r"\b(only|always|never|all|none|every)\b", option.says.lower()))
            if option.right:
                letters[letter] += 1
                longest += len(option.says) == lengths[-1] > lengths[-2]
                shortest += len(option.says) == lengths[0] < lengths[1]
    fair = len(QUESTIONS) / 4
    assert all(0.7 * fair <= letters[letter] <= 1.3 * fair for letter in "abcd"), letters
    assert longest <= 1.1 * fair and shortest <= 1.1 * fair, (longest, shortest)
    assert telltale[True] >= 1, "words such as `all` stand in right options, too"


def test_text_shows_the_questions_and_a_choice_is_explained(capsys):
    quiz.quiz("03")
    shown = capsys.readouterr().out
    reasons = [option.because for question in QUIZZES["03"].questions for option in question.options]
    assert "1. A ring all-reduce of 96 MB" in shown and "Discuss: " in shown and 'answers="....."' in shown
    assert not [reason for reason in reasons if reason in " ".join(shown.split())], "without a choice nothing is told"
    assert QUIZZES["03"].answer[:40] not in shown

    right, wrong = right_letters("03"), wrong_letters("03")
    quiz.quiz("03", answers=right[0].upper() + " " + wrong[1] + "---")
    said = " ".join(capsys.readouterr().out.split())
    questions = QUIZZES["03"].questions
    assert f"1. {right[0]}, right. {questions[0].chosen(right[0]).because}" in said
    assert f"2. {wrong[1]}, not right. {questions[1].chosen(wrong[1]).because}" in said
    assert "3. open" in said and "2 of 5 answered." in said
    assert questions[1].chosen(right[1]).because not in said, "who is wrong may try again"
    quiz.quiz("03", answers=right)
    assert "4 of 5 right at first choice." in capsys.readouterr().out


@pytest.mark.parametrize("name,answers,words", [
    ("3", None, "There is no quiz '3': choose one of '00', '01'"), ("03", "abca", "has 5 questions, but 'abca' has 4"),
    ("03", "abcxa", "'x' in 'abcxa' is not an answer: write one of abcd, or -"), ("03", "", "has 0 answers"),
])  # fmt: skip
def test_what_is_no_answer_is_refused(name, answers, words):
    refuses(re.escape(words), quiz.quiz, name, answers)
    assert not quiz._first


def test_a_cell_on_the_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(quiz, "in_engine", lambda: True)
    refuses("without %%px", quiz.quiz, "03")


def test_buttons_say_the_same_as_text():
    shown = quiz._Shown(QUIZZES["00"])
    rows = [child for child in shown.box.children if hasattr(child, "children")]
    assert len(rows) == 4 * len(QUIZZES["00"].questions)
    button = rows["abcd".index(wrong_letters("00")[0])].children[0]
    assert not any(said.value for said in shown.said)
    button.click()
    assert button.description.endswith("✗") and "not right." in shown.said[0].value
    right = rows["abcd".index(right_letters("00")[0])].children[0]
    right.click()
    assert right.description.endswith("✓") and "1 of 5 answered" in shown.result.value
    assert questions.as_html("`a < b` & c") == "<code>a &lt; b</code> &amp; c"


def test_lectures_ask_and_no_notebook_answers():
    asked = Counter()
    for notebook, source in notebooks().items():
        for name in re.findall(r"^lab\.quiz\((.*)\)$", source.read_text(), re.M):
            asked[name] += 1
            assert name == f'"{notebook.partition("_")[0]}"' and not notebook.endswith("_exercises"), source
    assert asked and max(asked.values()) == 1
    reasons = [option.because for question in QUESTIONS for option in question.options if len(option.because) > 40]
    reasons += [each.answer[:60] for each in QUIZZES.values() if each.answer]
    for book in (ROOT / "notebooks").glob("*/*.ipynb"):
        text = " ".join(book.read_text().split())
        assert not [reason for reason in reasons if reason in text], book


def test_progress_and_scores_of_a_learner(learners_folder, capsys):
    with pytest.raises(DtlibError, match="stores no progress"):
        (learners_folder / course.RECORD).rename(learners_folder / "aside")
        progress.progress()
    (learners_folder / "aside").rename(learners_folder / course.RECORD)
    progress.scores()
    assert "No score yet" in capsys.readouterr().out
    refuses("There is no result", lab.certificate)
    progress.progress()
    assert "Next: predict 'sum-for-eight', in lectures/00_start_here.ipynb." in capsys.readouterr().out

    (learners_folder / course.DONE).write_text('{"done": {"first-sum": true, "pi-streams": true}}')
    quiz.quiz("00", right_letters("00"))
    quiz.quiz("before", wrong_letters("before"))
    quiz.quiz("before", right_letters("before"))  # first choices count
    capsys.readouterr()
    progress.progress()
    shown = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()) for line in shown.splitlines() if line[:2].isdigit()}
    assert rows["00"] == "00 Start here 2 of 3 1 prediction"
    assert "pi-on-ranks" in rows["02"] and "pi-streams" not in rows["02"] and "quiz" in rows["02"]
    assert "all of it" in rows["06"] and "Next: predict" in shown and "02_pi" in shown.splitlines()[-1]

    with pytest.MonkeyPatch.context() as patch:  # in a notebook of a track, of which some is done in its lesson
        patch.chdir(learners_folder / "notebooks" / "workshop" / "two-hours")
        progress.progress()
    shown = capsys.readouterr().out
    assert [line[0] for line in shown.splitlines()[2:6]] == ["A", "B", "C", "D"] and "00 Start" not in shown
    assert "workshop/two-hours/" in shown.splitlines()[-1]

    over, at_par = "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7", "F0-7 B0-7"
    for puzzle in (over, at_par, over):
        verdict = judging.judge_here("schedule-puzzle", {"puzzle": [puzzle] * 4})
        assert verdict.passed == (puzzle == at_par) and verdict.scored[1:] == (33, "forward passes")
        course.scored(verdict.exercise, *verdict.scored, ranks=verdict.ranks)
    course.scored("byte-golf", 300, 400, "bytes", 3)
    course.scored("byte-golf", 350, 600, "bytes", 4)  # more bytes, and less of its par
    progress.scores()
    shown = " ".join(capsys.readouterr().out.split())
    assert "byte-golf 350 bytes on 4 ranks 600" in shown and "schedule-puzzle 33 forward passes 33" in shown
    pasted = "To paste: byte-golf 350/600 on 4 ranks; schedule-puzzle 33/33; quiz before 0 of 6"
    assert pasted in shown and "quiz 00 5 of 5" in shown
    known = json.loads((learners_folder / course.DONE).read_text())
    assert known["done"]["quiz before"] == [0, 6] and known["done"]["first-sum"] is True

    # The certificate names what was done here, and nothing else; it is one file.
    course.keep("capstone", {"plan": "pipe 4 <", "steps": 8, "rows": [["ms per step", "230", "<250>"]]})
    lab.certificate("your name")
    assert "Put your own name" in capsys.readouterr().out and not (learners_folder / "certificate.html").exists()
    lab.certificate("A & B")
    page = (learners_folder / "certificate.html").read_text(encoding="utf-8")
    done = ("A &amp; B", "pi-streams", "first-sum", "5 of 5", "350 bytes", "pipe 4 &lt;", "&lt;250&gt;")
    assert all(each in page for each in done)
    others = ("pi-on-ranks", "06 ZeRO", "14 Capstone", "http", "src=", "url(", "<script")
    assert not [each for each in others if each in page]


def test_a_score_is_kept_by_the_check_itself(monkeypatch):
    kept = []
    monkeypatch.setattr(judging.course, "scored", lambda *score: kept.append(score))
    monkeypatch.setattr(judging, "show", lambda *arguments: None)
    monkeypatch.setattr(judging, "_tries", Counter())
    judging._show_verdict(judging._verdict("schedule-puzzle", [["F0-7 B0-7"] * 4], ("puzzle", "")))
    judging._show_verdict(Verdict("first-sum", "total", 3))
    assert kept == [("schedule-puzzle", 33, 33, "forward passes", 0)]
    golf = {"right": 96, "images": 100, "unknown": [], "bytes": 70, "loads": 0}
    seen = [{"par": {**golf, "bytes": 60}, "mine": golf} for _ in range(3)]
    verdict = judging._verdict("byte-golf", seen, ("golf", ""))
    assert verdict.mistake == "over-par" and verdict.scored == (210, 180, "bytes") and not verdict.score
    assert isinstance(PUZZLES["schedule-puzzle"].judge([["F0-7 B0-7"] * 4]), Score)
    says = replace(PUZZLES["schedule-puzzle"], judge=lambda observations: "text", picture=None)
    monkeypatch.setattr(judging, "EXERCISES", {"says": says})
    verdict = judging._verdict("says", [["F0 B0"]], ("puzzle", ""))
    assert (verdict.score, verdict.scored) == ("text", ())
