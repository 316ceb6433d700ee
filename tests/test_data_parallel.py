"""Data parallelism beside its values (test_parity.py): payload, joining, buffers, arguments and refusals."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dtlib
from benchmarks.peers import torch_group
from dtlib.gradients.buckets import buckets_of
from dtlib.gradients.same_model import PASSES
from dtlib.gradients.tokens import mean_over_tokens
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.batch_norm import SyncBatchNorm
from dtlib.parallel.data.plain import DataParallelHooks, DataParallelNaive
from tests.cases import all_cases, refuses
from tests.models import EXACT, apart, batches, build, difference, loss_of, sgd, slice_of, train_alone
from tests.ranks import on_ranks


def test_the_first_bucket_is_a_small_one_and_each_has_one_dtype():
    floats, halves = [torch.zeros(10)] * 6, [torch.zeros(10, dtype=torch.float16)] * 2  # of 40 and 20 bytes
    assert buckets_of(floats, 120, 80) == [[0, 1], [2, 3, 4], [5]]
    assert buckets_of(floats, 39, 39) == [[0], [1], [2], [3], [4], [5]]  # larger than the cap
    assert buckets_of([floats[0], halves[0], floats[1], halves[1], floats[2]], 80, 40) == [[0], [1, 3], [2, 4]]


@on_ranks(2, 3, 4)
def test_payload_is_that_of_the_ring_and_flags_are_a_line_of_their_own(world):
    size = world.size
    for algorithm in ("ring", None) if size == 2 else ("ring",):
        model = DataParallel(nn.Linear(12 * size, 20 * size, bias=False), world.comm, algorithm=algorithm)
        for _ in range(PASSES):  # which compare values
            model(torch.randn(4, 12 * size)).sum().backward()
        with dtlib.trace() as trace:
            model(torch.randn(4, 12 * size)).sum().backward()
        gradients = sum(parameter.nbytes for bucket in model.buckets for parameter in bucket.parameters)
        assert gradients == 4 * 240 * size * size
        # A flag for the one parameter and two of the pass travel behind the gradients, which the ring splits unevenly.
        _, sent = trace.sent("all_reduce")
        assert abs(sent - 2 * gradients * (size - 1) // size) <= 3 * 4 * (size - 1)


@on_ranks(2, 3, 4)
def test_ranks_that_run_out_of_batches_join(world):
    with all_cases() as case:
        for name in ("plain", "convolutional"):
            mine = batches(name, 2 + world.rank, 4, seed=world.rank)
            ours = DataParallel(build(name), world.comm)
            theirs = nn.parallel.DistributedDataParallel(
                build(name), process_group=torch_group(world), find_unused_parameters=True
            )
            for model in (ours, theirs):
                with model.join():
                    train_alone(model, sgd(model), mine)
            everyones = world.comm.all_gather_object([tensor.tolist() for tensor in ours.state_dict().values()])
            with case(name):
                assert difference(ours, theirs) <= EXACT
                assert all(values == everyones[0] for values in everyones)


@on_ranks(2, 3)
def test_a_parameter_that_only_some_ranks_use_counts_as_zero_on_the_others(world):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes, self.never = (nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, x, use):
            return self.always(x) + (self.sometimes(x) if use else 0)

    x = torch.ones(1, 2, dtype=torch.float64)
    for progress in ("inline", "thread"):
        model = DataParallel(Sometimes().double(), world.comm, bucket_cap_mb=1e-5, progress=progress)
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(x, use=world.rank == 1).sum().backward()
            assert (model.module.sometimes.weight.grad == 1 / world.size).all(), progress
            assert (model.module.always.weight.grad == 1).all()
            assert model.module.never.weight.grad is None
        model.zero_grad(set_to_none=False)
        model(x, use=False).sum().backward()
        assert (model.module.always.weight.grad == 1).all()


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
    comm = world.comm
    frozen = nn.Linear(2, 2).requires_grad_(False)
    refuses("no parameter of this model requires a gradient", DataParallel, frozen, comm)
    complex_ = nn.Linear(2, 2, dtype=torch.complex64)
    refuses("weight is complex64: convert it, or freeze it", DataParallel, complex_, comm)
    words = r"weight is \(2, 2\) float32 on rank 0 and \(2, 3\) float32 on rank 1"
    refuses(words, DataParallel, nn.Linear(2 + world.rank, 2), comm)
    refuses("bucket_cap_mb=0", DataParallel, nn.Linear(2, 2), comm, bucket_cap_mb=0)
    refuses("choose 'inline' or 'thread'", DataParallel, nn.Linear(2, 2), comm, progress="often")
    refuses("device_ids", DataParallel, nn.Linear(2, 2), device_ids=[world.rank], error=TypeError)
    assert DataParallel(nn.Linear(2, 2)).comm is dtlib.init().comm
    comm.barrier()


@on_ranks(2)
def test_a_model_may_be_wrapped_again(world):
    module = build("plain")
    for _ in range(3):
        model = DataParallel(module, world.comm)
    refuses("bucket_cap_mb=0", DataParallel, module, world.comm, bucket_cap_mb=0)  # the model stays wrapped
    with dtlib.trace() as trace:
        loss_of(model, batches("plain", 1, 4)[0]).backward()
    assert [event.name for event in trace.events if event.kind == "operation"] == ["all_reduce"]


@on_ranks(2, 3)
def test_a_rank_without_any_batch_joins_the_others(world):
    ours, reference, batch = DataParallel(build("plain"), world.comm), build("plain"), batches("plain", 1, 4)[0]
    with ours.join():
        if world.rank == 0:
            optimizer = sgd(ours)
            (loss_of(ours, batch) * world.size).backward()  # the others add zeros, and the mean is over all ranks
            optimizer.step()
    assert difference(ours, train_alone(reference, sgd(reference), [batch])) <= EXACT


@on_ranks(2)
def test_what_would_be_lost_without_a_word_is_refused(world):
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(checkpoint(self.layer, x, use_reentrant=True))

    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(3, 2))

        def forward(self, words):
            return nn.functional.embedding(words, self.table, sparse=True)

    def backward(model, x):
        model(x).sum().backward()

    x, comm = torch.ones(1, 2), world.comm
    words = r"got a second gradient .* use_reentrant=False"
    refuses(words, backward, DataParallel(Twice(), comm), torch.ones(1, 2, requires_grad=True))
    dtlib.reset()
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    model = DataParallel(module, comm)
    module[1].requires_grad_(True)
    refuses("unfrozen or replaced after the model was wrapped", model, x)
    refuses("sparse=False", DataParallel, nn.Embedding(3, 2, sparse=True), comm)
    refuses(r"copy model\.module instead", copy.deepcopy, model)
    model = DataParallel(nn.Linear(2, 2), comm)
    for hook in (lambda parameter: None, torch.Tensor.detach):  # which is in no module
        late = model.module.weight.register_post_accumulate_grad_hook(hook)
        refuses("weight was given a hook after the one", backward, model, x)
        late.remove()
    backward(model, x)
    refuses("converted or moved after it was wrapped", model.double(), x.double())
    refuses("A gradient is sparse", backward, DataParallel(Sparse(), comm), torch.tensor([1]))


@on_ranks(2, 3)
def test_mean_over_tokens_is_the_mean_over_unequal_batches(world):
    reference, [batch] = build("plain"), batches("plain", 1, 2 * world.size)
    loss_of(reference, batch).backward()
    model = DataParallel(build("plain"))
    first = sum(range(world.rank))  # rank 0 has nothing, rank 1 one sample, ...
    x, y = (one[first:] if world.rank == world.size - 1 else one[first : first + world.rank] for one in batch)
    mean_over_tokens(cross_entropy(model(x), y, reduction="none"), world.comm).backward()
    for (name, parameter), averaged in zip(reference.named_parameters(), model.parameters(), strict=True):
        if parameter.grad is None:
            assert averaged.grad is None, name
        else:
            torch.testing.assert_close(averaged.grad, parameter.grad, rtol=0, atol=EXACT, msg=name)


@on_ranks(2, 3)
def test_one_rank_that_runs_one_more_forward_pass_is_seen_by_all(world):
    x, y = batches("plain", 1, 4)[0]
    model = DataParallel(build("plain"))
    if world.rank:
        model(x)
    refuses("one rank skipped a forward pass", loss_of(model, (x, y)).backward)
    model.zero_grad()
    loss_of(model, (x, y)).backward()


# Batch normalisation over the batches of all ranks


@on_ranks(1, 2)
def test_options_of_batch_normalisation_are_those_of_torch(world):
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    for momentum, affine, tracks in ((None, True, True), (0.3, False, True), (0.1, True, False)):
        options = {"momentum": momentum, "affine": affine, "track_running_stats": tracks}
        theirs, ours = (nn.Sequential(nn.BatchNorm1d(3, **options)).double() for _ in range(2))
        ours = SyncBatchNorm.convert_sync_batchnorm(ours, world.comm)
        for _ in range(3):
            expected, got = theirs(x), ours(x.chunk(world.size)[world.rank])
        assert apart(got, expected.chunk(world.size)[world.rank]) <= EXACT, options
        if tracks:
            assert apart(ours[0].running_var, theirs[0].running_var) <= EXACT, options
        theirs.eval(), ours.eval()
        assert apart(ours(x), theirs(x)) <= EXACT, options


@on_ranks(2)
def test_batch_normalisation_refuses_other_shapes_and_join(world):
    layer = SyncBatchNorm(3)
    refuses("got 1 values per channel on all ranks together", layer, torch.ones(1 if world.rank else 0, 3))
    refuses(r"needs inputs of shape \(N, 3, ...\), and got \(4, 2\)", layer, torch.ones(4, 2))
    model = DataParallel(nn.Sequential(SyncBatchNorm(3, world.comm)), world.comm)
    refuses("join", model.join().__enter__)
    world.comm.barrier()


@on_ranks(2)
def test_what_conversion_to_batch_normalisation_of_all_ranks_keeps(world):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.append(model[1])  # one layer under two names
    seen = []
    handle = model[1].register_forward_hook(lambda *_: seen.append(1))
    model = SyncBatchNorm.convert_sync_batchnorm(model)
    assert model[1] is model[3] and isinstance(model[1], SyncBatchNorm)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3)
    torch.testing.assert_close(twin(x), model(x))
    assert twin[1].comm is model[1].comm and twin[1].weight is not model[1].weight
    assert len(seen) == 4
    handle.remove()
    model(x)
    assert len(seen) == 4
    assert model[1](x.bfloat16()).dtype == torch.bfloat16


class Scaled(nn.Module):
    """What it saves for the backward pass is a buffer, which differs between ranks until rank 0's holds for all."""

    def __init__(self, rank):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4).double(), nn.BatchNorm1d(4).double()
        self.register_buffer("scale", torch.full((4,), 1.0 + rank, dtype=torch.float64))

    def forward(self, x):
        return self.norm(self.linear(x)) * self.scale


@on_ranks(2, 3)
def test_a_model_runs_forward_as_often_as_it_likes_before_it_runs_backward(world):
    """As a discriminator and a siamese net do (pytorch#66504)."""

    def engine(stage):
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        return lambda model: dtlib.initialize(
            model=model, config=config, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), comm=world.comm
        )[0]

    def train(wrapped, x):
        step = getattr(wrapped, "step", None)
        optimizer = None if step else torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for a, b in x:
            loss = (wrapped(a) - wrapped(b).roll(1, 0)).pow(2).mean()
            if step:
                wrapped.backward(loss)
                step()
            else:
                optimizer.zero_grad()
                loss.backward()
                if type(wrapped) is DataParallelNaive:
                    wrapped.average_gradients()
                optimizer.step()

    def expected(x):
        """One process: the mean of the ranks' gradients, each with its own statistics of the batch."""
        torch.manual_seed(0)
        model = Scaled(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for pairs in zip(*x, strict=True):
            optimizer.zero_grad()
            for a, b in pairs:
                ((model(a) - model(b).roll(1, 0)).pow(2).mean() / world.size).backward()
            optimizer.step()
        return model

    x = torch.randn(world.size, 3, 2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wrappers = {
        "plain": lambda model: DataParallelNaive(model, world.comm),
        "hooks": lambda model: DataParallelHooks(model, world.comm),
        "full": lambda model: DataParallel(model, world.comm),
        **{f"engine, stage {stage}": engine(stage) for stage in range(4)},
    }
    with all_cases() as case:
        for name, wrap in wrappers.items():
            torch.manual_seed(0)
            model = Scaled(world.rank)
            wrapped = wrap(model)
            train(wrapped, x[world.rank])
            with case(name):
                whole = Scaled(0)
                if name.startswith("engine"):
                    wrapped.gather(whole)
                else:
                    whole.load_state_dict(model.state_dict())
                for key in ("linear.weight", "norm.weight", "scale"):
                    assert apart(whole.state_dict()[key], expected(x).state_dict()[key]) <= EXACT, key


@on_ranks(2, 3)
def test_buffers_are_those_of_rank_0_again_in_each_step(world):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += world.rank + 1
            return super().forward(x)

    model, x = DataParallel(Counting(), world.comm), torch.ones(2, 1)
    for step in range(3):
        model(x).sum().backward()
        assert model.module.count == step + world.rank + 1


@on_ranks(2)
def test_plain_classes_refuse_a_step_without_averages_and_other_values_on_a_rank(world):
    def trained(kind, average=True, load=False):
        model = kind(build("chain"), world.comm)
        optimizer = sgd(model)
        if load and world.rank == 1:
            model.module.load_state_dict(build("chain", seed=7).state_dict())
        for batch in batches("chain", 3, 8):
            optimizer.zero_grad()
            loss_of(model, slice_of(batch, world.rank, 2)).backward()
            if kind is DataParallelNaive and average:
                model.average_gradients()
            optimizer.step()

    refuses("gradients were not averaged", trained, DataParallelNaive, average=False)
    for kind in (DataParallelNaive, DataParallelHooks):
        refuses("parameters differ", trained, kind, load=True)
        trained(kind)
