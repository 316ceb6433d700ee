"""ZeRO stage 3 beside its values (test_parity.py): what is whole when, payload, mixed precision and refusals."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn

import dtlib
from dtlib.gradients.precision import MasterWeights
from dtlib.gradients.shard_info import note
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.sharded import fully_shard, units_of
from tests.cases import refuses
from tests.models import (
    EXACT,
    batches,
    build,
    difference,
    difference_of_values,
    loss_of,
    seeded,
    sgd,
    slice_of,
    train,
    train_alone,
    units,
)
from tests.ranks import on_ranks

STEPS = 3


def sharded(model, comm, **options):
    for module in units(model):
        fully_shard(module, comm, **options)
    return fully_shard(model, comm, **options)


@on_ranks(2, 3)
def test_bfloat16_follows_stage_1(world):
    comm, data = world.comm, batches("plain", STEPS, 4 * world.size, torch.bfloat16)
    theirs = build("plain", torch.bfloat16)
    zero = ZeroOptimizer(theirs.parameters(), torch.optim.SGD, comm, lr=0.1, momentum=0.9)
    ours = sharded(build("plain", torch.bfloat16), comm)
    masters = MasterWeights(p for p in ours.parameters() if p.requires_grad)
    optimizer = torch.optim.SGD(masters.masters, lr=0.1, momentum=0.9)
    for batch in data:
        loss_of(theirs, slice_of(batch, comm.rank, comm.size)).backward()
        zero.step()
        loss_of(ours, slice_of(batch, comm.rank, comm.size)).backward()
        masters.take_gradients()
        optimizer.step()
        masters.copy_to_parameters()
        ours.zero_grad()
    # Units cut the ring's sums elsewhere, so gradients may round to another 16-bit number; see test_zero.py.
    assert difference_of_values(ours, theirs, comm) <= 0.01


@on_ranks(2, 3)
def test_averages_of_several_backward_passes_add_up(world):
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    fully_shard(model, world.comm)
    for passes in (1, 2, 3):
        model(torch.full((1, 3), world.rank + 1.0, dtype=torch.float64)).sum().backward()
        assert (model.weight.grad.clone() == passes * (world.size + 1) / 2).all()


@on_ranks(2, 3, 4)
def test_payload_is_one_and_a_half_times_that_of_data_parallelism(world):
    payload_is_that_of_the_formula(world, True)
    payload_is_that_of_the_formula(world, False)


def payload_is_that_of_the_formula(world, reshard):
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
    for unit in (model[0], model[2], model):
        fully_shard(unit, world.comm, reshard_after_forward=reshard)
    flat = sum(f.shards.length * world.size for module in (model[0], model[2]) for f in module._unit.flats)
    model(torch.randn(4, 7)).sum().backward()
    with dtlib.trace() as trace:
        model(torch.randn(4, 7)).sum().backward()
    once = 4 * flat * (world.size - 1) // world.size  # of float32
    assert trace.sent("reduce_scatter")[1] == once
    assert trace.sent("all_gather")[1] == once * (2 if reshard else 1)
    assert trace.sent("all_reduce")[1] <= 2 * 4 * world.size  # which parameters were used: a byte a parameter
    with dtlib.trace() as trace, torch.no_grad():
        model(torch.randn(4, 7))
    assert trace.sent()[1] == once


def gathered(model) -> list[str]:
    """The units that are whole at this moment."""
    return [
        name for name, module in model.named_modules()
        if "_unit" in module.__dict__ and module._unit.flats and not any(flat.is_free() for flat in module._unit.flats)
    ]  # fmt: skip


@on_ranks(2)
def test_nobody_keeps_the_whole_parameters(world):
    model = build("transformer")
    originals = [weakref.ref(parameter) for parameter in model.parameters()]
    sharded(model, world.comm)
    gc.collect()
    assert not any(reference() is not None for reference in originals)


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [False, True])
def test_only_the_units_that_compute_are_whole(world, prefetch):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    for layer in [*model, model]:
        fully_shard(layer, world.comm, prefetch=prefetch)
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(gathered(model)), prepend=True)
    for _ in range(2):
        seen.clear()
        out = model(torch.randn(2, 4))
        assert gathered(model) == []
        out.sum().backward()
        assert gathered(model) == []
    # The hook runs before that of the unit, which frees it.
    assert [names[0] for names in seen] == ["0", "1", "2", "3"]
    assert [len(names) for names in seen] == ([2, 2, 2, 1] if prefetch else [1, 1, 1, 1])
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == 4 * 4 * 10  # of 20 float32 a layer each rank has 10


@on_ranks(2)
def test_units_are_prefetched_by_a_thread_on_a_slow_network(world):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in [*model, model]:
        fully_shard(layer, world.comm.emulate_network(latency=1e-3, bandwidth=1e9))
    assert model._unit.progress == "thread" and model._unit.prefetch
    for _ in range(3):
        model(torch.ones(4, 8)).square().sum().backward()
        assert gathered(model) == []


@on_ranks(2, 3)
def test_evaluation_and_exceptions(world):
    data, comm = batches("plain", STEPS, 4 * world.size), world.comm
    reference = build("plain")
    train_alone(reference, sgd(reference), data)
    ours = sharded(build("plain"), comm)
    broken = ours.second.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours(data[0][0])
    broken.remove()
    assert gathered(ours) == []
    hook = []
    handle = ours.first.register_forward_hook(lambda m, i, out: hook.append(out.register_hook(lambda grad: 1 / 0)))
    with pytest.raises(ZeroDivisionError):
        ours(data[0][0]).sum().backward()
    handle.remove()
    comm.barrier()
    # Gradients of the second layer had left: ranks that differ in that would be out of step.
    refuses(r"interrupted while gradients were in flight", ours, data[0][0])
    ours = sharded(build("plain"), comm)
    optimizer = sgd(ours)
    for batch in data:
        loss_of(ours, slice_of(batch, comm.rank, comm.size)).backward()
        with torch.no_grad():
            before = ours.eval()(batch[0])
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(before, ours.train()(batch[0]))
        optimizer.zero_grad()
    assert difference_of_values(ours, reference, comm) <= EXACT


@on_ranks(2)
def test_what_it_cannot_do_is_refused(world):
    model, comm = build("transformer"), world.comm
    fully_shard(model.embedding, comm)
    refuses(r"output.weight is shared with weight of another unit", fully_shard, model, comm)
    refuses("is already a unit", fully_shard, model.embedding, comm)
    refuses("weight is on the meta device", fully_shard, nn.Linear(2, 2, device="meta"), comm)
    refuses("weight is complex64", fully_shard, nn.Linear(2, 2, dtype=torch.complex64), comm)
    refuses(r"The models differ: (weight|bias) is", fully_shard, nn.Linear(2, 2 + world.rank), comm)


@on_ranks(2, 3)
def test_whole_parameters_are_summoned_and_what_rank_0_changes_holds(world):
    reference = build("transformer", seed=3)
    model = sharded(build("transformer"), world.comm)
    with model.summon_full_params():
        assert {name: value.shape for name, value in model.state_dict().items()} == {
            name: value.shape for name, value in reference.state_dict().items()
        }
        assert model.output.weight is model.embedding.weight
        assert difference(model, build("transformer")) == 0
        if world.rank == 0:
            model.load_state_dict(reference.state_dict())
        refuses("leave that context", model, batches("transformer", 1, 2)[0][0])
        assert model._unit._uses == 0, "a refused pass counts as one that has ended, and no later one frees the unit"
    assert difference_of_values(model, reference, world.comm) == 0
    data = batches("transformer", 2, 4 * world.size)
    train_alone(reference, sgd(reference), data)
    train(model, sgd(model), data, world.comm)
    assert difference_of_values(model, reference, world.comm) <= EXACT


@dataclasses.dataclass
class Output:
    values: torch.Tensor


class Wrapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return Output(self.layer(x))


@on_ranks(2)
def test_what_goes_wrong_without_a_word_elsewhere(world):
    batch = batches("plain", 1, 8)[0]
    mine = slice_of(batch, world.rank, 2)

    def fresh():
        return sharded(build("plain"), world.comm)

    def meddle(change, words):
        model = fresh()
        change(model)
        refuses(words, model, batch[0])

    meddle(lambda model: model.requires_grad_(True), "bias was unfrozen after fully_shard")
    meddle(lambda model: model.requires_grad_(False), "weight was frozen after fully_shard")
    meddle(lambda model: model.float(), "weight was converted or moved after fully_shard")
    state = {name: value.clone() for name, value in fresh().state_dict().items()}
    meddle(lambda model: model.load_state_dict(state, assign=True), "was replaced after fully_shard")
    meddle(lambda model: model.second.weight.register_hook(lambda grad: 2 * grad), "given a hook of its gradient")
    hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda grad: 2 * grad)
    refuses("weight has a gradient hook", fully_shard, hooked)
    model = fresh()
    refuses("cannot be copied", copy.deepcopy, model)
    loss_of(model, mine).backward()
    refuses("clip with clip_grad_norm_ of", nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    reference = build("plain")
    loss_of(reference, batch).backward()
    norm = nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    assert abs(model.clip_grad_norm_(1e9) - norm) <= EXACT
    refuses("create_graph=True", loss_of(fresh(), mine).backward, create_graph=True)
    cut = nn.Linear(2, 2)
    note(cut.weight, tensor=(world.rank, world.size))  # of which the second is no rank here
    words = "other ranks have other shards of layers"
    refuses(words, fully_shard(cut, world.comm).clip_grad_norm_, 1.0)
    # What stayed here in no_sync() is dropped by zero_grad() of the optimizer.
    model = fresh()
    optimizer = sgd(model)
    with model.no_sync():
        (loss_of(model, mine) * 7).backward()
    optimizer.zero_grad()
    loss_of(model, mine).backward()
    optimizer.step()
    sgd(reference).step()
    assert difference_of_values(model, reference, world.comm) <= EXACT
    wrapping, alone = Wrapping().double(), Wrapping().double()
    fully_shard(wrapping.layer), fully_shard(wrapping)
    with wrapping.summon_full_params():
        alone.load_state_dict(wrapping.state_dict())
    wrapping(mine[0]).values.square().mean().backward()
    alone(batch[0]).values.square().mean().backward()
    got = torch.cat(world.comm.all_gather_object(wrapping.layer.bias.grad.clone()))
    torch.testing.assert_close(got, alone.layer.bias.grad, rtol=0, atol=1e-12)


def test_units_are_the_repeated_layers_that_share_nothing():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    assert units_of(encoder) == list(encoder.layers)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[3].weight = tied[0].weight
    assert units_of(tied) == [tied[2]]


class Branches(nn.Module):
    """Two layers, of which an input uses one."""

    def __init__(self):
        super().__init__()
        self.both = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
        self.both[1].requires_grad_(False)

    def forward(self, x, which):
        return self.both[which](x) + x


@on_ranks(2)
def test_forward_passes_before_a_backward_pass_are_those_of_one_process(world):
    def losses(model, rank):
        for number, which in enumerate((rank == 0, rank == 1)):  # ranks use the layers in another order
            x = torch.full((1, 3), rank + number + 1.0, dtype=torch.float64, requires_grad=True)
            yield model(x, int(which)).square().sum()

    world.comm.time_limit = 20
    for whole_between in (False, True):
        model = seeded(Branches)
        ours = fully_shard(seeded(Branches), world.comm, reshard_after_forward=not whole_between)
        optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (model, ours)]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(sum(losses(model, rank)) / 2 for rank in range(2)).backward()
            next(losses(ours, world.rank))  # of which nobody computes gradients
            sum(losses(ours, world.rank)).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert difference_of_values(ours, model, world.comm) <= EXACT
    world.comm.time_limit = None
