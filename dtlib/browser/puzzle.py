"""The room with the schedule puzzle, judged as in lesson 07."""

from dtlib.browser.fields import Button, Choice, Hidden, Text
from dtlib.browser.schedule import drawn
from dtlib.browser.svg import sentence
from dtlib.browser.verdicts import verdict
from dtlib.lessons.l07 import judge_puzzle

TITLE, LESSON = "Schedule puzzle", "07_schedule_puzzle_exercises"
SAYS = (
    "Order the work of a pipeline by hand: a line for each of 4 ranks, 8 micro-batches. F3 is a forward pass and takes "
    "1, B3 its backward pass and takes 2; F0-3 stands for F0 F1 F2 F3. An activation is kept from F to the end of B. "
    "At par, the shortest time possible, you pass. Level 4 has I3 and W3, the halves of B3. Check again for the next "
    "hint."
)
LEVELS = {
    str(number): f"{number}: at most {level.activations} activations" for number, level in judge_puzzle.LEVELS.items()
}
FORM = (
    Choice("puzzle", "level", "1", LEVELS), Text("order", "your order", "F0 F1\nF0\nF0\nF0"),
    Button("check", "Check"), Hidden("attempt", "0"),
)  # fmt: skip


def show(puzzle: str, order: str, attempt: str, pressed: str = "") -> str:
    """Return the verdict on a learner's order and its picture, as HTML."""
    if not pressed:
        return sentence("Write your order, then check it.")
    exercise = judge_puzzle.exercise(int(puzzle))
    observed = [judge_puzzle.observe(order)]
    picture = exercise.picture(observed) if exercise.picture else None
    shown = drawn(picture.simulation, "Yours") if picture else ""
    return verdict(f"level {puzzle}", lambda: exercise.judge(observed), attempt) + shown
