"""The planner: does a model fit on given GPUs, how long does a step take, and how large is the error? (pure Python)

model.py       a transformer and a GPU: sizes, parameters, operations
mesh.py        a plan: axes, batch, schedule; impossible plans raise an error
memory.py      bytes on a GPU                          wire.py    bytes sent, by axis
time.py        seconds per step                        runs.py    days of a run, checkpoint interval
calibrated.py  measured coefficients with error bands; `python -m tools.planner` writes this file
estimate.py    estimate one plan; search the best of many
exact.py       bytes that dtlib's own strategies store and send
configs.py     a plan as a config for `dtlib train`
command.py, report.py    `dtlib plan`, and its tables
"""

from dtlib.planner.calibrated import CALIBRATIONS
from dtlib.planner.estimate import Estimate, estimate, search
from dtlib.planner.memory import Memory, memory
from dtlib.planner.mesh import Plan, check
from dtlib.planner.model import DEVICES, MODELS, Device, Model, PlanError, from_transformers
from dtlib.planner.runs import days_of, save_interval
from dtlib.planner.wire import step_bytes

__all__ = [
    "CALIBRATIONS", "DEVICES", "MODELS", "Device", "Estimate", "Memory", "Model", "Plan", "PlanError",
    "check", "days_of", "estimate", "from_transformers", "memory", "save_interval", "search",
    "step_bytes",
]  # fmt: skip
