import subprocess
import sys

import numpy as np
import pytest
import torch

from dtlib.comm import solo
from dtlib.comm.watch.recorder import recording
from dtlib.errors import CommunicationError
from dtlib.parallel.data import DataParallel
from tests.cases import refuses
from tests.ranks import on_ranks


@on_ranks(1, 2, 3, 4)
def test_it_counts_what_a_real_rank_counts(world):
    count = 12 * world.size + 5
    root = world.size - 1
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def operations(comm):
        whole, chunk = torch.ones(12 * comm.size), torch.ones(12)
        comm.all_reduce(torch.ones(count), algorithm="ring")
        comm.all_reduce(torch.ones(count), "max")
        comm.all_reduce(torch.ones(count, dtype=torch.bfloat16), algorithm="naive")
        comm.broadcast(torch.ones(count), root)
        comm.reduce(torch.ones(count), root)
        comm.scatter(chunk, whole, root)
        comm.gather(whole, chunk, root)
        comm.reduce_scatter(chunk, whole)
        comm.all_gather(whole, chunk)
        comm.all_to_all(torch.ones(12 * comm.size), whole)
        rows = [min(comm.rank, other) for other in range(comm.size)]
        comm.all_to_all(torch.ones(sum(rows), 3), torch.ones(sum(rows), 3), rows, rows)
        comm.broadcast_object({"text": "x" * 100}, root)
        comm.all_gather_object({"text": "x" * 100})
        handle = comm.send(chunk, right, async_op=True)
        comm.recv(chunk, left)
        handle.wait()

    with recording() as real:
        operations(world.comm)
    with recording() as simulated:
        operations(solo(world.rank, world.size))
    waits = [event for event in real if event.kind == "wait"]
    assert len(waits) == 1 and not any(event.simulated for event in real)
    assert [(e.kind, e.what, e.messages, e.bytes) for e in simulated] == [
        (e.kind, e.what, e.messages, e.bytes) for e in real
    ]


def test_it_says_that_it_is_simulated_and_checks_as_the_real_one_does():
    comm = solo(2, 4)
    assert (comm.rank, comm.size, comm.simulated) == (2, 4, True)
    assert repr(comm) == "SoloCommunicator(rank=2, size=4, simulated)"
    received = comm.recv(torch.ones(3), source=1, async_op=True)
    assert received.wait().tolist() == [0, 0, 0] and received.done()
    assert comm.all_gather(np.zeros(4), np.ones(1)).tolist() == [0, 0, 1, 0]
    assert comm.all_gather_object("mine") == ["mine"] * 4 and comm.broadcast_object("mine", 3) == "mine"
    for call, words in {
        (lambda: comm.all_reduce(torch.ones(2, dtype=torch.bool))): "does not take bool",
        (lambda: comm.broadcast(torch.ones(2), root=4)): "0 to 3",
        (lambda: comm.all_gather(torch.zeros(3), torch.zeros(2))): "4 times as many elements",
        (lambda: comm.split(0)): "solo has none",
        (lambda: solo(4, 4)): r"solo\(rank=4, size=4\)",
        (lambda: solo(0, 0)): "size=0",
    }.items():
        refuses(words, call, error=CommunicationError)


@pytest.mark.slow
def test_it_needs_no_mpi():
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"  # an import of it raises
        "import torch; from dtlib.comm import solo\n"
        "comm = solo(0, 8); comm.all_reduce(torch.ones(8)); comm.barrier(); comm.all_gather_object(1)\n"
        "comm.recv(torch.ones(2), 1)\n"
        "import dtlib\n"
        "try: dtlib.init()\n"
        "except dtlib.DtlibError as error: assert 'finds no MPI library (' in str(error), error\n"
        "else: assert False"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_model_trains_beside_ranks_that_do_not_exist():
    """Flags of gradients that would come from others are zeros, and no sign of a mistake."""
    model = DataParallel(torch.nn.Linear(4, 4), solo(0, 64))
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
    assert torch.isfinite(model.module.weight.grad).all()
