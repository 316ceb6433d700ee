"""The DeepSpeed config keys that the lessons use: read, check and complete them.

Every refused value raises an error with the key, the value and a value that works. Counterpart: the configuration JSON
of DeepSpeed (deepspeed.ai/docs/config-json). Names and batch arithmetic are DeepSpeed's, and so are most defaults.
"""

import difflib
import json
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar, get_args, get_type_hints

from dtlib.errors import MOST, DtlibError, number
from dtlib.files import read_text

S = TypeVar("S")  # the dataclass of a section
AnyConfig: TypeAlias = dict | str | Path  # a str or Path names a JSON file


class ConfigError(DtlibError):
    """An unknown key in the config, or a key with a value that cannot work."""


@dataclass
class TypeAndParams:
    """An optimizer or a scheduler: ``{"type": "AdamW", "params": {"lr": 1e-3}}``."""

    type: str
    params: dict = field(default_factory=dict)


@dataclass
class BFloat16:
    """Parameters and gradients in bfloat16; master weights and optimizer states in float32."""

    enabled: bool = False


@dataclass
class Float16:
    """Parameters and gradients in float16, with loss scaling; master weights and optimizer states in float32.

    Small gradients underflow in float16, so the loss is multiplied by a scale and the gradients are divided by it.
    ``loss_scale`` 0 means dynamic scaling. The scale then starts at 2 ** ``initial_scale_power`` and doubles after
    ``loss_scale_window`` steps without overflow. It halves after ``hysteresis`` steps with overflow, but never falls
    below ``min_loss_scale``.
    """

    enabled: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1


@dataclass
class OffloadOptimizer:
    """Location of optimizer states and master weights: ``none`` is the parameters' device, ``cpu`` is host memory."""

    device: str = "none"


@dataclass
class ZeroOptimization:
    """The ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters.

    ``reduce_bucket_size`` counts elements. Without it a bucket has 25 MiB (DeepSpeed: 5e8 elements). Stage 3 ignores
    it, because it communicates unit by unit. ``overlap_comm`` makes pending messages progress in a thread during
    computation. Without it, they progress only while computation leaves cores idle.
    """

    stage: int = 0
    reduce_bucket_size: int | None = None
    overlap_comm: bool | None = None
    offload_optimizer: OffloadOptimizer = field(default_factory=OffloadOptimizer)


@dataclass
class Pipeline:
    """Execution of a ``PipelineModule``: ``schedule`` is ``gpipe``, ``1f1b`` or ``zero_bubble_h1``.

    If ``activation_checkpoint_interval`` is above 0, a stage stores only its inputs, and recomputes activations in the
    backward pass. ``stages`` must equal the module's number of stages.
    """

    stages: int | None = None
    schedule: str = "1f1b"
    activation_checkpoint_interval: int = 0


@dataclass
class Config:
    """A complete config.

    ``train_batch_size`` is ``train_micro_batch_size_per_gpu`` times ``gradient_accumulation_steps`` times the number of
    ranks. ``seed`` sets the order of ``training_data``. A pipeline prints its loss every ``steps_per_print`` steps.
    ``gradient_clipping`` 0 means no clipping. It is the default here; DeepSpeed 0.19.8 clips at 1.
    """

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


_POSITIVE = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "loss_scale_window",
    "hysteresis", "reduce_bucket_size", "min_loss_scale", "steps_per_print", "stages", "steps", "epochs", "save_every",
)  # fmt: skip
MOST_POWERS_OF_TWO = 127
STAGES = (0, 1, 2, 3)
OFFLOAD_DEVICES = ("none", "cpu")


def read(config: AnyConfig, ranks: int, others: bool = False) -> Config:
    """Return a checked ``Config`` for ``ranks`` ranks, from a dictionary or the path of a JSON file.

    ``others``: leave out unknown keys instead of refusing them, because DeepSpeed itself will check them.

    Raises:
        ConfigError: with the key, the value and a value that works.
    """
    made = section(Config, dictionary_of(config), "", others)
    if made.bf16.enabled and made.fp16.enabled:
        raise ConfigError("bf16.enabled and fp16.enabled are both true, but a model has one type: disable one of them.")
    if made.fp16.initial_scale_power > MOST_POWERS_OF_TWO:
        raise ConfigError(
            f"fp16.initial_scale_power is {made.fp16.initial_scale_power}, but float32 ends at 2 ** "
            f"{MOST_POWERS_OF_TWO}: use less, such as 16."
        )
    stage, device = made.zero_optimization.stage, made.zero_optimization.offload_optimizer.device
    for key, value, known in (("stage", stage, STAGES), ("offload_optimizer.device", device, OFFLOAD_DEVICES)):
        if value not in known:
            raise ConfigError(f"zero_optimization.{key} is {value!r}: choose one of {', '.join(map(str, known))}.")
    if device == "cpu" and not stage:
        raise ConfigError("zero_optimization.offload_optimizer needs shards: set zero_optimization.stage to 1, 2 or 3.")
    complete(made, ranks)
    return made


def dictionary_of(config: AnyConfig) -> dict:
    """Return a copy of a config as a dictionary; refuse values that no key accepts."""
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
    """Fill in the missing one of the three batch sizes of ``config``.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks.

    Raises:
        ConfigError: if the three sizes contradict each other.
    """
    whole, micro, steps = (
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    )  # fmt: skip
    if micro is None:
        if whole is None:
            raise ConfigError("train_batch_size is missing: set it, or train_micro_batch_size_per_gpu.")
        micro = whole // ((steps or 1) * ranks)
    if whole is None:
        whole = micro * (steps or 1) * ranks
    # micro is 0 if the batch has fewer samples than ranks and steps; the check below reports it.
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
            f"config={str(path)!r} cannot be read ({problem.strerror}): pass the path of a JSON file."
        ) from None
    except ValueError as problem:
        raise ConfigError(f"{path.name} is not a config ({problem}): pass the path of a JSON file.") from None


def _without_repetition(pairs) -> dict:
    keys = [key for key, _ in pairs]
    if repeated := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError(f"{', '.join(sorted(repeated))} occurs twice in the same section: leave one of them out.")
    return dict(pairs)


def _check_values(value, name: str = "") -> None:
    """Refuse values that no key accepts, in any section."""
    if isinstance(value, (dict, list, tuple)):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            _check_values(inside, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number(name, value, -MOST, whole=False, error=ConfigError)
    elif isinstance(value, str) and value == "auto":
        raise ConfigError(f"{name} is 'auto', which only Hugging Face's Trainer supports: set it, or leave it out.")


def section(kind: type[S], values: object, prefix: str, others: bool = False) -> S:
    """Return a dataclass made from a section of the config; refuse unknown keys, or leave them out with ``others``."""
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix.rstrip('.')} is {_shown(values)}: pass a dictionary.")
    known, made = get_type_hints(kind), {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key in known:
            inner = next((one for one in (known[key], *get_args(known[key])) if is_dataclass(one)), None)
            if isinstance(inner, type):
                made[key] = section(inner, value, f"{name}.", others)
            else:
                made[key] = _checked(name, key, value, known[key])
        elif not others:
            near = difflib.get_close_matches(str(key), known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"leave it out. Known are {', '.join(known)}."
            raise ConfigError(f"{name} is no key of the config: {cure}")
    if kind is TypeAndParams and "type" not in made:
        raise ConfigError(f'{prefix}type is missing: name one, as in {{"type": "AdamW", "params": {{"lr": 0.001}}}}.')
    return kind(**made)


def _shown(value) -> str:
    return "null" if value is None else f"{value!r:.60}"


def _checked(name: str, key: str, value, kind):
    """Return the value if it has this type, or None where the type allows null."""
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
