"""The room with all quizzes of the course. Each answer is explained once it is chosen, and first choices count."""

from dtlib.browser.fields import Choice, Hidden, put
from dtlib.browser.svg import sentence
from dtlib.lab.checks.questions import as_html, quizzes

TITLE, LESSON = "Quizzes", "start"
SAYS = "The quizzes of the lessons and tracks, and the tests before and after the course. First choices count."
OPEN = "-"
FORM = (Choice("quiz", "quiz", "07", {name: name for name in quizzes()}), Hidden("answers"), Hidden("asked"))


def show(quiz: str, answers: str, asked: str = "") -> str:
    """Return the questions of ``quiz`` with the answers so far, as HTML.

    ``answers`` belongs to the quiz ``asked``. It has one letter per question, and ``-`` for a question without an
    answer.
    """
    questions = quizzes()[quiz].questions
    given = answers if asked == quiz and len(answers) == len(questions) else OPEN * len(questions)
    given = "".join(
        letter if letter in question.letters else OPEN for letter, question in zip(given, questions, strict=True)
    )
    shown = [_question(number, question, given) for number, question in enumerate(questions)]
    if discuss := quizzes()[quiz].discuss:
        shown.append(f"<p><b>Discuss.</b> {as_html(discuss)}</p>")
    done = [letter for letter in given if letter != OPEN]
    right = sum(
        letter != OPEN and question.chosen(letter).right for letter, question in zip(given, questions, strict=True)
    )
    result = f"{right} of {len(given)} right at first choice." if len(done) == len(given) else ""
    kept = put("asked", quiz)
    return "".join(shown) + kept + sentence(result or f"{len(done)} of {len(given)} answered.")


def _question(number: int, question, given: str) -> str:
    chosen = given[number]
    rows = []
    for letter in question.letters:
        option = question.chosen(letter)
        sign = "" if chosen == OPEN else " ✓" if option.right else " ✗" if letter == chosen else ""
        after = given[:number] + (letter if chosen == OPEN else chosen) + given[number + 1 :]
        rows.append(
            f'<button class="option" id="quiz-{number}{letter}" name="answers" value="{after}"'
            f"{' aria-pressed=true' if letter == chosen else ''}><b>{letter}{sign}</b> {as_html(option.says)}</button>"
        )
    said = ""
    if chosen != OPEN:
        option = question.chosen(chosen)
        words = f"{chosen}, {'right' if option.right else 'not right'}."
        kind = "right" if option.right else "not-yet"
        said = f'<div role="status" class="{kind}"><b>{words}</b> {as_html(option.because)}</div>'
    return f"<fieldset><legend>{number + 1}. {as_html(question.asks)}</legend>{''.join(rows)}{said}</fieldset>"
