"""DistributedOptimizer beside its values (test_parity.py): compression, sparse gradients, states and refusals."""

import warnings

import pytest
import torch
from torch import nn

import dtlib
import dtlib.horovod as hvd
from dtlib.parallel.zero import ZeroOptimizer
from tests.cases import refuses
from tests.models import EXACT, adamw, batches, build, difference, loss_of, sgd, slice_of
from tests.ranks import on_ranks


@on_ranks(2)
def test_the_average_is_divided_before_the_sum(world):
    """In 16 bits the sum of these overflows, and that of halves does not."""
    hvd.init()
    for op, gradient in ((hvd.Sum, float("inf")), (hvd.Average, 40000.0)):
        weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], op=op)
        (weight * 40000).sum().backward()
        optimizer.synchronize()
        assert weight.grad.tolist() == [gradient] * 4


@on_ranks(2, 3)
def test_fp16_compression_sends_half_the_bytes_and_rounds(world):
    data = batches("plain", 1, 4 * world.size, torch.float32)
    gradients, sent = {}, {}
    hvd.init()
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        model = build("plain", torch.float32)
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)
        with dtlib.trace() as trace:
            loss_of(model, slice_of(data[0], world.rank, world.size)).backward()
            optimizer.synchronize()
        sent[compression] = trace.sent("all_reduce")[1]
        gradients[compression] = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(gradient.dtype == torch.float32 for gradient in gradients[compression])
    assert sent[hvd.Compression.fp16] * 2 == sent[hvd.Compression.none]
    # float16 keeps 11 bits: each value and each of the sums is rounded by at most 2^-11 of its size.
    for exact, rounded in zip(gradients[hvd.Compression.none], gradients[hvd.Compression.fp16], strict=True):
        assert not torch.equal(exact, rounded) or not exact.any()
        torch.testing.assert_close(rounded, exact, rtol=0, atol=world.size * 2**-11 * float(exact.abs().max() + 1))


@on_ranks(2, 3)
def test_buckets_leave_during_the_backward_pass_the_last_layers_first(world):
    hvd.init()
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False, dtype=torch.float64) for _ in range(4)))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}  # as scripts read it
    sizes = [len(bucket.parameters) for bucket in optimizer._buckets]
    assert sizes == [1, 3] and optimizer._buckets[0].parameters[0] is model[3].weight
    with dtlib.trace() as trace:
        model(torch.ones(2, 300, dtype=torch.float64) * (world.rank + 1)).sum().backward()
        started = sum(event.name == "all_reduce" and event.kind == "operation" for event in trace.events)
        optimizer.step()
    assert started == 2
    alike = world.comm.all_gather_object([parameter.tolist() for parameter in model.parameters()])
    assert all(one == alike[0] for one in alike)


@on_ranks(2, 3)
def test_a_parameter_that_only_some_ranks_use_counts_as_zero_on_the_others(world):
    hvd.init()
    always, sometimes, never = (nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(3))
    model = nn.ModuleDict({"always": always, "sometimes": sometimes, "never": never})
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    x = torch.ones(1, 2, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        (always(x) + (sometimes(x) if world.rank == 1 else 0)).sum().backward()
        optimizer.step()
        assert (sometimes.weight.grad == 1 / world.size).all()
        assert (always.weight.grad == 1).all()
        assert (never.weight.grad == 0).all()


@on_ranks(2)
def test_sparse_gradients_are_refused(world):
    hvd.init()
    words = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=1.0), words.named_parameters())
    refuses("build embeddings with sparse=False", words(torch.tensor([world.rank])).sum().backward)
    del optimizer


@on_ranks(2, 3)
def test_the_optimizer_is_still_one_of_its_class(world):
    hvd.init()
    model = build("plain")
    inner = adamw(model)
    loss_of(model, batches("plain", 1, 4)[0]).backward()
    inner.step()
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    inner.zero_grad()
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    assert isinstance(optimizer, torch.optim.AdamW) and type(optimizer).__name__ == "AdamW"
    assert optimizer.state[model.second.weight]["step"] == 1  # state is kept
    loss_of(model, batches("plain", 1, 4, seed=world.rank)[0]).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005
    second = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    optimizer.zero_grad()
    loss_of(model, batches("plain", 1, 4, seed=world.rank)[0]).backward()
    assert optimizer.step(lambda: 3.0) == 3.0
    second.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0005)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    refuses("was frozen or missing when this", optimizer.step, error=ValueError)
    everyones = world.comm.all_gather_object([parameter.tolist() for parameter in model.parameters()])
    assert all(one == everyones[0] for one in everyones)


@on_ranks(2, 3)
def test_parameters_and_optimizer_state_come_from_the_root_bit_by_bit(world):
    hvd.init()
    root = world.size - 1
    for make in (sgd, adamw):
        model = build("transformer", seed=world.rank)
        optimizer = make(model)
        if world.rank == root:
            loss_of(model, batches("transformer", 1, 4)[0]).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.25
        hvd.broadcast_parameters(model.named_parameters(), root)
        hvd.broadcast_optimizer_state(optimizer, root)
        assert optimizer.param_groups[0]["lr"] == 0.25
        state = world.comm.all_gather_object(str(optimizer.state_dict()))
        assert all(one == state[0] for one in state) and len(optimizer.state) == len(list(model.parameters()))
    transposed = torch.full((2, 3), float(world.rank)).t()
    hvd.broadcast_parameters([transposed], root)
    assert (transposed == root).all()
    model = build("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1 / 3 if world.rank == 0 else 0.5, betas=(0.8 + 1e-9, 0.9))
    if world.rank:  # what others have is replaced
        loss_of(model, batches("plain", 1, 4)[0]).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (1 / 3, (0.8 + 1e-9, 0.9))
    assert not optimizer.state
    with_closure = torch.optim.LBFGS(model.parameters(), lr=0.5 if world.rank else 0.25)
    hvd.broadcast_optimizer_state(with_closure, 0)
    assert with_closure.param_groups[0]["lr"] == 0.25


@on_ranks(2)
def test_arguments_that_are_refused(world):
    hvd.init()
    model = build("plain")
    names = list(model.named_parameters())

    def make(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    refused = {
        "named_parameters has names twice: .*twice": {"named_parameters": [("twice", p) for _, p in names]},
        r"were not named: those of shape \(10, 6\)": {"named_parameters": names[1:]},
        "backward_passes_per_step is 0: give a whole number from 1": {"backward_passes_per_step": 0},
        "backward_passes_per_step is 1.5: give a whole number": {"backward_passes_per_step": 1.5},
        "op=9": {"op": 9},
    }
    for words, options in refused.items():
        refuses(words, make, error=ValueError, **options)
    words = "LBFGS computes more gradients on some ranks"
    refuses(words, hvd.DistributedOptimizer, torch.optim.LBFGS(model.parameters()), error=ValueError)
    refuses("is wrapped already", hvd.DistributedOptimizer, make(), error=ValueError)


@on_ranks(2)
def test_calls_in_the_wrong_order_are_refused(world):
    hvd.init()
    model, batch = build("transformer"), batches("transformer", 1, 4)[0]
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    loss_of(model, batch).backward()
    refuses(r"was called after loss.backward.* but before", optimizer.zero_grad, error=AssertionError)
    words = "more than backward_passes_per_step times before call to step"
    refuses(words, loss_of(model, batch).backward, error=AssertionError)
    refuses("was changed or replaced", optimizer.synchronize, error=hvd.HorovodInternalError)
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), backward_passes_per_step=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, batch).backward()
        loss_of(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()


# What would go wrong without a word


@on_ranks(2, 3)
def test_gradients_that_are_changed_while_they_travel_are_an_error(world):
    hvd.init()
    for compression in ("none", "fp16"):
        changed_while_they_travel(compression)


def changed_while_they_travel(compression):
    model, batch = build("plain", torch.float32), batches("plain", 1, 4, torch.float32)[0]
    options = {"compression": getattr(hvd.Compression, compression)}
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    for change in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda: model.zero_grad(set_to_none=False),
        lambda: model.zero_grad(set_to_none=True),
    ):
        loss_of(model, batch).backward()
        change()
        refuses("was changed or replaced", optimizer.step, error=hvd.HorovodInternalError)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3)
def test_closures_and_parameters_frozen_or_thawed_on_the_way(world):
    hvd.init()
    decay = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    ours, alone = build("convolutional"), build("convolutional")
    first, reference_first = next(ours.parameters()), next(alone.parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), **decay), ours.named_parameters())
    reference = torch.optim.SGD(alone.parameters(), **decay)
    for step, batch in enumerate(batches("convolutional", 6, 2 * world.size)):
        first.requires_grad_(step in (2, 3))
        reference_first.requires_grad_(step in (2, 3))

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(ours, slice_of(batch, world.rank, world.size))
            loss.backward()
            return loss

        assert optimizer.step(closure).dim() == 0
        reference.zero_grad()
        sum(loss_of(alone, slice_of(batch, rank, world.size)) / world.size for rank in range(world.size)).backward()
        reference.step()
        assert difference(ours, alone, buffers=False) <= EXACT, step


@on_ranks(2, 3)
def test_a_scheduler_made_before_the_distributed_optimizer_sets_its_rate(world):
    hvd.init()
    model = build("plain")
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    inner.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1  # on the root, and on those who have loaded its state


@on_ranks(2)
def test_a_zero_optimizer_of_the_same_parameters_replaces_it(world):
    hvd.init()
    model, batch = build("plain"), batches("plain", 1, 4)[0]
    hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, world.comm, lr=0.1)
    for _ in range(2):  # the second pass without a step of Horovod's optimizer would be an error
        loss_of(model, batch).backward()
        optimizer.step()


@on_ranks(2)
def test_parameters_that_differ_between_ranks_are_refused(world):
    hvd.init()

    def trained(rate, steps, broadcast=True):
        torch.manual_seed(0 if broadcast else world.rank)
        model = nn.Linear(3, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate), model.named_parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

    refuses("broadcast_parameters", trained, 0.1, 1, broadcast=False)
    refuses("learning rates", trained, 0.1 * (world.rank + 1), 2)
    trained(0.1, 10)
