"""ZeRO against torch's ZeroRedundancyOptimizer and FSDP2 on gloo, DeepSpeed, and a step without communication."""

import torch
from torch import nn

from benchmarks.compare import in_turns, row
from benchmarks.data_parallel import large, transformer
from benchmarks.peers import deepspeed_engine, deepspeed_is_installed, torch_group
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from dtlib.parallel.zero.sharded import fully_shard

RANKS = 2
MODELS = {"784-2048-2048-10": large, "transformer 4 x 256": transformer}
SETTINGS = {"lr": 1e-3}


def rows(world, repeats: int):
    for name, build in MODELS.items():
        yield from _against_torch(world, name, build, repeats)


def units(model) -> list:
    """The same units for both sides: each linear layer, each layer of the transformer."""
    layers = model.layers if hasattr(model, "layers") else model
    return [layer for layer in layers if any(True for _ in layer.parameters())]


def training_step(model, optimizer, x):
    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _steps(world, build):
    """A whole step of each, as a function without arguments."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard as fsdp2
    from torch.distributed.optim import ZeroRedundancyOptimizer

    group = torch_group(world)
    mesh = DeviceMesh.from_group(group, "cpu")
    adamw = torch.optim.AdamW

    model, x = build()
    steps = {"alone": training_step(model, adamw(model.parameters(), **SETTINGS), x)}
    for stage in (1, 2):
        model = build()[0]
        optimizer = ZeroOptimizer(model.parameters(), adamw, world.comm, stage, **SETTINGS)
        steps[f"stage {stage}"] = training_step(model, optimizer, x)
    model = build()[0]
    for module in [*units(model), model]:
        fully_shard(module, world.comm)
    steps["stage 3"] = training_step(model, adamw(model.parameters(), **SETTINGS), x)

    for stage, plain in enumerate((Stage1, Stage2, Stage3), 1):
        model = build()[0]
        zero = plain(world.comm, model, adamw, units(model), **SETTINGS)
        steps[f"plain stage {stage}"] = _step_of_plain(model, zero, x)

    model = nn.parallel.DistributedDataParallel(build()[0], process_group=group, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), adamw, process_group=group, **SETTINGS)
    steps["ZeroRedundancyOptimizer"] = training_step(model, optimizer, x)
    for reshard, name in ((False, "FSDP2 without resharding"), (True, "FSDP2 with resharding")):
        model = build()[0]
        for module in [*units(model), model]:
            fsdp2(module, mesh=mesh, reshard_after_forward=reshard)
        steps[name] = training_step(model, adamw(model.parameters(), **SETTINGS), x)
    for stage in (1, 2, 3) if deepspeed_is_installed() else ():
        model = build()[0]
        optimizer = adamw(model.parameters(), **SETTINGS)
        steps[f"DeepSpeed stage {stage}"] = _step_of_engine(deepspeed_engine(world, model, optimizer, stage, len(x)), x)
    return steps


def _step_of_plain(model, zero, x):
    def step():
        model(x).square().mean().backward()
        zero.step()

    return step


def _step_of_engine(engine, x):
    def step():
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


PAIRS = {
    "stage 1": ("ZeroRedundancyOptimizer", "DeepSpeed stage 1", "alone"),
    "stage 2": ("FSDP2 without resharding", "DeepSpeed stage 2", "alone"),
    "stage 3": ("FSDP2 with resharding", "DeepSpeed stage 3", "alone"),
}


def _against_torch(world, name, build, repeats):
    steps = _steps(world, build)
    for step in steps.values():
        step()  # orders are recorded, memory is allocated
    seconds = in_turns(world.comm, steps, repeats)
    for stage, peers in PAIRS.items():
        for ours in (stage, f"plain {stage}"):
            for peer in (peer for peer in peers if peer in seconds):
                said = "one process, no communication" if peer == "alone" else peer
                yield row(f"{ours}, {name}", said, seconds[ours], seconds[peer])
