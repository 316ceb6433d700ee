"""Ranks of 64 that do not exist: construction, shards and memory, by torch's fake process group and by solo()."""

from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from math import ceil
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtlib
from dtlib.comm import solo
from dtlib.parallel.zero.sharded import fully_shard
from dtlib.theory.zero import zero_bytes
from tests.cases import for_each

SIZE, WIDTH, LAYERS = 64, 192, 3  # a layer has 37,056 elements, which 64 divides


def plain_core(strategy):
    """The file alone: contracts, which dtlib adds, wait for the ranks that do not exist."""
    spec = spec_from_file_location(
        f"plain_{strategy}", Path(dtlib.__file__).parent / "parallel" / strategy / "plain.py"
    )
    spec.loader.exec_module(core := module_from_spec(spec))
    return core


@contextmanager
def fake_rank(rank):
    """The default group is of 64 ranks, of which this process is one; what would come from others is not written."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def layers(width=WIDTH):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])


def held(tensors):
    """Bytes of the storages behind tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t is not None}
    return sum(storage.nbytes() for storage in storages.values())


def states_of(optimizer):
    return [t for of_one in optimizer.state.values() for t in of_one.values() if torch.is_tensor(t) and t.dim()]


@for_each(rank=[0, 1, 63], stage=[1, 2, 3])
def test_a_plain_stage_holds_the_bytes_of_the_formula(rank, stage):
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers()]
    expected = zero_bytes(sizes, SIZE, stage, "adam", rank)
    with fake_rank(rank) as group:
        model, plain = layers(), plain_core("zero")
        zero = [plain.Stage1, plain.Stage2, plain.Stage3][stage - 1](group, model, torch.optim.Adam, list(model))
        model(torch.randn(2, WIDTH)).square().mean().backward()
        shards = [unit.shard for unit in zero.units]
        gradients = held([p.grad for p in [*model.parameters(), *shards]])
        assert gradients == expected["gradients"], "bytes of gradients after the backward pass"
        zero.step()
        parameters = held([t for unit in zero.units for t in (unit.flat, unit.shard)])
        assert parameters == expected["parameters"] + expected["padding"] and expected["padding"] == 0
        assert held(states_of(zero.optimizer)) == expected["optimizer_states"]


@for_each(rank=[0, 5, 63])
def test_shards_of_stage_3_are_as_large_as_torchs(rank):
    """FSDP2 cuts each parameter along its first dimension; ours cuts a unit's flat memory."""
    ours = layers()
    for layer in ours:
        fully_shard(layer, solo(rank, SIZE))
    with fake_rank(rank):
        theirs = layers()
        for layer in [*theirs, theirs]:
            fsdp(layer)
        of_torch = sum(p.to_local().numel() for p in theirs.parameters())
    assert sum(p.numel() for p in ours.parameters()) == of_torch == LAYERS * WIDTH * (WIDTH + 1) // SIZE


@for_each(rank=[0, 63])
def test_tensor_parallel_slices_are_those_of_torch(rank):
    with fake_rank(rank) as group:
        ours = plain_core("tensor").ParallelMLP(WIDTH, 4 * WIDTH, group)
        theirs = nn.ModuleDict({"linear1": nn.Linear(WIDTH, 4 * WIDTH), "linear2": nn.Linear(4 * WIDTH, WIDTH)})
        mesh = dist.init_device_mesh("cpu", (SIZE,))
        parallelize_module(theirs, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
        found = {name: tuple(p.shape) for name, p in ours.named_parameters()}
        assert found == {name: tuple(local(p).shape) for name, p in theirs.named_parameters()}
        assert found["linear1.weight"] == (4 * WIDTH // SIZE, WIDTH)
        assert ours(torch.randn(2, 5, WIDTH)).shape == (2, 5, WIDTH)


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def test_buckets_and_experts_of_64_ranks():
    with fake_rank(7) as group:
        model = plain_core("data").DataParallelBuckets(layers(), group, bucket_cap_mb=0.2)
        sizes = [sum(p.numel() for p in bucket) for bucket in model.buckets]
        assert len(sizes) == LAYERS and sum(sizes) == LAYERS * WIDTH * (WIDTH + 1)
        model(torch.randn(2, WIDTH)).sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters()) and not model.in_flight
        experts = plain_core("expert").MixtureOfExperts(8, [nn.Linear(8, 8)], group, top=2)
        assert experts.gate.weight.shape == (SIZE, 8)


@pytest.mark.parametrize("width", [7, 65])
def test_shards_cover_each_element_once_where_64_divides_nothing(width):
    """The last shards of the flat memory are padding alone."""
    elements = sum(p.numel() for p in layers(width)[0].parameters())
    found = []
    for rank in range(SIZE):
        layer = layers(width)[0]
        fully_shard(layer, solo(rank, SIZE))
        found.append(sum(p.numel() for p in layer.parameters()))
    assert sum(found) == elements and max(found) == ceil(elements / SIZE)
