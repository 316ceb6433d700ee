"""``dtlib tour``: the core of lessons 00 to 08 on MPI engines, without a browser, in one table."""

import shutil
import time
from pathlib import Path

from dtlib import pi
from dtlib.files import own_folder
from dtlib.lab import course
from dtlib.lab.course import LEFT_BEHIND, PROFILE
from dtlib.lab.engines import engine_processes, engine_set
from dtlib.lab.engines.workshop import Record
from dtlib.theory import collectives as theory

POINTS = 10**7
WIDTHS = [22, 28, 24, 8, 7]  # of the table's columns: below 100 with the room between them


def tour(ranks: int, profile: str | None = None) -> int:
    """Run every stop on ``ranks`` engines and print a table of results; returns 0 if all are as expected, else 1.

    Without a ``profile`` it works on a copy of the course's: the engines of open notebooks are left alone.
    """
    from tabulate import tabulate

    with own_folder("tour") as folder:
        if profile is None:
            profile = folder / PROFILE.name
            left_behind = shutil.ignore_patterns(*LEFT_BEHIND)
            shutil.copytree(course.SOURCE / PROFILE, profile, ignore=left_behind)
        try:
            engines = engine_set.engines(ranks, profile=profile)
            rows = [_row(engines, *stop) for stop in _stops(folder, ranks)]
        finally:
            if Path(profile, "ipcluster_config.py").is_file():  # else no engine has started there
                engine_processes.end(Record(Path(profile)))
    print()
    head = ("lesson", f"on {ranks} MPI engines", "result", "as expected", "seconds")
    print(tabulate(rows, head, maxcolwidths=WIDTHS, maxheadercolwidths=WIDTHS))
    return 0 if all(row[3] == "yes" for row in rows) else 1


def _stops(folder: Path, ranks: int):
    """The stops: lesson, what happens, the function that runs on every rank, its arguments, what every rank returns."""
    inside = pi.count_compiled(0, POINTS)
    yield "00 Start here", "all_reduce of the ranks", sum_of_ranks, (), sum(range(ranks))
    yield "02 MPI and pi", f"count {POINTS:,} points", count_points, (POINTS,), inside
    file = str(pi.write_points(folder / "points.bin", 10**5))
    yield "02 MPI and pi", "count a file of 100,000 points", count_points_of_file, (file,), pi.count_compiled(0, 10**5)
    elements = 1000 * ranks
    sent = (
        f"sum {sum(range(ranks))}, {8 * theory.elements_sent('all_reduce', 'ring', ranks, 0, elements):,} bytes a rank"
    )
    yield "03 Collectives", f"ring all_reduce of {8 * elements:,} bytes", ring_of_ranks, (elements,), sent
    yield "04 Data parallelism", "3 steps on digits, against one process", data_parallel_steps, (3,), "equal to 1e-12"
    what = f"{ranks} ranks of 16 digits, and one process of {16 * ranks}, 10 steps"
    yield "05 Large batches", what, ranks_or_one_large_batch, (), f"rate {0.02 * ranks:g}, losses equal to 1e-12"
    expected = "losses equal to 1e-12, bytes by the formula"
    yield "06 ZeRO", "3 steps at stages 0 to 3, states counted", zero_stages, (3,), expected
    expected = "losses equal to 1e-12, bubbles by the formula"
    yield "07 Pipelines", "3 steps by each of four schedules", pipeline_steps, (3,), expected
    expected = "shards equal to 1e-12, both ways equal to 1e-12"
    what = "a perceptron in shards; the replicator both ways"
    yield "08 Tensor and hybrid parallelism", what, layers_in_shards_and_replicas, (3,), expected


def _row(engines, lesson, what, function, arguments, expected):
    began = time.perf_counter()
    results = engines.view.apply_sync(function, *arguments)
    seconds = time.perf_counter() - began
    right = "yes" if set(results) == {expected} else "NO"
    shown = f"{results[0] if len(set(results)) == 1 else results}"
    return lesson, what, shown if right == "yes" else f"{shown}; expected: {expected}", right, f"{seconds:.2f}"


def sum_of_ranks() -> int:
    import torch

    from dtlib.world import init

    world = init()
    return int(world.comm.all_reduce(torch.tensor(world.rank)))


def ring_of_ranks(elements: int) -> str:
    """The sum of the ranks by the ring, and the bytes that this rank sent for it."""
    import torch

    import dtlib

    comm = dtlib.init().comm
    with dtlib.trace() as trace:
        tensor = comm.all_reduce(torch.full((elements,), comm.rank), algorithm="ring")
    values = ", ".join(f"{value}" for value in tensor.unique().tolist())
    return f"sum {values}, {trace.sent()[1]:,} bytes a rank"


def data_parallel_steps(steps: int) -> str:
    """Train on this rank's slice of each batch, and on whole batches alone; says how far apart the models end."""
    import torch

    from dtlib.lab import digits
    from dtlib.parallel.data import DataParallel
    from dtlib.world import init

    comm = init().comm
    (x, y), _ = digits.load(torch.float64)
    torch.manual_seed(0)
    alone = digits.net(dtype=torch.float64)
    torch.manual_seed(comm.rank)
    model = DataParallel(digits.net(dtype=torch.float64), comm)
    for net, mine in ((model, slice(comm.rank, 96 * comm.size, comm.size)), (alone, slice(0, 96 * comm.size))):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x[mine]), y[mine]).backward()
            optimizer.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    off = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    return "equal to 1e-12" if off < 1e-12 else f"off by {off:.1e}"


def ranks_or_one_large_batch() -> str:
    """Train with the linear rule on all ranks, 16 digits each, and here alone with as many: are the losses the same?"""
    import torch

    import dtlib
    from dtlib.training.rates import linear_rule
    from dtlib.workloads import digits

    comm = dtlib.init().comm
    images, labels = digits.load()
    batch, rate = 16 * comm.size, linear_rule(0.02, 16 * comm.size, 16)
    torch.manual_seed(0)
    together = torch.nn.Linear(64, 10).double()
    alone = torch.nn.Linear(64, 10).double()
    alone.load_state_dict(together.state_dict())
    config = {"train_batch_size": batch, "optimizer": {"type": "SGD", "params": {"lr": rate, "momentum": 0.9}}}
    engine, *_ = dtlib.initialize(model=together, config=config)
    optimizer = torch.optim.SGD(alone.parameters(), lr=rate, momentum=0.9)
    furthest = 0.0
    for step in range(10):
        x, y = images[step * batch :][:batch].double(), labels[step * batch :][:batch]
        loss = torch.nn.functional.cross_entropy(alone(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = engine.train_batch(iter([(x[comm.rank :: comm.size], y[comm.rank :: comm.size])]))
        furthest = max(furthest, abs(loss.item() - mean.item()))
    return f"rate {rate:g}, losses {'equal to' if furthest < 1e-12 else f'{furthest:.0e} apart, not'} 1e-12"


def zero_stages(steps: int) -> str:
    """Train at each stage of ZeRO: are the losses those of data parallelism, and model states what the formula says?"""
    import torch

    import dtlib
    from dtlib.lab import digits
    from dtlib.theory.zero import Scheme, zero_bytes

    comm = dtlib.init().comm
    (x, y), _ = digits.load(torch.float64)
    losses_at, furthest, wrong = [], 0.0, []
    for stage in range(4):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 24,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = dtlib.initialize(model=digits.net(dtype=torch.float64), config=config)
        slices = [
            slice(24 * comm.size * step + comm.rank, 24 * comm.size * (step + 1), comm.size) for step in range(steps)
        ]
        with dtlib.memory(engine) as held:
            losses = [engine.train_batch(iter([(x[its], y[its])])).item() for its in slices]
        losses_at.append(losses)
        furthest = max(furthest, *(abs(a - b) for a, b in zip(losses, losses_at[0], strict=True)))
        formula = zero_bytes(held.sizes[0], comm.size, stage, Scheme(8, 8, 0, 16), comm.rank)
        wrong += [stage] * any(held.lines[line] != count for line, count in formula.items())
    apart = "equal to" if furthest < 1e-12 else f"{furthest:.0e} apart, not"
    return f"losses {apart} 1e-12, bytes {f'of stages {wrong} not ' * bool(wrong)}by the formula"


def pipeline_steps(steps: int) -> str:
    """Train by each schedule: are losses those of the unsplit model, and the simulated bubble that of the formula?"""
    import torch
    from torch import nn

    import dtlib
    from dtlib.lab import digits
    from dtlib.lessons.l07.explorer import ORDERS, simulate
    from dtlib.parallel.pipeline import LayerSpec, Linear, PipelineModule
    from dtlib.schedule import formulas

    comm, (x, y), loss_fn = dtlib.init().comm, digits.load(torch.float64)[0], nn.functional.cross_entropy
    specs = [
        LayerSpec(kind, *sizes) for _ in range(2 * comm.size) for kind, sizes in ((Linear, (64, 64)), (nn.Tanh, ()))
    ]
    microbatches, furthest, wrong = 2 * comm.size, 0.0, []
    for name, order in ORDERS.items():
        alone = PipelineModule(specs, 1, comm=comm.split(comm.rank)).double()
        module = PipelineModule(specs, comm.size * order.chunks, comm=comm, stages_per_rank=order.chunks).double()
        schedule = order.runs(module.stages(), microbatches, loss_fn)
        last = module.num_stages - 1 in module.stage_indices
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (module, alone)]
        for images, labels in zip(x.split(8 * microbatches)[:steps], y.split(8 * microbatches)[:steps], strict=True):
            losses: list[torch.Tensor] = []
            schedule.step(*([images] if comm.rank == 0 else []), target=labels if last else None, losses=losses)
            loss = loss_fn(alone(images), labels)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if last:
                furthest = max(furthest, abs(torch.stack(losses).mean() - loss).item())
        formula = formulas.bubble(order.formulas, comm.size, microbatches, order.chunks)
        wrong += [name] * (abs(simulate(name, comm.size, microbatches).bubble - formula) > 1e-12)
    furthest = comm.all_reduce(torch.tensor(furthest), op="max").item()
    apart = "equal to" if furthest < 1e-12 else f"{furthest:.0e} apart, not"
    return f"losses {apart} 1e-12, bubbles {f'of {wrong} not ' * bool(wrong)}by the formula"


def layers_in_shards_and_replicas(steps: int) -> str:
    """A perceptron in shards against the whole one, gradients included; a process per replica against one graph."""
    import torch

    import dtlib
    from dtlib.lab import digits
    from dtlib.parallel.replicator import Replicator
    from dtlib.parallel.tensor import ParallelMLP

    comm = dtlib.init().comm
    (x, y), _ = digits.load(torch.float64)
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.GELU(), torch.nn.Linear(100, 64)).double()
    torch.manual_seed(0)
    cut = ParallelMLP(64, 100, comm).double()
    mine, theirs = (x[:24].clone().requires_grad_() for _ in range(2))
    out, expected = cut(mine), whole(theirs)
    for result in (out, expected):
        result.square().sum().backward()
    slices = cut.linear1.get_parameter("weight").grad, whole.get_parameter("0.weight").grad
    assert mine.grad is not None and theirs.grad is not None and slices[0] is not None and slices[1] is not None
    off = [out - expected, mine.grad - theirs.grad, slices[0] - slices[1][cut.linear1.slice]]
    apart = max(difference.abs().max().item() for difference in off)

    def train(replicator):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 10).double()
        optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

        def step_fn(inputs):
            loss = torch.nn.functional.cross_entropy(model(inputs[0]), inputs[1])
            optimizer.minimize(loss)
            return loss

        batches = [slice(24 * i, 24 * i + 24) for i in range(steps * comm.size)]
        pairs = [(x[batch], y[batch]) for batch in batches]
        return replicator.run(step_fn, lambda replica: pairs[replica :: comm.size])

    between, in_graph = train(Replicator(comm)), train(Replicator(replicas=comm.size))
    ways = (between - in_graph).abs().max().item()
    told = ["equal to 1e-12" if distance < 1e-12 else f"off by {distance:.1e}" for distance in (apart, ways)]
    return f"shards {told[0]}, both ways {told[1]}"


def count_points(points: int) -> int:
    from dtlib.world import init

    return pi.count_on_ranks(points, init().comm)


def count_points_of_file(file: str) -> int:
    from dtlib.world import init

    return pi.count_file(file, init().comm).inside
