"""The DeepSpeed config keys that the lessons use: read, checked, and completed.

Every mistake is refused with the key, the value, and what would be right. Counterpart: the configuration JSON of
DeepSpeed (deepspeed.ai/docs/config-json), whose names and batch arithmetic these are, and mostly its defaults.
"""

import difflib
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar, get_type_hints

from dtlib.errors import MOST, DtlibError, number
from dtlib.files import read_text

S = TypeVar("S")  # a section
AnyConfig: TypeAlias = dict | str | Path  # str and Path: of a JSON file


class ConfigError(DtlibError):
    """A key of the config that is unknown, or whose value cannot be right."""


@dataclass
class TypeAndParams:
    """``{"type": "AdamW", "params": {"lr": 1e-3}}``, of an optimizer or a scheduler."""

    type: str
    params: dict = field(default_factory=dict)


@dataclass
class BFloat16:
    """Parameters and gradients in bfloat16, master weights and optimizer states in float32."""

    enabled: bool = False


@dataclass
class Float16:
    """The same in float16, where small gradients vanish: the loss is scaled up, and gradients down again.

    ``loss_scale`` 0 means dynamic: it begins at 2 ** ``initial_scale_power``, doubles after ``loss_scale_window`` good
    steps, and halves after ``hysteresis`` steps that overflow, but not below ``min_loss_scale``.
    """

    enabled: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1


@dataclass
class OffloadOptimizer:
    """Where optimizer states and master weights live: ``none`` means with the parameters, ``cpu`` in host memory."""

    device: str = "none"


@dataclass
class ZeroOptimization:
    """``stage`` 0 is data parallelism; 1 shares out the optimizer's states, 2 gradients too, 3 parameters too.

    ``reduce_bucket_size`` counts elements; without it a bucket is 25 MiB (DeepSpeed: 5e8 elements); stage 3 sends
    units. ``overlap_comm`` moves messages on in a thread while computing goes on; without it that is done where
    computing leaves the cores idle.
    """

    stage: int = 0
    reduce_bucket_size: int | None = None
    overlap_comm: bool | None = None
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)


@dataclass
class Pipeline:
    """How a ``PipelineModule`` runs: ``gpipe``, ``1f1b`` or ``zero_bubble_h1``. With an
    ``activation_checkpoint_interval`` above 0 a stage keeps its inputs only, and computes activations anew. ``stages``
    are as many as the module has."""

    stages: int | None = None
    schedule: str = "1f1b"
    activation_checkpoint_interval: int = 0


@dataclass
class Config:
    """A whole config. ``train_batch_size`` is the product of the two below it and the number of ranks; ``seed`` is that
    of the order in which ``training_data`` comes. Every ``steps_per_print`` steps a pipeline prints its
    loss. ``gradient_clipping`` 0 clips nothing: what a config does not ask for is not done (DeepSpeed clips at 1 unless
    told otherwise)."""

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    optimizer: TypeAndParams | None = None
    scheduler: TypeAndParams | None = None
    bf16: BFloat16 = field(default_factory=BFloat16)
    fp16: Float16 = field(default_factory=Float16)
    gradient_clipping: float = 0.0
    zero_optimization: ZeroOptimization = field(default_factory=ZeroOptimization)
    pipeline: Pipeline = field(default_factory=Pipeline)
    seed: int = 0
    steps_per_print: int | None = None


_SECTIONS = {
    "optimizer": TypeAndParams, "scheduler": TypeAndParams, "bf16": BFloat16, "fp16": Float16,
    "zero_optimization": ZeroOptimization, "zero_optimization.offload_optimizer": OffloadOptimizer,
    "pipeline": Pipeline,
}  # fmt: skip
_MAY_BE_NULL = ("optimizer", "scheduler", "zero_optimization.offload_optimizer")
_POSITIVE = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "loss_scale_window",
    "hysteresis", "reduce_bucket_size", "min_loss_scale", "steps_per_print", "stages", "steps", "epochs", "save_every",
)  # fmt: skip
# Sections in which DeepSpeed has more keys, which say how it writes, buffers or sends: all of those are one warning.
_IGNORED_IN = ("", "bf16.", "zero_optimization.", "zero_optimization.offload_optimizer.")
TYPO = 0.8  # a key as similar to a known one is a mistake
# Another kind of training, or other arithmetic: accepted where it is switched off, else refused.
_MUST_BE_OFF = (
    "amp", "autotuning", "communication_data_type", "compression_training", "curriculum_learning", "data_efficiency",
    "data_types", "eigenvalue", "elasticity", "fp32_allreduce", "hybrid_engine", "progressive_layer_drop",
    "quantize_training", "sparse_attention", "tensor_parallel", "torch_autocast", "auto_cast",
    "consecutive_hysteresis", "fp16_master_weights_and_grads", "check_grad_overflow", "bf16_master_weights_and_grads",
    "bf16_optimizer_states", "zero_quantized_weights", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "zenflow",
)  # fmt: skip
MOST_POWERS_OF_TWO = 127
STAGES = (0, 1, 2, 3)
OFFLOAD_DEVICES = ("none", "cpu")


def read(config: AnyConfig, ranks: int, rank: int = 0) -> Config:
    """A checked ``Config`` from a dictionary or the path of a JSON file, for this number of ranks.

    Rank 0 warns once of all keys that change nothing here.

    Raises:
        ConfigError: one sentence with the key, the value and what would be right.
    """
    config = dictionary_of(config)
    inert: list[str] = []
    made = section(Config, _with_new_names(config), "", inert)
    if made.bf16.enabled and made.fp16.enabled:
        raise ConfigError("bf16.enabled and fp16.enabled are both true, but a model has one type: disable one of them.")
    if made.fp16.initial_scale_power > MOST_POWERS_OF_TWO:
        raise ConfigError(
            f"fp16.initial_scale_power is {made.fp16.initial_scale_power}, and float32 ends at 2 ** "
            f"{MOST_POWERS_OF_TWO}: give less, such as 16."
        )
    if made.zero_optimization.stage not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise ConfigError(f"zero_optimization.stage is {made.zero_optimization.stage}: choose one of {known}.")
    device = made.zero_optimization.offload_optimizer.device
    parameters = config.get("zero_optimization", {}).get("offload_param")
    parameters = parameters if isinstance(parameters, dict) else {}
    for key, where in {"offload_optimizer": device, "offload_param": parameters.get("device", "none")}.items():
        if where not in OFFLOAD_DEVICES:
            raise ConfigError(
                f"zero_optimization.{key}.device is {where!r}: choose one of {', '.join(OFFLOAD_DEVICES)}."
            )
    if device == "cpu" and not made.zero_optimization.stage:
        raise ConfigError("zero_optimization.offload_optimizer needs shards: set zero_optimization.stage to 1, 2 or 3.")
    complete(made, ranks)
    if made.zero_optimization.stage == 3 and made.zero_optimization.reduce_bucket_size:
        inert.append("zero_optimization.reduce_bucket_size")
    if inert and rank == 0:
        warnings.warn(f"These keys of the config change nothing here: {', '.join(inert)}.", stacklevel=3)
    return made


def dictionary_of(config: AnyConfig) -> dict:
    """A copy of a config, from a dictionary or the path of a JSON file; its values make sense somewhere."""
    try:
        if isinstance(config, (str, Path)):
            config = _from_file(Path(config))
        if not isinstance(config, dict):
            raise ConfigError(f"config={config!r:.60}: pass a dictionary, or the path of a JSON file.")
        _check_values(config)
    except RecursionError:
        raise ConfigError("The config's lists and sections are too deep: no known key is so deep.") from None
    return dict(config)


def complete(config: Config, ranks: int) -> None:
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks: two give the third.

    Raises:
        ConfigError: where they do not multiply out.
    """
    whole, micro, steps = (
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    )  # fmt: skip
    if micro is None:
        if whole is None:
            raise ConfigError("train_batch_size is missing: give it, or train_micro_batch_size_per_gpu.")
        micro = whole // ((steps or 1) * ranks)
    if whole is None:
        whole = micro * (steps or 1) * ranks
    steps = steps or max(1, whole // (micro * ranks)) if micro else steps or 1
    if whole != micro * steps * ranks:
        raise ConfigError(
            f"train_batch_size is {whole}, but train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{steps} x {ranks} ranks is {micro * steps * ranks}: {_what_fits(config, ranks)}."
        )
    config.train_batch_size, config.train_micro_batch_size_per_gpu = whole, micro
    config.gradient_accumulation_steps = steps


def _what_fits(config, ranks: int) -> str:
    given = (config.train_micro_batch_size_per_gpu or 1) * (config.gradient_accumulation_steps or 1) * ranks
    if config.train_micro_batch_size_per_gpu and config.gradient_accumulation_steps:
        return f"set train_batch_size {given}, or leave one of the three out"
    return f"make train_batch_size a multiple of {given}"


def _from_file(path: Path) -> dict:
    try:
        return json.loads(read_text(path), object_pairs_hook=_without_repetition)
    except OSError as problem:
        raise ConfigError(
            f"config={str(path)!r} cannot be read ({problem.strerror}): give the path of a JSON file."
        ) from None
    except ValueError as problem:
        raise ConfigError(f"{path.name} is not a config ({problem}): pass the path of a JSON file.") from None


def _without_repetition(pairs) -> dict:
    keys = [key for key, _ in pairs]
    if repeated := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError(f"{', '.join(sorted(repeated))} stands twice in the same section: leave one of them out.")
    return dict(pairs)


def _check_values(value, name: str = "") -> None:
    """Refuse what is a value for no key, wherever it stands."""
    if isinstance(value, (dict, list, tuple)):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            _check_values(inside, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number(name, value, -MOST, whole=False, error=ConfigError)
    elif isinstance(value, str) and value == "auto":
        raise ConfigError(f"{name} is 'auto', which Hugging Face's Trainer fills in: give the value, or leave it out.")


def _with_new_names(config: dict) -> dict:
    """The config with the keys that have taken the place of old ones."""
    config, zero = dict(config), config.get("zero_optimization")
    if "bfloat16" in config and "bf16" in config:
        raise ConfigError("bfloat16 is the old name of bf16, and both are given: leave bfloat16 out.")
    if "bfloat16" in config:
        config["bf16"] = config.pop("bfloat16")
    if isinstance(zero, dict) and "cpu_offload" in zero:
        config["zero_optimization"] = zero = dict(zero)
        offload = _checked("zero_optimization.cpu_offload", "cpu_offload", zero.pop("cpu_offload"), bool | None)
        if offload and zero.setdefault("offload_optimizer", {"device": "cpu"}) != {"device": "cpu"}:
            raise ConfigError(
                "zero_optimization.cpu_offload is the old name of offload_optimizer, and both are given: leave "
                "cpu_offload out."
            )
    return config


def section(kind: type[S], values: object, prefix: str, inert: list[str] | None = None) -> S:
    """A dataclass from its section of the config. Keys that change nothing are added to ``inert``; without that list,
    every unknown key is refused."""
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix.rstrip('.')} is {_shown(values)}: give a dictionary.")
    known, made = get_type_hints(kind), {}
    ignored = inert if prefix in _IGNORED_IN else None
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key in known and name not in _SECTIONS:
            made[key] = _checked(name, key, value, known[key])
        elif key in known:
            if value is not None or name not in _MAY_BE_NULL:
                made[key] = section(_SECTIONS[name], value, f"{name}.", inert)
        elif inert is not None and key in _MUST_BE_OFF:
            if not _is_off(value):
                raise ConfigError(f"{name} is {_shown(value)}, and there is nothing like it here: leave it out.")
            inert.append(name)
        else:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6 if ignored is None else TYPO)
            if near or ignored is None:
                cure = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
                raise ConfigError(f"{name} is no key of the config: {cure}")
            ignored.append(name)
    if kind is TypeAndParams and "type" not in made:
        raise ConfigError(f'{prefix}type is missing: name one, as in {{"type": "AdamW", "params": {{"lr": 0.001}}}}.')
    return kind(**made)


def _is_off(value) -> bool:
    """Whether a key asks for nothing: ``false``, ``null``, a section with ``"enabled": false`` or without values."""
    if isinstance(value, dict):
        return not value.get("enabled", any(not _is_off(entry) for entry in value.values()))
    return value is None or value is False


def _shown(value) -> str:
    return "null" if value is None else f"{value!r:.60}"


def _checked(name: str, key: str, value, kind):
    """The value, if it is of this kind, or null where that means the default."""
    if value is None and isinstance(None, kind):
        return None
    kind = next((entry for entry in getattr(kind, "__args__", [kind]) if entry is not type(None)), kind)
    if kind in (float, int):
        least = (1 if kind is int else 1e-9) if key in _POSITIVE else 0
        return number(name, value, least, whole=kind is int, error=ConfigError)
    problem = f"{name} is {_shown(value)}: give"
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{problem} true or false.")
    if kind is str and not isinstance(value, str):
        raise ConfigError(f"{problem} a name in quotes.")
    if kind is dict and not isinstance(value, dict):
        raise ConfigError(f"{problem} a dictionary.")
    return value
