"""An engine for a model in pipeline stages, which runs complete steps only."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves, tree_map

from dtlib.comm import Communicator
from dtlib.errors import DtlibError
from dtlib.gradients.precision import clip_by_norm
from dtlib.parallel.pipeline import PipelineModule, PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZeroBubbleH1
from dtlib.training.config import Config, ConfigError
from dtlib.training.data import RankLoader
from dtlib.training.engine import Engine
from dtlib.training.strategies import Replicated
from dtlib.training.torch_runtime import pipeline_schedule as torch_schedule

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "zero_bubble_h1": ScheduleZeroBubbleH1}


def check_pipeline(model: PipelineModule, settings: Config, runtime: str) -> None:
    """Raise for settings that a pipeline does not support.

    Raises:
        ConfigError, DtlibError: on every rank.
    """
    stage, schedule = settings.zero_optimization.stage, settings.pipeline.schedule
    known = list(SCHEDULES) if runtime == "dtlib" else ["gpipe", "1f1b"]
    if schedule not in known:
        raise ConfigError(f"pipeline.schedule is {schedule!r}: with runtime={runtime!r} choose {' or '.join(known)}.")
    if settings.pipeline.stages not in (None, model.num_stages):
        raise ConfigError(f"pipeline.stages is {settings.pipeline.stages}, but the module has {model.num_stages}.")
    again = settings.pipeline.activation_checkpoint_interval or model.activation_checkpoint_interval
    if runtime == "torch" and (stage > 1 or again):
        raise ConfigError(
            "torch's pipelines support zero_optimization.stage 0 and 1, and no "
            "pipeline.activation_checkpoint_interval: leave these out, or use runtime='dtlib'."
        )
    if len(model.stage_indices) > 1:
        raise DtlibError(
            "train_batch() runs one stage per rank: use stages_per_rank=1, or your own schedule, "
            "ScheduleInterleaved1F1B(model.stages(), ...)."
        )
    if settings.fp16.enabled:
        raise ConfigError("fp16.enabled is true, but a pipeline does not scale its loss: use bf16.")
    if stage == 3:
        raise ConfigError("zero_optimization.stage is 3, but a pipeline divides the parameters already: use 0, 1 or 2.")
    if stage and model.has_ties:
        raise ConfigError(
            f"zero_optimization.stage is {stage}, but tied layers of a pipeline need whole gradients: use stage 0."
        )


class PipelineEngine(Engine):
    """``train_batch`` and ``eval_batch`` for a ``PipelineModule``.

    All ranks of a pipeline call them with the same data. Counterpart: DeepSpeed's ``PipelineEngine``.
    """

    module: PipelineModule

    def __init__(
        self, module: PipelineModule, strategy: Replicated, scheduler: LRScheduler | None, config: Config,
        comm: Communicator, loader: RankLoader | None, runtime: str = "dtlib",
    ):  # fmt: skip
        super().__init__(module, strategy, scheduler, config, comm, loader)
        name, count = config.pipeline.schedule, self.gradient_accumulation_steps()
        loss_fn = module.loss_fn or torch.nn.functional.cross_entropy
        self._shapes: list | None = None
        self._make: Callable | None = None
        self._schedule: object = None
        if runtime == "torch":
            self._make = partial(torch_schedule, name, strategy.forward, module, count, loss_fn)
        else:
            stage = PipelineStage(strategy.forward, module.comm.rank, module.num_stages, module.comm)
            recompute = max(config.pipeline.activation_checkpoint_interval, module.activation_checkpoint_interval) > 0
            self._schedule = SCHEDULES[name](stage, count, loss_fn, recompute)
        self._first, self._last = module.comm.rank == 0, module.comm.rank == module.num_stages - 1

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise DtlibError("A pipeline is not called on one micro-batch: use train_batch() or eval_batch().")

    forward = backward = step = __call__

    def train_batch(self, data_iter: Iterator | None = None, loss_fn: Callable | None = None) -> Tensor:
        """Run a complete step of ``gradient_accumulation_steps`` micro-batches; return their mean loss over all ranks.

        ``data_iter`` yields pairs of inputs and targets, by default from ``training_data``. The loss function is the
        module's, by default cross-entropy.

        Raises:
            DtlibError: without data, for a ``loss_fn``, or if ``data_iter`` ends before the step does.
        """
        if loss_fn is not None:
            raise DtlibError("The loss of a pipeline belongs to its last stage: pass PipelineModule(loss_fn=...).")
        began = time.perf_counter()
        loss = self._run("step", data_iter)
        self.module.reduce_tied_gradients()
        self.micro_steps += self.gradient_accumulation_steps()
        self._update()
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            seconds = time.perf_counter() - began
            rate = self.train_batch_size() / seconds
            print(
                f"steps: {self.global_steps} loss: {loss:0.4f} iter time (s): {seconds:0.3f} samples/sec: {rate:0.3f}",
                flush=True,
            )
        return loss

    def eval_batch(self, data_iter: Iterator | None = None) -> Tensor:
        """Return the mean loss of one step's micro-batches over all ranks, without training.

        Modules run in evaluation mode, and return to their previous mode afterwards.
        """
        modes = [(module, module.training) for module in self._strategy.forward.modules()]
        self.eval()
        try:
            return self._run("eval", data_iter)
        finally:
            for module, training in modes:
                module.training = training

    def _place(self, folder, tag: str) -> Path:
        """Return the folder of this stage's own checkpoint."""
        return Path(folder) / tag / f"stage{self.module.comm.rank}of{self.module.num_stages}"

    @property
    def _everyone(self):
        return self.module.everyone

    def _whole(self, mine, like):
        stages = self.module.comm
        # Only the ranks of one stage have this layer. The first of them broadcasts it.
        owner = stages.all_gather_object(mine is not None).index(True)
        return stages.broadcast((like if mine is None else mine.detach()).clone(), root=owner)

    def _run(self, what: str, data_iter):
        pairs, count = list(self._micro_batches(data_iter)), self.gradient_accumulation_steps()
        if len({tuple(tensor.shape[1:] for tensor in tree_leaves(pair)) for pair in pairs}) > 1:
            raise DtlibError(
                "Micro-batches of a step differ in more than their number of samples: pad all to one shape."
            )
        # Schedules split the batch into micro-batches themselves, so concatenate them first.
        x, y = (tree_map(lambda *same: torch.cat(same), *each) for each in zip(*pairs, strict=True))
        losses: list[torch.Tensor] = []
        mean = torch.zeros((), dtype=torch.float64)
        inputs = x if isinstance(x, tuple) else (x,)
        shapes = [tensor.shape for tensor in tree_leaves((x, y))]
        # torch's PipelineStage is built for one shape of inputs: build it again if the shapes change.
        if self._make and shapes != self._shapes:
            self._shapes, self._schedule = shapes, self._make(inputs)
        run = getattr(self._schedule, what)
        run(*(inputs if self._first else ()), target=y if self._last else None, losses=losses)
        if self._last:
            # The mean over samples, like the gradients: sizes of micro-batches may differ by one.
            sizes = torch.tensor([len(some) for some in tree_leaves(y)[0].tensor_split(count)], dtype=torch.float64)
            mean = (torch.stack(losses).detach().double().cpu() * sizes).sum() / sizes.sum()
        self.module.comm.broadcast(mean, root=self.module.num_stages - 1)
        return self.comm.all_reduce(mean, op="mean")

    def _clip(self, gradients) -> float:
        parameters = self._masters.parameters
        # A tied parameter exists on several stages, and must count once in the norm.
        counted = [
            gradient
            for gradient, parameter in zip(gradients, parameters, strict=True)
            if gradient is not None and self.module.counted(parameter)
        ]
        comm = self.module.comm if self._strategy.shards_on is None else self.module.everyone
        return clip_by_norm(gradients, self.config.gradient_clipping, comm, counted)
