"""The count of bytes that are alive, against torch's allocator, the garbage collector and the kernel."""

import gc
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy

from dtlib.measure.live import Live
from dtlib.measure.storages import strided
from tests.ranks import on_ranks

MEBIBYTE = 2**20


def allocated(run) -> int:
    """The most bytes at a time that torch's allocator gave out, as its profiler has it."""
    only_memory = False, True, False, False, False
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, *only_memory, torch._C._profiler._ExperimentalConfig()))
    try:
        run()
    finally:
        events = [event for thread in _disable_profiler_legacy() for event in thread]
    most = running = 0
    for event in events:
        if event.kind() == "memory_alloc":
            running += event.cpu_memory_usage()
            most = max(most, running)
    return most


def collected() -> int:
    """Bytes of all tensors that the garbage collector knows."""
    gc.collect()
    found = strided(one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in found}.values())


def perceptron():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).bfloat16()
    return model, torch.randn(24, 64).bfloat16()


def transformer():
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(8, 16, 64)


def convolution():
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    return nn.Sequential(*layers), torch.randn(24, 1, 8, 8)


def two_steps(build, foreach):
    model, x = build()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    for _ in range(2):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, x, optimizer


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("build", [perceptron, transformer, convolution])
def test_now_is_what_the_collector_finds_and_peak_what_the_allocator_gave_out(build, foreach):
    before = collected()
    with Live() as live:
        kept = two_steps(build, foreach)
    assert live.now == collected() - before
    del kept
    gc.collect()
    assert live.now == 0
    # Kernels have a few numbers of their own, such as the sums of batch normalisation: 2 x 8 floats.
    assert 0 <= allocated(lambda: two_steps(build, foreach)) - live.peak <= 2 * 8 * 4


OF_A_PROCESS = """
import re, torch
from pathlib import Path
from dtlib.measure.live import Live

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

with Live() as live:
    first, before = torch.ones(2**22), (live.now, resident())
    kept = [torch.ones(2**22) for _ in range(4)]
    views = [one[1:] for one in kept]
    grown = live.now - before[0], resident() - before[1]
    del kept
    held = live.now
    del views
    left = live.now
assert grown[0] == 4 * first.nbytes and abs(grown[1] - grown[0]) < 2**21, grown
assert held - left == grown[0] and left == first.nbytes, (held, left)
assert resident() - before[1] < 2**21
"""


@pytest.mark.slow
def test_memory_of_the_process_grows_and_shrinks_by_as_much():
    """Of a new one, whose memory nothing has used before."""
    subprocess.run([sys.executable, "-c", OF_A_PROCESS], check=True)


def test_views_resized_storages_and_memory_of_others():
    given, other = torch.zeros(10), torch.zeros(1000)
    with Live(given, given[3:]) as live:
        other.add_(1)  # neither given nor allocated here
        assert live.now == 40
        with torch.no_grad():
            given.resize_(20)
        assert live.now == 80
        view = torch.zeros(100)[3:]
        view.untyped_storage().resize_(0)
        assert live.now == 80
        view.untyped_storage().resize_(1000)
        assert live.now == 80 + 1000
        shared = torch.from_numpy(view.numpy()), torch.from_dlpack(view), torch.from_numpy(np.zeros(50))
        assert live.now == 80 + 1000
        numbers = torch.tensor([1.0, 2.0])
        assert live.now == 80 + 1000 + 8
        del view, shared
        sparse = torch.zeros(3, 3).to_sparse()
        nothing = torch.zeros(1000, device="meta")
        assert live.now == 80 + 8
    resize = torch.UntypedStorage.resize_
    assert resize is torch._C.StorageBase.resize_ and live.peak == 80 + 1000 + 8
    assert numbers.numel() == 2 and sparse._nnz() == 0 and nothing.is_meta


def test_bytes_by_the_line_that_allocated_them():
    model, changes = nn.Linear(100, 100), []
    with Live(*model.parameters()) as live:
        live.changed = changes.append
        loss = model(torch.ones(50, 100)).sum()
        kept = [torch.zeros(7000)]  # line of the leak
        at = live.by_line()
        loss.backward()
        del loss
    (first, place, text), *_ = live.by_line()
    assert (first, text) == (40_400, "") and place == "before:0"
    assert (28_000, "kept = [torch.zeros(7000)]  # line of the leak") in [(count, text) for count, _, text in at]
    assert [text for count, _, text in live.by_line() if count == 40_400] == ["", "loss.backward()"]
    assert all(place.startswith("test_live.py:") for _, place, _ in live.by_line()[1:])
    assert sum(count for count, *_ in live.by_line(at_peak=True)) == live.peak == max(changes) and kept


@on_ranks(2)
def test_messages_handles_and_memory_of_collectives_are_alive(world):
    comm = world.comm.split(0)
    with Live() as live:
        handles = [comm.send(torch.ones(1000), 1 - comm.rank, async_op=True) for _ in range(3)]
        room = torch.empty(1000)
        for _ in range(3):
            comm.recv(room, 1 - comm.rank)
        for handle in handles:
            handle.wait()
        kept = live.now
        del handles, handle
        assert (kept, live.now) == (4 * 4000, 4000)
        comm.all_reduce(room, algorithm="ring")
        scratch = sum(tensor.nbytes for tensor in comm.tensors_by_kind()["communication"])
        assert scratch >= 2000 and live.now == 4000 + scratch
