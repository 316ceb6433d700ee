"""Checkpoints: saved on N ranks and loaded on M, killed at any moment, and refused for a reason."""

import ast
import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch import nn

from dtlib import checkpoint
from dtlib.checkpoint import CheckpointError, folder, load, local_shards, save
from dtlib.gradients.precision import MasterWeights
from dtlib.parallel.data import DataParallel
from dtlib.parallel.zero import ELEMENTWISE, ZeroOptimizer
from dtlib.parallel.zero.sharded import fully_shard
from dtlib.world.launch import start_ranks
from dtlib.world.processes import Process, with_descendants
from tests.conftest import files_of_at_most, wait_until
from tests.models import batches, build, loss_of, slice_of
from tests.ranks import on_ranks

ROOT = Path(__file__).parents[1]
CLASSES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4}),
}
CLASSES |= {kind.__name__: (kind, {"lr": 0.01}) for kind in ELEMENTWISE}
BEFORE, AFTER = 3, 4


class Run:
    """A model in training with ZeRO ``stage``, on the ranks of ``comm``; it begins at random values of its own."""

    def __init__(self, stage, comm, name, kind, dtype=torch.float64, groups=1, scheduled=False, seed=0):
        self.comm, self.masters = comm, None
        self.model = self.call = build(name, dtype, seed)
        kind, settings = CLASSES[kind]
        if stage == 0:
            self.call = DataParallel(self.model, comm)
        if stage == 3:
            for child in self.model.children():
                if name != "transformer":  # there the embedding is tied to the output
                    fully_shard(child, comm)
            fully_shard(self.model, comm)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if dtype.itemsize == 2 and stage in (0, 3):
            self.masters = MasterWeights(trained)
            trained = self.masters.masters
        param_groups = [{"params": trained[i::groups], "weight_decay": 0.01 * i} for i in range(groups)]
        if stage in (1, 2):
            self.optimizer = ZeroOptimizer(param_groups, kind, comm, stage, bucket_cap_mb=0.0005, **settings)
        else:
            self.optimizer = kind(param_groups, **settings)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.8) if scheduled else None

    def losses(self, data):
        """Train on each batch; the mean loss over ranks before each step."""
        found = []
        for batch in data:
            loss = loss_of(self.call, slice_of(batch, self.comm.rank, self.comm.size))
            loss.backward()
            if self.masters:
                self.masters.take_gradients()
            self.optimizer.step()
            if self.masters:
                self.masters.copy_to_parameters()
            self.optimizer.zero_grad()
            self.model.zero_grad()
            if self.scheduler:
                self.scheduler.step()
            found.append(self.comm.all_reduce(loss.detach().double().clone(), op="mean").item())
        return found

    def save(self, path):
        extra = {"scheduler": self.scheduler.state_dict()} if self.scheduler else None
        save(path, self.call, self.optimizer, self.comm, self.masters, extra)

    def load(self, path):
        extra = load(path, self.call, self.optimizer, self.comm, self.masters)
        if self.scheduler:
            self.scheduler.load_state_dict(extra["scheduler"])
        return self


@contextmanager
def of_size(comm, size):
    """The first ``size`` ranks of ``comm`` among themselves; None on the others, which wait here."""
    yield comm.split(0 if comm.rank < size else None)
    comm.barrier()


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("plain", "adamw"), ("transformer", "adamw"), pytest.param("plain", "sgd", marks=pytest.mark.slow)],
)
def test_training_goes_on_at_another_stage_on_other_ranks(world, stage, name, kind, tmp_path):
    data = batches(name, BEFORE + AFTER, 12)
    run = Run(stage, world.comm, name, kind, groups=2, scheduled=True)
    run.losses(data[:BEFORE])
    run.save(tmp_path)
    unbroken = run.losses(data[BEFORE:])
    assert unbroken[-1] != unbroken[0]
    for size, others in ((3, (0, 1, 2, 3)), (4, (3 - stage,)), (1, (0,))):
        with of_size(world.comm, size) as comm:
            for other in others if comm else ():
                again = Run(other, comm, name, kind, groups=2, scheduled=True, seed=7).load(tmp_path)
                worst = max(abs(a - b) for a, b in zip(again.losses(data[BEFORE:]), unbroken, strict=True))
                assert worst <= 1e-12, f"stage {stage} on 4 ranks, stage {other} on {size}: {worst}"


@on_ranks(2)
@pytest.mark.parametrize("kind", [kind.__name__ for kind in ELEMENTWISE])
def test_states_of_every_elementwise_optimizer(world, kind, tmp_path):
    data = batches("plain", 2 * BEFORE, 12)
    run = Run(1, world.comm, "plain", kind)
    run.losses(data[:BEFORE])
    run.save(tmp_path)
    again = Run(3, world.comm, "plain", kind, seed=7).load(tmp_path)
    unbroken = run.losses(data[BEFORE:])
    assert max(abs(a - b) for a, b in zip(again.losses(data[BEFORE:]), unbroken, strict=True)) <= 1e-12


@on_ranks(2)
def test_an_optimizer_may_know_frozen_parameters_or_not(world, tmp_path):
    model = build("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches("plain", 2, 4):
        loss_of(model, batch).backward()
        optimizer.step()
    save(tmp_path, model, optimizer, world.comm)
    again = Run(1, world.comm, "plain", "adamw", seed=7).load(tmp_path)
    again.save(tmp_path)
    other = build("plain", seed=8)
    loaded = torch.optim.AdamW(other.parameters())
    load(tmp_path, other, loaded, world.comm)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert optimizer.state.get(ours, {}).keys() == loaded.state.get(theirs, {}).keys()
        assert all(torch.equal(value, loaded.state[theirs][what]) for what, value in optimizer.state[ours].items())
    assert not loaded.state[other.first.bias] and not loaded.state[other.unused.weight]


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_goes_on_from_its_masters(world, stage, tmp_path):
    data = batches("plain", BEFORE + 1, 12, torch.bfloat16)
    run = Run(stage, world.comm, "plain", "adamw", torch.bfloat16)
    run.losses(data[:BEFORE])
    run.save(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["tensors"]["second.weight"]["roles"]["master"]["dtype"] == "float32"
    assert "master" not in index["tensors"]["first.bias"]["roles"], "it is frozen"
    masters = whole(tmp_path, "second.weight", "master")
    assert not torch.equal(masters, masters.bfloat16().float()), "otherwise this test sees nothing"
    for size, others in ((3, (0, 1, 2, 3)), (1, (0,))):
        with of_size(world.comm, size) as comm:
            for other in others if comm else ():
                again = Run(other, comm, "plain", "adamw", torch.bfloat16, seed=7).load(tmp_path)
                again.save(tmp_path / "again")
                for name, tensor in index["tensors"].items():
                    for role in tensor["roles"]:
                        assert torch.equal(whole(tmp_path, name, role), whole(tmp_path / "again", name, role)), name
                # Into a model in float32 go the masters, not the rounded values.
                single = build("plain", torch.float32, 7)
                load(tmp_path, single, comm=comm)
                assert torch.equal(single.second.weight, masters)


def whole(path, name, role="value"):
    return folder.Reader(path, folder.read_index(path)).read(name, role)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_that_were_not_saved_get_the_values(world, stage, tmp_path):
    plain = build("plain", torch.bfloat16, 3)
    save(tmp_path, plain, plain_sgd(plain), world.comm)
    run = Run(stage, world.comm, "plain", "sgd", torch.bfloat16, seed=7).load(tmp_path)
    for holding in local_shards.local_shards_of(run.model, run.optimizer, run.masters, world.comm):
        before = dict(plain.named_parameters())[holding.name].detach().reshape(-1)
        before = before[holding.slice.start : holding.slice.stop]
        assert torch.equal(holding.value.reshape(-1), before)
        assert holding.master is None or torch.equal(holding.master.reshape(-1), before.float())
        assert (holding.master is None) == (holding.name == "first.bias")


def plain_sgd(model, lr=0.5):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)


@on_ranks(3)
def test_each_rank_writes_an_equal_slice_and_reads_no_more_than_it_needs(world, tmp_path):
    class Counting(folder.Reader):
        elements = 0

        def read(self, name, role, start=0, stop=None):
            Counting.elements += stop - start
            return super().read(name, role, start, stop)

    run = Run(0, world.comm, "transformer", "adamw")
    run.losses(batches("transformer", 1, 12))
    run.save(tmp_path)
    sizes = folder.read_index(tmp_path)["files"].values()
    assert len(sizes) == 3 and max(sizes) < 1.2 * min(sizes)

    other = Run(3, world.comm, "transformer", "adamw", seed=7)
    before, folder.Reader = folder.Reader, Counting
    try:
        other.load(tmp_path)
    finally:
        folder.Reader = before
    # Values and two states of Adam, of this rank's pieces alone; no buffers here.
    assert Counting.elements == 3 * sum(p.numel() for p in other.model.parameters())


@on_ranks(1, 2)
@pytest.mark.parametrize(("stage", "other"), [(0, 0), (0, 3), (3, 0), (3, 3)])
def test_awkward_tensors(world, stage, other, tmp_path):
    """No dimension, no elements, one element, strides of their own; buffers that are kept and that are not."""

    def awkward(seed, stage):
        torch.manual_seed(seed)
        model = nn.Module()
        model.module = nn.Linear(1, 1)  # named like what a wrapper has
        model.scale, model.empty = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(0, 3))
        model.filters = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        model.register_buffer("count", torch.tensor(seed))
        model.register_buffer("mask", torch.rand(3) > 0.5)
        model.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)
        if stage == 3:
            fully_shard(model, world.comm)
        return model, torch.optim.NAdam(model.parameters(), lr=0.01)

    def step(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    model, optimizer = awkward(1, stage)
    step(model, optimizer)
    step(model, optimizer)
    save(tmp_path / "saved", model, optimizer, world.comm)
    again, loaded = awkward(2, other)
    load(tmp_path / "saved", again, loaded, world.comm)
    assert again.count == 1 and torch.equal(again.mask, model.mask) and (again.scratch == 2).all()
    step(model, optimizer)
    step(again, loaded)
    for theirs in again.parameters():
        state = loaded.state[theirs]
        assert state.keys() == {"step", "mu_product", "exp_avg", "exp_avg_sq"}
        assert (state["step"].shape, state["step"].item()) == ((), 3)
    if stage == other:
        for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
            for what, state in optimizer.state[ours].items():
                assert torch.equal(state, loaded.state[theirs][what]), what
                assert (state.dtype, state.stride()) == (
                    loaded.state[theirs][what].dtype,
                    loaded.state[theirs][what].stride(),
                )
    save(tmp_path / "one", model, optimizer, world.comm)
    save(tmp_path / "other", again, loaded, world.comm)
    tensors = [folder.read_index(tmp_path / path)["tensors"] for path in ("one", "other")]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert tensor["roles"].keys() == tensors[1][name]["roles"].keys()
        for role in tensor["roles"]:
            assert torch.equal(whole(tmp_path / "one", name, role), whole(tmp_path / "other", name, role))


@on_ranks(3)
def test_buffers_are_those_of_rank_0(world, tmp_path):
    model = build("convolutional")
    for buffer in model.buffers():
        buffer.fill_(world.rank + 1)
    save(tmp_path, model, comm=world.comm)
    load(tmp_path, model, comm=world.comm)
    assert all((buffer == 1).all() for buffer in model.buffers())


@on_ranks(4)
def test_random_numbers_go_on_on_as_many_ranks(world, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    torch.manual_seed(world.rank)
    torch.rand(3)
    save(tmp_path, model, comm=world.comm, extra={"epoch": 3, "who": world.rank})
    following = torch.rand(4)
    torch.manual_seed(99)
    assert load(tmp_path, model, comm=world.comm) == {"epoch": 3, "who": 0}
    assert torch.equal(torch.rand(4), following)
    torch.manual_seed(99)
    left_alone = torch.rand(4)
    torch.manual_seed(99)
    with of_size(world.comm, 3) as comm:
        if comm:
            load(tmp_path, model, comm=comm)
            assert torch.equal(torch.rand(4), left_alone)


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_settings_of_groups_come_back(world, stage, tmp_path):
    run = Run(stage, world.comm, "plain", "adamw", groups=2)
    run.optimizer.param_groups[1].update(lr=0.125, betas=(0.5, 0.75), foreach=True)
    run.save(tmp_path)
    again = Run(stage, world.comm, "plain", "adamw", groups=2).load(tmp_path)
    for optimizer in {again.optimizer, local_shards.local(again.optimizer)}:
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.125]
        assert optimizer.param_groups[1]["betas"] == (0.5, 0.75)
        assert optimizer.param_groups[1]["foreach"] is None, "how this machine computes stays as it is"


# Killed, full disks


class Killed(BaseException):
    """Stands for kill -9: nothing handles it."""


def test_killed_at_every_step_of_saving(tmp_path, monkeypatch):
    """Every call that changes the disk is the last one once; after the rename the new checkpoint counts, not before."""
    steps, limit = [], None

    def watch(module, name):
        original = getattr(module, name)

        def call(*arguments, **keywords):
            if len(steps) == limit:
                raise Killed
            steps.append(name)
            return original(*arguments, **keywords)

        monkeypatch.setattr(module, name, call)

    for module, name in ((folder, "save_file"), (json, "dumps"), (os, "fsync"), (os, "replace"), (Path, "unlink")):
        watch(module, name)
    model, found = nn.Linear(2, 2), []
    for at in range(100):
        limit = None
        fill(model, 1)
        save(tmp_path, model)
        assert len(list(tmp_path.iterdir())) == 2, "what the killed one has left is deleted"
        limit = at
        steps.clear()
        fill(model, 2)
        with suppress(Killed):
            save(tmp_path, model)
            break
        fill(model, 3)
        load(tmp_path, model)
        assert (model.weight == (2 if "replace" in steps else 1)).all() and (model.bias == model.weight[0, 0]).all()
        found.append(model.bias[0].item())
    # save_file, fsync of it and its folder, dump, fsync, replace, fsync, unlink
    assert found == [1.0] * 7 + [2.0] * 2


def fill(model, value):
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(value)


LOOP = """
import sys, torch, dtlib
from pathlib import Path
from dtlib.checkpoint import save
from tests.test_checkpoint import fill
world = dtlib.init()
path, confirmed = Path(sys.argv[1]), Path(sys.argv[2])
model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(20)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = int(sys.argv[3])
while True:
    step += 1
    fill(model, step)
    save(path, model, optimizer, world.comm, extra={"step": step})
    if world.rank == 0:
        confirmed.write_text(str(step))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_moments_of_saving(tmp_path):
    path, confirmed = tmp_path / "checkpoint", tmp_path / "confirmed"
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(20)])
    step, leftovers, chance = 0, 0, random.Random(3)
    for _ in range(8):
        confirmed.unlink(missing_ok=True)
        mpiexec = start_ranks(["-c", LOOP, str(path), str(confirmed), str(step)], 2, cwd=ROOT)
        try:
            wait_until(confirmed.exists)
            time.sleep(chance.uniform(0, 0.05))
        finally:
            for process in reversed(with_descendants(Process.of(mpiexec.pid))):
                if found := process.find():
                    with suppress(Exception):
                        found.kill()
            mpiexec.wait()
        extra = load(path, model)
        assert extra["step"] > step and extra["step"] >= int(confirmed.read_text() or 0)
        step = extra["step"]
        for parameter in model.parameters():
            assert (parameter == step).all(), "of two checkpoints"
        leftovers += len(list(path.iterdir())) > 3
    assert leftovers, "no run was killed in the middle of saving"
    save(path, model)
    assert len(list(path.iterdir())) == 2


@on_ranks(3)
@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_on_one_rank_is_one_sentence_on_all(world, full, tmp_path):
    model = nn.Linear(20, 20)
    fill(model, 1)
    save(tmp_path, model, comm=world.comm)
    files = set(os.listdir(tmp_path))
    world.comm.barrier()  # before another rank writes again
    with files_of_at_most(100) if world.rank == full else nullcontext():
        said = refusal(save, tmp_path, model, comm=world.comm)
    assert f"rank{full}-" in said and "File too large" in said
    assert len(set(world.comm.all_gather_object(said))) == 1
    fill(model, 2)
    load(tmp_path, model, comm=world.comm)
    assert (model.weight == 1).all()
    assert set(os.listdir(tmp_path)) == files


@on_ranks(2)
def test_a_full_disk_at_the_index_leaves_the_folder_as_it_was(world, tmp_path):
    """Or what was written for nothing would take the room of the next checkpoint."""
    model = nn.Linear(2, 2)
    save(tmp_path, model, comm=world.comm)
    files = set(os.listdir(tmp_path))
    world.comm.barrier()  # before another rank writes again
    with patch.object(folder, "write_atomically", side_effect=OSError(28, "No space left on device")):
        assert "No space left" in refusal(save, tmp_path, model, comm=world.comm)
    world.comm.barrier()
    assert set(os.listdir(tmp_path)) == files


def test_two_runs_that_save_to_one_folder_leave_a_whole_checkpoint(tmp_path):
    """A thread commits in the middle of the other commit, between its index and its clean-up."""
    model, replace, second = nn.Linear(2, 2), folder._replace, []

    def save_or_be_refused():  # which of the two depends on who is first
        with suppress(CheckpointError):
            save(tmp_path, model)

    def slowly(path, text):
        replace(path, text)
        if not second:
            second.append(threading.Thread(target=save_or_be_refused))
            second[0].start()
            wait_until(lambda: len(list(tmp_path.glob("rank0-*"))) > 1)

    save(tmp_path, model)
    with patch.object(folder, "_replace", slowly):
        save_or_be_refused()
        second[0].join(60)
    load(tmp_path, model)
    assert len(list(tmp_path.iterdir())) == 2


# Refusals


def refusal(call, *arguments, **keywords) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **keywords)
    assert str(caught.value).endswith("."), caught.value
    return str(caught.value)


def edit(path, **changes):
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps({**index, **changes}))


def data_file(path, rank=1):
    return next(path.glob(f"rank{rank}-*"))


def truncate(path):
    os.truncate(data_file(path), data_file(path).stat().st_size - 8)


def mangle(path):
    with open(data_file(path), "r+b") as file:
        file.write(b"\xff" * 16)


def swap(path):
    """A file of another checkpoint under the name of this one."""
    name, ours = data_file(path), (path / "index.json").read_text()
    content = name.read_bytes()
    mark = json.loads(ours)["id"].encode()
    name.write_bytes(content.replace(mark, b"0" * len(mark)))


def pieces(change):
    """A damage: ``change(path, pieces)`` of the value of a weight, as the index has them."""

    def damage(path):
        tensors = folder.read_index(path)["tensors"]
        change(path, tensors["first.weight"]["roles"]["value"]["pieces"])
        edit(path, tensors=tensors)

    return damage


def rename_a_piece(path, pieces):
    name = next(iter(pieces))
    pieces[f"../{path.name}/{name}"] = pieces.pop(name)


def begin_before_the_start(path, pieces):
    first = min(pieces, key=lambda name: int(pieces[name].partition(":")[0]))
    pieces[first] = f"-1:{pieces[first].partition(':')[2]}"


def lose_a_state(path):
    """One bit of its name: then only rank 1 lacks it."""
    file = data_file(path)
    file.write_bytes(file.read_bytes().replace(b"random/cpu", b"random/cpt"))


def damage_a_random_state(path):
    """A state of the right length, which no generator has; only on rank 1."""
    with open(data_file(path), "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        first, end = header["random/cpu"]["data_offsets"]
        file.seek(start + first)
        file.write(b"\xff" * (end - first))


def odd_setting(path):
    index = json.loads((path / "index.json").read_text())
    index["optimizer"]["groups"][0]["settings"]["lr"] = {"a": 1}
    edit(path, optimizer=index["optimizer"])


DAMAGES = {
    "no folder": (lambda path: (path / "index.json").unlink(), "pass the folder"),
    "not JSON": (lambda path: (path / "index.json").write_text('{"format": '), "is not JSON"),
    "a list": (lambda path: (path / "index.json").write_text("[]"), "no index of a dtlib checkpoint"),
    "another format": (lambda path: edit(path, format="something"), "no index of a dtlib checkpoint"),
    "newer": (lambda path: edit(path, version=2), "has version 2"),
    "nonsense": (lambda path: edit(path, tensors={"a": 1}), "is damaged"),
    "incomplete": (
        lambda path: (path / "index.json").write_text('{"format": "dtlib checkpoint", "version": 1}'),
        "lacks",
    ),
    "a file is missing": (lambda path: data_file(path).unlink(), "is missing"),
    "truncated": (truncate, "bytes, but the index says"),
    "mangled": (mangle, "is damaged"),
    "of another checkpoint": (swap, "belongs to checkpoint 0000"),
    "elements are missing": (pieces(lambda path, pieces: pieces.popitem()), "is incomplete"),
    "elements twice": (pieces(lambda path, pieces: pieces.update({data_file(path).name: "29:60"})), "is incomplete"),
    "a negative place": (pieces(begin_before_the_start), "is incomplete"),
    "a piece elsewhere": (pieces(rename_a_piece), "not among its files"),
    "an extra that was none": (lambda path: edit(path, extra={"__tuple__": 3}), "is damaged"),
}
WHERE_LOADED = {  # exported without
    "an optimizer that is none": (lambda path: edit(path, optimizer=3), "is damaged"),
    "a setting of another kind": (odd_setting, "is damaged"),
    "a random state is missing": (lose_a_state, "is damaged"),
    "a damaged random state": (damage_a_random_state, ".safetensors is damaged"),
}


@on_ranks(2)
@pytest.mark.parametrize("damage", DAMAGES | WHERE_LOADED)
def test_what_is_damaged_is_refused_on_all_ranks_and_changes_nothing(world, damage, tmp_path):
    do, words = (DAMAGES | WHERE_LOADED)[damage]
    model = build("plain")
    save(tmp_path, model, plain_sgd(model), world.comm)
    if world.rank == 0:
        do(tmp_path)
    world.comm.barrier()
    refused_and_unchanged(world, words, tmp_path, build("plain", seed=5), plain_sgd)
    if world.rank == 0 and damage in DAMAGES:
        assert words in refusal(checkpoint.export, tmp_path, tmp_path / "out")


@on_ranks(2)
def test_a_learning_rate_in_a_tensor_is_set_in_place_and_only_by_a_whole_checkpoint(world, tmp_path):
    model, rate = build("plain"), torch.tensor(0.125)
    save(tmp_path, model, plain_sgd(model), world.comm)
    load(tmp_path, model, optimizer := plain_sgd(model, rate), world.comm)
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0.5
    rate.fill_(0.125)
    if world.rank == 0:
        damage_a_random_state(tmp_path)
    world.comm.barrier()
    refused_and_unchanged(world, "is damaged", tmp_path, model, lambda model: plain_sgd(model, rate))
    assert rate == 0.125


@on_ranks(2)
def test_a_pointer_that_cannot_be_read_is_refused(world, tmp_path):
    """And not taken for one that is missing: training would begin anew."""
    for rank, damage in enumerate(
        (lambda path: path.write_bytes(b"\xff"), os.mkfifo, lambda path: path.symlink_to("no"))
    ):
        path = tmp_path / f"latest{rank}"
        if world.rank == 0:
            damage(path)
        world.comm.barrier()
        assert "is damaged" in refusal(checkpoint.read_latest, path, world.comm)
    assert checkpoint.read_latest(tmp_path / "none", world.comm) is None


def refused_and_unchanged(world, expected, path, model, make_optimizer=None):
    before = [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]
    optimizer = make_optimizer(model) if make_optimizer else None
    random_state = torch.get_rng_state()
    said = refusal(load, path, model, optimizer, world.comm)
    assert expected in said, said
    assert len(set(world.comm.all_gather_object(said))) == 1
    after = [*model.parameters(), *model.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert optimizer is None or not optimizer.state
    assert torch.equal(torch.get_rng_state(), random_state)


class Different(nn.Module):
    """Like ``Plain`` but for what is asked for."""

    def __init__(self, width=10, extra=False, without=(), count=torch.int64):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, width), nn.Linear(width, 3), nn.Linear(4, 4)
        self.first.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros(2, dtype=count))
        if extra:
            self.extra = nn.Linear(1, 1)
        for name in without:
            delattr(self, name)


def two_groups(model):
    first, *others = (p for p in model.parameters() if p.requires_grad)
    return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.5)


def fewer(model):
    return torch.optim.SGD(model.first.parameters(), lr=0.5)


def adam(model):
    return torch.optim.Adam(model.parameters())


MISMATCHES = {
    "missing": ({"extra": True}, None, "lacks extra.bias (and 1 more) of the model"),
    "unexpected": ({"without": ["unused"]}, None, "The model lacks unused.bias (and 1 more)"),
    "shape": ({"width": 11}, None, "first.weight has shape (10, 6)"),
    "type": ({"count": torch.float32}, None, "count is int64"),
    "optimizer": ({}, adam, "has the states of SGD, not of Adam"),
    "number of groups": ({}, two_groups, "has 2 groups of parameters"),
    "groups": ({}, fewer, "differ in second.bias (and 3 more)"),
}


@on_ranks(1, 3)
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_another_model_or_optimizer_is_refused_by_name(world, mismatch, tmp_path):
    model = Different()
    save(tmp_path, model, plain_sgd(model), world.comm)
    settings, make_optimizer, expected = MISMATCHES[mismatch]
    refused_and_unchanged(world, expected, tmp_path, Different(**settings), make_optimizer)


@on_ranks(2)
def test_a_mistake_on_one_rank_is_refused_on_all(world, tmp_path):
    model = Different()
    save(tmp_path, model, comm=world.comm)
    refused_and_unchanged(world, "was saved without an optimizer", tmp_path, model, plain_sgd)
    mine = Different(extra=world.rank == 1)
    refused_and_unchanged(world, "lacks extra.bias", tmp_path, mine)

    def refuses(expected, *arguments, **keywords):
        said = refusal(save, tmp_path, *arguments, comm=world.comm, **keywords)
        assert expected in said, said
        assert len(set(world.comm.all_gather_object(said))) == 1

    files = set(os.listdir(tmp_path))
    world.comm.barrier()
    refuses("first.weight is", Different(width=10 + world.rank))
    refuses("extra cannot be written as JSON", model, extra={"a": object()} if world.rank == 0 else None)
    refuses("that the model does not have", model, plain_sgd(Different()))
    half, optimizer = Different().bfloat16(), None
    optimizer = torch.optim.SGD(MasterWeights(half.parameters()).masters, lr=0.1)
    refuses("pass the optimizer's model, and masters=", half, optimizer)
    refuses("is complex128", nn.ParameterList([torch.zeros(2, dtype=torch.complex128)]))
    matrix = nn.Linear(3, 3)
    factored = torch.optim.Adafactor(matrix.parameters())
    matrix(torch.ones(1, 3)).sum().backward()
    factored.step()
    refuses("element-wise", matrix, factored)
    # Saved by one rank of two: half of each tensor is nowhere.
    with of_size(world.comm, 1) as alone:
        run = Run(3, world.comm, "plain", "sgd")
        if alone:
            assert "is incomplete" in refusal(save, tmp_path, run.model, comm=alone)
    assert set(os.listdir(tmp_path)) == files
    load(tmp_path, model, comm=world.comm)


# Elsewhere

PLAIN = f"""
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tests.models import adamw, batches, build, loss_of
for folder in sys.argv[1:]:
    model = build("transformer", seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    names, states = get_state_dict(model, optimizer)
    asked = {{"model": names, "optimizer": states, "extra": {{"epoch": None}}}}
    dcp.load(asked, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=asked["model"], optim_state_dict=asked["optimizer"])
    losses = []
    for batch in batches("transformer", {BEFORE + AFTER}, 12)[{BEFORE}:]:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps([losses, asked["extra"]["epoch"]]))
assert "dtlib" not in sys.modules
"""


@on_ranks(3)
def test_plain_torch_goes_on_from_an_export(world, tmp_path):
    data, unbroken = batches("transformer", BEFORE + AFTER, 12), {}
    for stage in (2, 3):
        run = Run(stage, world.comm, "transformer", "adamw")
        run.losses(data[:BEFORE])
        save(tmp_path / f"ours{stage}", run.call, run.optimizer, world.comm, extra={"epoch": stage})
        unbroken[stage] = run.losses(data[BEFORE:])
    if world.rank == 0:
        for stage in unbroken:
            checkpoint.export(tmp_path / f"ours{stage}", tmp_path / f"theirs{stage}")
        program = [sys.executable, "-c", PLAIN, *(str(tmp_path / f"theirs{stage}") for stage in unbroken)]
        ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        for (stage, expected), line in zip(unbroken.items(), ended.stdout.splitlines(), strict=True):
            losses, epoch = json.loads(line)
            assert epoch == stage
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 1e-12
    world.comm.barrier()


def test_loading_executes_no_code(tmp_path):
    """Nothing here can: neither by what it imports and calls, nor by what is in the files."""
    for path in (ROOT / "dtlib" / "checkpoint").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not {"pickle", "marshal", "shelve", "importlib"} & set(names), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "torch.load", "torch.save"), path
    save(tmp_path, nn.Linear(2, 2))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    with safe_open(data_file(tmp_path, 0), "pt") as file:
        assert set(file.keys()) == {"weight/value", "bias/value", "random/cpu"}


def test_what_killed_runs_left_is_deleted_and_other_files_are_not(tmp_path):
    model = nn.Linear(2, 2)
    save(tmp_path, model)
    for name in (".tmpAb3xYz", ".index.json.7-0123abcd.tmp", "rank3-0123abcd.safetensors", "notes.txt", ".tmp"):
        (tmp_path / name).write_text("x")
    save(tmp_path, model)
    kept = {path.name for path in tmp_path.iterdir() if not path.name.startswith("rank0-")}
    assert kept == {"index.json", "notes.txt", ".tmp"} and len(list(tmp_path.iterdir())) == 4


@on_ranks(1)
def test_all_files_are_open_to_those_that_the_umask_says(world, tmp_path):
    for umask in (0o022, 0o077):
        before = os.umask(umask)
        try:
            save(tmp_path, nn.Linear(2, 2), comm=world.comm)
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}
