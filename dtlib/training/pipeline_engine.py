"""An engine for a model in stages: whole steps, from as many micro-batches as the config accumulates."""

import torch
from torch.utils._pytree import tree_leaves, tree_map

from dtlib.errors import DtlibError
from dtlib.gradients.precision import clip_by_norm
from dtlib.parallel.pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZeroBubbleH1
from dtlib.training.config import ConfigError
from dtlib.training.engine import Engine

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "zero_bubble_h1": ScheduleZeroBubbleH1}


def check_pipeline(model, settings, runtime: str) -> None:
    """Refuse what a pipeline cannot be combined with.

    Raises:
        ConfigError, DtlibError: on every rank.
    """
    stage, schedule = settings.zero_optimization.stage, settings.pipeline.schedule
    if runtime != "dtlib":
        raise DtlibError(f"initialize(runtime={runtime!r}) has no pipelines: use runtime='dtlib'.")
    if schedule not in SCHEDULES:
        raise ConfigError(f"pipeline.schedule is {schedule!r}: choose one of {', '.join(SCHEDULES)}.")
    if len(model.stage_indices) > 1:
        raise DtlibError(
            "train_batch() runs one stage a rank: with stages_per_rank=1, or by a schedule of your own, "
            "ScheduleInterleaved1F1B(model.stages(), ...)."
        )
    if settings.fp16.enabled:
        raise ConfigError("fp16.enabled is true, and a pipeline does not scale its loss: use bf16.")
    if stage == 3:
        raise ConfigError("zero_optimization.stage is 3, and a pipeline has cut the parameters already: use 0, 1 or 2.")
    if stage and model.has_ties:
        raise ConfigError(
            f"zero_optimization.stage is {stage}, and tied layers of a pipeline need whole gradients: use stage 0."
        )


class PipelineEngine(Engine):
    """``train_batch`` and ``eval_batch`` of a ``PipelineModule``; every rank calls them with the same data of its
    pipeline. Counterpart: DeepSpeed's ``PipelineEngine``."""

    def __init__(self, module, strategy, scheduler, config, comm, loader):
        super().__init__(module, strategy, scheduler, config, comm, loader)
        stage = PipelineStage(strategy.forward, module.comm.rank, module.num_stages, module.comm)
        recompute = config.pipeline.activation_checkpoint_interval > 0
        self._schedule = SCHEDULES[config.pipeline.schedule](
            stage, config.gradient_accumulation_steps, module.loss_fn or torch.nn.functional.cross_entropy, recompute
        )
        self._first, self._last = stage.is_first, stage.is_last

    def __call__(self, *args, **kwargs):
        raise DtlibError("A pipeline is not called on one micro-batch: use train_batch() or eval_batch().")

    backward = step = __call__

    def train_batch(self, data_iter=None, loss_fn=None):
        """A whole step from ``gradient_accumulation_steps`` micro-batches; returns their mean loss over all ranks.

        ``data_iter`` yields pairs of inputs and targets, by default from ``training_data``. The loss function is that
        of the module, by default cross-entropy.
        """
        if loss_fn is not None:
            raise DtlibError("The loss of a pipeline belongs to its last stage: pass PipelineModule(loss_fn=...).")
        losses = self._run(self._schedule.step, data_iter)
        self.module.reduce_tied_gradients()
        self.micro_steps += self.config.gradient_accumulation_steps
        self._update()
        return losses

    def eval_batch(self, data_iter=None):
        """The mean loss of as many micro-batches, over all ranks, without training: without dropout, and with the
        statistics that have been gathered. Modules are afterwards in the mode in which they were."""
        modes = [(module, module.training) for module in self._strategy.forward.modules()]
        self.eval()
        try:
            return self._run(self._schedule.eval, data_iter)
        finally:
            for module, training in modes:
                module.training = training

    def _saved(self):
        raise DtlibError(
            "A checkpoint holds a whole model, and a rank of a pipeline has one stage: save each stage in a folder of "
            "its own, with dtlib.checkpoint.save(folder, model, optimizer, comm=model.data_comm)."
        )

    def _run(self, run, data_iter):
        batches = data_iter if data_iter is not None else self._batches
        if batches is None:
            raise DtlibError("train_batch() has no data: pass data_iter, or give initialize() training_data.")
        count = self.config.gradient_accumulation_steps
        try:
            pairs = [next(batches) for _ in range(count)]
        except StopIteration:
            raise DtlibError(f"data_iter ended before the {count} micro-batches of a step.") from None
        x, y = (tree_map(lambda *same: torch.cat(same), *each) for each in zip(*pairs, strict=True))
        losses, mean = [], torch.zeros((), dtype=torch.float64)
        run(*([x] if self._first else []), target=y if self._last else None, losses=losses)
        if self._last:
            # Of samples, as the gradients: micro-batches may differ by one.
            sizes = torch.tensor([len(some) for some in tree_leaves(y)[0].tensor_split(count)], dtype=torch.float64)
            mean = (torch.stack(losses).double().cpu() * sizes).sum() / sizes.sum()
        self.module.comm.broadcast(mean, root=self.module.num_stages - 1)
        return self.comm.all_reduce(mean, op="mean")

    def _clip(self, gradients) -> float:
        parameters = self._masters.parameters
        counted = [
            gradient
            for gradient, parameter in zip(gradients, parameters, strict=True)
            if gradient is not None and self.module.counted(parameter)
        ]
        comm = self.module.comm if self._strategy.shards_on is None else self.module.everyone
        return clip_by_norm(gradients, self.config.gradient_clipping, comm, counted)
