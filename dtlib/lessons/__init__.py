"""The lessons: one folder per lesson, with all files that only this lesson uses.

__init__.py       NOTEBOOKS, the names of its notebooks
lecture.py        the source of its lecture, in percent format; also appendix.py
exercises.py      the source of its exercises, with solutions; also puzzle.py
figures.py        its figures
judge_*.py        EXERCISES: checks of answers, with error messages and hints; observe_*.py runs the answers
predictions.py    the questions that learners predict, and the comments on their predictions
quiz.toml         its multiple-choice questions

lab/checks/exercise.py reads the names in ``EXERCISES = {...}`` from the text, without importing it: keep that form.
"""
