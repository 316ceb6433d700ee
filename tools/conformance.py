"""Conformance tables: each public name and argument of three counterparts, and what it is here.

    python -m tools.conformance              writes docs/reference/conformance/*.md
    python -m tools.conformance --signatures also reads the signatures anew, of those counterparts that are installed

``same``: there is such a name, and the argument with the same default. ``differs``: in the way that is said.
``refused``: it is not there, or the call says why it cannot be. A test compares the tables with the code.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

from dtlib.errors import DtlibError

DATA = Path(__file__).parent / "data"
FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "conformance"
TITLES = {
    "torch": "torch 2.13: DistributedDataParallel, FSDP2, ZeroRedundancyOptimizer",
    "deepspeed": "DeepSpeed 0.19: what its example scripts call",
    "horovod": "Horovod 0.28: horovod.torch",
}
DDP, FSDP, ZERO = "torch.nn.parallel.DistributedDataParallel", "torch.distributed.fsdp", "torch.distributed.optim"
ENGINE, PIPE = "deepspeed.DeepSpeedEngine", "deepspeed.pipe.PipelineModule"
PLAN = "dtlib.parallel.zero.sharded.fully_shard"

MEANINGS = (
    ("same", "dtlib has this name, or this argument with the same default"),
    ("differs", "dtlib has it, but it works differently: see the last column"),
    ("refused", "dtlib does not have it, or raises an error"),
)
# The counterpart's name -> ours.
NAMES = {
    "torch": {
        DDP: "dtlib.parallel.data.DataParallel",
        **{f"{DDP}.{name}": f"dtlib.parallel.data.DataParallel.{name}" for name in (
            "no_sync", "join", "join_hook", "register_comm_hook", "forward",
        )},
        f"{FSDP}.fully_shard": PLAN,
        **{f"{FSDP}.FSDPModule.{name}": f"dtlib.parallel.zero.sharded.FSDPModule.{name}" for name in (
            "reshard", "unshard", "set_is_last_backward", "set_requires_gradient_sync",
            "set_requires_all_reduce", "set_reshard_after_forward", "set_reshard_after_backward",
            "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "set_gradient_divide_factor",
        )},
        f"{FSDP}.MixedPrecisionPolicy": "dtlib.parallel.zero.sharded.MixedPrecisionPolicy",
        f"{FSDP}.CPUOffloadPolicy": "dtlib.parallel.zero.sharded.CPUOffloadPolicy",
        f"{ZERO}.ZeroRedundancyOptimizer": "dtlib.parallel.zero.ZeroOptimizer",
        **{f"{ZERO}.ZeroRedundancyOptimizer.{name}": f"dtlib.parallel.zero.ZeroOptimizer.{name}" for name in (
            "add_param_group", "consolidate_state_dict", "join_hook", "load_state_dict", "state_dict", "step",
            "zero_grad",
        )},
    },
    "deepspeed": {
        **{f"deepspeed.{name}": f"dtlib.deepspeed.{name}" for name in (
            "initialize", "add_config_arguments", "init_distributed", "get_accelerator", "log_dist", "init_inference",
            "tp_model_init", "zero.Init", "zero.GatheredParameters", "checkpointing.configure", "comm.get_rank",
        )},
        **{f"{ENGINE}.{name}": f"dtlib.training.Engine.{name}" for name in (
            "forward", "backward", "step", "train", "eval", "zero_grad", "save_checkpoint", "load_checkpoint",
            "save_16bit_model", "is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary", "no_sync",
            "get_global_grad_norm", "get_lr", "train_batch_size", "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps", "set_train_batch_size", "fp16_enabled", "bfloat16_enabled",
            "zero_optimization", "zero_optimization_stage", "gradient_clipping", "loss_scale", "deepspeed_io",
            "destroy", "compile", "offload_states", "reload_states",
        )},
        PIPE: "dtlib.deepspeed.pipe.PipelineModule",
        "deepspeed.pipe.LayerSpec": "dtlib.deepspeed.pipe.LayerSpec",
        "deepspeed.pipe.TiedLayerSpec": "dtlib.deepspeed.pipe.TiedLayerSpec",
        "deepspeed.PipelineEngine.train_batch": "dtlib.training.pipeline_engine.PipelineEngine.train_batch",
        "deepspeed.PipelineEngine.eval_batch": "dtlib.training.pipeline_engine.PipelineEngine.eval_batch",
        "deepspeed.utils.RepeatingLoader": "dtlib.deepspeed.utils.RepeatingLoader",
        **{f"deepspeed.runtime.lr_schedules.{name}": f"dtlib.training.rates.{name}" for name in (
            "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest",
        )},
    },
    "horovod": {},
}  # fmt: skip

# Why a row is not the same: (verdict, words); a name alone stands for all of its arguments.
WORDS = json.loads((DATA / "conformance_words.json").read_text(encoding="utf-8"))


class Refused(str):
    """The sentence of a name that is not offered."""

    __slots__ = ()

    def __new__(cls, sentence):
        return super().__new__(cls, str(sentence))


def find(dotted: str):
    """The object of that name; or the sentence that who uses it gets, or None where there is none."""
    module, path = dotted, []
    while module:
        try:
            found = importlib.import_module(module)
            break
        except ImportError:
            module, _, name = module.rpartition(".")
            path.insert(0, name)
    else:
        return None
    for name in path:
        try:
            found = getattr(found, name)
        except DtlibError as sentence:
            return Refused(sentence)
        except AttributeError:
            return None
    return found


def signature(thing) -> dict[str, str] | None:
    """Arguments and their defaults as text; None for what is no function."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    left_out = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: _text(p.default) for p in parameters if p.name != "self" and p.kind not in left_out}


def _text(default) -> str:
    if default is inspect.Parameter.empty:
        return ""
    return getattr(default, "__name__", None) or repr(default).split(" at 0x")[0]


def signatures_of(surface: str) -> dict | None:
    """As the installed counterpart has them; None where it is not installed."""
    found = {name: signature(thing) for name in NAMES[surface] if (thing := find(name)) is not None}
    return found or None


def ours_of(surface: str, name: str) -> str:
    return NAMES[surface].get(name) or name.replace("horovod.torch", "dtlib.horovod")


def rows(surface: str) -> list[tuple[str, str, str, str, str]]:
    """(name, argument, default, verdict, words) of each name and each argument."""
    stored = json.loads((DATA / "conformance_signatures.json").read_text(encoding="utf-8"))[surface]
    found = []
    for name, arguments in stored.items():
        ours = find(ours_of(surface, name))
        if isinstance(ours, Refused):
            found.append((name, ", ".join(arguments or ()), "", "refused", str(ours)))
            continue
        here = signature(ours) if ours is not None else {}
        found.append((name, "", "", *_verdict(surface, name, "", ours is not None)))
        for argument, default in (arguments or {}).items():
            same = ours is not None and here is not None and here.get(argument) == default
            found.append((name, argument, default, *_verdict(surface, name, argument, same)))
    return found


def _verdict(surface: str, name: str, argument: str, same: bool) -> tuple[str, str]:
    words = WORDS[surface]
    for key in (f"{name}({argument})" if argument else name, f"*({argument})" if argument else None):
        if key in words:
            return tuple(words[key])
    if not argument and same:
        return "same", ""
    if argument and not same and name in words and words[name][0] == "refused":
        return tuple(words[name])
    return ("same", "") if same else ("unexplained", "")


def table(surface: str) -> str:
    lines, all_rows = [], rows(surface)
    counts = {verdict: sum(row[3] == verdict for row in all_rows) for verdict in ("same", "differs", "refused")}
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines += [f"# {TITLES[surface]}", "", f"{len(all_rows)} rows: {total}. Made by `python -m tools.conformance`.", ""]
    lines += ["| here | meaning |", "|---|---|", *(f"| {verdict} | {words} |" for verdict, words in MEANINGS), ""]
    lines += ["| name | argument | default | here | difference, or what to use instead |", "|---|---|---|---|---|"]
    for name, argument, default, verdict, words in all_rows:
        cells = (
            f"`{name}`" if not argument else "",
            f"`{argument}`" if argument else "",
            f"`{default}`" if default else "",
        )
        lines.append(f"| {' | '.join(cells)} | {verdict} | {words} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    file = DATA / "conformance_signatures.json"
    if "--signatures" in sys.argv:
        stored = json.loads(file.read_text(encoding="utf-8"))
        for surface in TITLES:
            stored[surface] = signatures_of(surface) or stored.get(surface, {})
        file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    for surface in TITLES:
        (FOLDER / f"{surface}.md").write_text(table(surface), encoding="utf-8")


if __name__ == "__main__":
    main()
