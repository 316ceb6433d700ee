"""torch's own classes on our backend: against gloo, and against a group that sends nothing.

The second is the bound: what a step takes when communication costs no time (its values are wrong, and nobody looks).
Where dtlib has a class of its own for the same thing, that is a third column.
"""

from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dtlib.backend
from benchmarks.compare import in_turns, repeated, row
from benchmarks.data_parallel import Accelerated, large, training_step, transformer
from benchmarks.peers import torch_group
from dtlib.comm import progress_thread
from dtlib.comm.torch.backend_work import GroupWork
from dtlib.comm.torch.group_on_communicator import Group
from dtlib.comm.watch import recorder
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.sharded import fully_shard

RANKS = 2
MICROBATCHES = 8
PEERS = {"gloo": "gloo", "nothing": "a group that sends nothing", "own": "dtlib's own class"}


class Silent(Group):
    """A group whose operations, while it is ``silent``, are over before they begin."""

    silent = False

    def _begin(self, opts, starts, result, finish=None):
        return GroupWork((), result, finish) if self.silent else super()._begin(opts, starts, result, finish)

    def in_silence(self, function):
        """``function`` without messages; called with them first, as what is agreed on at first must be right."""
        function()
        function()

        def silently():
            self.silent = True
            function()
            self.silent = False

        return silently


def rows(world, repeats: int):
    groups = {"gloo": torch_group(world), "ours": dist.new_group(backend=dtlib.backend.NAME)}
    groups["nothing"] = _silent(groups["ours"])
    for question in (_small, _ddp, _sharded, _zero, _tensor, _pipeline, _hidden):
        yield from question(world, groups, repeats)


def _silent(group):
    """Such a group, which torch knows under a name of its own."""
    silent = Silent(None, group.comm, group.members, lambda _: None)
    silent._set_group_name("nothing")
    c10d = dist.distributed_c10d
    c10d._world.pg_map[silent] = (dtlib.backend.NAME, None)
    c10d._world.pg_names[silent] = "nothing"
    c10d._world.pg_group_ranks[silent] = {rank: rank for rank in range(group.size())}
    c10d._world.pg_backend_config[silent] = c10d._world.pg_backend_config[group]
    c10d._register_process_group("nothing", silent)
    return silent


def _compared(world, groups, case, functions, repeats):
    functions["nothing"] = groups["nothing"].in_silence(functions["nothing"])
    seconds = in_turns(world.comm, functions, repeats)
    for peer, name in PEERS.items():
        if peer in functions:
            yield row(case, name, seconds["ours"], seconds[peer])


def _small(world, groups, repeats):
    tensor = torch.zeros(1024)
    calls = {name: repeated(partial(dist.all_reduce, tensor, group=group), 50) for name, group in groups.items()}
    calls["own"] = repeated(partial(world.comm.all_reduce, tensor), 50)
    yield from _compared(world, groups, "all_reduce 4 kB", calls, repeats)


MODELS = {"784-2048-2048-10": large, "transformer 4 x 256": transformer}


def _ddp(world, groups, repeats):
    for name, build in MODELS.items():
        steps = {}
        for peer, group in groups.items():
            model, x = build()
            model = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
            steps[peer] = training_step(model, x)
        model, x = build()
        steps["own"] = training_step(DataParallel(model, world.comm), x)
        yield from _compared(world, groups, f"DDP {name}", steps, repeats)


def _sharded(world, groups, repeats):
    for name, build in MODELS.items():
        for reshard in (True, False):
            steps = {}
            for peer, group in [*groups.items(), ("own", None)]:
                model, x = build()
                units = [unit for unit in _units(model) if list(unit.parameters())]
                if group is None:
                    for unit in [*units, model]:
                        fully_shard(unit, world.comm, reshard_after_forward=reshard)
                else:
                    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",))
                    for unit in [*units, model]:
                        fsdp2(unit, mesh=mesh, reshard_after_forward=reshard)
                steps[peer] = training_step(model, x)
            said = "with" if reshard else "without"
            yield from _compared(world, groups, f"FSDP2 {said} resharding {name}", steps, repeats)


def _units(model):
    return model if isinstance(model, nn.Sequential) else model.layers


def _zero(world, groups, repeats):
    build, steps = large, {}
    for peer, group in groups.items():
        model, x = build()
        model = DistributedDataParallel(model, process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group)
        steps[peer] = partial(_step, model, optimizer, x)
    model, x = build()
    steps["own"] = partial(_step, model, ZeroOptimizer(model.parameters(), torch.optim.AdamW, world.comm, stage=1), x)
    yield from _compared(world, groups, "ZeroRedundancyOptimizer 784-2048-2048-10", steps, repeats)


def _step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def _tensor(world, groups, repeats):
    steps = {}
    for peer, group in groups.items():
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tensor",))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        steps[peer] = training_step(model, torch.randn(64, 512))
    yield from _compared(world, groups, "DTensor plan 512-2048-512", steps, repeats)


def _pipeline(world, groups, repeats):
    mse, width = nn.functional.mse_loss, 256
    x, y = torch.randn(2, MICROBATCHES * 8, width)
    arguments, target = ([x], None) if world.rank == 0 else ([], y)
    for kind in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        steps = {}
        for peer, group in groups.items():
            stage = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())])
            stage = pipelining.PipelineStage(stage, world.rank, world.size, torch.device("cpu"), group=group)
            steps[peer] = repeated(partial(kind(stage, MICROBATCHES, mse).step, *arguments, target=target), 10)
        yield from _compared(world, groups, f"pipelining {kind.__name__} width {width}", steps, repeats)


def _hidden(world, groups, repeats):
    """How much of DDP's communication is left to wait for on an EMULATED accelerator, whose core is idle meanwhile.

    Waits are those that the recorder sees; the time over silence has what buckets and messages take from one another.
    """
    models, waits = {}, {"thread": [], "inline": []}
    for peer in ("ours", "nothing"):
        ddp = partial(
            DistributedDataParallel, process_group=groups[peer], bucket_cap_mb=5, gradient_as_bucket_view=True
        )
        models[peer] = ddp(Accelerated())
    x = torch.zeros(1, requires_grad=True)

    def backward(peer):
        models[peer](x).sum().backward()

    def recorded(progress, context):
        with recorder.recording() as events, context():
            backward("ours")
        waits[progress].append(sum(event.end - event.start for event in events if event.kind == "wait"))

    buffers = [torch.zeros_like(weight) for weight in models["ours"].module.weights]

    def communication():
        for buffer in buffers:
            dist.all_reduce(buffer, group=groups["ours"])

    functions = {
        "thread": partial(recorded, "thread", progress_thread),
        "inline": partial(recorded, "inline", nullcontext),
        "nothing": groups["nothing"].in_silence(partial(backward, "nothing")),
        "communication": communication,
    }
    seconds = in_turns(world.comm, functions, repeats)
    for name in ("thread", "inline"):
        more = seconds[name] - seconds["nothing"]
        for said, took in (("left to wait for", np.array(waits[name][-repeats:])), ("over silence", more)):
            case = f"DDP on an emulated accelerator, {name}, {said}"
            yield row(case, "all of its communication", took, seconds["communication"])
