"""Pipelines beside their values (test_parity.py): nested tensors, cuts, tied weights, headers and refusals."""

import pytest
import torch
from torch import nn

from benchmarks.peers import torch_group
from dtlib import schedule as schedules
from dtlib.comm.watch.recorder import recording
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline import (
    LayerSpec,
    Linear,
    PipelineModule,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubbleH1,
    TiedLayerSpec,
)
from dtlib.parallel.pipeline.stage import _recomputed
from tests.cases import refuses
from tests.models import OPTIMIZERS, apart
from tests.ranks import on_ranks

SCHEDULES = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zb-h1": ScheduleZeroBubbleH1
}  # fmt: skip
STEPS = 3
WORDS, WIDTH = 11, 6


def layers(count):
    """Layers of different sizes; a weight is tied between the first and the last."""
    inner = [
        LayerSpec(Linear, WIDTH, WIDTH) if i % 2 else LayerSpec(nn.LayerNorm, WIDTH) for i in range(count - 2)
    ]  # fmt: skip
    embed = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH)
    head = TiedLayerSpec("words", nn.Linear, WIDTH, WORDS)
    return [embed, *inner, head]


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def weighted_sum(output, cotangent):
    return (output * cotangent).sum(-1).mean()


def batches(samples, dtype=torch.float64, length=4):
    """Texts of two lengths, each with a random cotangent of the output."""
    torch.manual_seed(3)
    sizes = [(samples, length + step % 2) for step in range(STEPS)]
    return [(torch.randint(0, WORDS, size), torch.randn(*size, WORDS).to(dtype)) for size in sizes]


def trained_alone(specs, optimizer, data, dtype, comm):
    """All layers in one process, with the same values; ``losses`` are those of all steps."""
    model = PipelineModule(specs, 1, weighted_sum, comm=comm.split(comm.rank)).to(dtype)
    optimizer, model.losses = OPTIMIZERS[optimizer](model), []
    for x, y in data:
        loss = weighted_sum(model(x), y.to(dtype))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.losses.append(loss.detach())
    return model


def difference(reference, module) -> float:
    """Between the layers of this rank and those of the unsplit model."""
    theirs = dict(reference.layers.named_parameters(remove_duplicate=False))
    return max((apart(mine, theirs[name]) for name, mine in module.layers.named_parameters()), default=0.0)


class Backwards(ScheduleGPipe):
    @staticmethod
    def order(ranks, microbatches, stages):
        return [
            actions[:microbatches] + actions[microbatches:][::-1] for actions in schedules.gpipe(ranks, microbatches)
        ]


@on_ranks(2)
def test_what_it_cannot_do_is_refused(world):
    comm, linear = world.comm, nn.Linear(2, 2)
    specs = [LayerSpec(nn.Linear, 2, 2) for _ in range(3)]
    for stages, method, words in (
        (3, "parameters", r"num_stages=3\): the stages need 3 ranks, but there are 2: use a divisor of 2"),
        (2, (0, 3), r"partition_method=\[0, 3\] does not cut 3 layers into 2 stages: pass 3 rising numbers"),
        (2, "by-eye", "partition_method='by-eye': choose 'parameters'"),
        (2, "time", "pass sample=x"),
        (0, "parameters", r"num_stages=0\): pass whole numbers from 1 on"),
    ):
        refuses(words, PipelineModule, specs, stages, partition_method=method)
    refuses(r"num_stages=3, stages_per_rank=2\): pass whole numbers", PipelineModule, specs, 3, stages_per_rank=2)
    words = r"num_stages=2, stages_per_rank=0\): pass whole numbers from 1 on, and a divisor"
    refuses(words, PipelineModule, specs, 2, stages_per_rank=0)
    words = "Layers 0 and 2 share the parameter weight, but are on stages 0 and 1, so each"
    refuses(words, PipelineModule, [linear, nn.Tanh(), linear], 2)
    several = PipelineModule([*specs, *specs], 4, stages_per_rank=2)
    refuses("This rank has 2 stages: pass stages", several, torch.zeros(1, 2))
    refuses("1 layers cannot be cut into 2 stages", PipelineModule, specs[:1], 2)
    refuses(r"stage_index=\d\): rank \d of 2 has stages \[\d\] of 2", PipelineStage, linear, 1 - world.rank, 2, comm)
    stage = PipelineStage(linear, world.rank, 2, comm)
    refuses("", ScheduleGPipe, stage, 0)
    words = r"stages 0, 2 of 4|stages 1, 3 of 4"
    refuses(words, ScheduleInterleaved1F1B, [PipelineStage(linear, world.rank, 4, comm)], 4)
    refuses(rf"stage {world.rank} does B of micro-batches \[1, 0\]; messages come in the", Backwards, stage, 2)
    several = [PipelineStage(nn.Linear(2, 2), index, 4, comm) for index in (world.rank, world.rank + 2)]
    refuses(r"ScheduleGPipe runs stages .* for several stages per rank, use", ScheduleGPipe, several, 2)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=torch_group(world))
    words = r"DistributedDataParallel would not average .* wrap the stage in dtlib\.parallel\.data"
    refuses(words, PipelineStage, ddp, world.rank, 2, comm)
    schedule, x = ScheduleGPipe(stage, 4), torch.zeros(4, 2)
    with torch.no_grad():
        refuses(r"step\(\) cannot compute gradients under no_grad: call eval", schedule.step, x, target=x)
    if world.rank == 1:
        refuses(r"step\(\) on the last stage needs a loss: ScheduleGPipe\(\.\.\., loss_fn\)", schedule.step, target=x)
    else:
        refuses("3 samples cannot be cut into 4 micro-batches", schedule.step, torch.zeros(3, 2))
        refuses("needs the inputs", schedule.step)
        for inputs, words in (
            ((torch.tensor(1.0),), r"tensors of shapes \(\): the first dimension of each is the samples"),
            ((x, torch.zeros(2, 2)), r"shapes \(4, 2\), \(2, 2\): the first dimension of each"),
            ((["a", "b"],), "tensors of shapes none: the first"),
            ((x, {"y": torch.zeros(4).numpy()}), "have a ndarray, which cannot be cut"),
            ((nn.utils.rnn.pack_sequence([torch.zeros(2)] * 4),), "have a PackedSequence, which cannot be cut"),
        ):
            refuses(words, schedule.step, *inputs)
    comm.barrier()


@on_ranks(3)
def test_ranks_without_a_stage_are_refused_on_all_of_them(world):
    specs = [LayerSpec(nn.Linear, 2, 2) for _ in range(3)]
    words = r"num_stages=2\): the stages need 2 ranks, but there are 3: pass a comm"
    refuses(words, PipelineModule, specs, 2, comm=world.comm)
    words = r"num_stages=2\): stages cannot be divided equally among 3 ranks"
    refuses(words, PipelineStage, nn.Linear(2, 2), min(world.rank, 1), 2, world.comm)


class Nested(nn.Module):
    """Takes tensors in a tuple and a dictionary, beside what is none; in place first."""

    def __init__(self):
        super().__init__()
        self.layer = Linear(3, 3)

    def forward(self, pair, scale=1, **named):
        (a, b, nothing), bias = pair, named["more"]["bias"]
        assert nothing is None and len(a) == len(b) == len(bias)
        return self.layer(a * scale + b) + bias


class Doubled(nn.Module):
    """Changes what it gets in place; takes and gives two tensors, of which the second is cut into by nobody."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x.mul_(2).tanh()), x


def nested_loss(output, target):
    (first, second), (a, more) = output, target
    return nn.functional.mse_loss(first, a) + nn.functional.mse_loss(second, more["b"])


@on_ranks(1, 2)
def test_nested_tensors_are_cut_and_layers_work_in_place(world):
    nested_tensors_are_cut(world, recompute=False)
    nested_tensors_are_cut(world, recompute=True)


def nested_tensors_are_cut(world, recompute):
    def made():
        torch.manual_seed(0)
        return [Nested().double(), Doubled().double()]

    a, b, bias, y, z = torch.randn(5, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    arguments, named, target = ((a, b, None),), {"scale": 3, "more": {"bias": bias}}, (y, {"b": z})
    whole, mine, own = made(), made(), range(world.rank, 2, world.size)
    expected = whole[1](whole[0](*arguments, **named))
    nested_loss(expected, target).backward()
    stages = [PipelineStage(mine[i], i, 2, world.comm) for i in own]
    schedule = (ScheduleInterleaved1F1B if world.size == 1 else ScheduleZeroBubbleH1)(stages, 2, nested_loss, recompute)
    first, last = 0 in own, 1 in own
    output = schedule.step(*(arguments if first else ()), target=target if last else None, **(named if first else {}))
    for i in own:
        for ours, theirs in zip(mine[i].parameters(), whole[i].parameters(), strict=True):
            assert (ours.grad - theirs.grad).abs().max() <= 1e-12
    again = schedule.eval(*(arguments if first else ()), target=target if last else None, **(named if first else {}))
    if last:
        for outputs in (output, again):
            assert all((ours - theirs).abs().max() <= 1e-12 for ours, theirs in zip(outputs, expected, strict=True))
        assert not output[0].requires_grad


class Gives(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return {"dict": {"a": x}, "str": "text", "NoneType": None, "tuple of Tensor, NoneType": (x, None)}[self.what]


@on_ranks(2)
def test_what_is_no_tensor_is_not_given_to_the_next_stage(world):
    x = torch.zeros(2, 2)
    for kind in ("dict", "str", "NoneType", "tuple of Tensor, NoneType"):
        stage = PipelineStage(Gives(kind), world.rank, 2, world.comm)
        schedule = ScheduleGPipe(stage, 2, nn.functional.mse_loss)
        if world.rank == 0:
            refuses(f"Stage 0 returned a {kind}: return a tensor, or", schedule.eval, x)
            refuses(r"ended with DtlibError, and its messages may .* create a new one", schedule.eval, x)
    # The last one may give what it likes.
    output = ScheduleGPipe(PipelineStage(Gives("dict"), 0, 1, world.comm.split(world.rank)), 2).eval(x)
    assert output["a"].shape == (2, 2)


class Reuses(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("room", torch.zeros(1, 2))

    def forward(self, x):
        return self.room.copy_(x)


@on_ranks(2)
def test_a_stage_that_changes_what_it_has_given_is_refused(world):
    stage = PipelineStage(nn.Identity() if world.rank else Reuses(), world.rank, 2, world.comm)
    schedule = ScheduleGPipe(stage, 2)
    if world.rank == 0:
        words = "Stage 0 changed in place its output of the previous micro-batch"
        refuses(words, schedule.eval, torch.zeros(2, 2))


class Fussy(nn.Linear):
    """Raises at its first micro-batch, when the others have long been sent."""

    def forward(self, x):
        if not hasattr(self, "called"):
            self.called = True
            raise ValueError("a mistake of the learner's")
        return super().forward(x)


@on_ranks(2)
def test_a_step_that_was_cut_short_leaves_no_stale_messages_to_the_next(world):
    comm = world.comm
    stage = PipelineStage((Fussy if world.rank else nn.Linear)(2, 2), world.rank, 2, comm)
    schedule = ScheduleGPipe(stage, 2)
    if world.rank == 0:
        schedule.eval(torch.ones(4, 2))
    else:
        refuses("a mistake", schedule.eval, error=ValueError)
        refuses("A step of this ScheduleGPipe ended with ValueError, and its messages", schedule.eval)
    schedule = ScheduleGPipe(stage, 2)
    torch.manual_seed(0)
    whole, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.zeros(4, 2)
    stage.submodule.load_state_dict(whole[world.rank].state_dict())
    output = schedule.eval(*([x] if world.rank == 0 else []))
    assert world.rank == 0 or torch.equal(output, whole(x))


@on_ranks(1, 2)
def test_recomputation_moves_statistics_once(world):
    def made():
        torch.manual_seed(0)
        first = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
        return [nn.Sequential(first, nn.BatchNorm1d(4), nn.Dropout(0.5)), nn.Linear(4, 3)]

    x, y = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(0))
    own, found = range(world.rank, 2, world.size), []
    for recompute in (False, True):
        modules = made()
        stages = [PipelineStage(modules[i], i, 2, world.comm) for i in own]
        schedule = (ScheduleInterleaved1F1B if world.size == 1 else ScheduleGPipe)(
            stages, 4, nn.functional.mse_loss, recompute
        )
        torch.manual_seed(1)
        for _ in range(2):
            schedule.step(*([x] if 0 in own else []), target=y if 1 in own else None)
        found.append(
            [t for i in own for t in (*modules[i].state_dict().values(), *(p.grad for p in modules[i].parameters()))]
        )
    for once, anew in zip(*found, strict=True):
        torch.testing.assert_close(once, anew)


class Counting(nn.Module):
    """What a measurement may leave behind: statistics, random numbers, gradients; gives a tuple."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.layer(self.norm(x))), x


@on_ranks(4)
def test_cuts_by_time_leave_nothing_behind_and_are_the_same_everywhere(world):
    """Two pipelines side by side, which both must be cut as rank 0 measured."""
    counting = Counting()
    specs = [counting, lambda pair: pair[0] + pair[1], LayerSpec(nn.ReLU, inplace=True), LayerSpec(nn.Linear, 4, 4)]
    before, state = {k: v.clone() for k, v in counting.state_dict().items()}, torch.get_rng_state()
    module = PipelineModule(specs, 2, partition_method="time", sample=torch.randn(8, 4, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in counting.state_dict().items())
    assert all(parameter.grad is None for parameter in counting.parameters())
    assert len({tuple(cuts) for cuts in world.comm.all_gather_object(module.cuts)}) == 1
    with pytest.raises(DtlibError, match="could not measure layer 1 with the sample: RuntimeError: "):
        PipelineModule([nn.Linear(4, 4), nn.Linear(3, 3)], 2, partition_method="time", sample=torch.zeros(2, 4))


@on_ranks(2)
def test_tied_weights_that_are_frozen_unused_or_loaded(world):
    def tied():
        return PipelineModule([
            TiedLayerSpec("w", nn.Linear, 3, 3, bias=False), TiedLayerSpec("w", nn.Linear, 3, 3, bias=False)
        ], 2)  # fmt: skip

    module = tied()
    (weight,) = module.parameters()
    module.reduce_tied_gradients()
    assert weight.grad is None, "nobody used it"
    if world.rank == 0:
        weight.requires_grad_(False)
    refuses(r"tied weight of shape \(3, 3\) is frozen on 1 of its 2 stages", module.reduce_tied_gradients)
    weight.requires_grad_(True)
    weight.grad = torch.zeros(3, 3).to_sparse() if world.rank == 0 else None
    words = r"tied weight of shape \(3, 3\) has a sparse gradient: build its layers with"
    refuses(words, module.reduce_tied_gradients)
    module = tied()
    module.load_state_dict({k: torch.ones(3, 3) for k in module.state_dict()}, assign=True)  # other Parameters
    (weight,) = module.parameters()
    weight.grad = torch.full((3, 3), world.rank + 1.0)
    module.reduce_tied_gradients()
    assert torch.equal(weight.grad, torch.full((3, 3), 3.0)) and module.counted(weight) == (world.rank == 0)


def test_cuts():
    from dtlib.parallel.pipeline.cuts import balanced_cuts

    assert balanced_cuts([1, 1, 1, 1], 2) == [0, 2, 4]
    assert balanced_cuts([9, 1, 1, 1], 3)[1] == 1
    assert balanced_cuts([0, 0, 0], 3) == [0, 1, 2, 3]


def test_a_linear_layer_in_two_halves():
    from dtlib.parallel.pipeline import defer_weight_gradients

    torch.manual_seed(0)
    ours, x = Linear(3, 4).double(), torch.randn(2, 5, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w, b: _apply(ours, x, w, b), (x, ours.weight, ours.bias))
    ours(x).square().sum().backward()
    whole = [p.grad.clone() for p in (*ours.parameters(), x)]
    ours.zero_grad()
    x.grad = None
    with defer_weight_gradients() as halves:
        ours(x).square().sum().backward()
    assert ours.weight.grad is None and torch.equal(x.grad, whole[2]) and len(halves) == 1
    halves[0]()
    assert torch.equal(ours.weight.grad, whole[0]) and torch.equal(ours.bias.grad, whole[1])
    halves[0]()  # adds, and leaves no graph behind
    torch.testing.assert_close(ours.weight.grad, 2 * whole[0])
    assert not ours.weight.grad.requires_grad


def test_a_linear_layer_under_create_graph_and_autocast():
    torch.manual_seed(0)
    ours, plain = Linear(3, 4).double(), nn.Linear(3, 4).double()
    plain.load_state_dict(ours.state_dict())
    x, found = torch.randn(5, 2, 3).double().requires_grad_(), []
    for layer in (ours, plain):
        loss = layer(x).tanh().square().sum()
        gradients = torch.autograd.grad(loss, (x, *layer.parameters()), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        found.append(torch.autograd.grad(penalty, (x, *layer.parameters())))
    assert max(map(apart, *found)) <= 1e-12
    narrow, found = x.detach().float(), []
    for layer in (ours.float(), plain.float()):
        with torch.autocast("cpu", torch.bfloat16):
            layer(narrow).square().sum().backward()
        found.append([parameter.grad for parameter in layer.parameters()])
    assert all(torch.equal(mine, other) for mine, other in zip(*found, strict=True))


class Forces(nn.Module):
    """Takes a gradient in its forward pass, whose gradients of weights are not asked for."""

    def __init__(self):
        super().__init__()
        self.layer = Linear(3, 3)

    def forward(self, x):
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(inner).square().sum(), inner)
        return self.layer(x + slope)


@on_ranks(1)
def test_gradients_within_a_layer_are_not_those_of_its_weights(world):
    torch.manual_seed(0)
    ours, plain, x = Forces().double(), Forces().double(), torch.randn(4, 3).double()
    plain.load_state_dict(ours.state_dict())
    nn.functional.mse_loss(plain(x), torch.zeros_like(x)).backward()
    schedule = ScheduleGPipe(PipelineStage(ours, 0, 1, world.comm), 2, nn.functional.mse_loss, recompute=True)
    schedule.step(x, target=torch.zeros_like(x))
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() <= 1e-12


def test_a_linear_layer_adds_to_gradients_where_nobody_watches():
    from dtlib.parallel.pipeline.linear import defer_weight_gradients, weights_at_once

    torch.manual_seed(0)
    ours, plain = Linear(3, 4).double(), nn.Linear(3, 4).double()
    plain.load_state_dict(ours.state_dict())
    rows = torch.randn(3, 5, 3).double()
    for x in rows:
        plain(x).square().sum().backward()
        with weights_at_once():
            ours(x).square().sum().backward()
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() <= 1e-12
    seen = []
    ours.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    with defer_weight_gradients() as halves:
        ours(rows[0]).square().sum().backward()
    assert len(seen) == 1 and not halves, "a hook sees each gradient, when autograd has added it"


@on_ranks(2)
def test_what_a_header_cannot_say_is_refused(world):
    from dtlib.parallel.pipeline.edges import header_of, kinds_of, read_header, runs_of

    kinds = kinds_of([torch.zeros(2, 3, requires_grad=True), torch.zeros((), dtype=torch.int64)])
    assert read_header(header_of(kinds, 5)) == (kinds, 5)
    assert runs_of(list("aaabccb")) == [2, 1, 0, 0, 1, 0, 0]
    many, odd = kinds_of([torch.zeros(1, 1)] * 300), kinds_of([torch.zeros(1, dtype=torch.complex64)])
    refuses(r"gives 300 tensors to the next one, which do not fit .* 512 bytes: join some", header_of, many, 0)
    refuses(r"The output of a stage does not support complex64: use one of", header_of, odd, 0)
    stage = PipelineStage(nn.Linear(2, 2), world.rank, 2, world.comm)
    schedule = ScheduleGPipe(stage, 2, lambda output, target: output)
    x = torch.zeros(2, 2)
    if world.rank == 0:
        schedule.comm.time_limit = 1
        refuses("", schedule.step, x)
    else:
        refuses(r"loss_fn returned shape \(1, 2\): return one number", schedule.step, target=x)


@on_ranks(2)
def test_micro_batches_that_are_alike_are_announced_once(world):
    stage = PipelineStage(nn.Linear(2, 2), world.rank, 2, world.comm)
    schedule = ScheduleGPipe(stage, 4, nn.functional.mse_loss)
    for samples, headers in ((8, 1), (9, 2), (10, 2)):  # 2 2 2 2, then 3 2 2 2 and 3 3 2 2
        x = torch.zeros(samples, 2)
        arguments, target = ([x] if world.rank == 0 else []), x if world.rank else None
        with recording() as events:
            schedule.step(*arguments, target=target)
        messages, sent = (sum(getattr(event, name) for event in events) for name in ("messages", "bytes"))
        assert (messages, sent) == ((4 + headers, 8 * samples + 512 * headers) if world.rank == 0 else (4, 8 * samples))


@on_ranks(1)
def test_stages_of_one_rank_wait_for_no_messages(world):
    from dtlib.comm import waiting

    own = [PipelineStage(nn.Linear(2, 2), index, 2, world.comm) for index in range(2)]
    schedule = ScheduleInterleaved1F1B(own, 2, nn.functional.mse_loss)
    schedule.step(torch.zeros(2, 2), target=torch.zeros(2, 2))
    assert waiting.idle()


@on_ranks(4)
def test_actions_are_recorded_for_ranks_as_the_world_counts_them(world):
    module = PipelineModule([LayerSpec(nn.Linear, 2, 2)] * 2, 2)
    x = torch.zeros(2, 2)
    schedule = ScheduleGPipe(module.stages(), 2, nn.functional.mse_loss)
    with recording() as events:
        schedule.step(*([x] if 0 in module.stage_indices else []), target=x if 1 in module.stage_indices else None)
    assert {event.rank for event in events if event.kind == "phase"} == {world.rank}


class Growing(nn.Linear):
    """More features with each micro-batch, which no header of an earlier one can know."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x).repeat(1, self.calls)


@on_ranks(2)
def test_activations_that_change_shape_without_a_reason_are_refused(world):
    stage = PipelineStage(Growing(2, 2), world.rank, 2, world.comm)
    schedule = ScheduleGPipe(stage, 2, nn.functional.mse_loss)
    if world.rank == 0:
        words = r"gave activations of shapes \[\(1, 2\)\] and then \[\(1, 4\)\]: pad them"
        refuses(words, schedule.step, torch.zeros(2, 2))
    else:
        schedule.comm.time_limit = 1
        refuses("", schedule.step, target=torch.zeros(2, 2))


def _apply(layer, x, weight, bias):
    from dtlib.parallel.pipeline.linear import _Linear

    return _Linear.apply(x, weight, bias)


class ChangesBuffers(nn.Module):
    """Two names of one buffer, of which each pass replaces one; a third that only large inputs change."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", both := torch.ones(2))
        self.register_buffer("before", both)
        self.register_buffer("factor", torch.ones(2))

    def forward(self, x):
        self.before, self.mean = self.mean, self.mean + 1
        if x.max() > 1:
            self.factor = 3 * self.factor
        return self.layer(x) * self.mean * self.before * self.factor


def test_recomputed_passes_use_the_buffers_of_their_own_pass():
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        module = ChangesBuffers().double()
        inputs = [torch.full((1, 2), float(i), dtype=torch.float64) for i in (1, 2, 3)]
        outputs = [_recomputed(module, (x,), {}) if recomputed else module(x) for x in inputs]
        sum(output.sum() for output in outputs).backward()
        gradients.append(module.layer.weight.grad)
    assert torch.equal(*gradients)
