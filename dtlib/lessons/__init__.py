"""The lessons, a folder each: all that is a lesson's own stands there, side by side.

__init__.py       NOTEBOOKS, the names of its notebooks
lecture.py        the source of its lecture, in percent format; also appendix.py
exercises.py      the source of its exercises, with solutions; also puzzle.py
figures.py        its figures
judge_*.py        EXERCISES, and what is looked at and said of an answer; observe_*.py
predictions.py    what learners predict, and what is said to it
quiz.toml         its choice questions
"""
