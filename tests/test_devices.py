"""CUDA tensors without a GPU: every strategy on a fake device, the fake device itself, and where devices are named."""

import ast
import re
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from dtlib.comm.torch import nccl
from tests.cases import refuses
from tests.conftest import ROOT
from tests.ranks import on_ranks
from tests.test_parity import TABLE, check

# They use classes, futures or graphs of torch, which know no such device.
ELSEWHERE = "torch", "hook", "ContextParallel", "Replicator, one graph", "on other communicators"
ROWS = [name for name in TABLE if not name.startswith(ELSEWHERE) and not name.endswith(("torch", "all_reduce"))]
# One of each kind in the fast tier, where half of its cases run.
FAST = {
    "DataParallelNaive", "SyncBatchNorm", "plain Stage3", "fully_shard, kept", "pipeline, plain", "tensor, plain",
    "MixtureOfExperts, plain", "attention, zigzag",
}  # fmt: skip


@on_ranks(2, device="fake")
@pytest.mark.parametrize("strategy", [name for name in ROWS if name in FAST])
def test_half_of_parity_on_a_fake_gpu(world, strategy):
    check(world, strategy, half=True)


@pytest.mark.slow
@on_ranks(2, device="fake")
@pytest.mark.parametrize("strategy", ROWS)
def test_parity_on_a_fake_gpu(world, strategy):
    """Values of one process, while each tensor travels as a GPU's does."""
    check(world, strategy, half=False)


@pytest.mark.gpu
@on_ranks(2, device="cuda")
@pytest.mark.parametrize("strategy", ROWS)
def test_parity_on_a_gpu(world, strategy):
    test_parity_on_a_fake_gpu.body(world, strategy)


@on_ranks(2, device="fake")
def test_the_fake_gpu_has_a_gpus_rules(world):
    device, here = world.device, torch.ones(3)
    there = torch.zeros(3, device=device) + 2
    assert there.is_cuda and not there.is_cpu and here.device == device
    refuses("same device", lambda: torch.add(there, torch.ones(3, device="cpu")), error=RuntimeError)
    refuses("not supported", there.numpy, error=RuntimeError)
    with pytest.raises((AttributeError, RuntimeError)):  # by builds of torch without and with CUDA
        torch.cuda.mem_get_info()
    host, second = torch.empty(3, device="cpu", pin_memory=True), torch.cuda.Stream()
    second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(second):
        host.copy_(there, non_blocking=True)
    assert host.isnan().all()  # nobody has waited
    second.synchronize()
    assert host.tolist() == [2, 2, 2]
    there += 1
    with torch.cuda.stream(second):  # which does not come after the sum
        host.copy_(there, non_blocking=True)
    second.synchronize()
    assert host.isnan().all()


# Devices by name, and torch.cuda: here alone.
NAME_DEVICES = {
    "comm/types.py", "comm/torch/nccl.py", "comm/torch/group_work.py", "comm/torch/communicator_on_group.py",
    "world/__init__.py", "world/torchrun.py", "backend/__init__.py", "backend/group.py", "export/demos.py",
}  # fmt: skip
DEFAULTS = {  # where the CPU is a default or a place by intention: a line of code for each
    "training/config.py": 2, "training/engine.py": 1, "training/strategies.py": 3, "training/deepspeed_runtime.py": 1,
    "training/torch_runtime.py": 1, "gradients/buckets.py": 1, "gradients/reducer.py": 1,
    "comm/torch/group_on_communicator.py": 1,
    "lab/checks/answer_memory.py": 1,
    "lab/engines/on_ranks.py": 1, "lab/engines/rank_table.py": 1, "parallel/zero/optimizer.py": 1,
    "parallel/pipeline/stage.py": 1,
    "horovod/functions.py": 1, "checkpoint/saving.py": 2, "checkpoint/loading.py": 4,
}  # fmt: skip


def device_names(text: str) -> int:
    """Lines with a device by name, with ``.cuda()`` or with ``torch.cuda``."""
    lines = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"cpu|cuda(:\d+)?|mps", node.value):
                lines.add(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr == "cuda":
            lines.add(node.lineno)
    return len(lines)


def test_devices_are_named_in_few_files():
    assert device_names('x.cuda()\ny = torch.cuda.Stream()\nz = "cuda:1", "cpu"\n"no cpu"') == 3
    found = {
        path.relative_to(ROOT / "dtlib").as_posix(): count
        for path in sorted((ROOT / "dtlib").rglob("*.py"))
        if "/lessons/" not in str(path) and "/course/" not in str(path)
        if (count := device_names(path.read_text()))
    }
    assert {name: count for name, count in found.items() if name not in NAME_DEVICES} == DEFAULTS


def test_nccl_that_refuses_says_so_once(monkeypatch):
    """One message on rank 0, and host memory from then on."""
    comm = SimpleNamespace(rank=0, size=2, all_gather_object=lambda thing: [thing, thing])
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0, uuid="GPU-0")
    ended = []

    class Refuses:
        def allreduce(self, tensors):
            raise RuntimeError("ncclInvalidUsage\nDuplicate GPU detected")

        def abort(self):
            ended.append(self)

    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("dtlib.comm.torch.group_work.make_group", lambda *_: Refuses())
    monkeypatch.setattr("dtlib.comm.torch.store.shared_store", lambda comm: None)
    monkeypatch.setattr(nccl, "nccl_version", lambda: (2, 29))
    assert nccl.nccl_communicator(comm, torch.device("cpu")) is None and not ended  # too old: it is not asked
    monkeypatch.setattr(nccl, "nccl_version", lambda: (2, 30))
    with pytest.warns(UserWarning, match="^NCCL refuses, so CUDA tensors go through host memory: .*Duplicate GPU"):
        assert nccl.nccl_communicator(comm, torch.device("cpu")) is None
    assert len(ended) == 1
