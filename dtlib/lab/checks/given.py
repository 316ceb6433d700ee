"""Answers talk through the communicator that they are given; ``world.comm`` is another one, with other ranks on it."""

from collections.abc import Iterator
from contextlib import contextmanager

OPERATIONS = ("all_reduce", "broadcast", "broadcast_object", "all_gather", "all_gather_object", "barrier", "reduce")


class OfTheWorld(BaseException):
    """A call on another communicator than the one that was given."""


@contextmanager
def world_out_of_reach() -> Iterator[None]:
    """Meanwhile every call on ``world.comm`` ends the caller's part, in place of a wait for ranks that do not call."""
    from dtlib.world import init

    world = init().comm

    def refused(name):
        def call(*_, **__):
            raise OfTheWorld(f"world.comm.{name}(...)")

        return call

    for name in OPERATIONS:
        setattr(world, name, refused(name))
    try:
        yield
    finally:
        for name in OPERATIONS:
            delattr(world, name)
