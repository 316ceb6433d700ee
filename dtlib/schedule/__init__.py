"""Pipeline schedules as data: one list of actions per rank, which can be checked, timed, drawn and run.

    one_f_one_b(3, 4)      [[0F0, 0F1, 0F2, 0B0, 0F3, 0B1, 0B2, 0B3],      rank 0, with stage 0
                            [1F0, 1F1, 1B0, 1F2, 1B1, 1F3, 1B2, 1B3],      rank 1, with stage 1
                            [2F0, 2B0, 2F1, 2B1, 2F2, 2B2, 2F3, 2B3]]      rank 2, with stage 2

This package sends and computes nothing, so it works without torch and without ranks:

    actions.py       the actions of a rank, and their dependencies
    orders.py        the schedules GPipe, 1F1B, interleaved 1F1B and ZB-H1
    checking.py      checks that a schedule is complete, in order and free of deadlock
    simulation.py    start and end of each action, idle time and activations of each rank
    drawing.py       a simulation as text
    formulas.py      the papers' closed formulas for idle time and activations
"""

from dtlib.schedule import formulas
from dtlib.schedule.actions import Action, ScheduleError, needs, parse
from dtlib.schedule.checking import validate
from dtlib.schedule.drawing import draw
from dtlib.schedule.orders import gpipe, interleaved, one_f_one_b, zero_bubble_h1
from dtlib.schedule.simulation import Simulation, peak_activations, simulate

__all__ = [
    "Action",
    "ScheduleError",
    "Simulation",
    "draw",
    "formulas",
    "gpipe",
    "interleaved",
    "needs",
    "one_f_one_b",
    "parse",
    "peak_activations",
    "simulate",
    "validate",
    "zero_bubble_h1",
]
