"""``runtime="deepspeed"``: DeepSpeed itself, on the ranks of this world; on the CPU where there is no GPU."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from dtlib.errors import DtlibError
from dtlib.parallel.pipeline import LayerSpec, TiedLayerSpec
from dtlib.training.torch_runtime import process_group
from dtlib.world import init
from dtlib.world.machine import gpu_names

INSTALL = "DS_BUILD_OPS=0 pip install 'dtlib[deepspeed]'"
CACHE = Path("~/.cache/dtlib/torch_extensions").expanduser()
OURS = ("optimizer", "seed", "pipeline")  # sections that are not for its config
FOR_ITS_OPTIMIZERS = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def library() -> ModuleType:
    """The package ``deepspeed``, with its own idea of ranks set up; all ranks of the world call this.

    Its first use on a machine compiles for about a minute, into a folder of its own.

    Raises:
        DtlibError: where it is not installed.
    """
    if find_spec("deepspeed") is None:
        raise DtlibError(f"runtime='deepspeed' finds no DeepSpeed: install it with {INSTALL}, or use runtime='torch'.")
    world = init()
    if not gpu_names():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(CACHE))
    # As its launcher would say it; it asks the environment even where torch's group is there already.
    # Open MPI may number the ranks of a node by their places, and DeepSpeed refuses another number than Open MPI's.
    local_rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", world.local_rank)
    for name, value in (("RANK", world.rank), ("WORLD_SIZE", world.size), ("LOCAL_RANK", local_rank)):
        os.environ.setdefault(name, str(value))
    process_group(world.comm)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's, about names that DeepSpeed uses
    import deepspeed

    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if world.rank:
        world.comm.barrier()  # rank 0 compiles, the others find what it has made
    deepspeed.init_distributed("gloo" if not gpu_names() else None, auto_mpi_discovery=False)
    if not world.rank:
        world.comm.barrier()
    return deepspeed


def engine(
    model: nn.Module, config: dict, optimizer: Callable | None, parameters: Iterable | None, scheduler: object
) -> tuple:
    """``deepspeed.initialize`` for a config in DeepSpeed's keys; ``optimizer`` makes one of torch's for parameters."""
    # Its own default is 1, and ours 0: what a config does not ask for is not done.
    theirs = {"gradient_clipping": 0.0, "steps_per_print": 10**9}
    theirs |= {key: value for key, value in config.items() if key not in OURS}
    pipeline = {k: v for k, v in config.get("pipeline", {}).items() if k not in ("schedule", "stages")}
    deepspeed = library()
    if not is_pipeline(model):
        from deepspeed.utils import groups

        groups.mpu = None  # the grid of an earlier pipeline, which it would take for that of this model
    made = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=parameters, lr_scheduler=scheduler,
        config={**theirs, **({"pipeline": pipeline} if pipeline else {}), **FOR_ITS_OPTIMIZERS},
    )  # fmt: skip
    return made[0], made[3]


def is_pipeline(model: object) -> bool:
    """Whether a model is DeepSpeed's own ``PipelineModule``."""
    return find_spec("deepspeed") is not None and type(model).__module__.startswith("deepspeed.")


def pipeline_module(layers: Iterable, stages: int, loss_fn: Callable | None, seed: int) -> nn.Module:
    """Layers as DeepSpeed's ``PipelineModule``, with the values that ours gives them."""
    deepspeed = library()
    from deepspeed import pipe

    def theirs(layer):
        if isinstance(layer, TiedLayerSpec):
            return pipe.TiedLayerSpec(
                layer.key, layer.typename, *layer.module_args, forward_fn=layer.forward_fn,
                tied_weight_attr=layer.tied_weight_attr, **layer.module_kwargs,
            )  # fmt: skip
        if isinstance(layer, LayerSpec):
            return pipe.LayerSpec(layer.typename, *layer.module_args, **layer.module_kwargs)
        return layer

    return deepspeed.pipe.PipelineModule(
        [theirs(layer) for layer in layers], num_stages=stages, loss_fn=loss_fn, seed_layers=True, base_seed=seed,
        seed_fn=lambda number: torch.manual_seed(int(number)), partition_method="parameters",
        dynamic_shape=True,
    )  # fmt: skip


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a parameter that stage 3 may have cut; all ranks call it."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()
