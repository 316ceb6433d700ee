"""Read the config of `dtlib train`: the workload, the section ``run`` and the axes of the mesh."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

from dtlib.comm import Communicator
from dtlib.errors import DtlibError, number
from dtlib.training import config as configuration
from dtlib.training.config import AnyConfig, ConfigError
from dtlib.workloads.workload import Workload
from dtlib.world.machine import gpu_names

WORKLOADS = ("vision", "summarization", "decoder")
# Axes of the mesh beside data, in the mesh's order, with the config key of each size.
AXES = {
    "pipe": "pipeline.stages", "context": "context_parallel.size", "expert": "expert_parallel.size",
    "tensor": "tensor_parallel.autotp_size",
}  # fmt: skip
CONFIGS = Path(__file__).parents[1] / "course" / "notebooks" / "configs"


@dataclass
class Run:
    """The config's section ``run``.

    ``steps`` or ``epochs`` is the length of training, including the steps of a loaded checkpoint. A checkpoint is saved
    every ``save_every`` steps and at the end. ``gpus`` is the number of GPUs that the run needs, one per rank; 0 uses
    the GPUs that exist. ``float64`` sets the dtype of computation. ``seed`` is for dropout, which differs between
    ranks. ``memory_limit`` is the largest number of bytes of model states and buffers (of modules and of communication)
    that a rank may have in the second step. ``link_latency`` (seconds per message) and ``link_bandwidth`` (bytes per
    second) describe a slow link between all ranks, EMULATED.
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


@dataclass
class ContextParallel:
    """The config's section ``context_parallel``: ranks per sequence, order of the tokens, and method of attention."""

    size: int = 1
    order: str = "zigzag"
    method: str = "ring"


@dataclass
class ExpertParallel:
    """The config's section ``expert_parallel``: the number of ranks over which experts are divided."""

    size: int = 1


def read(
    workload: str | Callable[..., Workload], config: AnyConfig | None, comm: Communicator, stage: int | None,
    steps: int | None, runtime: str,
) -> tuple[Callable[..., Workload], Run, dict, dict[str, int], ContextParallel]:  # fmt: skip
    """Return a function that makes the workload, and the checked parts of the config.

    These are the section ``run``, the keys for ``initialize``, the sizes of the mesh's axes, and ``context_parallel``.

    Raises:
        ConfigError, DtlibError: for sections that cannot work together on this number of ranks.
    """
    config = configuration.dictionary_of(CONFIGS / f"{workload}.json" if config is None else config)
    for name in ("workload", "zero_optimization", "pipeline", "tensor_parallel"):
        if not isinstance(config.get(name) or {}, dict):
            raise ConfigError(f"{name} is {config[name]!r:.60}: pass a dictionary.")
    run = configuration.section(Run, config.pop("run", {}), "run.")
    if stage is not None:
        config["zero_optimization"] = {**(config.get("zero_optimization") or {}), "stage": stage}
    run.steps = steps or run.steps
    if steps is None and run.steps and run.epochs:
        raise ConfigError("run.steps and run.epochs are both set: leave one of them out.")
    gpus = len(gpu_names())
    if run.gpus and (run.gpus > gpus or run.gpus != comm.size):
        raise ConfigError(
            f"run.gpus is {run.gpus}, but there are {gpus} GPUs here and {comm.size} ranks: set the same number as "
            "both, or leave it out."
        )
    own = config.pop("workload", None) or {}
    if isinstance(workload, str):
        if workload not in WORKLOADS:
            raise DtlibError(f"There is no workload {workload!r}: choose one of {', '.join(WORKLOADS)}.")
        workload = import_module(f"dtlib.workloads.{workload}").workload
    context = configuration.section(ContextParallel, config.pop("context_parallel", {}), "context_parallel.")
    expert = configuration.section(ExpertParallel, config.pop("expert_parallel", {}), "expert_parallel.")
    axes = {
        "pipe": (config.get("pipeline") or {}).get("stages") or 1, "context": context.size, "expert": expert.size,
        "tensor": (config.pop("tensor_parallel", None) or {}).get("autotp_size") or 1,
    }  # fmt: skip
    stages, tensor = axes["pipe"], axes["tensor"]
    for axis, ways in axes.items():
        if comm.size % int(number(AXES[axis], ways, error=ConfigError)):
            raise ConfigError(f"{AXES[axis]} is {ways}, but there are {comm.size} ranks: use a divisor of {comm.size}.")
    if comm.size % math.prod(axes.values()):
        raise ConfigError(
            f"{stages} stages of {tensor} tensor ranks{_of(axes)} are {math.prod(axes.values())}, but there are "
            f"{comm.size} ranks: use numbers whose product divides {comm.size}."
        )
    for axis in ("tensor", "context", "expert"):
        if axes[axis] > 1 and (runtime != "dtlib" or axis not in inspect.signature(workload).parameters):
            raise ConfigError(
                f"{AXES[axis]} is {axes[axis]}: only layers of `dtlib train decoder` can be divided over ranks, with "
                "--runtime=dtlib."
            )
    _check_experts(own.get("experts") or 0, axes, (config.get("zero_optimization") or {}).get("stage") or 0, config)
    if run.link_bandwidth and runtime != "dtlib":
        raise ConfigError("run.link_bandwidth slows only dtlib's own messages: leave it out, or use --runtime=dtlib.")
    configuration.read(config, comm.size // stages // tensor, others=runtime == "deepspeed")
    return partial(workload, own), run, config, axes, context


def _of(axes) -> str:
    return "".join(f", {axes[axis]} {axis} ranks" for axis in ("context", "expert") if axes[axis] > 1)


def _check_experts(count, axes, stage, config) -> None:
    expert = axes["expert"]
    if expert > 1 and (not isinstance(count, int) or count < 1 or count % expert):
        raise ConfigError(f"expert_parallel.size is {expert}, but workload.experts is {count}: use a multiple of it.")
    for key, found in (
        ("zero_optimization.stage", stage), ("pipeline.stages", axes["pipe"] - 1),
        ("tensor_parallel.autotp_size", axes["tensor"] - 1), ("gradient_clipping", config.get("gradient_clipping")),
    ):  # fmt: skip
        if count and found:
            raise ConfigError(
                f"workload.experts is {count}, and {key} is set: experts need axes of data, context and experts, "
                "without ZeRO and clipping. Leave one of them out."
            )
