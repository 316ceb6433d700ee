"""torch's DDP in a notebook's cells, on our backend: whom it waits for, Stop, reset, and a rank that is killed."""

import re
import threading
import time

import pytest

from tests.test_engines import ENGINES, notebooks  # noqa: F401

BEGIN = """%%px
import os, torch, dtlib.backend
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("dtlib")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(3, 2))
x = torch.ones(4, 3)
print(dist.get_world_size())
"""
LEAVES_EARLY = """%%px
for step in range(4):
    if rank == 1 and step == 2: break
    model(x).sum().backward()
"""
ANEW = """%%px
model = DistributedDataParallel(model.module)
model(x).sum().backward()
print(dist.get_rank() + 10)
"""


@pytest.mark.slow
def test_ddp_is_stopped_and_goes_on(notebooks):  # noqa: F811
    notebook = notebooks()
    notebook.run(ENGINES.format(2))
    assert notebook.run(BEGIN).count("| 2") == 2
    pressed = []
    threading.Timer(6, lambda: (pressed.append(time.monotonic()), notebook.stop_button())).start()
    shown = notebook.run(LEAVES_EARLY)
    print(f"{time.monotonic() - pressed[0]:.2f} s from Stop to the end of the cell\n{shown}")
    assert re.search(r"Waiting: rank 0.*, \d s in all_reduce.*: rank 1 has finished its cell", shown), shown
    assert "line 3: model(x).sum().backward()" in shown
    assert "Interrupted on rank" in shown
    notebook.run("%px dtlib.reset()")
    assert "wrap the model anew" in notebook.run("%px model(x)")
    assert "rank 0 | 10\nrank 1 | 11" in notebook.run(ANEW)
    shown = notebook.run("%%px\nif rank: os.kill(os.getpid(), 9)\nmodel(x).sum().backward()")
    assert "Rank 1 was ended by signal 9 (Killed)" in shown, shown
