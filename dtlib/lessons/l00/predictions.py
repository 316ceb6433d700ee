"""Lesson 00: what is predicted in it, and where the answers come from."""

from dtlib.lab.checks.exercise import Prediction

PREDICTIONS = {"sum-for-eight": Prediction(got=lambda: sum(range(8)), hint="The ranks of eight are 0 to 7.")}
