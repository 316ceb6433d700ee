"""Convert a plan to a config of `dtlib train`, with DeepSpeed's keys."""

from dataclasses import replace

from dtlib.planner.mesh import Plan
from dtlib.planner.model import Model, PlanError

OURS = {"gpipe": "gpipe", "one_f_one_b": "1f1b", "zero_bubble_h1": "zero_bubble_h1"}
OURS_RECOMPUTE = {"none": "none", "selective": "selective", "full": "full"}


def for_dtlib(model: Model | None, plan: Plan) -> dict:
    """Return a config for `dtlib train --config FILE --ranks {plan.gpus}`.

    The config includes the model's sizes if `dtlib train decoder` supports such a model.

    Raises:
        PlanError: if `dtlib train` cannot run the plan.
    """
    own = model if model and is_decoder(model) else None
    if not own and plan.tensor * plan.context * plan.expert > 1:
        raise PlanError(
            "dtlib train divides layers, sequences and experts only of its own decoder: a model of 256 words, untied, "
            "with MLPs of four times its width."
        )
    if plan.pipe > 1 and plan.zero == 3:
        raise PlanError("dtlib train's pipelines support ZeRO stages 0, 1 and 2, not 3: they divide the parameters.")
    if own and own.experts and (plan.zero or plan.pipe * plan.tensor > 1):
        raise PlanError(
            f"{plan}: dtlib train has experts on axes of data, context and experts, without ZeRO. Plan with zero=0, "
            "pipe=1, tensor=1."
        )
    if plan.micro_batch % plan.context:
        raise PlanError(
            f"A micro-batch of {plan.micro_batch} is not a multiple of context {plan.context}: in dtlib train each of "
            f"these ranks reads its own samples. Use a multiple of {plan.context}."
        )
    if own and plan.context > 1 and own.seq % (2 * plan.context):
        raise PlanError(
            f"seq is {own.seq}, but {plan.context} context ranks of dtlib train need equal parts: use a multiple of "
            f"{2 * plan.context}."
        )
    # In dtlib train each context rank reads its own samples: the micro-batch is smaller, and the data axis is longer.
    shared = replace(plan, micro_batch=plan.micro_batch // plan.context, data=plan.shards)
    config: dict = {
        "train_batch_size": shared.batch, "train_micro_batch_size_per_gpu": shared.micro_batch,
        "gradient_accumulation_steps": shared.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0003}}, "zero_optimization": {"stage": plan.zero},
    }  # fmt: skip
    if own:
        sizes = {name: getattr(own, name) for name in ("layers", "hidden", "heads", "seq")}
        config["workload"] = {**sizes, "recompute": _known(plan.recompute, OURS_RECOMPUTE, "dtlib train decoder")}
        config["tensor_parallel"] = {"autotp_size": plan.tensor}
        if own.experts:
            config["workload"] |= {"experts": own.experts, "top": own.active}
            config["expert_parallel"] = {"size": plan.expert}
        if plan.context > 1:
            config["context_parallel"] = {"size": plan.context, "method": plan.context_algorithm}
    elif plan.recompute not in ("none", "full") or (plan.recompute == "full" and plan.pipe == 1):
        raise PlanError(f"dtlib train recomputes whole stages of a pipeline, or nothing: not {plan.recompute!r} here.")
    if plan.pipe > 1:
        schedule = _known(plan.schedule, OURS, "dtlib train")
        again = int(plan.recompute == "full" and not is_decoder(model))
        config["pipeline"] = {"stages": plan.pipe, "schedule": schedule, "activation_checkpoint_interval": again}
    return config


def is_decoder(model: Model | None) -> bool:
    """Return whether `dtlib train decoder` supports this model (workloads/decoder.py)."""
    if model is None:
        return False
    if model.experts and model.active > 2:
        return False
    as_dtlibs = replace(model, vocab=256, ffn=4 * model.hidden, kv_heads=model.heads, gated=False, tied=False)
    return replace(model, ffn=model.mlp, kv_heads=model.kv) == as_dtlibs


def _known(value: str, names: dict, whose: str) -> str:
    if value not in names:
        raise PlanError(f"{whose} has no {value!r}: choose one of {', '.join(names)}.")
    return names[value]
