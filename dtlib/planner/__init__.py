"""Will it fit, how long will it take, and how far off was that where it was measured? (pure Python)

model.py       a transformer and a GPU: sizes, parameters, operations
mesh.py        a plan: axes, batch, schedule; what cannot be is refused with its numbers
memory.py      bytes on a GPU                          wire.py    bytes that travel, by axis
time.py        seconds of a step                       runs.py    days, save interval
calibrated.py  coefficients, with their bands: written by `python -m tools.planner`, with how far off they were
estimate.py    one plan in one call; why not; the best of many
configs.py     a plan for `dtlib train`
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
