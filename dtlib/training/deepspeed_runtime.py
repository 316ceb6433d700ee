"""``runtime="deepspeed"``: run DeepSpeed on the ranks of this world; on the CPU if there is no GPU."""

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
from dtlib.training.torch_runtime import process_group
from dtlib.world import init
from dtlib.world.machine import gpu_names

INSTALL = "DS_BUILD_OPS=0 pip install 'dtlib[deepspeed]'"
CACHE = Path("~/.cache/dtlib/torch_extensions").expanduser()
# Sections that only dtlib reads.
OURS = ("optimizer", "seed", "pipeline")
OPTIMIZER_SETTINGS = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def library() -> ModuleType:
    """Import and initialise ``deepspeed``, and return the package; all ranks of the world call this.

    The first use on a machine compiles DeepSpeed's extensions into ``CACHE``, which takes about a minute.

    Raises:
        DtlibError: if DeepSpeed is not installed.
    """
    if find_spec("deepspeed") is None:
        raise DtlibError(f"runtime='deepspeed' finds no DeepSpeed: install it with {INSTALL}, or use runtime='torch'.")
    world = init()
    if not gpu_names():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(CACHE))
    # DeepSpeed reads these variables, which its launcher sets, even if torch's process group exists already. Open MPI
    # may number the ranks of a node differently from us, and DeepSpeed refuses a LOCAL_RANK that differs from Open
    # MPI's.
    local_rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", world.local_rank)
    for name, value in (("RANK", world.rank), ("WORLD_SIZE", world.size), ("LOCAL_RANK", local_rank)):
        os.environ.setdefault(name, str(value))
    process_group(world.comm)
    # DeepSpeed uses names that torch deprecates, and torch warns about each.
    warnings.filterwarnings("ignore", category=FutureWarning)
    import deepspeed

    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if world.rank:
        # Rank 0 compiles first; the other ranks then load its build.
        world.comm.barrier()
    deepspeed.init_distributed("gloo" if not gpu_names() else None, auto_mpi_discovery=False)
    if not world.rank:
        world.comm.barrier()
    return deepspeed


def engine(
    model: nn.Module, config: dict, optimizer: Callable | None, parameters: Iterable | None, scheduler: object
) -> tuple:
    """Call ``deepspeed.initialize`` with a config in DeepSpeed's keys, and return its engine and its scheduler.

    ``optimizer`` is a function from parameters to a torch optimizer.
    """
    # DeepSpeed clips at 1 and prints by default. A config without these keys must do neither.
    theirs = {"gradient_clipping": 0.0, "steps_per_print": 10**9}
    theirs |= {key: value for key, value in config.items() if key not in OURS}
    made = library().initialize(
        model=model, optimizer=optimizer, model_parameters=parameters, lr_scheduler=scheduler,
        config={**theirs, **OPTIMIZER_SETTINGS},
    )  # fmt: skip
    return made[0], made[3]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter that stage 3 may have sharded; all ranks call this."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter]):
        return parameter.detach().clone()
