"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks; two give the third."""

from dtlib.errors import DtlibError


class ConfigError(DtlibError):
    """A key of the config that is unknown, or whose value cannot be right."""


def complete(config, ranks: int) -> None:
    """Fill in what is missing of the three.

    Raises:
        ConfigError: where they do not multiply out.
    """
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


def _what_fits(config, ranks: int) -> str:
    given = (config.train_micro_batch_size_per_gpu or 1) * (config.gradient_accumulation_steps or 1) * ranks
    if config.train_micro_batch_size_per_gpu and config.gradient_accumulation_steps:
        return f"give train_batch_size {given}, or leave one of the three out"
    return f"make train_batch_size a multiple of {given}"
