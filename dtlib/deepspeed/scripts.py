"""Functions that DeepSpeed scripts call before ``initialize``."""

import os
from argparse import ArgumentParser

from dtlib.errors import DtlibError
from dtlib.world import init


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE`` to an ``argparse`` parser, and return the parser.

    Counterpart: ``deepspeed.add_config_arguments``.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script; nothing here reads it")
    group.add_argument("--deepspeed_config", default=None, help="the path of a config in JSON")
    return parser


def init_distributed(
    dist_backend: str | None = None, *_: object, rank: int = -1, world_size: int = -1, **__: object
) -> None:
    """Join the world, and create torch's default group on the backend ``dtlib`` unless there is one.

    Sets ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``, which scripts read. DeepSpeed's arguments about the rendezvous are
    accepted and ignored, because MPI knows all ranks.

    Raises:
        DtlibError: if ``rank`` or ``world_size`` differs from the world's.

    Counterpart: ``deepspeed.init_distributed``.
    """
    from torch import distributed

    import dtlib.backend  # noqa: F401, which registers the backend

    world = init()
    for name, given, there in (("rank", rank, world.rank), ("world_size", world_size, world.size)):
        if given not in (-1, there):
            raise DtlibError(f"init_distributed({name}={given}): here it is {there}, so leave it out.")
    if not distributed.is_initialized():
        distributed.init_process_group("dtlib", init_method="dtlib://")
    # Only now, because torch would expect that a launcher has set MASTER_ADDR and MASTER_PORT as well.
    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.local_rank), WORLD_SIZE=str(world.size))
