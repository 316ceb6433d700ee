"""A training with planned faults, on ranks: ``python -m dtlib.lessons.l11b.training OPTIONS FOLDER``.

OPTIONS is JSON with keys of ``OPTIONS`` below. A small network learns digits with 48 images per step over all ranks.
The default is float64, so that runs can be compared to the last digits. FOLDER gets the journal, checkpoints if
requested, and the final parameters.
"""

import json
import os
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import dtlib
from dtlib import recovery
from dtlib.workloads import digits

OPTIONS = {
    "by": "checkpoint",  # or "memory", "shrink", or "engine" (dtlib.initialize with checkpoints)
    "runtime": "dtlib",  # of the engine
    "stage": 0,  # ZeRO stage of the engine
    "steps": 60,
    "every": 10,  # steps from one checkpoint to the next
    "commit": 1,  # steps from one commit in memory to the next
    "seconds": 0.0,  # EMULATED computation per step; the core is idle
    "hidden": 32,
    "dtype": "float64",  # DeepSpeed has no float64
    "time_limit": None,  # seconds that a rank waits for others
    "faults": [],  # each {"kind": "kill", "rank": 2, "step": 20, "at": "begin"}
}
BATCH = 48
PARAMETERS = "parameters.safetensors"


def make(options: dict):
    """Return model, optimizer, loss and the function of batches; every caller gets the same."""
    torch.manual_seed(0)
    hidden, dtype = options["hidden"], getattr(torch, options["dtype"])
    model = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    images, labels = digits.load()
    images = images.to(dtype)

    def batch_of(step):
        places = (torch.arange(BATCH) + BATCH * step) % len(images)
        return images[places], labels[places]

    return model, optimizer, nn.functional.cross_entropy, batch_of


def alone(options: dict) -> tuple[nn.Module, list[float]]:
    """Train in this process, without faults and without dtlib.recovery; return the model and its losses."""
    options = OPTIONS | options
    model, optimizer, loss_fn, batch_of = make(options)
    losses = []
    for step in range(options["steps"]):
        x, y = batch_of(step)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


class PlannedFaults:
    """The faults of this rank. Each happens once, even if its step is repeated, unless it has ``always``."""

    def __init__(self, faults: list[dict], rank: int, folder: Path, journal):
        self.faults = [(folder / f"fault-{number}", f) for number, f in enumerate(faults) if f["rank"] == rank]
        self.journal = journal

    def due(self, step: int, moment: str) -> list[dict]:
        """Return the faults of this moment, and record that they happened."""
        found = []
        for mark, fault in self.faults:
            if (fault["step"], fault.get("at", "begin")) == (step, moment) and not mark.exists():
                if not fault.get("always"):
                    mark.touch()
                self.journal.write("fault", kind=fault["kind"], step=step)
                found.append(fault)
        return found

    def happen(self, step: int, moment: str) -> None:
        """Execute the faults of this moment."""
        for fault in self.due(step, moment):
            match fault["kind"]:
                case "kill" if "seconds" in fault:  # a kill after this time, at any point of the program
                    signal.setitimer(signal.ITIMER_REAL, fault["seconds"])
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "ask to end":
                    os.kill(os.getpid(), signal.SIGTERM)
                case "raise":
                    raise RuntimeError("this rank's data cannot be read.")
                case "full disk":
                    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


def with_accidents(replica, options: dict, accidents: PlannedFaults):
    """Return the same replica, with the planned faults of this rank."""
    batch_of = replica.batch_of
    late = [fault for _, fault in accidents.faults if fault["kind"] == "late"]

    def eventful(step):
        time.sleep(options["seconds"] + sum(fault["seconds"] for fault in late if step >= fault["step"]))
        due = [fault["kind"] for fault in accidents.due(step, "nan")]
        accidents.happen(step, "begin")
        x, y = batch_of(step)
        return (x * torch.nan if due else x), y

    replica.batch_of = eventful
    first = next(iter(replica.trained.values()))
    first.register_hook(lambda gradient: accidents.happen(replica.steps, "backward"))
    replica.optimizer.register_step_post_hook(lambda *_: accidents.happen(replica.steps, "update"))
    return replica


def train_by_engine(options: dict, world, folder: Path, journal) -> None:
    """Train with ``dtlib.initialize``, at any stage of ZeRO, with dtlib's or torch's classes."""
    model, _, _, batch_of = make(options)
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": options["stage"]},
    }
    engine, *_ = dtlib.initialize(model=model, config=config, runtime=options["runtime"])
    accidents, losses = PlannedFaults(options["faults"], world.rank, folder, journal), []
    if (folder / "latest").exists():
        losses = engine.load_checkpoint(folder)[1]["losses"]
    while engine.global_steps < options["steps"]:
        step = engine.global_steps
        time.sleep(options["seconds"])
        accidents.happen(step, "begin")
        x, y = batch_of(step)
        losses.append(float(engine.train_batch(iter([(x[world.rank :: world.size], y[world.rank :: world.size])]))))
        if world.rank == 0:
            journal.write("step", ranks=world.size, step=step + 1, loss=losses[-1])
        if engine.global_steps % options["every"] == 0 or engine.global_steps == options["steps"]:
            engine.save_checkpoint(folder, client_state={"losses": losses})


def main() -> None:
    """Run the training of the command line."""
    options, folder = OPTIONS | json.loads(sys.argv[1]), Path(sys.argv[2])
    ways = {
        "checkpoint": partial(recovery.train_and_save, folder=folder / "checkpoint", every=options["every"]),
        "memory": partial(recovery.train_and_commit, every=options["commit"]),
        "shrink": recovery.train_and_shrink,
    }
    world = dtlib.init()
    world.comm.time_limit = options["time_limit"]
    journal = recovery.Journal(folder, world)
    with journal.log_outcome():
        if options["by"] == "engine":
            return train_by_engine(options, world, folder, journal)
        accidents = PlannedFaults(options["faults"], world.rank, folder, journal)
        replica = with_accidents(recovery.Replica(*make(options)), options, accidents)
        replica.status.listen()
        comm = ways[options["by"]](replica, world.comm, options["steps"], on_event=journal)
        if comm.rank == 0:
            save_file(dict(replica.model.state_dict()), folder / PARAMETERS, {"losses": json.dumps(replica.losses)})
    recovery.leave(comm)


if __name__ == "__main__":
    main()
