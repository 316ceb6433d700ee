"""torch's own classes on our backend: their values are those that they have on gloo."""

import os
import signal
import subprocess
import threading
import warnings
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import dtlib.backend
from benchmarks.peers import torch_group
from dtlib.errors import DtlibError
from dtlib.world.launch import start_ranks
from tests.cases import refuses
from tests.conftest import said_by_ranks, start_python, wait_until
from tests.ranks import on_ranks

ReduceOp = dist.ReduceOp
_groups = {}


def both(world):
    """Two groups of all ranks, by name: gloo and ours."""
    if world.size not in _groups:
        _groups[world.size] = {"gloo": torch_group(world), "dtlib": dist.new_group(backend="dtlib")}
    return _groups[world.size]


def equal(world, run, atol=1e-12, **options) -> None:
    """``run(group)`` returns tensors: the same on both groups, to the last digits of float64."""
    results = {}
    for name, group in both(world).items():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            results[name] = run(group, **options)
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(results["gloo"]) == len(results["dtlib"]) > 0
    for theirs, ours in zip(results["gloo"], results["dtlib"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def trained(model, steps=3, optimizer=None, step=None, device="cpu"):
    """Parameters after some steps on batches that differ between ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        x = torch.randn(4, 6, generator=generator).to(device)
        if step:
            step(number, x)
        else:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class WithUnused(nn.Module):
    """Which layer is used depends on the rank."""

    def __init__(self):
        super().__init__()
        self.first, self.either = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x):
        return self.either[min(dist.get_rank(), 1)](self.first(x))


# Every function of torch.distributed


def test_a_conjugate_view_is_refused_with_the_way_out():
    """Its memory has other values than it has itself."""
    from dtlib.comm.torch.reductions import dense

    refuses(r"pass tensor\.resolve_conj", lambda: dense(torch.tensor([1 + 2j]).conj()))
    assert dense(torch.tensor([1 + 2j]).conj().resolve_conj()).tolist() == [[1, -2]]


@on_ranks(1, 2, 3, slow=(1,))
def test_collectives_and_reductions(world):
    group, rank, size = both(world)["dtlib"], world.rank, world.size
    everyone = range(size)
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64):
        x = torch.tensor([rank + 1, 2]).to(dtype)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [sum(r + 1 for r in everyone), 2 * size]
    for op, wanted in (
        (ReduceOp.AVG, (size + 1) / 2), (ReduceOp.MAX, size), (ReduceOp.MIN, 1),
        (dist._make_nccl_premul_sum(0.5), sum(r + 1 for r in everyone) / 2),
    ):  # fmt: skip
        y = torch.tensor([rank + 1.0])
        dist.all_reduce(y, op, group=group)
        assert y.item() == wanted
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, group=group)
    assert flags.tolist() == [True, True, False]
    sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,), check_invariants=True)
    dist.all_reduce(sparse, group=group)
    assert sparse.to_dense()[3] == 2 * size + (size == 4)
    tensors = [
        torch.sparse_coo_tensor([[rank, 3, rank]], [1.0, 2.0, rank], (4,), check_invariants=True),
        torch.tensor([1.0, rank]),
        torch.sparse_coo_tensor([[0], [rank]], [rank + 1.0], (2, 5), check_invariants=True),
    ]
    sums = [tensor.to_dense().clone() for tensor in tensors]
    for whole in sums:
        dist.all_reduce(whole, group=group)
    group.allreduce(tensors).wait()
    assert [tensor.to_dense().tolist() for tensor in tensors] == [whole.tolist() for whole in sums]
    assert [tensor.is_sparse for tensor in tensors] == [True, False, True]
    whole = torch.tensor([rank, -rank, 2])
    refuses("has the reductions SUM", dist.all_reduce, whole, ReduceOp.BOR, error=dist.DistBackendError, group=group)
    assert whole.tolist() == [rank, -rank, 2]
    work = dist.all_reduce(whole, ReduceOp.AVG, group=group, async_op=True)
    work.wait()
    options = dist.AllreduceOptions()
    options.reduceOp = ReduceOp.AVG
    more, halves = torch.tensor([rank, -rank, 2], dtype=torch.int32), torch.tensor([rank / 2])
    group.allreduce([more, halves], options).wait()
    assert halves.item() == (size - 1) / 4 and options.reduceOp == ReduceOp.AVG
    assert whole.tolist() == more.tolist() == [(size - 1) // 2, -((size - 1) // 2), 2], "as NCCL: no fraction"
    with pytest.raises(dist.DistBackendError, match="complex"):
        dist.reduce(torch.ones(2, dtype=torch.complex64), 0, ReduceOp.PRODUCT, group=group)
    with pytest.raises(dist.DistBackendError, match="but it has"):
        dist.all_gather([torch.empty(4) for _ in everyone], torch.ones(1), group=group)
    with pytest.raises(dist.DistBackendError, match="but it has"):
        dist.reduce_scatter(torch.empty(4), [torch.ones(1) for _ in everyone], group=group)

    gathered = [torch.empty(2, 3).t() for _ in everyone]  # not contiguous
    dist.all_gather(gathered, torch.full((3, 2), float(rank)), group=group)
    assert [one[2, 1].item() for one in gathered] == list(everyone)
    uneven = [torch.empty(r + 1) for r in everyone]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)), group=group)
    assert [one.tolist() for one in uneven] == [[r] * (r + 1) for r in everyone]
    whole = torch.empty(2 * size)
    work = dist.all_gather_single(whole, torch.full((2,), rank + 0.5), group=group, async_op=True)
    assert work.wait() and work.is_completed() and work.exception() is None
    assert whole.tolist() == [r + 0.5 for r in everyone for _ in "ab"]
    dist.all_gather(bytes_ := [torch.empty(2, dtype=torch.float8_e4m3fn) for _ in everyone],
                    torch.ones(2).to(torch.float8_e4m3fn), group=group)  # fmt: skip
    assert bytes_[-1].float().tolist() == [1, 1]

    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.full((2,), float(r)) for r in everyone], group=group)
    assert out.tolist() == [rank * size] * 2
    part = torch.empty(rank + 1)
    dist.reduce_scatter(part, [torch.full((r + 1,), float(r)) for r in everyone], group=group)
    assert part.tolist() == [rank * size] * (rank + 1)
    dist.reduce_scatter_single(out, torch.arange(2.0 * size), ReduceOp.AVG, group=group)
    assert out.tolist() == [2 * rank, 2 * rank + 1]

    counts, mean = torch.tensor([rank, -rank, 2]), [(size - 1) // 2, -((size - 1) // 2), 2]
    dist.reduce(summed := counts.clone(), 0, ReduceOp.AVG, group=group)
    assert summed.tolist() == (counts.tolist() if rank else mean), "as NCCL: no fraction"
    dist.reduce_scatter_single(summed, counts.repeat(size), ReduceOp.AVG, group=group)
    assert summed.tolist() == mean
    part = torch.empty(rank + 1, dtype=torch.int64)
    dist.reduce_scatter(part, [torch.full((r + 1,), -rank) for r in everyone], ReduceOp.AVG, group=group)
    assert part.tolist() == [mean[1]] * (rank + 1)
    part = torch.empty(rank + 1, dtype=torch.complex64)
    dist.reduce_scatter(part, [torch.full((r + 1,), 1j * rank) for r in everyone], ReduceOp.AVG, group=group)
    assert part.tolist() == [1j * (size - 1) / 2] * (rank + 1)

    last = size - 1
    total = torch.tensor([2.0])
    dist.reduce(total, last, group=group)
    assert total.item() == (2 * size if rank == last else 2)
    lists = [torch.empty(2) for _ in everyone] if rank == last else None
    dist.gather(torch.full((2,), float(rank)), lists, dst=last, group=group)
    assert rank != last or [one[0].item() for one in lists] == list(everyone)
    dist.scatter(out, [torch.full((2,), r * 3.0) for r in everyone] if rank == last else None, src=last, group=group)
    assert out.tolist() == [3 * rank] * 2
    dist.broadcast(out, src=last, group=group)
    assert out.tolist() == [3 * last] * 2

    out = torch.empty(size)
    dist.all_to_all_single(out, torch.arange(float(size)) + 10 * rank, group=group)
    assert out.tolist() == [10 * r + rank for r in everyone]
    alike = {"output_split_sizes": [1] * size, "input_split_sizes": [1] * size} if rank == 0 else {}
    dist.all_to_all_single(out, torch.arange(float(size)) - rank, group=group, **alike)  # said by one, meant by all
    assert out.tolist() == [rank - r for r in everyone]
    sizes = [r + 1 for r in everyone]  # rank r gets r + 1 from each
    out = torch.empty(size * (rank + 1), 2)
    source = torch.full((sum(sizes), 2), float(rank))
    dist.all_to_all_single(out, source, [rank + 1] * size, sizes, group=group)
    assert out[:, 1].tolist() == [r for r in everyone for _ in range(rank + 1)]
    outs = [torch.empty(r + 1) for r in everyone]
    dist.all_to_all(outs, [torch.full((rank + 1,), float(rank)) for _ in everyone], group=group)
    assert [one.tolist() for one in outs] == [[r] * (r + 1) for r in everyone]
    with pytest.raises(dist.DistBackendError, match="input_split_sizes"):
        dist.all_to_all_single(out, source, [rank + 1] * size, [1] * (size + 1), group=group)

    dist.barrier(group)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in everyone]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as together:
        a, b = torch.ones(2), torch.ones(3) * 2
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)
    together.wait()
    assert a.tolist() == [size] * 2 and b.tolist() == [2 * size] * 3


@on_ranks(2)
def test_what_autograd_has_saved(world):
    """A backward pass goes on where a collective left the values, and is refused where it changed them."""
    group = both(world)["dtlib"]
    x = torch.ones(2, requires_grad=True)
    for collective in (dist.broadcast, dist.reduce):
        y = x.exp()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collective(y.detach(), 0, group=group)
        if (world.rank == 0) == (collective is dist.broadcast):
            y.sum().backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
    y = x.exp()
    with pytest.warns(UserWarning, match=r"changes a tensor .* autograd.*clone\(\).*distributed\.nn\.functional"):
        dist.all_reduce(y, group=group)
    refuses("modified by an inplace operation", lambda: y.sum().backward(), error=RuntimeError)


@on_ranks(2, 3)
def test_messages_subgroups_and_the_end(world):
    from dtlib.comm import lifetime

    group, rank, size = both(world)["dtlib"], world.rank, world.size
    right, left = (rank + 1) % size, (rank - 1) % size
    x, y = torch.full((3,), float(rank)), torch.empty(3)
    both_ways = [dist.P2POp(dist.isend, x, right, group), dist.P2POp(dist.irecv, y, left, group)]
    for work in dist.batch_isend_irecv(both_ways):
        work.wait()
    assert y.tolist() == [left] * 3
    if rank == 0:
        for source in range(size - 1, 0, -1):
            assert dist.recv(y, source, group=group, tag=4) == source and y[0] == source
    else:
        dist.send(x, 0, group=group, tag=4)
    refuses("recv from an unknown rank", dist.recv, y, error=dist.DistBackendError, group=group)
    refuses("tags from 0 to", dist.send, x, right, error=dist.DistBackendError, group=group, tag=2**14)

    before = len(lifetime._members)
    for _ in range(3):  # those of its members that are not in order count as they are named
        pair = dist.new_group([size - 1, 0], backend="dtlib")
        if rank in (0, size - 1):
            y.fill_(float(rank))
            dist.broadcast(y, src=size - 1, group=pair)
            assert y[0] == size - 1 and dist.get_process_group_ranks(pair) == [0, size - 1]
            dist.destroy_process_group(pair)
            refuses("destroyed", pair.allreduce, [y], error=dist.DistBackendError)
        del pair
    world.comm.split(0)  # ranks meet, and free what all have let go
    world.comm.split(0)
    assert len(lifetime._members) <= before + 1
    with pytest.raises(dist.DistBackendError, match="one for each rank"):
        dist.all_gather([torch.empty(3)], torch.empty(3), group=group)


# torch's classes


@on_ranks(2, 3, 4, slow=(4,))
def test_ddp(world):
    def plain(group, **options):
        return trained(DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.0002, **options))

    equal(world, plain)
    equal(world, plain, static_graph=True)
    equal(world, plain, gradient_as_bucket_view=True)

    def unused(group):
        return trained(DistributedDataParallel(WithUnused(), process_group=group, find_unused_parameters=True))

    equal(world, unused)

    def accumulated(group):
        model = DistributedDataParallel(network(), process_group=group)

        def step(number, x):
            with model.no_sync():
                model(x).square().mean().backward()
            model(x + 1).square().mean().backward()

        return trained(model, step=step)

    equal(world, accumulated)

    def joined(group):
        model = DistributedDataParallel(network(), process_group=group)
        with model.join():
            return trained(model, steps=2 + dist.get_rank())

    equal(world, joined)

    def hooked(group):
        model = DistributedDataParallel(network(), process_group=group)

        def hook(state, bucket):
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0] / world.size)

        model.register_comm_hook(None, hook)
        return trained(model)

    equal(world, hooked)

    def with_buffers(group):
        model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), process_group=group)
        return [*trained(model), model.module[0].running_var]

    equal(world, with_buffers)


@on_ranks(2, 3, 4, slow=(3, 4))
def test_fsdp2_and_zero(world):
    def sharded(group, reshard):
        model = network()
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        return trained(model)

    equal(world, sharded, reshard=True)
    equal(world, sharded, reshard=False)

    def zero(group, overlap=False):
        model = DistributedDataParallel(network(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, eps=1e-4)
        return trained(model, optimizer=optimizer)

    equal(world, zero)
    zero_in_a_hook(world)


def zero_in_a_hook(world):
    """It waits within a hook of the backward pass. torch refuses gloo, which may hang there."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks

    def run(group, hook=None):
        torch.manual_seed(0)
        model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.0001)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group, lr=0.1, overlap_with_ddp=bool(hook)
        )
        if hook:
            model.register_comm_hook(group, hook(default_hooks.allreduce_hook, model, optimizer))
        generator = torch.Generator().manual_seed(world.rank)
        batches = [torch.randn(4, 6, generator=generator) for _ in range(4)]
        for x in batches[:1] * 2 * bool(hook) + batches:  # the first two only show it the buckets
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    group = both(world)["dtlib"]
    for hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        for one, other in zip(run(group, hook), run(group), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@on_ranks(4, slow=(4,))
def test_meshes(world):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = {id(group): name for name, group in both(world).items()}

    def mesh_of(group, *axes):
        backends = dict.fromkeys(axes, names[id(group)])
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=axes, backend_override=backends)

    def hybrid(group, reshard):
        model, mesh = network(), mesh_of(group, "replicate", "shard")
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)

        def step(number, x):
            for part, last in zip(x.chunk(2), (False, True), strict=True):
                model.set_requires_gradient_sync(last)
                model(part).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        return trained(model, step=step)

    equal(world, hybrid, reshard=True)
    equal(world, hybrid, reshard=False)

    def tensor_parallel(group):
        model, mesh = network(), mesh_of(group, "data", "tensor")
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["data"])

        def step(number, x):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number + dist.get_rank() // 2))
            model(x).square().mean().backward()

        return trained(model, step=step)

    equal(world, tensor_parallel)

    def redistributed(group):
        mesh = mesh_of(group, "a", "b")
        whole = distribute_tensor(torch.arange(35.0).view(5, 7), mesh, (Shard(0), Shard(1)))
        turned = whole.redistribute(mesh, (Shard(1), Replicate()))
        product = turned @ whole.redistribute(mesh, (Shard(0), Shard(1))).t()
        return [turned.full_tensor(), product.full_tensor()]

    equal(world, redistributed)


@on_ranks(2, 3, 4, slow=(3, 4))
def test_pipelining_and_checkpoints(world, tmp_path):
    from torch.distributed import checkpoint, pipelining

    rank, size = world.rank, world.size

    def pipelined(group, kind, mine):
        stages = [network() for _ in range(size * len(mine))]
        for stage in stages:
            stage[-1] = nn.Linear(8, 6)
        own = [
            pipelining.PipelineStage(stages[index], index, len(stages), torch.device("cpu"), group=group)
            for index in mine
        ]
        schedule = kind(own if len(mine) > 1 else own[0], 2 * size, loss_fn=nn.functional.mse_loss)
        x, y = torch.randn(2, 4 * size, 6)
        losses = {"target": y, "losses": []} if len(stages) - 1 in mine else {}
        schedule.step(*([x] if 0 in mine else []), **losses)
        return [p.grad for stage in own for p in stage.submod.parameters()] + losses.get("losses", [])

    for kinds, mine in (
        (("GPipe", "1F1B"), [rank]),
        (("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"), [rank, rank + size]),
        (("ZBVZeroBubble", "DualPipeV"), [rank, 2 * size - 1 - rank]),
    ):
        for kind in kinds:
            equal(world, pipelined, kind=getattr(pipelining, f"Schedule{kind}"), mine=mine)

    folder = world.comm.broadcast_object(str(tmp_path))

    def saved(group):
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",))
        model = fully_shard(network(), mesh=mesh)
        state = model.state_dict()
        checkpoint.save(state, checkpoint_id=f"{folder}/one", process_group=group)
        checkpoint.async_save(state, checkpoint_id=f"{folder}/two", process_group=both(world)["gloo"]).result()
        wanted = [p.full_tensor().clone() for p in model.parameters()]
        found = []
        for name in ("one", "two"):
            for p in model.parameters():
                p.data.zero_()
            checkpoint.load(state, checkpoint_id=f"{folder}/{name}", process_group=group)
            found += [p.full_tensor() for p in model.parameters()]
        for one, other in zip(wanted * 2, found, strict=True):
            assert torch.equal(one, other)
        return found

    equal(world, saved)


@pytest.mark.gpu
@on_ranks(1, 2)
def test_cuda_tensors(world):
    """Through NCCL where each rank has a GPU, through pinned host memory where they share one."""
    both(world)
    group, device = dist.new_group(backend="dtlib"), world.device
    x = torch.full((4,), world.rank + 1.0, device=device)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [sum(range(1, world.size + 1))] * 4
    whole = [torch.empty(4, device=device) for _ in range(world.size)]
    dist.all_gather(whole, torch.full((4,), float(world.rank), device=device), group=group)
    assert [one[0].item() for one in whole] == list(range(world.size))
    ours = trained(DistributedDataParallel(network().to(device), process_group=group), device=device)
    theirs = trained(DistributedDataParallel(network(), process_group=both(world)["dtlib"]))
    assert [p.shape for p in ours] == [p.shape for p in theirs]
    same = [gathered(world, p.cpu()) for p in ours]
    assert all(torch.equal(one[0], other) for one in same for other in one)
    dist.destroy_process_group(group)


# When something goes wrong


def stop_once(told) -> None:
    """Ctrl-C, once this rank was told of a long wait."""
    wait_until(lambda: told)
    signal.raise_signal(signal.SIGINT)


@on_ranks(2)
def test_a_step_that_is_stopped(world):
    """One rank leaves early; the other is told so, is stopped, and both go on after a reset."""
    from dtlib.comm import waiting
    from dtlib.comm.watch import board

    both(world)
    group = dist.new_group(backend="dtlib", timeout=timedelta(seconds=30))
    old = []  # what holds a module must not keep it at work
    told, waiting.notice, board.NOTICE_SECONDS = [], lambda said: told.append(said), 0.5
    try:
        for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            model = DistributedDataParallel(network(), process_group=group, **options)
            x = torch.ones(4, 6)
            if world.rank == 0:
                del told[:]
                threading.Thread(target=stop_once, args=(told,)).start()
                with pytest.raises(KeyboardInterrupt):
                    model(x).square().mean().backward()
                if not options:
                    assert "in all_reduce" in told[0] and "test_backend.py" in told[0], told
                    assert "rank 1 in dtlib.reset()" in told[0] or "rank 1 has not arrived" in told[0], told
                refuses("reset", dist.barrier, group, error=dist.DistBackendError)
            dtlib.reset()
            refuses("wrap the model again", model, x)
            del told[:]
            old.append(model)
            model = DistributedDataParallel(model.module, process_group=group, **options)
            trained(model)
            assert len({tuple(p.flatten().tolist()) for p in gathered(world, next(model.parameters()))}) == 1
    finally:
        waiting.notice, board.NOTICE_SECONDS = None, 3.0
    with pytest.raises(dist.DistBackendError, match=r"timeout is over.*Waited 0.2 s in barrier|interrupted|failed"):
        if world.rank == 0:
            group.set_timeout(timedelta(seconds=0.2))
            dist.barrier(group)
        else:
            group.comm._queue.abandon("was interrupted")
            dist.barrier(group)
    dtlib.reset()
    group.comm.verify = True
    with pytest.raises(dist.DistBackendError, match="calls of the ranks differ"):
        dist.all_reduce(torch.ones(2 + world.rank), group=group)
    dtlib.reset()
    group.comm.verify = False
    with dtlib.trace() as trace:
        model(x).square().mean().backward()
    # torch's buckets, which two ranks exchange, and a flag for each parameter: was it used?
    assert trace.sent()[1] == 4 * sum(p.numel() + 1 for p in model.parameters())
    dist.destroy_process_group(group)


@on_ranks(2, 4, slow=(4,))
def test_fsdp2_that_is_stopped(world):
    """In its forward or its backward pass: all ranks' modules refuse, those too whose group was not at work."""
    both(world)
    names = ("replicate", "shard")
    override = dict.fromkeys(names, "dtlib")
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=names, backend_override=override)

    def sharded():
        model = network()
        for layer in (model[0], model[2], model[4], model):  # nothing is left to the root
            fully_shard(layer, mesh=mesh if world.size == 4 else mesh["shard"])
        return model

    x, refused = torch.ones(4, 6), []
    for where in ("forward", "backward"):
        model = sharded()
        loss = model(x).square().mean() if where == "backward" else None
        if world.rank == 0:
            threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
            with pytest.raises(KeyboardInterrupt):
                model(x) if loss is None else loss.backward()
        dtlib.reset()
        for one in (*refused, model):
            refuses(r"was interrupted.*fully_shard", one, x)
        refused.append(model)
        torch.manual_seed(0)
        trained(model := sharded())
        dtlib.reset()  # between two steps: it goes on
        values = [gathered(world, p) for p in trained(model)]
        assert all((one == one[0]).all() for one in values)


def gathered(world, tensor):
    return world.comm.all_gather(torch.empty(world.size, *tensor.shape), tensor.detach())


SCRIPT = """
import sys
import dtlib.backend
import torch
from torch import distributed as dist
dist.init_process_group("dtlib", init_method="dtlib://")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 2 and dist.get_backend() == "dtlib"
mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
x = torch.ones(3) * rank
dist.all_reduce(x, group=mesh.get_group("a"))
assert x.tolist() == [1, 1, 1]
dist.destroy_process_group()
dist.init_process_group("dtlib", init_method="dtlib://")
dtlib.backend.emulate_network(0.05, 1e9)
import time
began = time.monotonic()
dist.barrier()
assert time.monotonic() - began > 0.05
dist.all_reduce(x)
assert x.tolist() == [2, 2, 2]
if rank == 1:
    raise ValueError("the learner's own mistake")
dist.barrier()
"""


def test_a_script_without_settings_and_its_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    process = start_ranks([str(script)], 2, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    _, said = process.communicate(timeout=90)
    assert process.returncode != 0
    assert "ValueError: the learner's own mistake" in said, said
    assert "assert" not in said


TORCHS = """
import os, sys, torch
from torch import distributed as dist
backend = sys.argv[1]
dist.init_process_group(backend)
assert (str(dist.get_rank()), str(dist.get_world_size())) == (os.environ["RANK"], os.environ["WORLD_SIZE"])
assert os.environ["LOCAL_RANK"] == os.environ["RANK"] and os.environ["LOCAL_WORLD_SIZE"] == "2"
x = torch.ones(3)
dist.all_reduce(x)
if backend == "dtlib":  # gloo finds addresses of the group before in the launcher's store, also under torchrun
    dist.destroy_process_group()
    dist.init_process_group(backend)
assert x.tolist() == [2, 2, 2] and dist.get_backend() == backend and __name__ == "__main__"
print(sys.argv, __file__, sys.path[0])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["dtlib", "gloo"])
def test_a_program_of_torchs_runs_as_it_is(tmp_path, backend):
    script = tmp_path / "train.py"
    script.write_text(TORCHS)
    said = said_by_ranks(["-m", "dtlib.backend", str(script), backend], 2)
    assert said == f"{[str(script), backend]} {script} {tmp_path}\n" * 2


def test_without_mpi_and_with_another_rank_it_is_refused(tmp_path):
    from dtlib.backend import process_groups

    script = tmp_path / "train.py"
    script.write_text('import torch.distributed as dist, dtlib.backend; dist.init_process_group("dtlib")')
    torchruns = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for words in (["-m", "dtlib.backend", script], [script]):
        ran = start_python(*words, env=torchruns)
        said = ran.communicate(timeout=90)[1]
        command = f"start them with `mpiexec -n 1 python -m dtlib.backend {script}`"
        assert ran.returncode and f"torchrun started these processes without it: {command}" in said, said
    ran = start_python("-m", "dtlib.backend", "nowhere.py")
    assert ran.communicate()[1].startswith("nowhere.py: mpiexec -n RANKS python -m dtlib.backend PROGRAM")
    assert ran.returncode == 1
    with pytest.raises(DtlibError, match="world_size is 7, but this process is rank 0 of 1 in MPI: leave"):
        process_groups.rendezvous("dtlib://?rank=0&world_size=7")


@on_ranks(2)
def test_a_wrapper_is_refused(world):
    from torch.distributed.tensor import DTensor, Replicate

    group = both(world)["dtlib"]
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("all",))
    whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    refuses("a wrapper, DTensor: pass the one inside", dist.all_reduce, whole, error=dist.DistBackendError, group=group)
