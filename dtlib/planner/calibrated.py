"""Coefficients of the planner, with their bands: written by ``python -m tools.planner``."""

from dtlib.planner.time import Calibration, Speeds

# Of a GPU's memory, before it is full.
USABLE = 0.900
CALIBRATIONS = {
    "a100-node": Calibration(
        device="a100", rows=675,
        source="vTrain, arXiv:2312.12391, one node of 8 A100, Megatron-LM",
        error=0.062, band=(0.854, 1.114),
        speeds=Speeds(
            matrix=0.732, attention=0.327, bandwidth=0.574, launch=0.00104, call=3.47e-05, hop=4.13e-05,
            hop_outside=3e-05, inside=450000000000.0, outside=80000000000.0, boundary=0.0013, hidden=1e-09, step=0.0016,
            straggle=0.01,
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
            matrix=0.903, attention=0.325, bandwidth=0.799, launch=0.00148, call=9.6e-05, hop=7.03e-06,
            hop_outside=1.47e-05, inside=300000000000.0, outside=125000000000.0, boundary=0.000187, hidden=1e-09,
            step=0.0106, straggle=0.00379,
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
        error=0.100, band=(0.888, 1.833),
        speeds=Speeds(
            matrix=0.668, attention=0.175, bandwidth=0.915, launch=0.00106, call=8.16e-05, hop=2.56e-06,
            hop_outside=5.39e-05, inside=395000000000.0, outside=313000000000.0, boundary=0.0002, hidden=0.468,
            step=0.0584, straggle=0.0147,
        ),
        seen={
            "data": (1, 128), "tensor": (1, 32), "pipe": (1, 1), "context": (1, 1), "expert": (1, 1), "zero": (0, 1),
            "micro_batch": (1, 128), "gpus": (8, 128), "hidden": (2048, 4096), "seq": (4096, 4096),
            "recompute": ("none",),
        },
    ),
}  # fmt: skip
