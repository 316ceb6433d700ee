"""What scripts written for DeepSpeed call before ``initialize``."""

import os
from argparse import ArgumentParser

from dtlib.errors import DtlibError
from dtlib.world import init


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE`` to a script's ``argparse`` parser; returns the parser.

    Counterpart: ``deepspeed.add_config_arguments``.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script; nothing here reads it")
    group.add_argument("--deepspeed_config", default=None, help="the path of a config in JSON")
    return parser


def init_distributed(
    dist_backend: str | None = None, *_: object, rank: int = -1, world_size: int = -1, **__: object
) -> None:
    """Join the world, and make torch's default group of its ranks, unless there is one: on the backend ``dtlib``.

    Sets ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``, where scripts look for them. How ranks meet needs no arguments:
    those of DeepSpeed are taken, whatever they say.

    Raises:
        DtlibError: for a ``rank`` or ``world_size`` that is not the world's.

    Counterpart: ``deepspeed.init_distributed``.
    """
    from torch import distributed

    import dtlib.backend  # noqa: F401, which registers it

    world = init()
    for name, given, there in (("rank", rank, world.rank), ("world_size", world_size, world.size)):
        if given not in (-1, there):
            raise DtlibError(f"init_distributed({name}={given}): here it is {there}, so leave it out.")
    if not distributed.is_initialized():
        distributed.init_process_group("dtlib", init_method="dtlib://")
    # Afterwards: torch would take them for a launcher's, who says where ranks meet, too.
    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.local_rank), WORLD_SIZE=str(world.size))
