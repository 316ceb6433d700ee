"""What stages of a plain pipeline must not have, as each rank sees its own alone."""

from collections.abc import Callable

from torch import nn

from dtlib.errors import DtlibError


def about_stage(stage: nn.Module, loss_fn: Callable) -> tuple:
    """What ``check_stages`` has to know of a rank's stage of a pipeline."""
    trained = any(parameter.requires_grad for parameter in stage.parameters())
    norms = [
        name
        for name, module in stage.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    # Stages live in different processes: a tied layer shows by its values, of which eight are enough, and by another
    # name, as stages that were built from one seed have such values under one name.
    values = {name: tuple(p.detach().flatten()[:8].tolist()) for name, p in stage.named_parameters() if p.dim() > 1}
    options = getattr(loss_fn, "keywords", {})  # of functools.partial
    return trained, norms, values, getattr(loss_fn, "reduction", options.get("reduction", "mean"))


def check_stages(stages: list[tuple], microbatches: int) -> None:
    """Refuse stages, told by ``about_stage`` of each rank, that would have other gradients than the whole model."""
    trained, norms, values, reductions = zip(*stages, strict=True)
    if idle := [rank for rank, any_trained in enumerate(trained) if not any_trained]:
        raise DtlibError(f"Stages {idle} train no parameter: give each one, or see PipelineStage.")
    if reductions[-1] != "mean":
        raise DtlibError(f"loss_fn has reduction={reductions[-1]!r}: take the mean over samples.")
    if any(norms) and microbatches > 1:
        rank, names = next((rank, names) for rank, names in enumerate(norms) if names)
        raise DtlibError(
            f"{names[0]} of rank {rank} is batch norm, and would see one micro-batch at a time: take a group norm, or "
            "microbatches=1."
        )
    seen: dict[tuple, tuple] = {}
    for rank, named in enumerate(values):
        for name, some in named.items():
            first, its_name = seen.setdefault(some, (rank, name))
            if first != rank and name != its_name and len(set(some)) > 1:
                raise DtlibError(
                    f"{name} of rank {rank} has the values of {its_name} of rank {first}: a tied layer needs the "
                    "gradients of both stages, see TiedLayerSpec; others need seeds of their own."
                )
