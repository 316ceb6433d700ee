"""``dtlib.initialize``: from a model and a config to something that trains."""

from contextlib import nullcontext
from functools import partial

import torch

from dtlib import checkpoint
from dtlib.comm import as_communicator
from dtlib.errors import DtlibError
from dtlib.precision import LossScale, all_finite, clip_by_norm
from dtlib.training import config as configuration
from dtlib.training.config import ConfigError
from dtlib.training.data import RankLoader
from dtlib.training.rates import SCHEDULERS
from dtlib.training.strategies import STRATEGIES
from dtlib.world import init

COUNTS = ("global_steps", "skipped_steps")
OPTIMIZERS = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad")
RUNTIMES = ("dtlib", "torch")


def initialize(
    model, config, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, collate_fn=None,
    runtime: str = "dtlib", comm=None,
):  # fmt: skip
    """Make ``model`` trainable on all ranks; returns ``engine, optimizer, dataloader, lr_scheduler``.

    Args:
        model: an ``nn.Module``; with bf16 or fp16 in the config it is converted.
        config: a dictionary with DeepSpeed's keys (config.py), or the path of a JSON file with one.
        optimizer: instead of the config's: a function of parameters that returns a torch optimizer, or one of
            torch's that was made for ``model``'s parameters, where they are not in 16 bits.
        model_parameters: what is trained, if not all of it.
        training_data: a ``Dataset``; ``dataloader`` then gives this rank's share in micro-batches, else it is None.
        lr_scheduler: instead of the config's: a function of the optimizer that returns a scheduler.
        runtime: ``dtlib``, or ``torch`` for the same engine on torch's own classes (strategies.py).
        comm: by default the world's.

        engine, optimizer, dataloader, scheduler = dtlib.initialize(model=net, config=config, training_data=digits)
        for x, y in dataloader:
            loss = cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()

    Raises:
        ConfigError: for a mistake in the config: with the key, the value and what would be right.

    Counterpart: ``deepspeed.initialize``.
    """
    comm = comm if comm is not None else init().comm
    if runtime not in RUNTIMES:
        raise DtlibError(f"initialize(runtime={runtime!r}): choose one of {', '.join(RUNTIMES)}.")
    settings = configuration.read(config, comm.size)
    if settings.bf16.enabled or settings.fp16.enabled:
        model.to(torch.bfloat16 if settings.bf16.enabled else torch.float16)
    wanted = _names_of(model_parameters, model)
    stage = settings.zero_optimization.stage
    if stage == 3 and isinstance(optimizer, torch.optim.Optimizer):
        raise DtlibError(
            "This optimizer was made for whole parameters, which stage 3 replaces by parts: pass a function that makes "
            "it, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )

    def trained():
        return [p for name, p in model.named_parameters() if p.requires_grad and name in wanted]

    make = partial(_optimizer, settings, optimizer)
    strategy = STRATEGIES[runtime][stage](model, as_communicator(comm), trained, make, settings.zero_optimization)
    scheduler = _scheduler(settings, lr_scheduler, strategy.optimizer)
    loader = None
    if training_data is not None:
        micro = settings.train_micro_batch_size_per_gpu
        loader = RankLoader(training_data, micro, comm.rank, comm.size, collate_fn=collate_fn)
    engine = Engine(model, strategy, scheduler, settings, comm, loader)
    return engine, strategy.optimizer, loader, scheduler


class Engine:
    """A model, its optimizer and its schedule. ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``, for each
    micro-batch; every ``gradient_accumulation_steps``-th ``step()`` changes the model. Counterpart: DeepSpeedEngine."""

    def __init__(self, module, strategy, scheduler, config, comm, loader):
        self.module = module
        self.optimizer, self.lr_scheduler = strategy.optimizer, scheduler
        self.config, self.comm = config, comm
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.before_step_hooks = []  # functions without arguments, called between the last backward() and the step
        self._strategy, self._masters = strategy, strategy.masters
        self._loader = loader
        self._batches = loader.forever() if loader is not None else None
        self._norm = None
        self._loss_of_batch = None
        fp16 = config.fp16
        self._scale = LossScale()
        if fp16.enabled and fp16.loss_scale == 0:
            window = fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale
            self._scale = LossScale(2.0**fp16.initial_scale_power, True, *window)
        elif fp16.enabled:
            self._scale = LossScale(fp16.loss_scale)

    def __call__(self, *args, **kwargs):
        with nullcontext() if self.is_gradient_accumulation_boundary() else self._strategy.no_sync():
            return self._strategy.forward(*args, **kwargs)

    def backward(self, loss):
        """Gradients of this micro-batch's mean loss; at the last one of a step they are averaged over all ranks."""
        scaled = loss * (self._scale.scale / self.config.gradient_accumulation_steps)
        with nullcontext() if self.is_gradient_accumulation_boundary() else self._strategy.no_sync():
            scaled.backward()
        return loss

    def step(self) -> None:
        """After each ``backward``. At a boundary: unscale, clip, step the optimizer and the schedule."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        for hook in self.before_step_hooks:
            hook()
        strategy = self._strategy
        gradients = strategy.reduce(self._scale.scale)
        # What is found here is the same on all ranks: averages are, and of shards the ranks tell each other.
        overflow = self.config.fp16.enabled and not all_finite(gradients, strategy.shards_on)
        self._scale.update(overflow)
        if overflow:
            self.skipped_steps += 1
        else:
            if self.config.gradient_clipping:
                self._norm = clip_by_norm(gradients, self.config.gradient_clipping, strategy.shards_on)
            strategy.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.zero_grad()
        self.global_steps += 1

    def train_batch(self, data_iter=None, loss_fn=None):
        """A whole step from ``gradient_accumulation_steps`` micro-batches; returns their mean loss over all ranks.

        ``data_iter`` yields pairs of inputs and targets, by default from ``training_data``; ``loss_fn(output, target)``
        is cross-entropy by default.
        """
        batches = data_iter if data_iter is not None else self._batches
        if batches is None:
            raise DtlibError("train_batch() has no data: pass data_iter, or give initialize() training_data.")
        loss_fn = loss_fn or torch.nn.functional.cross_entropy
        total = torch.zeros((), dtype=torch.float64)
        for _ in range(self.config.gradient_accumulation_steps):
            x, y = next(batches)
            loss = self.backward(loss_fn(self(x), y))
            total += loss.detach().double().cpu() / self.config.gradient_accumulation_steps
            self.step()
        return self.comm.all_reduce(total, op="mean")

    def save_checkpoint(self, folder, client_state=None) -> None:
        """Save all that training needs to go on, on any number of ranks and at any stage (dtlib.checkpoint).

        ``client_state`` is what JSON can hold, and what ``load_checkpoint`` returns. All ranks call it, after a step.

        Raises:
            CheckpointError: on all ranks; and DtlibError in the middle of a step, or on torch's classes.
        """
        parts = {"scheduler": self.lr_scheduler, "loader": self._loader, "loss_scale": self._scale}
        extra = {name: part.state_dict() for name, part in parts.items() if hasattr(part, "state_dict")}
        counts = {name: getattr(self, name) for name in COUNTS}
        checkpoint.save(folder, extra={"client_state": client_state, "counts": counts, **extra}, **self._saved())

    def load_checkpoint(self, folder):
        """Go on from what ``save_checkpoint`` saved; returns its ``client_state``. All ranks call it."""
        extra = checkpoint.load(folder, **self._saved())
        parts = {"scheduler": self.lr_scheduler, "loader": self._loader, "loss_scale": self._scale}
        for name, part in parts.items():
            if hasattr(part, "load_state_dict") and name in extra:
                part.load_state_dict(extra[name])
        for name in COUNTS:
            setattr(self, name, extra["counts"][name])
        # The number of micro-batches a step may be another one now.
        self.micro_steps = self.global_steps * self.config.gradient_accumulation_steps
        self._batches = self._loader.forever() if self._loader is not None else None
        return extra["client_state"]

    def _saved(self) -> dict:
        if self.micro_steps % self.config.gradient_accumulation_steps:
            raise DtlibError("Checkpoints are saved and loaded between steps: call step() for all micro-batches first.")
        if not self._strategy.portable:
            raise DtlibError(
                "torch has sharded this engine: save with torch.distributed.checkpoint, or use runtime='dtlib'."
            )
        masters = None if hasattr(self.optimizer, "part_of") else self._masters
        return {"model": self.module, "optimizer": self.optimizer, "comm": self.comm, "masters": masters}

    def zero_grad(self) -> None:
        for parameter in [*self.module.parameters(), *self._masters.masters]:
            parameter.grad = None
        self.optimizer.zero_grad()

    def train(self, mode: bool = True):
        self._strategy.forward.train(mode)
        return self

    def eval(self):
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the next ``step()`` changes the model."""
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before they were clipped; None where nothing is clipped."""
        return self._norm

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        return self._scale.scale

    def train_batch_size(self) -> int:
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps


def _names_of(parameters, model) -> set[str]:
    """The names of some of a model's parameters; of all for None."""
    chosen = None if parameters is None else {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if chosen is None or id(parameter) in chosen}


def _optimizer(settings, given, parameters):
    if given is not None:
        if isinstance(given, torch.optim.Optimizer):
            known = {id(parameter) for parameter in parameters}
            if any(id(p) not in known for group in given.param_groups for p in group["params"] if p.requires_grad):
                raise DtlibError(
                    "This optimizer was made for parameters that are not trained here: with bf16 or fp16 pass a "
                    "function that makes it, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
                )
            return given
        return given(parameters)
    if settings.optimizer is None:
        raise ConfigError("optimizer is missing: give it in the config, or pass optimizer= to initialize().")
    name, params = settings.optimizer.type, dict(settings.optimizer.params)
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer.type is {name!r}: choose one of {', '.join(OPTIMIZERS)}.")
    if name == "Adam" and params.pop("adam_w_mode", True):
        name = "AdamW"  # DeepSpeed's Adam decays weights as AdamW does, unless adam_w_mode is false
        params.setdefault("weight_decay", 0.0)
    try:
        return getattr(torch.optim, name)(parameters, **params)
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"optimizer.params {params} do not suit {settings.optimizer.type}: {problem}.") from None


def _scheduler(settings, given, optimizer):
    if given is not None:
        return given(optimizer) if callable(given) else given
    if settings.scheduler is None:
        return None
    name, params = settings.scheduler.type, settings.scheduler.params
    if name not in SCHEDULERS:
        raise ConfigError(f"scheduler.type is {name!r}: choose one of {', '.join(SCHEDULERS)}.")
    try:
        return SCHEDULERS[name](optimizer, **params)
    except TypeError as problem:
        raise ConfigError(f"scheduler.params {params} do not suit {name}: {problem}.") from None
