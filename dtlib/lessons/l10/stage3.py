"""Bytes sent and memory of a step with ZeRO stage 3, for each runtime.

mpiexec -n 2 python -m dtlib.lessons.l10.stage3 dtlib torch deepspeed     prints a row of JSON for each
mpiexec -n 2 python -m dtlib.lessons.l10.stage3 deepspeed tuned           and with settings for this small net
"""

import json
import sys
from itertools import pairwise

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import dtlib
from dtlib.measure.live import Live
from dtlib.training.initialization import initialize

WIDTHS = (784, 512, 512, 512, 10)
PARAMETERS = sum((inputs + 1) * outputs for inputs, outputs in pairwise(WIDTHS))
CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "eps": 1e-4}},
    "zero_optimization": {"stage": 3},
}

TUNED = {  # DeepSpeed's defaults suit models of billions of parameters
    "reduce_bucket_size": PARAMETERS,
    "stage3_max_reuse_distance": 0,  # free parameters after the forward pass, and gather them again
    "stage3_max_live_parameters": 0,
    "stage3_param_persistence_threshold": 0,  # shard small parameters, too
}


# Rank 0 of two; a nightly test counts the same numbers.
STORED = {
    "DeepSpeed, its defaults": {"messages": 8, "sent": 3_729_456, "held": 2_009_350_305, "peak": 2_016_952_485},
    "DeepSpeed, for this net": {"messages": 10, "sent": 5_594_180, "held": 13_053_081, "peak": 20_259_040},
}
WHEN = "DeepSpeed 0.19.8, 2026-11-26"


def net() -> nn.Sequential:
    """Return a net of 932,362 parameters, the same on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(*both) for both in pairwise(WIDTHS)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]


def counted(runtime: str) -> dict:
    """Return messages and bytes that a rank sends in its third step, and bytes of tensors after it and at its peak."""
    import dtlib.backend

    if not dist.is_initialized():
        dist.init_process_group("dtlib", init_method="dtlib://")  # so that the trace includes every runtime's messages
    chance = torch.Generator().manual_seed(dtlib.init().rank)
    x, y = torch.randn(32, 784, generator=chance), torch.randint(0, 10, (32,), generator=chance)
    with Live() as live:
        engine, *_ = initialize(model=net(), config=CONFIG, runtime=runtime)
        for _ in range(3):
            live.peak = live.now
            with dtlib.trace() as trace:
                loss = cross_entropy(engine(x), y)
                engine.backward(loss)
                engine.step()
        del loss
    messages, sent = trace.sent()
    return {"runtime": runtime, "messages": messages, "sent": sent, "held": live.now, "peak": live.peak}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name == "tuned":
            CONFIG["zero_optimization"] |= TUNED
        row = counted("deepspeed" if name == "tuned" else name) | {"runtime": name}
        if dtlib.init().rank == 0:
            print(json.dumps(row), flush=True)
