"""Data parallelism against one process that has the whole batch, and against torch's DistributedDataParallel."""

import copy

import pytest
import torch
from torch import nn

import dtlib
from benchmarks.peers import torch_group
from dtlib.errors import DtlibError
from dtlib.gradients.buckets import buckets_of
from dtlib.parallel.data import DataParallel, DataParallelNaive
from tests.models import OPTIMIZERS, adamw, batches, build, difference, loss_of, sgd, slice_of
from tests.ranks import on_ranks

STEPS = 3


def train_alone(model, optimizer, data, ranks, accumulate=1, clip=None):
    """One process with the whole batch. It computes the slices one after the other, as batch normalisation looks at
    each slice alone, and keeps the running statistics of the first."""
    for step, batch in enumerate(data):
        kept = None
        for rank in range(ranks):
            (loss_of(model, slice_of(batch, rank, ranks)) / ranks).backward()
            if rank == 0:
                kept = [buffer.clone() for buffer in model.buffers()]
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)
        if (step + 1) % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


def train(model, optimizer, data, comm, accumulate=1, clip=None):
    """The same on ranks, with anything that has ``no_sync``."""
    for step, batch in enumerate(data):
        last = (step + 1) % accumulate == 0
        if last:
            loss_of(model, slice_of(batch, comm.rank, comm.size)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                loss_of(model, slice_of(batch, comm.rank, comm.size)).backward()
    return model


@on_ranks(2, 3, 4, slow=(4,))
@pytest.mark.parametrize("name", ["plain", "convolutional", "transformer"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parity_with_one_process_and_with_torch_ddp(world, name, optimizer, accumulate):
    comm, count = world.comm, 4 * world.size
    data = batches(name, 2 * STEPS, count)
    clip = 0.5 if accumulate == 2 else None
    reference = build(name)
    train_alone(reference, OPTIMIZERS[optimizer](reference), data, world.size, accumulate, clip)
    ours = DataParallel(build(name, seed=world.rank), comm, bucket_cap_mb=0.0005)
    assert len(ours.buckets) > 1
    train(ours, OPTIMIZERS[optimizer](ours), data, comm, accumulate, clip)
    # The design's bound for float64. Running statistics reach the other ranks with the next forward pass.
    assert difference(ours, reference, buffers=comm.rank == 0) <= 1e-12
    theirs = nn.parallel.DistributedDataParallel(
        build(name), process_group=torch_group(world), find_unused_parameters=name == "plain"
    )
    train(theirs, OPTIMIZERS[optimizer](theirs), data, comm, accumulate, clip)
    assert difference(ours, theirs, buffers=comm.rank == 0) <= 1e-12
    for parameter in ours.module.parameters():
        assert parameter.requires_grad or parameter.grad is None
    if name == "plain":
        assert ours.module.unused.weight.grad is None


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["plain", "transformer"])
def test_float32_is_as_near_to_float64_as_torch_ddp(world, name):
    data = batches(name, STEPS, 4 * world.size, torch.float32)
    exact = build(name)
    train_alone(exact, sgd(exact), [(x.double() if x.is_floating_point() else x, y) for x, y in data], world.size)
    ours = DataParallel(build(name, torch.float32), world.comm)
    theirs = nn.parallel.DistributedDataParallel(
        build(name, torch.float32), process_group=torch_group(world), find_unused_parameters=True
    )
    errors = [difference(train(model, sgd(model), data, world.comm), exact) for model in (ours, theirs)]
    assert errors[0] <= max(2 * errors[1], 1e-5)


@on_ranks(2, 3)
def test_the_naive_class_and_the_buckets_agree(world):
    data = batches("transformer", STEPS, 4 * world.size)
    naive = DataParallelNaive(build("transformer", seed=world.rank), world.comm)
    optimizer = sgd(naive)
    for batch in data:
        loss_of(naive, slice_of(batch, world.rank, world.size)).backward()
        naive.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
    buckets = DataParallel(build("transformer", seed=world.rank), world.comm)
    assert difference(train(buckets, sgd(buckets), data, world.comm), naive) <= 1e-12


def test_the_first_bucket_is_a_small_one_and_each_has_one_dtype():
    floats, halves = [torch.zeros(10)] * 6, [torch.zeros(10, dtype=torch.float16)] * 2  # of 40 and 20 bytes
    assert buckets_of(floats, 120, 80) == [[0, 1], [2, 3, 4], [5]]
    assert buckets_of(floats, 39, 39) == [[0], [1], [2], [3], [4], [5]]  # larger than the cap
    assert buckets_of([floats[0], halves[0], floats[1], halves[1], floats[2]], 80, 40) == [[0], [1, 3], [2, 4]]


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("algorithm", ["ring", None])
def test_payload_is_that_of_the_ring_and_flags_are_a_line_of_their_own(world, algorithm):
    torch.manual_seed(0)
    size = world.size
    model = DataParallel(nn.Linear(12 * size, 20 * size, bias=False), world.comm, algorithm=algorithm)
    with dtlib.trace() as trace:
        model(torch.randn(4, 12 * size)).sum().backward()
    gradients = sum(bucket.buffer.nbytes for bucket in model.buckets)
    assert gradients == 4 * 240 * size * size
    # One flag for the one parameter travels behind the gradients: 4 bytes, which the ring splits unevenly.
    flag = 4
    _, sent = trace.sent("all_reduce")
    if algorithm == "ring" or size == 2:
        assert abs(sent - 2 * gradients * (size - 1) // size) <= 2 * flag * (size - 1)


@on_ranks(2, 3)
def test_uneven_batches_are_weighted_by_their_size(world):
    count = 5 * world.size - 1
    data = batches("plain", STEPS, count)
    reference = build("plain")
    train_alone(reference, sgd(reference), data, 1)
    ours = DataParallel(build("plain"), world.comm)
    optimizer = sgd(ours)
    for batch in data:
        mine = slice_of(batch, world.rank, world.size)
        ours.batch_size = len(mine[0])
        loss_of(ours, mine).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(ours, reference) <= 1e-12


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["plain", "convolutional"])
def test_ranks_that_run_out_of_batches_join(world, name):
    mine = batches(name, 2 + world.rank, 4, seed=world.rank)
    ours = DataParallel(build(name), world.comm)
    theirs = nn.parallel.DistributedDataParallel(
        build(name), process_group=torch_group(world), find_unused_parameters=True
    )
    for model in (ours, theirs):
        optimizer = sgd(model)
        with model.join():
            for batch in mine:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert difference(ours, theirs) <= 1e-12
    everyones = world.comm.all_gather_object([tensor.tolist() for tensor in ours.state_dict().values()])
    assert all(values == everyones[0] for values in everyones)


@on_ranks(2, 3)
@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_a_parameter_that_only_some_ranks_use_counts_as_zero_on_the_others(world, progress):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes, self.never = (nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, x, use):
            return self.always(x) + (self.sometimes(x) if use else 0)

    model = DataParallel(Sometimes().double(), world.comm, bucket_cap_mb=1e-5, progress=progress)
    x = torch.ones(1, 2, dtype=torch.float64)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(x, use=world.rank == 1).sum().backward()
        assert (model.module.sometimes.weight.grad == 1 / world.size).all()
        assert (model.module.always.weight.grad == 1).all()
        assert model.module.never.weight.grad is None
    model.zero_grad(set_to_none=False)
    model(x, use=False).sum().backward()
    assert (model.module.always.weight.grad == 1).all()


@on_ranks(2)
def test_gradients_are_views_of_the_buckets(world):
    model = DataParallel(build("plain"), world.comm)
    loss_of(model, batches("plain", 1, 4)[0]).backward()
    for bucket in model.buckets:
        for parameter, view in zip(bucket.parameters, bucket.buffer.views, strict=True):
            assert parameter.grad is None or parameter.grad.data_ptr() == view.data_ptr()


@on_ranks(2, 3)
def test_bfloat16_gradients_are_averaged_in_float32_at_each_hop(world):
    ours = DataParallel(build("plain", torch.bfloat16), world.comm)
    exact = build("plain")
    exact.load_state_dict(ours.module.state_dict())
    data = batches("plain", 1, 4 * world.size, torch.bfloat16)
    loss_of(ours, slice_of(data[0], world.rank, world.size)).backward()
    loss_of(exact, (data[0][0].double(), data[0][1])).backward()
    # bfloat16 keeps 8 bits; the gradient itself is computed in it, with several roundings.
    torch.testing.assert_close(ours.module.second.weight.grad.double(), exact.second.weight.grad, rtol=0.05, atol=0.01)


@on_ranks(2)
def test_evaluation_needs_no_other_rank_and_an_error_in_between_does_no_harm(world):
    model = DataParallel(build("convolutional"), world.comm)
    batch = batches("convolutional", 1, 4)[0]
    if world.rank == 0:
        model.eval()
        with torch.no_grad():
            model(batch[0])
        model.train()
    with pytest.raises(RuntimeError, match="on purpose"):
        output = model(batch[0])
        output.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("on purpose")))
        output.sum().backward()
    reference = build("convolutional")
    loss_of(reference, batch).backward()
    model.zero_grad()
    loss_of(model, batch).backward()
    torch.testing.assert_close(model.module.classify.weight.grad, reference.classify.weight.grad, rtol=0, atol=1e-12)


@on_ranks(2)
def test_what_cannot_be_averaged_is_refused_by_name(world):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(DtlibError, match="no parameter of this module requires a gradient"):
        DataParallel(frozen, world.comm)
    with pytest.raises(DtlibError, match="weight is complex64: convert it, or freeze it"):
        DataParallel(nn.Linear(2, 2, dtype=torch.complex64), world.comm)
    with pytest.raises(DtlibError, match=r"weight is \(2, 2\) float32 on rank 0 and \(2, 3\) float32 on rank 1"):
        DataParallel(nn.Linear(2 + world.rank, 2), world.comm)
    with pytest.raises(DtlibError, match="bucket_cap_mb=0"):
        DataParallel(nn.Linear(2, 2), world.comm, bucket_cap_mb=0)
    with pytest.raises(DtlibError, match="choose 'inline' or 'thread'"):
        DataParallel(nn.Linear(2, 2), world.comm, progress="often")
    world.comm.barrier()


@on_ranks(2)
def test_what_other_code_has_is_accepted_as_comm(world):
    from mpi4py import MPI

    data = batches("plain", STEPS, 8)
    reference = build("plain")
    train_alone(reference, adamw(reference), data, 2)
    for comm in (MPI.COMM_WORLD, torch_group(world)):
        ours = DataParallel(build("plain"), comm)
        assert difference(train(ours, adamw(ours), data, world.comm), reference) <= 1e-12


@on_ranks(2)
def test_a_model_may_be_wrapped_again(world):
    module = build("plain")
    for _ in range(3):
        model = DataParallel(module, world.comm)
    with dtlib.trace() as trace:
        loss_of(model, batches("plain", 1, 4)[0]).backward()
    assert [event.name for event in trace.events if event.kind == "operation"] == ["all_reduce"]


@on_ranks(2, 3)
def test_a_rank_without_any_batch_joins_those_that_weight_theirs(world):
    ours = DataParallel(build("plain"), world.comm)
    reference = build("plain")
    batch = batches("plain", 1, 4)[0]
    optimizer = sgd(ours)
    with ours.join():
        if world.rank == 0:
            ours.batch_size = 4
            loss_of(ours, batch).backward()
            optimizer.step()
    optimizer = sgd(reference)
    loss_of(reference, batch).backward()
    optimizer.step()
    assert difference(ours, reference) <= 1e-12


@on_ranks(2)
def test_what_would_be_lost_without_a_word_is_refused(world):
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(checkpoint(self.layer, x, use_reentrant=True))

    model = DataParallel(Twice(), world.comm)
    with pytest.raises(DtlibError, match=r"got a second gradient .* use_reentrant=False"):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    dtlib.reset()
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    model = DataParallel(module, world.comm)
    module[1].requires_grad_(True)
    with pytest.raises(DtlibError, match="unfrozen after the model was wrapped"):
        model(torch.ones(1, 2))
    with pytest.raises(DtlibError, match="sparse=False"):
        DataParallel(nn.Embedding(3, 2, sparse=True), world.comm)

    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(3, 2))

        def forward(self, words):
            return nn.functional.embedding(words, self.table, sparse=True)

    with pytest.raises(DtlibError, match=r"copy model\.module instead"):
        copy.deepcopy(model)
    model = DataParallel(nn.Linear(2, 2), world.comm)
    late = model.module.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(DtlibError, match="weight was given a hook after that"):
        model(torch.ones(1, 2)).sum().backward()
    late.remove()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(DtlibError, match="converted or moved after it was wrapped"):
        model.double()(torch.ones(1, 2).double())
    model = DataParallel(Sparse(), world.comm)
    with pytest.raises(DtlibError, match="A gradient is sparse"):
        model(torch.tensor([1])).sum().backward()


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_batch_size_on_some_ranks_only_is_refused_on_all(world, dtype):
    model = DataParallel(nn.Linear(2, 2, bias=False, dtype=dtype))
    x = torch.ones(1, 2, dtype=dtype)
    for _ in range(2):
        model.batch_size = 3 if world.rank else None
        with pytest.raises(DtlibError, match="on some ranks only"):
            model(x).sum().backward()
        model.zero_grad()
        for samples in (1000 * (world.rank + 1), 0.25, 0):  # a sum of samples times 200 is beyond float16
            model.batch_size = samples
            (200 * (world.rank + 1) * model(x).sum()).backward()
            ranks = range(1, world.size + 1)
            mean = 200 * (sum(r * r for r in ranks) / sum(ranks) if samples > 1 else sum(ranks) / world.size)
            grad = model.module.weight.grad
            torch.testing.assert_close(grad, torch.full_like(grad, mean if samples else 0), rtol=1e-3, atol=0)
            model.zero_grad()
        model.batch_size = None
        model(x).sum().backward()
        assert (model.module.weight.grad == 1).all()
        model.zero_grad()


@on_ranks(2)
def test_arguments_of_torchs_class(world):
    model = DataParallel(nn.Linear(2, 2), device_ids=None, output_device=None, find_unused_parameters=True)
    assert model.comm is dtlib.init().comm
    DataParallel(nn.Linear(2, 2), world.comm, device_ids=["cpu"], output_device=torch.device("cpu"))
    for options in ({"device_ids": [world.rank]}, {"output_device": "cuda:1"}):
        with pytest.raises(DtlibError, match="this rank's module is on cpu: move it there"):
            DataParallel(nn.Linear(2, 2), **options)
    world.comm.barrier()
