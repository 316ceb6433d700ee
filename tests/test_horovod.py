"""Horovod's operations against numpy, the words of every refusal, and a script that was written for Horovod."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dtlib.horovod as hvd
from dtlib.horovod import basics
from tests.cases import refuses
from tests.conftest import said_by_ranks
from tests.ranks import on_ranks


def of_rank(rank, shape, dtype="float64"):
    """What a rank holds in these tests: small whole numbers, which every type adds exactly."""
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5 + rank + 1
    return torch.from_numpy(values).to(getattr(torch, dtype))


def everyone(size, shape, dtype="float64"):
    return np.stack([of_rank(rank, shape, dtype).double().numpy() for rank in range(size)])


def assert_is(tensor, expected):
    np.testing.assert_allclose(tensor.detach().double().numpy(), expected, rtol=1e-2 if tensor.itemsize == 2 else 1e-7)


@on_ranks(1, 2, 3, 4)
def test_who_am_i(world):
    assert (hvd.init(), hvd.init()) == (None, None)
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    assert (hvd.local_rank(), hvd.local_size()) == (world.rank, world.size)
    hvd.shutdown()
    assert not hvd.is_initialized()
    refuses(r"Horovod has not been initialized; use hvd.init\(\)", hvd.rank, error=ValueError)
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world.size


def test_ranks_are_counted_on_their_machine(monkeypatch):
    nodes = ["a", "b", "a", "b", "b"]
    found = []
    for rank in range(5):
        comm = SimpleNamespace(rank=rank)
        monkeypatch.setattr(basics, "_initialised", lambda comm=comm: SimpleNamespace(comm=comm, nodes=nodes))
        found.append((hvd.local_rank(), hvd.local_size()))
    assert found == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


@on_ranks(1, 2, 3, 4)
def test_allreduce_in_all_its_forms(world):
    hvd.init()
    for dtype in ("float64", "float32", "float16", "bfloat16", "int64", "int16"):
        allreduce_in_all_its_forms(world, dtype)


def allreduce_in_all_its_forms(world, dtype):
    mine, shape = of_rank(world.rank, (3, 4), dtype), (3, 4)
    values = everyone(world.size, shape, dtype)
    assert_is(hvd.allreduce(mine, op=hvd.Sum), values.sum(0))
    mean = values.mean(0) if mine.is_floating_point() else values.sum(0) // world.size
    assert_is(hvd.allreduce(mine), mean)
    assert_is(mine, values[world.rank])
    assert_is(hvd.synchronize(hvd.allreduce_async(mine, name="one")), mean)
    assert_is(hvd.allreduce(torch.tensor(float(world.rank)), op=hvd.Sum), sum(range(world.size)))
    # Integers are averaged towards zero, as C++ converts them.
    below = torch.tensor([-7 if world.rank == 0 else 0, -1 - world.rank]).to(mine.dtype)
    exact = np.array([-7 / world.size, -(world.size + 1) / 2])
    assert_is(hvd.allreduce(below), exact if mine.is_floating_point() else np.trunc(exact))


@on_ranks(1, 2, 3, 4)
def test_rows_of_different_number_are_gathered(world):
    hvd.init()
    for dtype in ("float64", "bfloat16", "int64", "bool"):
        rows_are_gathered(world, dtype)


def rows_are_gathered(world, dtype):
    rows = [0 if rank == 1 else 2 * rank + 1 for rank in range(world.size)]
    pieces = [of_rank(rank, (count, 3), dtype) for rank, count in enumerate(rows)]
    assert torch.equal(hvd.allgather(pieces[world.rank]), torch.cat(pieces))
    assert hvd.synchronize(hvd.allgather_async(torch.tensor([world.rank]))).tolist() == list(range(world.size))
    sent = of_rank(world.rank, (3, 2), dtype)
    root = world.size - 1
    assert torch.equal(hvd.broadcast(sent, root), of_rank(root, (3, 2), dtype))
    assert torch.equal(sent, of_rank(world.rank, (3, 2), dtype))
    assert hvd.broadcast_(sent, root) is sent
    assert torch.equal(sent, of_rank(root, (3, 2), dtype))
    assert hvd.allgather_object({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]
    assert hvd.broadcast_object("x" * 1000 * world.rank, root_rank=root) == "x" * 1000 * root


@on_ranks(2, 3)
def test_gradients_flow_through_the_operations(world):
    """Horovod's convention: the loss of all is the average of the ranks' losses, for allgather and broadcast."""
    hvd.init()
    rank, size = world.rank, world.size
    weights = [of_rank(other, (2, 2)) for other in range(size)]

    def gradient_of(operation):
        tensor = of_rank(rank, (2, 2)).requires_grad_()
        output = operation(tensor)
        (output * weights[rank].repeat(len(output) // 2, 1)).sum().backward()
        return tensor.grad

    mean = sum(weights) / size
    torch.testing.assert_close(gradient_of(hvd.allreduce), mean)
    torch.testing.assert_close(gradient_of(lambda t: hvd.allreduce(t, op=hvd.Sum)), size * mean)
    torch.testing.assert_close(gradient_of(hvd.allgather), mean)
    at_root = mean if rank == 1 else torch.zeros_like(mean)
    torch.testing.assert_close(gradient_of(lambda t: hvd.broadcast(t, 1)), at_root)
    # Second derivatives too: d/dx of the sum over ranks of x * x, and of its derivative.
    tensor = of_rank(rank, (3,)).requires_grad_()
    (first,) = torch.autograd.grad(hvd.allreduce(tensor**2, op=hvd.Sum).sum(), tensor, create_graph=True)
    torch.testing.assert_close(first, 2 * size * tensor)
    for operation in (lambda t: hvd.allreduce(t, op=hvd.Sum), hvd.allgather, lambda t: hvd.broadcast(t, 0)):
        (first,) = torch.autograd.grad((operation(tensor) ** 2).sum(), tensor, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), tensor)
        assert first.grad_fn is not None and second.shape == tensor.shape


@on_ranks(2)
def test_arguments_that_are_refused(world):
    hvd.init()
    one = torch.ones(2)
    changed = one.clone()
    handle = hvd.allgather_async(changed)
    changed.add_(1)
    refuses("was changed between the start", hvd.synchronize, handle, error=hvd.HorovodInternalError)
    refuses("complex64", hvd.allreduce, one.to(torch.complex64))
    refuses("bool", hvd.allreduce, one.bool(), op=hvd.Sum)
    refused = {
        "needs a torch tensor, and got float": lambda: hvd.allreduce_async(1.0),
        "op=17": lambda: hvd.allreduce(one, op=17),
        "allgather needs a first dimension": lambda: hvd.allgather(torch.tensor(1.0)),
        r"root_rank=2\): the ranks are 0 to 1": lambda: hvd.broadcast(one, 2),
        "pass the result of an asynchronous operation": lambda: hvd.synchronize(3),
        "'epoch' is int, not a tensor": lambda: hvd.broadcast_parameters({"epoch": 3}, 0),
    }
    for words, call in refused.items():
        refuses(words, call, error=ValueError)
    for call in (
        lambda: hvd.broadcast(one, 0.5), lambda: hvd.allreduce(one, process_set=hvd.size),
        lambda: hvd.allreduce(one, False), lambda: hvd.allreduce(one, average=False), lambda: hvd.init(comm=[0, 1]),
    ):  # fmt: skip
        refuses("float|process_set|positional|average|comm", call, error=TypeError)
    hvd.barrier()


@on_ranks(2, 3)
def test_names_are_compared_in_notebooks(world):
    hvd.init()
    comm = basics.communicator()
    try:
        comm.verify = True
        assert hvd.allreduce(torch.ones(2), name="same", op=hvd.Sum).tolist() == [world.size] * 2
        refuses(
            r"different operations \(rank 0: allreduce 'x0'; rank 1: allreduce 'x1'", hvd.allreduce, torch.ones(2),
            name=f"x{world.rank}", error=hvd.HorovodInternalError,
        )  # fmt: skip
        operation = hvd.allgather if world.rank else hvd.allreduce
        refuses("rank 0: allreduce 'y'; rank 1: allgather 'y'", operation, torch.ones(2), name="y")
    finally:
        comm.verify = False


def test_parts_of_horovod_that_are_left_out_say_so():
    ways_round = {
        "Adasum": "use op=hvd.Average", "ProcessSet": "split", "SyncBatchNorm": "dtlib.parallel.data.batch_norm",
        "alltoall_async": "comm.all_to_all", "elastic": "save checkpoints", "global_process_set": "split",
        "grouped_allreduce_": "for each tensor", "join": "as many batches",
        "reducescatter": "comm.reduce_scatter",
        "sparse_allreduce_async": "to_dense",
    }  # fmt: skip
    for name, way_round in ways_round.items():
        refuses(f"hvd.{name} is not offered here: .*{way_round}", getattr, hvd, name)
        assert not hasattr(hvd, name)
    from dtlib.parallel.data.batch_norm import SyncBatchNorm  # noqa: F401


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_script_for_horovod_trains(ranks):
    told = json.loads(said_by_ranks(["-m", "tests.horovod_script"], ranks).strip().splitlines()[-1])
    assert told["ranks"] == ranks and told["agree"]
    assert told["losses"][-1] < 0.7 * told["losses"][0]
    assert told["accuracy"] > 0.8
    assert told["lr"] == pytest.approx(0.02 * ranks / 4)
