"""Pipeline parallelism: stages of a model on different ranks, which work on different micro-batches at the same time.

    rank 0   F0 F1 F2 F3 .  .  .  B0 B1 B2 B3
    rank 1      F0 F1 F2 F3 .  B0 B1 B2 B3            time -->

Schedules are lists of actions, defined in dtlib/schedule. This package executes them.
"""

from dtlib.parallel.pipeline import checks  # noqa: F401  # installs the checks of plain.py on import
from dtlib.parallel.pipeline.interpreter import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubbleH1,
)
from dtlib.parallel.pipeline.layers import LayerSpec, PipelineModule, TiedLayerSpec
from dtlib.parallel.pipeline.linear import Linear, defer_weight_gradients
from dtlib.parallel.pipeline.stage import PipelineStage

__all__ = [
    "LayerSpec", "Linear", "PipelineModule", "PipelineStage", "Schedule1F1B", "ScheduleGPipe",
    "ScheduleInterleaved1F1B", "ScheduleZeroBubbleH1", "TiedLayerSpec", "defer_weight_gradients",
]  # fmt: skip
