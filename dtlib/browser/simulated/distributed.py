"""``torch.distributed`` for ranks that take turns: SIMULATED. Each function calls the communicator."""

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace

from dtlib.browser.simulated.communicator import SimulatedCommunicator

REDUCE_OPS = SimpleNamespace(SUM="sum", AVG="mean", MAX="max", MIN="min", PRODUCT="prod")


def fake_module(world: Callable[[], SimulatedCommunicator]) -> ModuleType:
    """Return the module; ``world()`` returns the communicator that is used without ``group=``.

    A process group is a communicator here.
    """

    def to_all(name, tensor, op="sum", group=None, async_op=False):
        return getattr(group or world(), name)(tensor, op=op, async_op=async_op)

    def with_out(name, out, tensor, group=None, async_op=False):
        return getattr(group or world(), name)(out, tensor, async_op=async_op)

    def reduce_scatter(out, tensor, op="sum", group=None, async_op=False):
        return (group or world()).reduce_scatter(out, tensor, op, async_op)

    def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
        return (group or world()).broadcast(tensor, src if group_src is None else group_src, async_op)

    def reduce(tensor, dst=None, op="sum", group=None, async_op=False, group_dst=None):
        return (group or world()).reduce(tensor, dst if group_dst is None else group_dst, op, async_op)

    def send(tensor, dst=None, group=None, tag=0, group_dst=None, async_op=False):
        return (group or world()).send(tensor, dst if group_dst is None else group_dst, tag, async_op)

    def recv(tensor, src=None, group=None, tag=0, group_src=None, async_op=False):
        return (group or world()).recv(tensor, src if group_src is None else group_src, tag, async_op)

    module = ModuleType("torch.distributed", "A stand-in, of ranks that take turns")
    vars(module).update(
        ReduceOp=REDUCE_OPS, broadcast=broadcast, reduce=reduce, reduce_scatter_single=reduce_scatter, send=send,
        recv=recv, isend=partial(send, async_op=True), irecv=partial(recv, async_op=True),
        all_reduce=partial(to_all, "all_reduce"), all_gather_single=partial(with_out, "all_gather"),
        all_to_all_single=partial(with_out, "all_to_all"), is_initialized=lambda: True,
        barrier=lambda group=None: (group or world()).barrier(),
        get_rank=lambda group=None: (group or world()).rank, get_world_size=lambda group=None: (group or world()).size,
    )  # fmt: skip
    return module
