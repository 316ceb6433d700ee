"""The plain cores: as short as promised, equal to the full classes in values and payload, and strict about the rest."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import dtlib
from dtlib.errors import DtlibError
from dtlib.parallel import tensor
from dtlib.parallel.data import DataParallel
from dtlib.parallel.data.plain import DataParallelBuckets, DataParallelHooks, DataParallelNaive
from dtlib.parallel.pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe
from dtlib.parallel.pipeline.plain import order, step
from dtlib.parallel.sharded import fully_shard
from dtlib.parallel.tensor.plain import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from dtlib.parallel.zero import ZeroOptimizer
from dtlib.parallel.zero.plain import Stage1, Stage2, Stage3
from tests.models import adamw, batches, build, difference, loss_of, part, sgd
from tests.ranks import on_ranks

PLAIN = sorted((Path(dtlib.__file__).parent / "parallel").glob("*/plain.py"))
STEPS = 4
ADAMW = {"lr": 0.01, "eps": 1e-4}
STAGES = {1: Stage1, 2: Stage2, 3: Stage3}


@pytest.mark.parametrize("file", PLAIN, ids=lambda file: file.parent.name)
def test_a_plain_core_is_read_in_ten_minutes(file):
    lines = file.read_text().splitlines()
    assert len(lines) <= 130
    assert sum(bool(line.strip()) for line in lines) <= 100


def test_every_strategy_that_is_taught_has_a_plain_core():
    assert [file.parent.name for file in PLAIN] == ["data", "pipeline", "tensor", "zero"]


def net(width=6):
    """Three layers, one of them small; each starts at another value on each rank, which construction has to mend."""
    layers = nn.Linear(width, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3)
    return nn.Sequential(*layers).double()


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def data(size, width=6, outputs=3):
    torch.manual_seed(1)
    return [(torch.randn(4 * size, width).double(), torch.randn(4 * size, outputs).double()) for _ in range(STEPS)]


def mine(batch, comm):
    return [whole.chunk(comm.size)[comm.rank] for whole in batch]


def one_process(size, optimizer=adamw):
    model = seeded(net)
    optimizer = optimizer(model)
    for x, y in data(size):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def refused(why, comm, function):
    """``function`` raises a DtlibError that says why, on every rank; a hang would end at the test's time limit."""
    with pytest.raises(DtlibError, match=why):
        function()
    comm.barrier()


def payload(trace, name, itemsize=8):
    """Messages and bytes of one verb, of float64 only: flags, notes and headers are integers or bytes."""
    chosen = [event for event in trace.events if event.name == name and "float64" in event.what]
    return [(event.messages, event.bytes) for event in chosen]
