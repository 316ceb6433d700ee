"""Pipelines, data parallelism, tensor parallelism and ZeRO on the axes of a mesh, against one process."""

import pytest
import torch
from torch import nn

import dtlib
from dtlib.comm.watch.recorder import recording
from dtlib.errors import DtlibError
from dtlib.parallel.data import DataParallel
from dtlib.parallel.pipeline import LayerSpec, PipelineModule, PipelineStage, Schedule1F1B
from dtlib.parallel.tensor import ParallelMLP
from dtlib.parallel.zero import ZeroOptimizer
from tests.cases import all_cases, refuses
from tests.models import EXACT, apart
from tests.ranks import on_ranks
from tests.test_pipeline import layers, loss_fn

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}}


def config(stage, schedule="1f1b", accumulate=4, **others):
    return {
        "train_batch_size": 16, "gradient_accumulation_steps": accumulate, "optimizer": ADAMW,
        "zero_optimization": {"stage": stage}, "gradient_clipping": 0.5, "pipeline": {"schedule": schedule}, **others,
    }  # fmt: skip


def plain_layers():
    kinds = (nn.Linear, 6, 8), (nn.LayerNorm, 8), (nn.Linear, 8, 8), (nn.Linear, 8, 3)
    return [LayerSpec(*kind) for kind in kinds]


def data_of(steps, tied):
    torch.manual_seed(5)
    if tied:
        words = [torch.randint(0, 11, (16, 5)) for _ in range(steps)]
        return [(w[:, :-1], w[:, 1:]) for w in words]
    return [(torch.randn(16, 6).double(), torch.randint(0, 3, (16,))) for _ in range(steps)]


def clipped(model, data, loss):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4), []
    for x, y in data:
        value = loss(model(x), y)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return losses


@on_ranks(4)
def test_two_pipelines_side_by_side_train_like_one_process(world):
    with all_cases() as case:
        for stage, schedule, tied in (
            (0, "1f1b", True), (0, "gpipe", False), (1, "1f1b", False), (2, "zero_bubble_h1", False),
            (0, "zero_bubble_h1", True),
        ):  # fmt: skip
            with case(stage, schedule, tied):
                assert pipelines_side_by_side(world, stage, schedule, tied) <= EXACT


def pipelines_side_by_side(world, stage, schedule, tied) -> float:
    """The largest difference of losses, parameters and a loss in evaluation from those of one process."""
    data, steps = data_of(3, tied), 4
    specs = layers(5) if tied else plain_layers()
    loss = loss_fn if tied else nn.functional.cross_entropy
    reference = PipelineModule(specs, 1, loss, comm=world.comm.split(world.rank)).double()
    expected = clipped(reference, data, loss)
    model = PipelineModule(specs, 2, loss).double()
    engine, *_ = dtlib.initialize(model=model, config=config(stage, schedule))
    mine = slice(8 * model.data_comm.rank, 8 * model.data_comm.rank + 8)  # of this pipeline

    def micro_batches(x, y):
        return zip(x[mine].chunk(steps), y[mine].chunk(steps), strict=True)

    errors = [apart(engine.train_batch(micro_batches(*batch)), its) for batch, its in zip(data, expected, strict=True)]
    theirs = dict(reference.layers.named_parameters(remove_duplicate=False))
    errors += [apart(parameter, theirs[name]) for name, parameter in model.layers.named_parameters()]
    x, y = data[0]
    return max(*errors, apart(engine.eval_batch(micro_batches(x, y)), loss(reference(x), y)))


@on_ranks(2)
def test_eval_batch_drops_nothing_and_moves_nothing(world):
    torch.manual_seed(0)
    frozen, layer = nn.BatchNorm1d(6).eval(), nn.BatchNorm1d(6)
    layers = [frozen, layer, nn.Dropout(0.5), LayerSpec(nn.Linear, 6, 3)]  # the same values everywhere
    model = PipelineModule(layers, 2, nn.functional.cross_entropy, partition_method=[0, 2, 4])
    settings = config(0, accumulate=2, train_batch_size=8)
    engine, *_ = dtlib.initialize(model=model, config=settings)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

    def batches(samples=8):
        return zip(x[:samples].tensor_split(2), y[:samples].tensor_split(2), strict=True)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    losses = [engine.eval_batch(batches()).item() for _ in range(2)]
    assert losses[0] == losses[1] and all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    if world.rank == 0:
        assert layer.training and not frozen.training
    else:
        assert all(module.training for module in model.modules())
    reference = PipelineModule(layers, 1, comm=world.comm.split(world.rank)).eval()
    for samples in (8, 7):  # 4 and 3: the mean is that of samples
        whole = nn.functional.cross_entropy(reference(x[:samples]), y[:samples]).item()
        assert abs(engine.eval_batch(batches(samples)).item() - whole) <= 1e-6
    refuses("needs 2 micro-batches, but data_iter ended after 1", engine.train_batch, iter([(x, y)]))


@on_ranks(4)
def test_accumulation_costs_stage_2_a_reduce_scatter_a_micro_batch(world):
    """What DeepSpeed refuses: it works, and this is its price on the wire."""
    sent = {}
    for stage in (1, 2):
        model = PipelineModule(plain_layers(), 2, nn.functional.cross_entropy).double()
        engine, *_ = dtlib.initialize(model=model, config=config(stage))
        x, y = data_of(1, False)[0]
        batches = list(zip(x[:8].chunk(4), y[:8].chunk(4), strict=True))
        with recording() as events:
            engine.train_batch(iter(batches))
        sent[stage] = sum(event.bytes for event in events if event.name == "reduce_scatter")
    assert sent[2] == 4 * sent[1] > 0


@on_ranks(4)
def test_what_a_pipeline_cannot_be_combined_with_is_refused(world):
    untied, tied = (PipelineModule(specs, 2) for specs in (plain_layers(), layers(5)))
    for model, settings, words in (
        (untied, config(3), "stage is 3, but a pipeline divides the parameters already"),
        (tied, config(1), "stage is 1, but tied layers of a pipeline need whole gradients"),
        (untied, config(0, "1b1f"), "pipeline.schedule is '1b1f': with runtime='dtlib' choose gpipe or 1f1b"),
        (untied, config(0, fp16={"enabled": True}), "use bf16"),
    ):
        refuses(words, dtlib.initialize, model=model, config=settings)
    engine, *_ = dtlib.initialize(model=untied, config=config(0))
    refuses(r"use train_batch\(\)", engine, torch.zeros(2, 6))
    interleaved = PipelineModule([*plain_layers(), nn.Tanh()], 4, stages_per_rank=2)
    refuses(r"train_batch\(\) runs one stage per rank", dtlib.initialize, model=interleaved, config=config(0))
    refuses(r"num_stages=3\): the stages need 3 ranks, but there are 4", PipelineModule, plain_layers(), 3)


@on_ranks(2)
def test_a_norm_of_parts_is_refused(world):
    words = "other ranks have other shards of layers"
    mlp = ParallelMLP(6, 8, world.comm)
    with pytest.raises(DtlibError, match=f"gradient_clipping is 0.5: {words}"):
        dtlib.initialize(model=mlp, config=config(0, accumulate=1), comm=world.comm.split(world.rank))
    optimizer = ZeroOptimizer(mlp.parameters(), torch.optim.SGD, world.comm.split(world.rank), lr=0.1)
    mlp(torch.zeros(1, 6)).sum().backward()
    refuses(r"clip_grad_norm_\(1.0\): .* clip with dtlib.parallel.tensor", optimizer.clip_grad_norm_, 1.0)


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def one_step(world, shape, stages) -> float:
    """Data, pipe and tensor axes at once: how far gradients of this rank's slice are from those of one process."""
    mesh = world.mesh(**shape)
    sizes = {axis: mesh[axis].size for axis in shape}
    alone = world.comm.split(world.rank)

    def block(i, comm):
        torch.manual_seed(i)
        return Block(ParallelMLP(6, 8, comm)).double()

    reference = nn.Sequential(*[block(i, alone) for i in range(stages)])
    torch.manual_seed(9)
    x, y = torch.randn(2, 8 * sizes["data"], 6).double()
    mse = nn.functional.mse_loss
    mse(reference(x), y).backward()
    place = mesh.coordinates
    mine = block(place["pipe"], mesh["tensor"])
    stage = PipelineStage(DataParallel(mine, mesh["data"]), place["pipe"], stages, mesh["pipe"])
    rows = slice(8 * place["data"], 8 * place["data"] + 8)
    target = y[rows] if stage.is_last else None
    Schedule1F1B(stage, 4, mse).step(*([x[rows]] if stage.is_first else []), target=target)
    theirs = reference[place["pipe"]]
    errors = [apart(mine.norm.weight.grad, theirs.norm.weight.grad)]
    for name, parameter in mine.mlp.named_parameters():
        whole, gradient = theirs.mlp.get_parameter(name).grad, parameter.grad
        if gradient.shape != whole.shape:
            axis = next(i for i in range(whole.dim()) if gradient.shape[i] != whole.shape[i])
            whole = whole.chunk(sizes["tensor"], axis)[place["tensor"]]
        errors.append(apart(gradient, whole))
    return max(errors)


@on_ranks(4)
def test_every_mesh_of_two_axes_on_four_ranks(world):
    with all_cases() as case:
        for data, pipe, tensor in ((2, 2, 1), (2, 1, 2), (1, 2, 2)):
            with case(data, pipe, tensor):
                assert one_step(world, {"data": data, "pipe": pipe, "tensor": tensor}, pipe) <= EXACT


@pytest.mark.nightly
@on_ranks(8)
def test_all_three_axes_on_eight_ranks(world):
    assert one_step(world, {"data": 2, "pipe": 2, "tensor": 2}, 2) <= EXACT
