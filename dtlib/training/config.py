"""The DeepSpeed config keys that the lessons use: read, checked, and completed.

Every mistake is refused with the key, the value, and what would be right. Counterpart: the configuration JSON of
DeepSpeed (deepspeed.ai/docs/config-json), whose names, defaults and batch arithmetic these are.
"""

import difflib
import json
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Real
from pathlib import Path

from dtlib.errors import DtlibError


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

    ``reduce_bucket_size`` counts elements; without it a bucket is 25 MiB (DeepSpeed: 5e8 elements). ``overlap_comm``
    moves messages on in a thread while computing goes on; without it that is done where computing leaves the cores
    idle.
    """

    stage: int = 0
    reduce_bucket_size: int | None = None
    overlap_comm: bool | None = None
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)


@dataclass
class Pipeline:
    """How a ``PipelineModule`` runs: ``gpipe``, ``1f1b`` or ``zero_bubble_h1``. With an
    ``activation_checkpoint_interval`` above 0 a stage keeps its inputs only, and computes activations anew."""

    schedule: str = "1f1b"
    activation_checkpoint_interval: int = 0


@dataclass
class Config:
    """A whole config. ``train_batch_size`` is the product of the two below it and the number of ranks."""

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


_SECTIONS = {
    "optimizer": TypeAndParams, "scheduler": TypeAndParams, "bf16": BFloat16, "fp16": Float16,
    "zero_optimization": ZeroOptimization, "zero_optimization.offload_optimizer": OffloadOptimizer,
    "pipeline": Pipeline,
}  # fmt: skip
_POSITIVE = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "loss_scale_window",
    "hysteresis", "reduce_bucket_size", "min_loss_scale",
)  # fmt: skip
STAGES = (0, 1, 2, 3)
OFFLOAD_DEVICES = ("none", "cpu")


def read(config, ranks: int) -> Config:
    """A checked ``Config`` from a dictionary or the path of a JSON file, for this number of ranks.

    Raises:
        ConfigError: one sentence with the key, the value and what would be right.
    """
    if isinstance(config, (str, Path)):
        config = _from_file(Path(config))
    if not isinstance(config, dict):
        raise ConfigError(f"config={config!r:.60}: pass a dictionary, or the path of a JSON file.")
    made = _section(Config, config, "")
    if made.bf16.enabled and made.fp16.enabled:
        raise ConfigError(
            "bf16.enabled and fp16.enabled are both true: a model has one type, so switch one of them off."
        )
    if made.zero_optimization.stage not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise ConfigError(f"zero_optimization.stage is {made.zero_optimization.stage}: choose one of {known}.")
    device = made.zero_optimization.offload_optimizer.device
    if device not in OFFLOAD_DEVICES:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.device is {device!r}: choose one of {', '.join(OFFLOAD_DEVICES)}."
        )
    if device == "cpu" and not made.zero_optimization.stage:
        raise ConfigError("zero_optimization.offload_optimizer needs shards: set zero_optimization.stage to 1, 2 or 3.")
    _complete_batch_sizes(made, ranks)
    return made


def _from_file(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except OSError as problem:
        raise ConfigError(
            f"config={str(path)!r} cannot be read ({problem.strerror}): give the path of a JSON file."
        ) from None
    except json.JSONDecodeError as problem:
        raise ConfigError(f"{path.name} is no JSON: {problem.msg} in line {problem.lineno}.") from None


def _section(kind, values, prefix: str):
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix.rstrip('.')} is {values!r:.60}: give a dictionary.")
    known = {entry.name: entry.type for entry in fields(kind)}
    made = {}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise ConfigError(f"{prefix}{key} is no key of the config: {cure}")
        if prefix + key in _SECTIONS:
            made[key] = _section(_SECTIONS[prefix + key], value, f"{prefix}{key}.")
        else:
            made[key] = _checked(f"{prefix}{key}", key, value, known[key])
    if kind is TypeAndParams and "type" not in made:
        raise ConfigError(f'{prefix}type is missing: name one, as in {{"type": "AdamW", "params": {{"lr": 0.001}}}}.')
    return kind(**made)


def _checked(name: str, key: str, value, kind):
    wants_number = kind in (float, int, int | None)
    if kind in (bool, bool | None) and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: give true or false.")
    if wants_number and (not isinstance(value, Real) or isinstance(value, bool)):
        raise ConfigError(f"{name} is {value!r}: give a number.")
    if kind in (int, int | None) and value != int(value):
        raise ConfigError(f"{name} is {value!r}: give a whole number.")
    if key in _POSITIVE and value <= 0:
        raise ConfigError(f"{name} is {value!r}: give a number above 0.")
    if wants_number and value < 0:
        raise ConfigError(f"{name} is {value!r}: give 0 or more.")
    if kind is str and not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}: give a name in quotes.")
    if kind is dict and not isinstance(value, dict):
        raise ConfigError(f"{name} is {value!r}: give a dictionary.")
    return int(value) if wants_number and kind is not float else value


def _complete_batch_sizes(config: Config, ranks: int) -> None:
    """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks; two give the third."""
    whole, micro, steps = (
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    )  # fmt: skip
    if whole is None and micro is None:
        raise ConfigError("train_batch_size is missing: give it, or train_micro_batch_size_per_gpu.")
    if whole is None:
        whole = micro * (steps or 1) * ranks
    elif micro is None:
        micro = whole // ((steps or 1) * ranks)
    steps = steps or max(1, whole // (micro * ranks)) if micro else steps or 1
    if whole != (micro or 0) * steps * ranks:
        raise ConfigError(
            f"train_batch_size is {whole}, but train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{steps} x {ranks} ranks is {(micro or 0) * steps * ranks}: {_what_fits(config, ranks)}."
        )
    config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = (
        whole,
        micro,
        steps,
    )


def _what_fits(config: Config, ranks: int) -> str:
    given = (config.train_micro_batch_size_per_gpu or 1) * (config.gradient_accumulation_steps or 1) * ranks
    if config.train_micro_batch_size_per_gpu and config.gradient_accumulation_steps:
        return f"give train_batch_size {given}, or leave one of the three out"
    return f"make train_batch_size a multiple of {given}"


def as_dictionary(config) -> dict:
    """A config as it would stand in its file, complete."""
    made = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    return {
        key: as_dictionary(value) if is_dataclass(value) else value for key, value in made.items() if value is not None
    }
