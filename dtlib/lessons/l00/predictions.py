"""Lesson 00: the questions that learners predict, and the sources of the answers."""

from dtlib.lab.checks.exercise import Prediction

PREDICTIONS = {"sum-for-eight": Prediction(got=lambda: sum(range(8)), hint="The ranks of eight are 0 to 7.")}
