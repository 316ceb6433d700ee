"""Collectives as torch's dispatcher sees them: what counts on gloo counts on ours, and wrapper tensors handle them."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import dtlib
from tests.ranks import on_ranks
from tests.test_backend import both


def calls(world, group):
    """One call of every function of ``torch.distributed`` that sends tensors, by name."""
    rank, size = world.rank, world.size
    right, left = (rank + 1) % size, (rank - 1) % size
    one, whole = torch.ones(2), torch.ones(2 * size)

    def many(count=size):
        return [torch.ones(2) for _ in range(count)]

    def to_all(function, *arguments, **options):
        return partial(function, *arguments, group=group, **options)

    def there_and_back(send, recv):
        work = send(one, right, group=group)
        recv(torch.ones(2), left, group=group)
        work.wait()

    def together(function, *pairs):
        with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
            for pair in pairs:
                function(*pair, group=group)
        manager.wait()

    def in_exchange():
        operations = [dist.P2POp(dist.isend, one, right, group), dist.P2POp(dist.irecv, torch.ones(2), left, group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    at_root = rank == 0
    yield "all_reduce", to_all(dist.all_reduce, one)
    yield "all_reduce, asynchronous", lambda: dist.all_reduce(one, group=group, async_op=True).wait()
    yield "all_reduce_coalesced", to_all(dist.all_reduce_coalesced, many(3))
    yield "broadcast", to_all(dist.broadcast, one, 0)
    yield "reduce", to_all(dist.reduce, one, 0)
    yield "all_gather", to_all(dist.all_gather, many(), one)
    yield "all_gather_coalesced", lambda: dist.all_gather_coalesced([many(3) for _ in range(size)], many(3), group)
    yield "all_gather_single", to_all(dist.all_gather_single, whole, one)
    yield "reduce_scatter", to_all(dist.reduce_scatter, one, many())
    yield "reduce_scatter_single", to_all(dist.reduce_scatter_single, one, whole)
    yield "gather", to_all(dist.gather, one, many() if at_root else None, 0)
    yield "scatter", to_all(dist.scatter, one, many() if at_root else None, 0)
    yield "all_to_all_single", to_all(dist.all_to_all_single, whole, whole.clone())
    yield "all_to_all", to_all(dist.all_to_all, many(), many())
    yield "barrier", lambda: dist.barrier(group)
    if size > 1:  # gloo has no pair with itself
        yield "send and recv", lambda: there_and_back(dist.isend, dist.recv)
        yield "batch_isend_irecv", in_exchange
    yield "objects", lambda: dist.all_gather_object([None] * size, {"rank": rank}, group=group)
    yield "coalesced all_reduce", lambda: together(dist.all_reduce, (one,), (whole,))
    yield "coalesced all_gather", lambda: together(dist.all_gather_single, (whole, one), (whole.clone(), one))
    yield "coalesced reduce_scatter", lambda: together(dist.reduce_scatter_single, (one, whole), (one.clone(), whole))
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("all",))
    yield "functional", lambda: dist._functional_collectives.all_reduce(one, "sum", group).wait()
    yield "DTensor", lambda: dist.tensor.distribute_tensor(whole, mesh, [dist.tensor.Shard(0)]).full_tensor()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), process_group=group)
    yield "DDP", lambda: model(torch.randn(4, 2)).sum().backward()
    sharded = dist.fsdp.fully_shard(nn.Linear(2, 2 * size), mesh=mesh)
    yield "FSDP2", lambda: sharded(torch.randn(4, 2)).sum().backward()


def counted(run):
    """What ``CommDebugMode`` counts, and the profiler's events of torch's operators and of the backend."""
    from torch.distributed.tensor.debug import CommDebugMode  # which imports a lot

    with CommDebugMode() as mode:
        run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    names = [event.name for event in profiler.events()]
    of_the_backend = Counter(name.split(":")[1] for name in names if name.startswith(("gloo:", "dtlib:")))
    return dict(mode.get_comm_counts()), Counter(name for name in names if "c10d" in name), of_the_backend


@on_ranks(1, 2, 3, slow=(1, 3))
def test_what_counts_on_gloo_counts_here(world):
    seen = {kind: dict(calls(world, group)) for kind, group in both(world).items()}
    for name in seen["gloo"]:
        theirs, ours = (counted(seen[kind][name]) for kind in ("gloo", "dtlib"))
        assert ours[:2] == theirs[:2], (name, ours, theirs)
        assert sum(ours[1].values()) > 0 or world.size == 1, name  # FSDP2 on one rank sends nothing
        if "reduce_scatter" not in ours[2]:  # gloo's is of all-reduces, and says so
            assert ours[2] == theirs[2], (name, ours, theirs)
    assert counted(seen["dtlib"]["all_reduce"])[0] == {torch.ops.c10d.allreduce_: 1}


class Pair(torch.Tensor):
    """A wrapper of two tensors; what happens to it happens to both."""

    @staticmethod
    def __new__(cls, one, other):
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)

    def __init__(self, one, other):
        self.both = one, other

    @classmethod
    def __torch_dispatch__(cls, operator, types, args, kwargs=None):
        of_one = [tree_map_only(Pair, lambda pair, i=i: pair.both[i], args) for i in range(2)]
        returned = [operator(*each, **(kwargs or {})) for each in of_one]
        for *_, work in (each for each in returned[:-1] if isinstance(each, tuple)):
            work.wait()  # who called waits for the last one only
        return returned[-1]


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.c10d.allreduce_.default:
            args[0][0].mul_(2)
            assert dist.ProcessGroup.unbox(args[1]).size() == dist.get_world_size()
        return operator(*args, **(kwargs or {}))


@on_ranks(2)
def test_modes_and_wrappers_take_part(world):
    from torch.distributed.tensor.debug import CommDebugMode

    for group in both(world).values():
        x, pair = torch.ones(2), Pair(torch.ones(2), torch.full((2,), 3.0))
        with Doubling(), CommDebugMode() as mode:
            dist.all_reduce(x, group=group)
        assert x.tolist() == [4, 4] and mode.get_total_counts() == 1
        dist.all_reduce(pair, group=group)
        assert [one.tolist() for one in pair.both] == [[2, 2], [6, 6]]
    with pytest.raises(dtlib.DtlibError, match="wrapper, Pair: pass the one inside"):
        world.comm.all_reduce(pair)
    group = both(world)["dtlib"]
    work = dist.all_reduce(pair, group=group, async_op=True)
    assert work.wait() and [one.tolist() for one in pair.both] == [[4, 4], [12, 12]]
    with profile(), pytest.raises(dist.DistBackendError, match="the list has"):  # our errors stay what they are
        dist.all_gather([torch.empty(4)] * 2, torch.ones(1), group=group)
