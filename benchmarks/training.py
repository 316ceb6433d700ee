"""A step of ``dtlib train`` on our engines, on torch's classes and, where it is installed, on DeepSpeed.

The same workload, config and batch; the runtimes take turns. On a GPU the model is in bfloat16.
"""

from importlib import import_module
from itertools import islice

from torch.utils._pytree import tree_map

from benchmarks.compare import in_turns, repeated, row
from benchmarks.peers import deepspeed_is_installed
from dtlib.parallel.pipeline import PipelineModule
from dtlib.training.data import RankLoader
from dtlib.training.initialization import initialize

RANKS = 2
WORKLOADS = {"vision": ({"model": "mlp"}, 32, 10), "summarization": ({"model": "tiny", "test_articles": 4}, 8, 1)}
PEERS = {"torch": "torch", "deepspeed": "DeepSpeed"}
PIPELINE = "pipeline"


def rows(world, repeats: int):
    runtimes = ["dtlib", "torch"] + ["deepspeed"] * deepspeed_is_installed()
    for name, (own, micro, times) in WORKLOADS.items():
        for stage in (0, 1, 2, 3, *[PIPELINE] * (world.size == 2)):
            asked = ["dtlib", "torch"] if stage == PIPELINE else runtimes
            steps = {runtime: repeated(_step(world, name, own, micro, stage, runtime), times) for runtime in asked}
            seconds = in_turns(world.comm, steps, repeats)
            for peer in asked[1:]:
                case = f"{name}, {stage if stage == PIPELINE else f'stage {stage}'}"
                yield row(case, PEERS[peer], seconds["dtlib"], seconds[peer])


def _step(world, name: str, own: dict, micro: int, stage, runtime: str):
    """A function that does one step of two micro-batches, always on the same samples."""
    work = import_module(f"dtlib.workloads.{name}").workload(own)
    config = {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "bf16": {"enabled": world.device.type == "cuda"},
        "zero_optimization": {"stage": 0 if stage == PIPELINE else stage},
    }  # fmt: skip
    model = work.model
    if stage == PIPELINE:
        model = PipelineModule(work.layers, world.size, work.loss_fn, base_seed=work.seed)
    engine, *_ = initialize(model=model.to(world.device), config=config, runtime=runtime)
    dtype = next(engine.module.parameters()).dtype
    place = (0, 1) if stage == PIPELINE else (world.rank, world.size)
    loader = RankLoader(work.train, micro, *place, 0, work.collate)

    def ready(tensor):
        return tensor.to(world.device, dtype if tensor.is_floating_point() else tensor.dtype)

    batch = tuple(tree_map(ready, each) for each in next(islice(loader.forever(), 1)))
    loss_fn = {} if stage == PIPELINE else {"loss_fn": work.loss_fn}
    return lambda: engine.train_batch(iter([batch, batch]), **loss_fn)
