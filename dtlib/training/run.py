"""``dtlib train``: a workload, a config and a runtime; the loop is the same for each of them.

    config {"workload": ..., "run": ..., DeepSpeed's keys}
      |
    workload -> initialize -> train_batch, train_batch, ... -> evaluate -> result
                   ^              |          |
                   |              v          v
                 resume         log      checkpoint

The section ``workload`` is for the workload's own module; ``run`` says how long, and on what; the rest is what
``dtlib.initialize`` reads.
"""

import copy
import io
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dtlib.checkpoint import pointed_to
from dtlib.checkpoint.folder import CheckpointError, together
from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.files import refuse_to_wait, writing
from dtlib.gradients.shard_info import note
from dtlib.measure.memory import memory
from dtlib.measure.progress import RankProgress, tell
from dtlib.parallel import expert
from dtlib.parallel.pipeline.cuts import balanced_cuts, parameters_of
from dtlib.parallel.tensor import whole_state_dict
from dtlib.training.config import AnyConfig
from dtlib.training.engine import LATEST
from dtlib.training.initialization import RUNTIMES, initialize, pipeline_of
from dtlib.training.run_config import CONFIGS as CONFIGS
from dtlib.training.run_config import read
from dtlib.workloads.shared_tokens import Shared
from dtlib.workloads.workload import Workload
from dtlib.world import init
from dtlib.world.mesh import Mesh

V = TypeVar("V")
STATES = ("parameters", "gradients", "master_weights", "optimizer_states", "padding")


def train(
    workload: str | Callable[..., Workload], config: AnyConfig | None = None, runtime: str = "dtlib",
    comm: Communicator | None = None, save: str | Path | None = None, resume: bool = False,
    log: str | Path | None = None, stage: int | None = None, steps: int | None = None,
    after_step: Callable[[int, float], object] = lambda step, loss: None,
) -> dict:  # fmt: skip
    """Train a workload as its config says; all ranks call it, and get the same result.

    Args:
        workload: ``vision``, ``summarization`` or ``decoder``, or a function that makes a ``Workload`` of the config's
            section.
        config: a dictionary, or the path of a JSON file; by default the lessons' own of that name.
        runtime: ``dtlib``, ``torch`` or ``deepspeed``.
        save: a folder for checkpoints.
        resume: go on from the last checkpoint in ``save``, also on another number of ranks, at another stage, and on
            torch from dtlib's or the other way round (DeepSpeed: on as many, from its own); from the beginning where
            there is none yet.
        log: a file to which each step adds a line of JSON; where it cannot, training goes on, with a warning.
        stage, steps: in place of the config's.
        after_step: told on every rank of each step, and its loss.

    Returns:
        ``workload, runtime, stage, stages`` (of a pipeline)``, tensor`` (ranks that share each layer)``, ranks,
        seconds, steps, loss``, what the workload
        measures (``accuracy``, or ``rouge_l`` and ``lead_rouge_l``), ``samples_per_second``, ``bytes_per_rank``
        (parameters, gradients and the optimizer's states), and ``losses``, of each step. Seconds, samples and losses
        are those of this call.

    Raises:
        DtlibError: on all ranks, for what cannot be.
    """
    world = init()
    comm = comm if comm is not None else world.comm
    if runtime not in RUNTIMES:
        raise DtlibError(f"runtime is {runtime!r}: choose one of {', '.join(RUNTIMES)}.")
    if resume and save is None:
        raise DtlibError("Training goes on from a checkpoint: say where it is (save; on the command line --save DIR).")
    tell("data and model are ready")
    make, run, settings, axes, context = agreed(comm, lambda: read(workload, config, comm, stage, steps, runtime))
    work = agreed(comm, make)
    asked = run, settings, axes, context
    return _Training(work, make, *asked, runtime, comm, world, save, resume, log, after_step).result()


class _Training:
    """A run: made, trained, measured."""

    def __init__(self, work, make, run, settings, axes, context, runtime, comm, world, save, resume, log, after_step):
        self.work, self.make, self.run, self.runtime, self.comm, self.save = work, make, run, runtime, comm, save
        self.rows_lost, self.after_step = 0, after_step  # of the log
        first = comm.rank == 0 and log
        self.log = agreed(comm, lambda: appended(log) if first else nullcontext())
        agreed(comm, lambda: _check_folder(save) if save else None)
        self.axes, self.stages, self.tensor = axes, axes["pipe"], axes["tensor"]
        if run.link_bandwidth:
            comm = comm.emulate_network(run.link_latency, run.link_bandwidth)
        self.mesh = mesh = Mesh(comm, {"data": -1, **axes})
        batches = mesh["data", "context", "expert"]  # ranks with samples of their own, and the same layers
        self.cuts: dict = {"tensor": mesh["tensor"]} if self.tensor > 1 else {}
        if axes["context"] > 1:
            self.cuts["context"] = Shared(mesh["context"], context.order, context.method)
        if work.experts:
            self.cuts |= {"expert": mesh["expert"], "copies": mesh["data", "context"]}
        if self.cuts:  # the same layers, cut
            work = agreed(comm, lambda: make(**self.cuts))
        if self.tensor > 1:
            self.save = Path(save, f"tensor{self.mesh.coordinates['tensor']}of{self.tensor}") if save else None
        self.device, self.dtype = world.device, torch.float64 if run.float64 else torch.float32
        model = work.model
        if self.stages > 1:
            model = pipeline_of(runtime, work.layers, self.stages, work.loss_fn, work.seed, **self._pipes(comm))
        if axes["context"] > 1:
            for parameter in model.parameters():
                note(parameter, sequences=mesh["context"].members)
        # The test needs a model that is whole on every rank; until then it takes no memory.
        self.whole = copy.deepcopy(self.work.model).to("meta")
        self.buffers = {name: buffer.clone() for name, buffer in self.work.model.named_buffers()}
        self.loss_fn = work.loss_fn
        self.engine, _, self.loader, _ = initialize(
            model=model.to(self.device, self.dtype), config=settings, runtime=runtime,
            comm=comm if self.tensor == 1 else batches,
            training_data=work.train, collate_fn=work.collate,
        )  # fmt: skip
        self.dtype = next((p.dtype for p in self.engine.module.parameters()), self.dtype)  # bf16, fp16
        self.batch = self.engine.train_batch_size()
        torch.manual_seed(1000 * run.seed + comm.rank)
        if resume and pointed_to(Path(self.save) / LATEST, comm) is not None:
            self.engine.load_checkpoint(self.save)
        elif resume and (others := sorted(Path(save).glob(f"**/{LATEST}"))):
            raise DtlibError(
                f"{self.save} has no checkpoint, but {others[0]}, of another tensor_parallel.autotp_size: continue "
                "with that one, or use another folder."
            )
        if resume:
            found = sorted(set(comm.all_gather_object(self.engine.global_steps)))
            if len(found) > 1:
                raise DtlibError(f"{save} has checkpoints after steps {found[0]} and {found[-1]}: use another folder.")
        self.first = self.engine.global_steps
        self.last = run.steps or (run.epochs or 1) * max(1, len(work.train) // self.batch)

    def result(self) -> dict:
        losses, seconds, held = self._train()
        tell("training is done, the test starts")
        measured = self.work.evaluate(self._gathered(), self.comm)
        return {
            "workload": self.work.name, "runtime": self.runtime, "stage": self.engine.config.zero_optimization.stage,
            "stages": self.stages, "tensor": self.tensor,
            "context": self.axes["context"], "expert": self.axes["expert"], "ranks": self.comm.size, "seconds": seconds,
            "steps": self.engine.global_steps, "loss": losses[-1] if losses else None, **measured,
            "samples_per_second": len(losses) * self.batch / max(seconds, 1e-9), "bytes_per_rank": held,
            "losses": losses,
        }  # fmt: skip

    def _train(self) -> tuple[list[float], float, list[int] | None]:
        batches, losses, held = self._batches(), [], None
        steps = range(self.first, self.last)
        with self.log as file, RankProgress(self.comm, len(steps) * self.batch, "samples") as progress:
            tell("")
            began = time.perf_counter()
            for step in steps:
                if step == steps[min(1, len(steps) - 1)]:  # the second has all states
                    counter = memory(self.engine)
                    self.engine.before_step_hooks.append(counter.sample)
                    losses.append(self._step(batches))
                    self.engine.before_step_hooks.remove(counter.sample)
                    counter.sample()
                    of_states = sum(counter.sampled[name] for name in STATES)
                    buffers = counter.sampled["buffers"] + counter.sampled["communication"]
                    everyones = self.comm.all_gather_object((of_states, buffers))
                    held = [states for states, _ in everyones]
                    self._hold_to_the_limit([sum(both) for both in everyones])
                else:
                    losses.append(self._step(batches))
                seconds = time.perf_counter() - began
                progress(self.batch, curve=losses, held=held)
                if file is not None:
                    rate = len(losses) * self.batch / seconds
                    row = {"step": step + 1, "loss": losses[-1], "seconds": seconds, "samples_per_second": rate}
                    self._log_row(file, {**row, "bytes_per_rank": held})
                every = self.run.save_every or self.last
                if self.save is not None and ((step + 1) % every == 0 or step == steps[-1]):
                    self.engine.save_checkpoint(self.save)
                self.after_step(step + 1, losses[-1])
            return losses, time.perf_counter() - began, held

    def _pipes(self, comm) -> dict:
        """The ranks of this pipeline, those with the same stage, and those of all pipelines beside it."""
        found = {"comm": self.mesh["pipe"], "data_comm": self.mesh["data", "context", "expert"], "everyone": comm}
        if self.tensor > 1:  # stages as those of the layers that are not cut
            cuts = balanced_cuts([parameters_of(layer) for layer in self.work.layers], self.stages)
            found |= {"everyone": self.mesh["data", "pipe", "context", "expert"], "cuts": cuts}
        return found

    def _hold_to_the_limit(self, held: list[int]) -> None:
        most, limit = max(held), self.run.memory_limit
        if limit is not None and most > limit:
            raise DtlibError(
                f"Rank {held.index(most)} holds {most:,} bytes of model states and buffers, and run.memory_limit is "
                f"{limit:,}: cut the model further, by a higher stage of ZeRO, or over more stages or tensor ranks."
            )

    def _log_row(self, file, row: dict) -> None:
        """As a whole line, or not at all."""
        line, size = json.dumps(row).encode() + b"\n", os.fstat(file.fileno()).st_size
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as problem:
            with suppress(OSError):
                file.truncate(size)
            if not self.rows_lost:
                warnings.warn(
                    f"{file.name} cannot be written ({problem.strerror}): rows of steps from {row['step']} on are "
                    "missing there, and training continues.", stacklevel=2,
                )  # fmt: skip
            self.rows_lost += 1

    def _step(self, batches) -> float:
        return float(self.engine.train_batch(batches, **({} if self.stages > 1 else {"loss_fn": self.loss_fn})))

    def _batches(self):
        """Micro-batches without end, where and as the model takes them."""

        def ready(tensor):
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)

        assert self.loader is not None  # of work.train
        batches = self.loader.forever()
        while True:
            several = [next(batches) for _ in range(self.engine.gradient_accumulation_steps())]
            for batch in alike(several) if self.stages > 1 else several:
                yield tree_map(ready, tuple(batch))

    def _gathered(self):
        """The trained model, whole on every rank, in float32."""
        model = self.whole.to_empty(device=self.device).to(self.dtype)
        with torch.no_grad():
            for name, buffer in model.named_buffers():  # those that no state_dict has
                buffer.copy_(self.buffers[name])
        if self.tensor > 1 or self.axes["expert"] > 1:
            cut = self.make(**self.cuts).model.to(self.device, self.dtype)
            self.engine.gather(cut)
            experts = expert.whole_state_dict(cut, self.mesh["expert"]) if self.tensor == 1 else None
            model.load_state_dict(experts or whole_state_dict(cut))
        else:
            self.engine.gather(model)
        return model.float()


def agreed(comm: Communicator, work: Callable[[], V]) -> V:
    """``work()`` on every rank; what is refused on one of them is refused on all, in its words."""
    try:
        return together(comm, work)
    except CheckpointError as problem:
        raise DtlibError(str(problem)) from problem.__cause__


def appended(path: str | Path) -> io.FileIO:
    """A file to whose end bytes are written at once."""
    with writing(path):
        file = io.FileIO(path, "ab", opener=refuse_to_wait)
    return file


def _check_folder(save) -> None:
    """Before training, as far as can be told then."""
    with writing(save, "name another folder"):
        Path(save).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=save).close()


def alike(batches: list) -> list:
    """Batches whose tensors differ in length, padded with zeros to the longest, as those of a pipeline's step are one
    tensor."""

    def padded(*same):
        longest = torch.tensor([tensor.shape for tensor in same]).amax(0).tolist()
        # pad() wants, from the last dimension on, how much before and behind; samples stay as many as they are.
        short = [[most - n for most, n in zip(longest[:0:-1], t.shape[:0:-1], strict=True)] for t in same]
        rooms = [[room for behind in each for room in (0, behind)] for each in short]
        return [torch.nn.functional.pad(t, room) if any(room) else t for t, room in zip(same, rooms, strict=True)]

    leaves = [tree_flatten(tuple(batch)) for batch in batches]
    columns = [padded(*same) for same in zip(*(flat for flat, _ in leaves), strict=True)]
    return [tree_unflatten(row, shape) for row, (_, shape) in zip(zip(*columns, strict=True), leaves, strict=True)]
