"""Ranks that train alone and meet in rounds, and accidents: ``local_deaths.py OPTIONS FOLDER``, with ULFM.

OPTIONS is JSON: ``die`` {rank: step}, ``steps``, and arguments of DiLoCo. Rank r's parameters, and what it knows of the
rounds, are FOLDER/r.pt at the end.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import dtlib
from dtlib import recovery
from dtlib.parallel.local import DiLoCo
from dtlib.recovery.shrink import failure_of_a_rank, shrunk
from tests.test_local import gradient_of, made


def train_in_rounds(local: DiLoCo, one_step, steps: int, tell) -> dtlib.Communicator:
    """Train until ``local.steps == steps``, on the ranks that are left; returns their communicator.

    A rank that dies between two rounds costs its own steps since the last one, and nothing else: the others have taken
    theirs alone, and still have them.
    """
    fewer = None
    while True:
        try:
            if fewer is not None:
                local.recover(fewer)
                fewer = None
            while local.steps < steps:
                one_step(local.steps)
                local.step()
            local.comm.barrier()  # nobody leaves as long as another one may need it
            return local.comm
        except Exception as error:
            if not failure_of_a_rank(error):
                raise
            fewer = shrunk(local.comm, tell)


def main(options: str, folder: str) -> None:
    options, world = json.loads(options), dtlib.init()
    model = made()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    local = DiLoCo(world.comm, model, inner, outer, **options["settings"])
    lost = []

    def one_step(step):
        if options["die"].get(str(world.rank)) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        gradient_of(model, world.rank, step)

    def tell(what, **facts):
        if what == "lost":
            lost.append(facts["ranks"])

    comm = train_in_rounds(local, one_step, options["steps"], tell)
    parameters = [parameter.detach() for parameter in model.parameters()]
    torch.save({"parameters": parameters, "lost": lost}, Path(folder) / f"{world.rank}.pt")
    recovery.leave(comm)


main(*sys.argv[1:3])
