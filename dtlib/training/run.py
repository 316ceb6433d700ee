"""``dtlib train``: run a workload with a config on a runtime. All three runtimes use this loop.

    config {"workload": ..., "run": ..., DeepSpeed's keys}
      |
    workload -> initialize -> train_batch, train_batch, ... -> evaluate -> result
                   ^              |          |
                   |              v          v
                 resume         log      checkpoint

The workload's module reads the section ``workload``, and run_config.py reads ``run`` (duration, number type, limits).
``dtlib.initialize`` reads the other keys.
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

from dtlib.checkpoint import read_latest
from dtlib.checkpoint.folder import CheckpointError, raise_on_all
from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.files import open_nonblocking, writing
from dtlib.gradients.shard_info import note
from dtlib.measure.memory import memory
from dtlib.measure.progress import RankProgress, print_line
from dtlib.parallel import expert
from dtlib.parallel.pipeline import PipelineModule
from dtlib.parallel.pipeline.cuts import balanced_cuts, parameters_of
from dtlib.parallel.tensor import whole_state_dict
from dtlib.training.config import AnyConfig
from dtlib.training.engine import LATEST
from dtlib.training.initialization import RUNTIMES, initialize
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
    """Train a workload as its config says; all ranks call this and return the same result.

    Args:
        workload: ``vision``, ``summarization`` or ``decoder``, or a function from the config's section ``workload`` to
            a ``Workload``.
        config: a dictionary or the path of a JSON file; by default the lessons' config for this workload.
        runtime: ``dtlib``, ``torch`` or ``deepspeed``.
        comm: by default the world's communicator.
        save: a folder for checkpoints.
        resume: continue from the latest checkpoint in ``save``, or start from the beginning if there is none. Number of
            ranks and ZeRO stage may change, also between the runtimes ``dtlib`` and ``torch``. DeepSpeed continues
            only from its own checkpoints, on the same number of ranks.
        log: a file to which each step appends a line of JSON. If writing fails, training continues with a warning.
        stage, steps: override the config's.
        after_step: called on every rank after each step, with the number of the step and its loss.

    Returns:
        A dictionary with ``workload, runtime, stage, stages`` (of the pipeline), ``tensor, context, expert`` (axis
        sizes), ``ranks, seconds, steps, loss``, the workload's results (``accuracy``, or ``rouge_l`` and
        ``lead_rouge_l``), ``samples_per_second``, ``bytes_per_rank`` (parameters, gradients, master weights and
        optimizer states), and ``losses`` of all steps. Seconds, samples and losses count this call only, not the steps
        before ``resume``.

    Raises:
        DtlibError: on all ranks, for arguments that cannot work.
    """
    world = init()
    comm = comm if comm is not None else world.comm
    if runtime not in RUNTIMES:
        raise DtlibError(f"runtime is {runtime!r}: choose one of {', '.join(RUNTIMES)}.")
    if resume and save is None:
        raise DtlibError("Training continues from a checkpoint: set its folder with save (or --save DIR).")
    print_line("data and model are ready")
    make, run, settings, axes, context = agreed(comm, lambda: read(workload, config, comm, stage, steps, runtime))
    work = agreed(comm, make)
    asked = run, settings, axes, context
    return _Training(work, make, *asked, runtime, comm, world, save, resume, log, after_step).result()


class _Training:
    """One run: build everything, train, evaluate."""

    def __init__(self, work, make, run, settings, axes, context, runtime, comm, world, save, resume, log, after_step):
        self.work, self.make, self.run, self.runtime, self.comm, self.save = work, make, run, runtime, comm, save
        self.rows_lost, self.after_step = 0, after_step  # rows_lost: log rows that could not be written
        first = comm.rank == 0 and log
        self.log = agreed(comm, lambda: appended(log) if first else nullcontext())
        agreed(comm, lambda: _check_folder(save) if save else None)
        self.axes, self.stages, self.tensor = axes, axes["pipe"], axes["tensor"]
        if run.link_bandwidth:
            comm = comm.emulate_network(run.link_latency, run.link_bandwidth)
        self.mesh = mesh = Mesh(comm, {"data": -1, **axes})
        # These ranks have the same layers, and load different samples.
        batches = mesh["data", "context", "expert"]
        self.cuts: dict = {"tensor": mesh["tensor"]} if self.tensor > 1 else {}
        if axes["context"] > 1:
            self.cuts["context"] = Shared(mesh["context"], context.order, context.method)
        if work.experts:
            self.cuts |= {"expert": mesh["expert"], "copies": mesh["data", "context"]}
        # Build the workload again, with layers that are sharded over tensor, context or expert ranks.
        if self.cuts:
            work = agreed(comm, lambda: make(**self.cuts))
        # The ranks of one tensor coordinate save one checkpoint.
        if self.tensor > 1:
            self.save = Path(save, f"tensor{self.mesh.coordinates['tensor']}of{self.tensor}") if save else None
        self.device, self.dtype = world.device, torch.float64 if run.float64 else torch.float32
        model = work.model
        if self.stages > 1:
            model = self._pipeline(work, comm)
        if axes["context"] > 1:
            # Each rank computes gradients of its own tokens only; the strategies must know this.
            for parameter in model.parameters():
                note(parameter, sequences=mesh["context"].members)
        # Evaluation needs the full model on every rank. Until then it stays on the meta device, without memory.
        self.whole = copy.deepcopy(self.work.model).to("meta")
        self.buffers = {name: buffer.clone() for name, buffer in self.work.model.named_buffers()}
        self.loss_fn = work.loss_fn
        self.engine, _, self.loader, _ = initialize(
            model=model.to(self.device, self.dtype), config=settings, runtime=runtime,
            comm=comm if self.tensor == 1 else batches,
            training_data=work.train, collate_fn=work.collate,
        )  # fmt: skip
        # initialize() converts parameters to bf16 or fp16, so inputs need their dtype.
        self.dtype = next((p.dtype for p in self.engine.module.parameters()), self.dtype)
        self.batch = self.engine.train_batch_size()
        torch.manual_seed(1000 * run.seed + comm.rank)
        if resume and read_latest(Path(self.save) / LATEST, comm) is not None:
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
        losses, seconds, bytes_per_rank = self._train()
        print_line("training is done, the test starts")
        measured = self.work.evaluate(self._gathered(), self.comm)
        return {
            "workload": self.work.name, "runtime": self.runtime, "stage": self.engine.config.zero_optimization.stage,
            "stages": self.stages, "tensor": self.tensor,
            "context": self.axes["context"], "expert": self.axes["expert"], "ranks": self.comm.size, "seconds": seconds,
            "steps": self.engine.global_steps, "loss": losses[-1] if losses else None, **measured,
            "samples_per_second": len(losses) * self.batch / max(seconds, 1e-9), "bytes_per_rank": bytes_per_rank,
            "losses": losses,
        }  # fmt: skip

    def _train(self) -> tuple[list[float], float, list[int] | None]:
        batches, losses, bytes_per_rank = self._batches(), [], None
        steps = range(self.first, self.last)
        with self.log as file, RankProgress(self.comm, len(steps) * self.batch, "samples") as progress:
            print_line("")
            began = time.perf_counter()
            for step in steps:
                # Memory is measured in the second step, because the first step allocates the optimizer states.
                if step == steps[min(1, len(steps) - 1)]:
                    counter = memory(self.engine)
                    self.engine.before_step_hooks.append(counter.sample)
                    losses.append(self._step(batches))
                    self.engine.before_step_hooks.remove(counter.sample)
                    counter.sample()
                    of_states = sum(counter.sampled[name] for name in STATES)
                    buffers = counter.sampled["buffers"] + counter.sampled["communication"]
                    everyones = self.comm.all_gather_object((of_states, buffers))
                    bytes_per_rank = [states for states, _ in everyones]
                    self._check_memory_limit([sum(both) for both in everyones])
                else:
                    losses.append(self._step(batches))
                seconds = time.perf_counter() - began
                progress(self.batch, curve=losses, memory=bytes_per_rank)
                if file is not None:
                    rate = len(losses) * self.batch / seconds
                    row = {"step": step + 1, "loss": losses[-1], "seconds": seconds, "samples_per_second": rate}
                    self._log_row(file, {**row, "bytes_per_rank": bytes_per_rank})
                every = self.run.save_every or self.last
                if self.save is not None and ((step + 1) % every == 0 or step == steps[-1]):
                    self.engine.save_checkpoint(self.save)
                self.after_step(step + 1, losses[-1])
            return losses, time.perf_counter() - began, bytes_per_rank

    def _pipeline(self, work, comm) -> PipelineModule:
        """Return this rank's stage; with tensor ranks, each tensor coordinate has its own pipelines."""
        cuts: str | list[int] = "parameters"
        # Balance the stages by the unsharded layers, so that they do not depend on the number of tensor ranks.
        if self.tensor > 1:
            cuts = balanced_cuts([parameters_of(layer) for layer in self.work.layers], self.stages)
        module = PipelineModule(work.layers, self.stages, work.loss_fn, cuts, self.mesh["pipe"], work.seed)
        module.data_comm = self.mesh["data", "context", "expert"]
        module.everyone = self.mesh["data", "pipe", "context", "expert"] if self.tensor > 1 else comm
        return module

    def _check_memory_limit(self, sizes: list[int]) -> None:
        """Raise if a rank's bytes exceed ``run.memory_limit``."""
        most, limit = max(sizes), self.run.memory_limit
        if limit is not None and most > limit:
            raise DtlibError(
                f"Rank {sizes.index(most)} holds {most:,} bytes of model states and buffers, and run.memory_limit is "
                f"{limit:,}: cut the model further, by a higher stage of ZeRO, or over more stages or tensor ranks."
            )

    def _log_row(self, file, row: dict) -> None:
        """Append a row to the log as a complete line, or write nothing."""
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
        """Yield micro-batches without end, on the model's device and in its dtype."""

        def ready(tensor):
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)

        assert self.loader is not None  # made from work.train
        batches = self.loader.forever()
        while True:
            several = [next(batches) for _ in range(self.engine.gradient_accumulation_steps())]
            for batch in alike(several) if self.stages > 1 else several:
                yield tree_map(ready, tuple(batch))

    def _gathered(self):
        """Return the trained model in float32, with full parameters on every rank."""
        model = self.whole.to_empty(device=self.device).to(self.dtype)
        with torch.no_grad():
            # Non-persistent buffers are in no state_dict, and the meta device lost their values: restore all from the
            # copies.
            for name, buffer in model.named_buffers():
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
    """Run ``work()`` on every rank; if one rank raises, all ranks raise the same message."""
    try:
        return raise_on_all(comm, work)
    except CheckpointError as problem:
        raise DtlibError(str(problem)) from problem.__cause__


def appended(path: str | Path) -> io.FileIO:
    """Open a file for appending, without a buffer."""
    with writing(path):
        file = io.FileIO(path, "ab", opener=open_nonblocking)
    return file


def _check_folder(save) -> None:
    """Refuse a folder that cannot be written, before training starts; check what can be checked by then."""
    with writing(save, "name another folder"):
        Path(save).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=save).close()


def alike(batches: list) -> list:
    """Pad the tensors of several batches with zeros to equal lengths.

    A pipeline concatenates the micro-batches of a step into one tensor, so their shapes must agree. The first
    dimension, the samples, stays as it is.
    """

    def padded(*same):
        longest = torch.tensor([tensor.shape for tensor in same]).amax(0).tolist()
        # torch's pad() takes (before, after) for each dimension, starting with the last. The dimension of samples is
        # left out.
        short = [[most - n for most, n in zip(longest[:0:-1], t.shape[:0:-1], strict=True)] for t in same]
        padding = [[pads for after in each for pads in (0, after)] for each in short]
        return [torch.nn.functional.pad(t, pads) if any(pads) else t for t, pads in zip(same, padding, strict=True)]

    leaves = [tree_flatten(tuple(batch)) for batch in batches]
    columns = [padded(*same) for same in zip(*(flat for flat, _ in leaves), strict=True)]
    return [tree_unflatten(row, shape) for row, (_, shape) in zip(zip(*columns, strict=True), leaves, strict=True)]
