"""Coefficients of the planner, with their bands: written by ``python -m tools.planner``."""

from dtlib.planner.time import Calibration, Speeds

# Of a GPU's memory, before it is full.
USABLE = 0.900
# Mean error of memory, on the family of rows where it is larger.
MEMORY_ERROR = 0.20
# Factors of a prediction between which nine of ten rows lie on which nothing was fitted; and with pipelines,
# where the calibration has seen none.
OUTSIDE, OUTSIDE_PIPE = (0.683, 1.248), (0.766, 32.529)
CALIBRATIONS = {
    "a100-node": Calibration(
        device="a100", rows=675,
        source="vTrain, arXiv:2312.12391, one node of 8 A100, Megatron-LM",
        error=0.062, band=(0.854, 1.113),
        speeds=Speeds(
            matrix=0.729, attention=0.35, bandwidth=0.569, launch=0.00104, call=3.5e-05, hop=4.12e-05,
            hop_outside=3e-05, inside=450000000000.0, outside=80000000000.0, boundary=0.00129, hidden=1e-09,
            step=0.00158, straggle=0.01,
        ),
        seen={
            "data": (1, 8), "tensor": (1, 8), "pipe": (1, 4), "context": (1, 1), "expert": (1, 1), "zero": (0, 0),
            "micro_batch": (1, 8), "gpus": (2, 8), "hidden": (1024, 2048), "seq": (1024, 1024), "recompute": ("none",),
        },
    ),
    "a100-cluster": Calibration(
        device="a100", rows=53,
        source="vTrain, arXiv:2312.12391, 8 to 64 nodes of 8 A100, Megatron-LM",
        error=0.067, band=(0.937, 1.264),
        speeds=Speeds(
            matrix=0.901, attention=0.35, bandwidth=0.783, launch=0.00148, call=9.59e-05, hop=7e-06,
            hop_outside=1.46e-05, inside=301000000000.0, outside=125000000000.0, boundary=0.000187, hidden=1e-09,
            step=0.0107, straggle=0.00379,
        ),
        seen={
            "data": (2, 64), "tensor": (1, 16), "pipe": (1, 32), "context": (1, 1), "expert": (1, 1), "zero": (0, 0),
            "micro_batch": (2, 64), "gpus": (64, 512), "hidden": (3072, 12288), "seq": (2048, 2048),
            "recompute": ("full",),
        },
    ),
    "h100-cluster": Calibration(
        device="h100", rows=199,
        source="Ultra-Scale Playbook's scan, nanotron, 1 to 16 nodes of 8 H100, without pipelines",
        error=0.102, band=(0.882, 1.822),
        speeds=Speeds(
            matrix=0.55, attention=0.35, bandwidth=0.622, launch=0.00103, call=8.72e-05, hop=2.44e-06,
            hop_outside=5.44e-05, inside=372000000000.0, outside=307000000000.0, boundary=0.0002, hidden=0.584,
            step=0.071, straggle=0.0115,
        ),
        seen={
            "data": (1, 128), "tensor": (1, 32), "pipe": (1, 1), "context": (1, 1), "expert": (1, 1), "zero": (0, 1),
            "micro_batch": (1, 128), "gpus": (8, 128), "hidden": (2048, 4096), "seq": (4096, 4096),
            "recompute": ("none",),
        },
    ),
}  # fmt: skip
