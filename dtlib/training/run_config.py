"""What `dtlib train` is asked for: a workload, the config's section ``run``, and the axes of the mesh."""

import inspect
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

from dtlib.errors import DtlibError
from dtlib.training import config as configuration
from dtlib.training.config import ConfigError
from dtlib.world.machine import gpu_names

WORKLOADS = ("vision", "summarization", "decoder")
CONFIGS = Path(__file__).parents[1] / "course" / "notebooks" / "configs"


@dataclass
class Run:
    """The config's section ``run``.

    ``steps``, or ``epochs``: how long to train, together with what a checkpoint has already. ``save_every`` so many
    steps, beside the end. ``gpus``: how many the run needs, one a rank; 0 takes what there is. ``float64``: compute in
    it. ``seed``: that of dropout, which is another on each rank. ``memory_limit``: bytes of model states that a rank
    may hold, counted in the second step. ``link_latency``, ``link_bandwidth``: seconds a message and bytes a
    second of a slow link between all ranks, EMULATED.
    """

    steps: int | None = None
    epochs: int | None = None
    save_every: int | None = None
    gpus: int = 0
    float64: bool = False
    seed: int = 0
    memory_limit: int | None = None
    link_latency: float = 0.0
    link_bandwidth: float | None = None


def read(workload, config, comm, stage, steps, runtime):
    """A function that makes the workload, and the checked sections of the config."""
    config = configuration.dictionary_of(CONFIGS / f"{workload}.json" if config is None else config)
    run = configuration.section(Run, config.pop("run", {}), "run.", [])
    if stage is not None:
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    run.steps = steps or run.steps
    if steps is None and run.steps and run.epochs:
        raise ConfigError("run.steps and run.epochs are both given: leave one of them out.")
    gpus = len(gpu_names())
    if run.gpus and (run.gpus > gpus or run.gpus != comm.size):
        raise ConfigError(
            f"run.gpus is {run.gpus}, and there are {gpus} GPUs here and {comm.size} ranks: give as many as both, or "
            "leave it out, to train on what there is."
        )
    own = config.pop("workload", {})
    if isinstance(workload, str):
        if workload not in WORKLOADS:
            raise DtlibError(f"There is no workload {workload!r}: choose one of {', '.join(WORKLOADS)}.")
        workload = import_module(f"dtlib.workloads.{workload}").workload
    if not isinstance(own, dict):
        raise ConfigError(f"workload is {own!r:.60}: give a dictionary.")
    stages = (config.get("pipeline") or {}).get("stages") or 1
    tensor = (config.get("tensor_parallel") or {}).get("autotp_size") or 1
    for name, ways in (("pipeline.stages", stages), ("tensor_parallel.autotp_size", tensor)):
        if not isinstance(ways, int) or ways < 1 or comm.size % ways:
            raise ConfigError(f"{name} is {ways}, and there are {comm.size} ranks: give a number that divides.")
    if comm.size % (stages * tensor):
        raise ConfigError(
            f"{stages} stages of {tensor} tensor ranks are {stages * tensor}, and there are {comm.size} ranks: give "
            "numbers whose product divides them."
        )
    if tensor > 1 and (runtime != "dtlib" or "tensor" not in inspect.signature(workload).parameters):
        raise ConfigError(
            f"tensor_parallel.autotp_size is {tensor}: layers that are cut over ranks are of `dtlib train decoder`, "
            "with --runtime=dtlib."
        )
    if run.link_bandwidth and runtime != "dtlib":
        raise ConfigError("run.link_bandwidth slows dtlib's own messages alone: leave it out, or use --runtime=dtlib.")
    others = {key: value for key, value in config.items() if key != "tensor_parallel"}
    configuration.read(others, comm.size // stages // tensor, rank=1)  # initialize() warns
    return partial(workload, own), run, config
