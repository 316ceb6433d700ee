"""``dtlib.initialize``: make a model trainable, as a config says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dtlib.comm import as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.precision import refuse_shards
from dtlib.gradients.shard_info import info_of
from dtlib.parallel.pipeline import PipelineModule
from dtlib.training import config as configuration
from dtlib.training.config import AnyConfig, ConfigError
from dtlib.training.data import AnyData, RankLoader
from dtlib.training.deepspeed_engine import check_deepspeed, deepspeed_engine
from dtlib.training.engine import Engine
from dtlib.training.pipeline_engine import PipelineEngine, check_pipeline
from dtlib.training.rates import SCHEDULERS
from dtlib.training.strategies import STRATEGIES, Alone
from dtlib.world import init

if TYPE_CHECKING:
    from dtlib.comm import AnyCommunicator

OPTIMIZERS = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad")
RUNTIMES = ("dtlib", "torch", "deepspeed")
# Runtime and ZeRO stage of each model that was passed to initialize().
_stages: WeakKeyDictionary = WeakKeyDictionary()


def initialize(
    model: nn.Module | None = None, config: AnyConfig | None = None, optimizer: Optimizer | Callable | None = None,
    model_parameters: Iterable | None = None, training_data: AnyData | None = None,
    lr_scheduler: Callable | None = None, collate_fn: Callable | None = None, runtime: str = "dtlib",
    comm: AnyCommunicator | None = None, *, args: object = None,
) -> tuple[Engine, Optimizer, RankLoader | None, LRScheduler | None]:  # fmt: skip
    """Make ``model`` trainable on all ranks; return ``engine, optimizer, dataloader, lr_scheduler``.

    All ranks call this. Example::

        engine, optimizer, dataloader, scheduler = dtlib.initialize(model=net, config=config, training_data=digits)
        for x, y in dataloader:
            loss = cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()

    Args:
        model: an ``nn.Module`` or a ``PipelineModule``. With bf16 or fp16 in the config it is converted in place.
        config: a dictionary with DeepSpeed's keys (config.py), or the path of a JSON file.
        optimizer: used instead of the config's. Either a function from parameters to a torch optimizer, or a torch
            optimizer over ``model``'s parameters, if these are not in 16 bits. Rank 0's optimizer states are copied to
            all ranks.
        model_parameters: the parameters to train, by default all. Groups, as torch's optimizers take them, are possible
            with the config's optimizer.
        training_data: a ``Dataset``, or a reader of ``dtlib.storage``, whose batches are tuples of its fields. Pass the
            whole data set on all ranks. ``dataloader`` then yields this rank's micro-batches, so do not divide the data
            yourself; without ``training_data`` it is None.
        lr_scheduler: used instead of the config's: a function from the optimizer to a scheduler. ``engine.step()``
            steps it, so do not step it yourself.
        collate_fn: makes a batch from a list of samples, as in torch's ``DataLoader``.
        args: a script's arguments; ``args.deepspeed_config`` is the path of the config if ``config`` is None.
        runtime: ``dtlib``; ``torch`` for the same engine on torch's own classes (strategies.py); or ``deepspeed``.
        comm: by default the world's communicator.

    Raises:
        ConfigError: for a mistake in the config, with the key, the value and a value that works.
        DtlibError: for other arguments that cannot work together.

    Counterpart: ``deepspeed.initialize``.
    """
    config = _the_config(args, config)
    if not isinstance(model, torch.nn.Module):
        raise DtlibError(f"model is {model!r:.60}: pass a torch module.")
    comm = as_communicator(comm) if comm is not None else init().comm
    if runtime not in RUNTIMES:
        raise DtlibError(f"initialize(runtime={runtime!r}): choose one of {', '.join(RUNTIMES)}.")
    if runtime == "deepspeed":
        check_deepspeed(model, comm)
    if isinstance(model, PipelineModule):
        comm = model.data_comm or model.comm.split(model.comm.rank)
    settings = configuration.read(config, comm.size, others=runtime == "deepspeed")
    samples = len(training_data) if isinstance(training_data, Sized) else None
    _check_same(comm, {"runtime": runtime, "len(training_data)": samples, **vars(settings)})
    if settings.bf16.enabled or settings.fp16.enabled:
        model.to(torch.bfloat16 if settings.bf16.enabled else torch.float16)
    if model_parameters is None and isinstance(optimizer, torch.optim.Optimizer):
        model_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = _groups_of(model_parameters, model)
    stage, loader = settings.zero_optimization.stage, None
    if training_data is not None:
        micro = settings.train_micro_batch_size_per_gpu
        assert micro is not None  # filled in by read()
        loader = RankLoader(training_data, micro, comm.rank, comm.size, settings.seed, collate_fn)
    if settings.pipeline.stages not in (None, 1) and not isinstance(model, PipelineModule):
        raise ConfigError(
            f"pipeline.stages is {settings.pipeline.stages}, but the model is not a PipelineModule: build one from its "
            "layers."
        )
    if runtime == "deepspeed":
        return deepspeed_engine(
            model, settings, configuration.dictionary_of(config), groups, partial(_optimizer, settings, optimizer),
            lr_scheduler, loader, comm,
        )  # fmt: skip
    if isinstance(model, PipelineModule):
        check_pipeline(model, settings, runtime)
    if settings.gradient_clipping:
        refuse_shards(model.parameters(), f"gradient_clipping is {settings.gradient_clipping:g}")
    if settings.fp16.enabled and any(info_of(parameter).differs() for parameter in model.parameters()):
        raise ConfigError(
            "fp16.enabled is true, but ranks have different shards or experts, with overflows in different steps: "
            "use bf16."
        )
    if stage == 3 and isinstance(optimizer, torch.optim.Optimizer):
        raise DtlibError(
            "This optimizer was created for whole parameters, which stage 3 replaces by shards: pass a function that "
            "creates it, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )

    if isinstance(optimizer, torch.optim.Optimizer) and any(comm.all_gather_object(bool(optimizer.state))):
        if stage:
            raise DtlibError(
                f"This optimizer has states, which stage {stage} would lose: pass a new optimizer, and load the states "
                "with dtlib.checkpoint or engine.load_checkpoint()."
            )
        optimizer.load_state_dict(comm.broadcast_object(optimizer.state_dict() if comm.rank == 0 else None))
    # Stage 3 replaces parameters by shards, and the hooks of stage 2 take each gradient as soon as it is computed. Both
    # stay on the model, so another strategy on the same model would not get its gradients.
    before = _stages.get(model)
    if before == ("dtlib", 3) or (before == ("dtlib", 2) and (stage == 0 or runtime == "torch")):
        what = "takes this model's gradients as they come" if before[1] == 2 else "has put shards in this model"
        raise DtlibError(f"An initialize() at stage {before[1]} {what}: build the model again.")
    _stages[model] = runtime, stage

    # A function, not a list: stage 3 and FSDP2 replace the parameters while they wrap the model.
    def trained():
        return [p for name, p in model.named_parameters() if p.requires_grad and name in groups]

    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name in groups]
    if isinstance(model, PipelineModule):
        trains = model.everyone.all_gather_object((model.comm.rank, bool(names)))
        if empty := [stage for stage, some in trains if not some]:
            raise DtlibError(
                f"Stage {empty[0]} of the pipeline has no parameter to train: use fewer stages, or set their starts "
                "with partition_method=[0, ...]."
            )
    if not names:
        raise DtlibError("There is no parameter to train: pass a model, or model_parameters, that require gradients.")
    make = partial(_optimizer, settings, optimizer, [groups[name] for name in names])
    kind = STRATEGIES[runtime][stage]
    # A single pipeline has no gradients to average.
    if stage == 0 and isinstance(model, PipelineModule) and comm.size == 1:
        kind = Alone
    strategy = kind(model, comm, trained, make, settings.zero_optimization)
    scheduler = _scheduler(settings, lr_scheduler, strategy.optimizer)
    if isinstance(model, PipelineModule):
        engine: Engine = PipelineEngine(model, strategy, scheduler, settings, comm, loader, runtime)
    else:
        engine = Engine(model, strategy, scheduler, settings, comm, loader)
    return engine, strategy.optimizer, loader, scheduler


def _check_same(comm, settings: dict) -> None:
    """Raise if a setting differs between ranks."""
    everyones = comm.all_gather_object({key: repr(value) for key, value in settings.items()})
    for key in settings:
        if len(values := sorted({one[key] for one in everyones})) > 1:
            raise ConfigError(
                f"{key} differs between ranks: {' and '.join(values)}. Give the same config and data on all ranks."
            )


def _the_config(args, config):
    """Return the config from ``config`` or from ``args.deepspeed_config``."""
    named = getattr(args, "deepspeed_config", None)
    if (config is None) == (named is None):
        what = "No config is given" if config is None else "config and args.deepspeed_config are given"
        raise ConfigError(f"{what}: pass one to initialize(), as config=, or as args with --deepspeed_config FILE.")
    return named if config is None else config


def _groups_of(parameters, model) -> dict[str, dict]:
    """Map the name of each parameter to train to the settings of its parameter group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    entries = list(names if parameters is None else parameters)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    found: dict[str, dict] = {}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
        params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        if unknown := [tuple(p.shape) for p in params if p not in names]:
            raise DtlibError(
                f"{len(unknown)} parameters to train do not belong to the model, the first of shape {unknown[0]}: "
                "make their module a part of the model."
            )
        found.update((names[parameter], settings) for parameter in params)
    return found


def _optimizer(settings, given, group_of, parameters):
    """Return the optimizer of ``parameters``; ``group_of`` has the group settings of each parameter."""
    if given is not None:
        if isinstance(given, torch.optim.Optimizer):
            known = {id(parameter) for parameter in parameters}
            if any(id(p) not in known for group in given.param_groups for p in group["params"] if p.requires_grad):
                raise DtlibError(
                    "This optimizer was created for parameters that are not trained here: with bf16 or fp16 pass a "
                    "function that creates it, such as lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
                )
            return given
        if any(group_of):
            raise DtlibError("Only the config's optimizer uses groups in model_parameters: make yours in optimizer=.")
        return given(parameters)
    if settings.optimizer is None:
        raise ConfigError("optimizer is missing: set it in the config, or pass optimizer= to initialize().")
    name, params = settings.optimizer.type, dict(settings.optimizer.params)
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer.type is {name!r}: choose one of {', '.join(OPTIMIZERS)}.")
    if name in ("Adam", "AdamW"):
        # DeepSpeed's Adam decays weights as AdamW does, unless adam_w_mode is false. Its default weight decay is 0 for
        # both, but torch's AdamW has 0.01.
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)
        name = "AdamW" if params.pop("adam_w_mode", True) or name == "AdamW" else "Adam"
    if name in ("Adam", "AdamW") and not params.get("foreach"):
        # Without `fused`, torch allocates temporaries as large as the parameters.
        params.setdefault("fused", True)
    groups = {id(group): {**group, "params": []} for group in group_of}
    for parameter, group in zip(parameters, group_of, strict=True):
        groups[id(group)]["params"].append(parameter)
    try:
        return getattr(torch.optim, name)(list(groups.values()), **params)
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"optimizer.params {params} do not match {settings.optimizer.type}: {problem}.") from None


def _scheduler(settings, given, optimizer):
    if given is not None:
        if not callable(given):
            raise DtlibError(
                f"lr_scheduler is a {type(given).__name__}, made for another optimizer: pass a function, such as "
                "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)."
            )
        scheduler = given(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise DtlibError(
                "ReduceLROnPlateau needs a loss, but the engine's step() has none: create it with the optimizer that "
                "initialize() returns, and call its step(loss) yourself."
            )
        return scheduler
    if settings.scheduler is None:
        return None
    name, params = settings.scheduler.type, settings.scheduler.params
    if name not in SCHEDULERS:
        raise ConfigError(f"scheduler.type is {name!r}: choose one of {', '.join(SCHEDULERS)}.")
    try:
        return SCHEDULERS[name](optimizer, **params)
    except TypeError as problem:
        raise ConfigError(f"scheduler.params {params} do not match {name}: {problem}.") from None
