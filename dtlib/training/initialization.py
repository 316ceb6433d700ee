"""``dtlib.initialize``: from a model and a config to something that trains."""

from functools import partial

import torch

from dtlib.comm import as_communicator
from dtlib.errors import DtlibError
from dtlib.parallel.pipeline import PipelineModule
from dtlib.precision import refuse_parts
from dtlib.training import config as configuration
from dtlib.training.config import ConfigError
from dtlib.training.data import RankLoader
from dtlib.training.engine import Engine
from dtlib.training.pipeline_engine import PipelineEngine, check_pipeline
from dtlib.training.rates import SCHEDULERS
from dtlib.training.strategies import STRATEGIES, Alone
from dtlib.world import init

OPTIMIZERS = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad")
RUNTIMES = ("dtlib", "torch")


def initialize(
    model, config, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, collate_fn=None,
    runtime: str = "dtlib", comm=None,
):  # fmt: skip
    """Make ``model`` trainable on all ranks; returns ``engine, optimizer, dataloader, lr_scheduler``.

    Args:
        model: an ``nn.Module``, or a ``PipelineModule``; with bf16 or fp16 in the config it is converted.
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
    if isinstance(model, PipelineModule):
        comm = model.data_comm or model.comm.split(model.comm.rank)
    settings = configuration.read(config, comm.size)
    if settings.bf16.enabled or settings.fp16.enabled:
        model.to(torch.bfloat16 if settings.bf16.enabled else torch.float16)
    wanted = _names_of(model_parameters, model)
    stage = settings.zero_optimization.stage
    if isinstance(model, PipelineModule):
        check_pipeline(model, settings, runtime)
    if settings.gradient_clipping:
        refuse_parts(model.parameters(), f"gradient_clipping is {settings.gradient_clipping:g}")
    if stage == 3 and isinstance(optimizer, torch.optim.Optimizer):
        raise DtlibError(
            "This optimizer was made for whole parameters, which stage 3 replaces by parts: pass a function that makes "
            "it, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )

    def trained():
        return [p for name, p in model.named_parameters() if p.requires_grad and name in wanted]

    make = partial(_optimizer, settings, optimizer)
    comm, kind = as_communicator(comm), STRATEGIES[runtime][stage]
    if stage == 0 and isinstance(model, PipelineModule) and comm.size == 1:
        kind = Alone
    strategy = kind(model, comm, trained, make, settings.zero_optimization)
    scheduler = _scheduler(settings, lr_scheduler, strategy.optimizer)
    loader = None
    if training_data is not None:
        micro = settings.train_micro_batch_size_per_gpu
        loader = RankLoader(training_data, micro, comm.rank, comm.size, collate_fn=collate_fn)
    kind = PipelineEngine if isinstance(model, PipelineModule) else Engine
    engine = kind(model, strategy, scheduler, settings, comm, loader)
    return engine, strategy.optimizer, loader, scheduler


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
