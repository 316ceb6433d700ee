"""Make an answer use the communicator that it was given, by refusing calls on ``world.comm``, which has other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock, patch

OPERATIONS = ("all_reduce", "broadcast", "broadcast_object", "all_gather", "all_gather_object", "barrier", "reduce")


class WorldCommUsed(BaseException):
    """A call on the world's communicator instead of the given one."""


@contextmanager
def refuse_world_comm() -> Iterator[None]:
    """Make every call on ``world.comm`` raise ``WorldCommUsed`` in this block, instead of waiting for others."""
    from dtlib.world import init

    world = init().comm

    refused = {name: Mock(side_effect=WorldCommUsed(f"world.comm.{name}(...)")) for name in OPERATIONS}
    with patch.multiple(world, **refused):
        yield
