"""Every strategy trains like one process that has the whole batch, and like torch's own class where there is one.

A row of the table below is a strategy, torch's class, and the cases that it runs: models with frozen, unused, tied and
twice used layers and batch normalisation; SGD with momentum and AdamW; accumulation and clipping; an uneven last batch;
float64 within 1e-12, float32 within twice the error of torch's class (where there is none, of one process), or 1e-5.
A row is one test for each number of ranks, which reports every case that fails.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import dtlib
import dtlib.horovod as hvd
from benchmarks.peers import torch_group
from dtlib import schedule as schedules
from dtlib.comm import as_communicator
from dtlib.parallel import context, expert, local
from dtlib.parallel.compression import PowerSGDState, TopKState, powerSGD_hook, top_k_hook
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.batch_norm import SyncBatchNorm
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive
from dtlib.parallel.expert.plain import MixtureOfExperts as PlainMixture
from dtlib.parallel.local import plain as plain_local
from dtlib.parallel.pipeline import Linear, PipelineModule, PipelineStage
from dtlib.parallel.pipeline.plain import step as plain_step
from dtlib.parallel.replicator import Replicator
from dtlib.parallel.tensor import ParallelMLP, clip_grad_norm_, whole_state_dict
from dtlib.parallel.tensor.plain import ParallelMLP as PlainParallelMLP
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from dtlib.parallel.zero.sharded import fully_shard
from tests import test_context, test_context_module, test_expert, test_local, test_pipeline, test_tensor
from tests.cases import all_cases
from tests.devices import DEVICE, of_one_process
from tests.models import (
    EXACT,
    MODELS,
    OPTIMIZERS,
    all_apart,
    apart,
    batches,
    build,
    full_values,
    loss_of,
    seeded,
    slice_of,
    train,
    train_alone,
    units,
)
from tests.ranks import on_ranks

STEPS = 3
SETTINGS = {"sgd": ("SGD", {"lr": 0.1, "momentum": 0.9}), "adamw": ("AdamW", {"lr": 0.01, "eps": 1e-4})}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    optimizer: str = "sgd"
    model: str = "plain"
    accumulate: int = 1
    clip: float | None = None
    uneven: bool = False  # the last batch is smaller, and slices differ by one sample
    dtype: torch.dtype = torch.float64
    joined: bool = False  # batch normalisation looks at the whole batch
    zeros: bool = False  # as in Horovod, an unused parameter has a gradient of zero

    @property
    def beside_torch(self) -> bool:
        """Torch's classes are slow, so they run some cases, and on the CPU, as gloo lacks operations on a GPU."""
        return not DEVICE and not self.uneven and (self.optimizer, self.accumulate) != ("sgd", 2)

    def __str__(self):
        facts = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return f"({', '.join(facts)})"

    def data(self, ranks: int):
        data = batches(self.model, STEPS * self.accumulate, 4 * ranks, self.dtype, cotangents=True)
        x, y = data[-1]
        if self.uneven:
            data[-1] = x[:-1], y[: -(len(y) // len(x))]
        return data

    def build(self, seed: int = 0):
        return build(self.model, self.dtype, seed)

    def optimizer_of(self, model):
        """An optimizer of what the model trains."""
        optimizer = OPTIMIZERS[self.optimizer](model)
        if self.zeros:
            optimizer.register_step_pre_hook(lambda *_: fill(model))
        return optimizer

    def train(self, model, world, optimizer=None, **options):
        optimizer = optimizer or self.optimizer_of(model)
        return train(model, optimizer, self.data(world.size), world, self.accumulate, self.clip, **options)


def fill(model):
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


PLAIN = [Case(), Case("adamw"), Case(dtype=torch.float32)]
HOOKED = [Case("adamw"), Case(dtype=torch.float32)]
WHOLE = [
    *(Case(), Case("adamw", uneven=True), Case("adamw", dtype=torch.float32)),
    *(Case(accumulate=2, clip=0.5), Case("adamw", accumulate=2, clip=0.5)),
]
ENGINE = [Case("adamw", accumulate=2, clip=0.5), Case(dtype=torch.float32)]
JOINED = [Case(joined=True), Case("adamw", uneven=True, joined=True)]
AWKWARD = ("plain", "convolutional", "transformer")
USED = ("chain", "convolutional", "transformer")  # all parameters are trained and used
GRAPHS = ("chain", "plain", "transformer")


@of_one_process
def alone(case: Case, ranks: int, dtype: torch.dtype = torch.float64) -> dict:
    """Parameters and buffers of one process that computes in ``dtype``, in float64."""
    data = [tuple(one.to(dtype) if one.is_floating_point() else one for one in batch) for batch in case.data(ranks)]
    model = replace(case, dtype=dtype).build()
    parts = 1 if case.joined else ranks
    train_alone(model, case.optimizer_of(model), data, parts, case.accumulate, case.clip)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value.detach().double() for name, value in values.items()}


def values_of(model, comm) -> dict:
    """Parameters and buffers, whole, in float64."""
    named = {**dict(model.named_buffers()), **full_values(model, comm)}
    return {name.removeprefix("module."): value.detach().double().clone() for name, value in named.items()}


# Torch's classes

_peers = {}


def peer_of(kind: Callable, world, case: Case) -> dict:
    """What torch's class has trained; computed once for all rows."""
    if (kind, case) not in _peers:
        _peers[kind, case] = values_of(kind(world, case), world.comm)
    return _peers[kind, case]


def ddp(world, case):
    model = case.build()
    unused = {"find_unused_parameters": case.model == "plain"}
    model = DistributedDataParallel(model, process_group=torch_group(world), **unused)
    return case.train(model, world)


def ddp_with_zero(world, case):
    unused = {"find_unused_parameters": case.model == "plain"}
    model = DistributedDataParallel(case.build(), process_group=torch_group(world), **unused)
    trained, (kind, settings) = [p for p in model.parameters() if p.requires_grad], SETTINGS[case.optimizer]
    kind = getattr(torch.optim, kind)
    return case.train(model, world, ZeroRedundancyOptimizer(trained, kind, torch_group(world), **settings))


def torch_fully_shard(world, case):
    model, mesh = case.build(), DeviceMesh.from_group(torch_group(world), "cpu")
    for module in [*units(model), model]:
        fsdp2(module, mesh=mesh)
    return case.train(model, world)


# Strategies that share out a batch: each trains a model, whose parameters are gathered afterwards.


def data_parallel(world, case):
    model = DataParallel(case.build(world.rank), world.comm, bucket_cap_mb=0.0002)
    assert len(model.buckets) > 1
    return case.train(model, world)


def plain_data_parallel(kind, world, case):
    model = kind(case.build(world.rank), world.comm)
    average = {"after_backward": model.average_gradients} if kind is DataParallelNaive else {}
    return case.train(model, world, **average)


def synchronised(world, case):
    model = DataParallel(SyncBatchNorm.convert_sync_batchnorm(case.build(world.rank)), world.comm)
    return case.train(model, world)


def hooked(make_hook, world, case):
    """A communication hook at settings at which nothing is lost."""
    model = DataParallel(case.build(world.rank), world.comm)
    model.register_comm_hook(*make_hook(world))
    return case.train(model, world)


class HorovodSteps:
    """A step with Horovod's way of clipping: first synchronize, then a step without."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.zero_grad = model, optimizer, optimizer.zero_grad
        self.step = optimizer.step

    def clip_grad_norm_(self, limit):
        self.optimizer.synchronize()
        nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.step = self.step_without

    def step_without(self):
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def horovod(world, case, **options):
    hvd.init()
    model = case.build(world.rank)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = OPTIMIZERS[case.optimizer](model)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=case.accumulate, **options
    )
    return case.train(model, world, HorovodSteps(model, optimizer))


def zero(stage, world, case):
    model, (kind, settings) = case.build(world.rank), SETTINGS[case.optimizer]
    optimizer = ZeroOptimizer(
        model.named_parameters(), getattr(torch.optim, kind), world.comm, stage, bucket_cap_mb=0.0005, **settings
    )
    return case.train(model, world, optimizer)


def plain_zero(stage, world, case):
    model, (kind, settings) = case.build(world.rank), SETTINGS[case.optimizer]
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    in_units = {"units": linears} if case.model in ("chain", "recomputed") else {}
    optimizer = stage(world.comm, model, getattr(torch.optim, kind), **in_units, **settings)
    if in_units:
        with torch.no_grad():
            model(case.data(1)[0][0])  # evaluation in between
    case.train(model, world, optimizer)
    for unit in optimizer.units if stage is Stage3 else ():
        optimizer.gather(unit)
    return model


def sharded(reshard, world, case):
    model = case.build(world.rank)
    for module in [*units(model), model]:
        fully_shard(module, world.comm, reshard_after_forward=reshard)
    return case.train(model, world)


def replicated(in_graph, world, case):
    """A process for each replica, or all replicas in one graph."""
    replicator = Replicator(replicas=world.size) if in_graph else Replicator(world.comm)
    model = case.build(0 if in_graph else world.rank)
    kind, settings = SETTINGS[case.optimizer]
    optimizer = getattr(torch.optim, kind)(model.parameters(), **settings)  # of frozen ones too: rank 0's values count
    optimizer, data = replicator.wrap_optimizer(optimizer), case.data(world.size)
    replicator.run(
        lambda batch: optimizer.minimize(loss_of(model, batch)),
        lambda replica: [slice_of(batch, replica, world.size) for batch in data],
    )
    return model


def engine(stage, runtime, world, case):
    kind, settings = SETTINGS[case.optimizer]
    config = {
        "train_batch_size": 4 * world.size * case.accumulate, "gradient_accumulation_steps": case.accumulate,
        "optimizer": {"type": kind, "params": {"weight_decay": 0.01 * (kind == "AdamW"), **settings}},
        "gradient_clipping": case.clip or 0.0, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    model, *_ = dtlib.initialize(model=case.build(world.rank), config=config, runtime=runtime)
    for batch in case.data(world.size):
        # The engine takes the mean over micro-batches, and one process here their sum.
        model.backward(loss_of(model, slice_of(batch, world.rank, world.size)) * case.accumulate)
        model.step()
    return model.module


def in_one_graph(world) -> Iterable:
    for name in ("plain", "transformer")[: 1 + (world.size == 2)] if world.rank == 0 else ():  # slow to capture
        case = Case("adamw", name)
        ours = values_of(replicated(True, world, case), world.comm)
        yield (case,), all_apart(ours, alone(case, world.size)), EXACT


def on_other_communicators(world) -> Iterable:
    """What other code has, and a slow network, on which strategies send from a thread."""
    slow = world.comm.emulate_network(latency=1e-4, bandwidth=1e9)
    others = {"gloo": torch_group(world), "mpi4py": world.comm.mpi, "slow network": slow}
    ways = {
        "data": data_parallel,
        "zero 1": partial(zero, 1),
        "zero 2": partial(zero, 2),
        "sharded": partial(sharded, True),
    }
    for (name, comm), (way, trained) in product(others.items(), ways.items()):
        case = Case(model="transformer")
        there = SimpleNamespace(comm=comm, rank=world.rank, size=world.size)
        ours = values_of(trained(there, case), world.comm)
        yield (way, name), all_apart(ours, alone(case, world.size)), EXACT

    for name, comm in {"gloo": torch_group(world), "mpi4py": world.comm.mpi}.items():
        models = seeded(lambda comm=comm: test_tensor.Language(as_communicator(comm))), seeded(test_tensor.Language)
        for model in models:
            test_tensor.train(model, OPTIMIZERS["sgd"](model), test_tensor.texts())
        yield ("tensor", name), test_tensor.difference(*models), EXACT


@dataclass(frozen=True)
class Row:
    train: Callable
    peer: Callable | None
    models: tuple[str, ...]
    cases: list[Case]

    half: bool = False  # as on a chequerboard: every model, and every case

    def __call__(self, world) -> Iterable:
        alternates = self.half and min(len(self.models), len(self.cases)) > 1
        for (i, name), (j, case) in product(enumerate(self.models), enumerate(self.cases)):
            if alternates and (i + j) % 2:
                continue
            case = replace(case, model=name)
            theirs = peer_of(self.peer, world, case) if self.peer and case.beside_torch else None
            if not theirs and case.dtype != torch.float64:
                theirs = alone(case, world.size, case.dtype)
            ours, reference = values_of(self.train(world, case), world.comm), alone(case, world.size)
            if world.rank and not case.joined:  # running statistics of one process are those of rank 0's slices
                ours, reference, theirs = map(without_statistics, (ours, reference, theirs))
            error = all_apart(ours, reference)
            if case.dtype == torch.float64:
                yield (case, "one process"), error, EXACT
                yield (case, "torch"), all_apart(ours, theirs) if theirs else 0, EXACT
            else:
                yield (case,), error, max(2 * all_apart(theirs, reference), 1e-5)


def without_statistics(values: dict | None) -> dict | None:
    return values and {name: value for name, value in values.items() if name not in BUFFERS}


BUFFERS = {name for model in AWKWARD for name, _ in MODELS[model]().named_buffers()}
LOSSLESS = {
    "top-k of all": lambda world: (TopKState(world.comm, 1.0), top_k_hook),
    "PowerSGD of full rank": lambda world: (PowerSGDState(world.comm, 16, min_compression_rate=0.01), powerSGD_hook),
    "torch's all_reduce": lambda world: (torch_group(world), default_hooks.allreduce_hook),
}


# Strategies that cut the model, its sequences or its experts: each has a model of its own


def pipelined(name, world) -> Iterable:
    """Tied first and last layers, uneven stages, uneven micro-batches, texts of different lengths."""
    microbatches, chunks = 2 * world.size, 2 if name == "interleaved" else 1
    stages, kind = world.size * chunks, test_pipeline.SCHEDULES[name]
    made, loss_fn = test_pipeline.layers(2 * stages + 1), test_pipeline.weighted_sum
    for optimizer, dtype, recompute in (
        ("sgd", torch.float64, False), ("adamw", torch.float64, True), ("adamw", torch.float32, False)
    ):  # fmt: skip
        data = test_pipeline.batches(2 * microbatches + 1, dtype)
        exact, reference = (
            test_pipeline.trained_alone(made, optimizer, data, its_dtype, world.comm)
            for its_dtype in (torch.float64, dtype)
        )
        module = PipelineModule(made, stages, loss_fn, stages_per_rank=chunks).to(dtype)
        schedule = kind(module.stages(), microbatches, loss_fn, recompute=recompute)
        step = OPTIMIZERS[optimizer](module)
        first, last = 0 in module.stage_indices, stages - 1 in module.stage_indices
        error = 0.0
        for (x, y), loss in zip(data, exact.losses, strict=True):
            losses = []
            out = schedule.step(*([x] if first else []), target=y if last else None, losses=losses)
            module.reduce_tied_gradients()
            step.step()
            step.zero_grad()
            if last:
                sizes = [len(some) for some in y.tensor_split(microbatches)]
                mean = sum(size * value.double() for size, value in zip(sizes, losses, strict=True)) / len(y)
                error = max(error, apart(mean, loss))
                assert out.shape[:2] == y.shape[:2]
        error = max(error, test_pipeline.difference(exact, module))
        bound = EXACT if dtype == torch.float64 else max(2 * test_pipeline.difference(exact, reference), 1e-5)
        yield (optimizer, dtype, f"recompute={recompute}"), error, bound
        simulated = schedules.simulate(kind.order(world.size, microbatches, stages))
        if name != "zb-h1":  # where layers that cannot be split keep less
            assert schedule.peak_in_flight == simulated.peak_activations[world.rank]
        out = schedule.eval(*([data[0][0]] if first else []))
        assert (out is None) == (not last)
        if last and dtype == torch.float64:
            yield (optimizer, "eval"), apart(out, exact(data[0][0])), EXACT
    if not DEVICE:
        yield from beside_torch_pipelining(name, world)


PEERS = {
    "gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B, "zb-h1": pipelining.ScheduleInterleavedZeroBubble,
}  # fmt: skip


def beside_torch_pipelining(name, world) -> Iterable:
    microbatches, stages = 2 * world.size, world.size * (2 if name == "interleaved" else 1)
    indices, where = range(world.rank, stages, world.size), {"device": torch.device("cpu"), "group": torch_group(world)}
    x, y = torch.randn(2, 3 * microbatches, 5, generator=torch.Generator().manual_seed(0)).double()
    arguments, target = ([x] if world.rank == 0 else []), y if world.rank == world.size - 1 else None

    def gradients(schedule, stage_class, **where):
        torch.manual_seed(world.rank)
        modules = [nn.Sequential(Linear(5, 5), nn.Tanh()).double() for _ in indices]
        own = [stage_class(module, i, stages, **where) for module, i in zip(modules, indices, strict=True)]
        several = name in ("interleaved", "zb-h1")  # torch's take a list
        schedule(own if several else own[0], microbatches, mse_loss).step(*arguments, target=target)
        return {(i, name): p.grad for i, module in enumerate(modules) for name, p in module.named_parameters()}

    ours = gradients(test_pipeline.SCHEDULES[name], PipelineStage, comm=world.comm)
    theirs = gradients(PEERS[name], pipelining.PipelineStage, **where)
    yield ("torch.distributed.pipelining",), all_apart(ours, theirs), EXACT


def plain_pipelined(world) -> Iterable:
    comm = world.comm
    x, y = batches("chain", 1, 4 * comm.size, cotangents=True)[0]
    first, last = (4 * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    is_last = comm.rank == comm.size - 1
    for schedule, microbatches in product(("gpipe", "1f1b"), (1, 2, 4)):
        whole, mine = build("chain"), nn.Sequential(*list(build("chain"))[2 * first : 2 * last])
        expected = mse_loss(whole(x), y)
        expected.backward()
        ends = x if comm.rank == 0 else None, y if is_last else None
        loss = plain_step(comm, mine, *ends, mse_loss, microbatches, schedule)
        theirs = [p for layer in list(whole)[2 * first : 2 * last] for p in layer.parameters()]
        errors = [apart(own.grad, its.grad) for own, its in zip(mine.parameters(), theirs, strict=True)]
        assert is_last or loss is None
        yield (schedule, microbatches), max([*errors, apart(torch.as_tensor(loss), expected) if is_last else 0]), EXACT


def apart_here(model, reference) -> float:
    """Between this rank's shards of a perceptron and those of a whole one."""
    errors = []
    for name, whole in reference.named_parameters():
        mine, layer = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
        dim = 1 if name == "linear2.weight" else 0
        is_cut = mine.shape != whole.shape
        errors.append(apart(mine, whole.chunk(layer.comm.size, dim)[layer.comm.rank] if is_cut else whole))
    return max(errors)


def tensor_parallel(kind, world) -> Iterable:
    """A perceptron, beside DTensor; ``kind`` is ours."""
    width = test_tensor.WIDTH
    data = [torch.randn(2, 10, width, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
    mesh = None if DEVICE else DeviceMesh.from_group(torch_group(world), "cpu")
    plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}

    def trained(model, dtype, optimizer):
        step, model.slopes = OPTIMIZERS[optimizer](model), []
        for x, cotangent in data:
            x = x.to(dtype, copy=True).requires_grad_()
            (model(x) * cotangent.to(dtype)).sum(-1).mean().backward()
            model.slopes.append(x.grad)
            step.step()
            step.zero_grad()
        return model

    for optimizer, dtype in product(OPTIMIZERS, (torch.float64, torch.float32)):
        plain = partial(seeded, lambda: test_tensor.PlainMLP(width, 36))
        exact = trained(plain(), torch.float64, optimizer)
        ours = trained(seeded(lambda: kind(width, 36, world.comm), dtype), dtype, optimizer)
        alone = plain(dtype) if DEVICE else parallelize_module(plain(dtype), mesh, plan)
        theirs = full_values(trained(alone, dtype, optimizer), world.comm)
        peer = all_apart(theirs, dict(exact.named_parameters()))
        bound = EXACT if dtype == torch.float64 else max(2 * peer, 1e-5)
        yield (optimizer, dtype), apart_here(ours, exact), bound
        yield (optimizer, dtype, "gradients of inputs"), max(map(apart, ours.slopes, exact.slopes)), bound
        if dtype == torch.float64:
            yield (optimizer, "torch alone"), peer, EXACT


def tied_language_model(world) -> Iterable:
    """Embedding, attention, perceptron and output layer in shards; the output layer is the embedding."""
    difference, data = test_tensor.difference, test_tensor.texts()
    for optimizer, limit in product(OPTIMIZERS, (None, 0.1)):
        reference, ours = seeded(test_tensor.Language), seeded(lambda: test_tensor.Language(world.comm))
        yield (optimizer, "initial values"), difference(ours, reference), 0
        norms = [
            test_tensor.train(model, OPTIMIZERS[optimizer](model), data, clip=limit and partial(clip, limit))
            for model, clip in (
                (ours, lambda limit, ours=ours: clip_grad_norm_(ours, limit, world.comm)),
                (reference, lambda limit, its=reference: nn.utils.clip_grad_norm_(its.parameters(), limit)),
            )
        ]
        assert ours.output.weight is ours.embedding.weight
        yield (optimizer, f"clip={limit}"), difference(ours, reference), EXACT
        same = [p for name, p in ours.named_parameters() if p.shape == reference.get_parameter(name).shape]
        theirs = world.comm.broadcast_object([parameter.detach() for parameter in same])
        yield (optimizer, "what every rank has, to the last bit"), max(map(apart, same, theirs)), 0
        if limit:
            assert all(norm > limit for norm in norms[1])
            yield (optimizer, "norms"), apart(*map(torch.tensor, norms)), EXACT
        else:
            yield (optimizer, "whole"), all_apart(whole_state_dict(ours), reference.state_dict()), EXACT


def experts(kind, world) -> Iterable:
    for name in test_expert.CASES:
        for part, error in test_expert.errors_of(kind, world.comm, name).items():
            yield (name, part), error, EXACT


def attention(way, world) -> Iterable:
    order = "zigzag" if way == "zigzag" else "contiguous"
    for causal, scale in product((True, False), (1.0, 1e4)):  # exp(1e4) would overflow; gradients carry q of 1e4
        whole = test_context.whole_tensors(8 * world.size, scale)
        expected = [test_context.my_tokens(x, world.comm, order, dim=2) for x in test_context.alone(*whole, causal)]
        ours, *_ = test_context.shared(world.comm, test_context.WAYS[way], whole, order, causal)
        for part, mine, theirs in zip(test_context.NAMES, ours, expected, strict=True):
            error = test_context.apart(mine, theirs)  # relative
            yield (f"causal={causal}", scale, part), error, EXACT if scale == 1 else 1e-6


def context_parallel(world) -> Iterable:
    """A transformer with padding, in every order, with and without recomputation."""
    of = test_context_module
    comm, reference, (x, target, mask) = world.comm, of.gradients_alone(3), of.texts(3)
    with torch.no_grad():
        expected = reference(x, torch.arange(x.shape[1]))
    ways = [(order, "ring") for order in of.ORDERS] + ([("zigzag", "ulysses")] if comm.size < 4 else [])
    for (order, method), recompute in product(ways, (False, True)):
        inner = of.language(recompute)
        model = DataParallel(context.ContextParallel(inner, comm, order, method), comm)
        cp = model.module
        losses = of.losses_of(model, cp.split(x), cp.split(target), cp.positions(x.shape[1]))
        of.mean_over_tokens(losses, comm, cp.split(mask)).backward()
        yield (order, method, f"recompute={recompute}"), of.gradients_apart(inner, reference), EXACT
        with torch.no_grad():
            outputs = cp.gather(model(cp.split(x), cp.positions(x.shape[1])))
        yield (order, method, "outputs"), apart(outputs, expected), EXACT
    assert nn.functional.scaled_dot_product_attention is of.scaled_dot_product_attention


def in_rounds(world) -> Iterable:
    """Local SGD and DiLoCo beside one process that plays all ranks, and beside data parallelism where they agree."""
    comm, of, steps, every = world.comm, test_local, 11, 4  # it ends within a round

    def differences(ours, theirs):
        return max(map(apart, ours, theirs))

    for outer, kind in product((None, of.OUTER), (plain_local, local)):
        model = of.made()
        if world.rank:  # rank 0's values count
            nn.init.ones_(model[0].weight)
        optimizers = [of.adamw(model), *([of.sgd(model, **outer)] if outer else [])]
        rounds = (kind.DiLoCo if outer else kind.LocalSGD)(comm, model, *optimizers, every)
        found = of.train(rounds, model, world.rank, range(steps))
        yield (kind.__name__, outer), differences(found, of.alone(comm.size, steps, every, outer)[comm.rank]), EXACT
    model = DataParallel(of.made(), comm)
    optimizer = of.sgd(model, lr=0.3 * 0.7, momentum=0.9, nesterov=True)
    for step in range(50):
        of.gradient_of(model, world.rank, step)
        optimizer.step()
    for kind in (plain_local.DiLoCo, local.DiLoCo):
        ours = of.made()
        rounds = kind(comm, ours, of.sgd(ours, lr=0.3), of.sgd(ours, **of.OUTER), 1)
        found = of.train(rounds, ours, world.rank, range(50))
        bound = 1e-10 if DEVICE else EXACT  # fifty steps with kernels that add in another order
        yield (kind, "rounds of one step are Nesterov's"), differences(found, model.parameters()), bound


TABLE = {
    "DataParallel": Row(data_parallel, ddp, AWKWARD, WHOLE),
    "DataParallelNaive": Row(partial(plain_data_parallel, DataParallelNaive), ddp, (*USED, "frozen"), PLAIN),
    "DataParallelHooks": Row(partial(plain_data_parallel, DataParallelHooks), ddp, (*USED, "frozen"), PLAIN),
    "DataParallelBuckets": Row(partial(plain_data_parallel, DataParallelBuckets), ddp, (*USED, "frozen"), PLAIN),
    "SyncBatchNorm": Row(synchronised, None, ("convolutional",), JOINED),
    **{f"hook, {name}": Row(partial(hooked, make), ddp, ("chain", "convolutional"), HOOKED)
       for name, make in LOSSLESS.items() if not DEVICE or name != "torch's all_reduce"},
    "Horovod": Row(horovod, ddp, AWKWARD, [replace(case, zeros=True) for case in WHOLE]),
    "ZeroOptimizer, stage 1": Row(partial(zero, 1), ddp_with_zero, AWKWARD, WHOLE),
    "ZeroOptimizer, stage 2": Row(partial(zero, 2), ddp_with_zero, AWKWARD, WHOLE),
    **{f"plain {kind.__name__}": Row(partial(plain_zero, kind), ddp_with_zero, (*USED, "recomputed"), PLAIN)
       for kind in (Stage1, Stage2, Stage3)},
    "fully_shard": Row(partial(sharded, True), torch_fully_shard, AWKWARD, WHOLE),
    "fully_shard, kept": Row(partial(sharded, False), None, AWKWARD, [Case("adamw", accumulate=2, clip=0.5)]),
    "fully_shard, frozen and recomputed units": Row(partial(sharded, True), None, ("frozen", "recomputed"), PLAIN),
    "Replicator": Row(partial(replicated, False), ddp, GRAPHS, PLAIN),
    "Replicator, one graph": in_one_graph,
    **{f"initialize, stage {stage}, {runtime}": Row(partial(engine, stage, runtime), None, AWKWARD, ENGINE)
       for stage, runtime in product(range(4), ("dtlib",) if DEVICE else ("dtlib", "torch"))},
    "on other communicators": on_other_communicators,
    **{f"pipeline, {name}": partial(pipelined, name) for name in test_pipeline.SCHEDULES},
    "pipeline, plain": plain_pipelined,
    "tensor": partial(tensor_parallel, ParallelMLP),
    "tensor, plain": partial(tensor_parallel, PlainParallelMLP),
    "tensor, a tied language model": tied_language_model,
    "MixtureOfExperts": partial(experts, expert.MixtureOfExperts),
    "MixtureOfExperts, plain": partial(experts, PlainMixture),
    **{f"attention, {way}": partial(attention, way) for way in test_context.WAYS},
    "ContextParallel": context_parallel,
    "LocalSGD and DiLoCo": in_rounds,
}  # fmt: skip


@on_ranks(2, 3, 4, slow=(2,), nightly=(4,))
@pytest.mark.parametrize("strategy", TABLE)
def test_parity(world, strategy):
    """On three ranks half of the models and cases of each row, as that runs on every commit."""
    check(world, strategy, half=world.size == 3)


def check(world, strategy, half):
    row = TABLE[strategy]
    with all_cases() as case:
        for name, error, bound in (replace(row, half=half) if isinstance(row, Row) else row)(world):
            with case(*name):
                assert error <= bound
