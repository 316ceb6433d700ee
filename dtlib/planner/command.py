"""``dtlib plan``: parse model, GPUs and batch, search for plans, and print or write them."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from dtlib.errors import read_number
from dtlib.files import open_nonblocking, read_json, writing
from dtlib.planner import report
from dtlib.planner.configs import for_dtlib
from dtlib.planner.estimate import Estimate, search
from dtlib.planner.mesh import Plan
from dtlib.planner.model import DEVICES, GIB, MODELS, Device, Model, PlanError, from_transformers, whole

MOST_GPUS = 10**6


def model_of(choice: Model | str | dict, seq: int = 0) -> Model:
    """Return the ``Model`` that ``choice`` describes; ``seq``, if not 0, overrides its sequence length.

    ``choice`` is a ``Model``, a name in ``MODELS``, the dictionary or the path of a transformers config.json, or sizes,
    such as ``layers=24,hidden=2048,heads=16,vocab=51200,seq=1024``.

    Raises:
        PlanError: for an unknown name or a file that is no such config.
    """
    if isinstance(choice, Model):
        return replace(choice, seq=seq or choice.seq)
    if isinstance(choice, dict):
        return from_transformers(choice, seq)
    if choice in MODELS:
        return replace(MODELS[choice], seq=seq or MODELS[choice].seq)
    if "=" in choice:
        made = _fields(choice, Model, "a model's sizes")
        if missing := [name for name in ("layers", "hidden", "heads", "vocab", "seq") if name not in made]:
            raise PlanError(f"{', '.join(missing)} is missing in the model's sizes {choice!r}.")
        return replace(Model(**made), seq=seq or made["seq"])
    try:
        return from_transformers(read_json(Path(choice), dict), seq)
    except ValueError:
        raise PlanError(f"{choice!r} is not a config of a model: pass a config.json of transformers.") from None
    except OSError:
        raise PlanError(
            f"There is no model {choice!r}: pass one of {', '.join(MODELS)}, a config.json, or layers=...,hidden=..."
        ) from None


def device_of(choice: Device | str) -> Device:
    """Return ``choice`` itself if it is a ``Device``, otherwise the one in ``DEVICES`` with this name."""
    if isinstance(choice, Device):
        return choice
    if choice not in list(DEVICES):
        raise PlanError(f"There is no device {choice!r}: choose one of {', '.join(DEVICES)}.")
    return DEVICES[choice]


def fixed_of(text: str) -> dict:
    """Parse text such as ``zero=3,recompute=full`` to fields of a ``Plan``."""
    return _fields(text, Plan, "a plan") if text else {}


def plan_for(
    model: Model | str | dict, gpus: int, device: Device | str = "h100", batch: int = 0, seq: int = 0,
    fixed: dict | None = None, best: int = 10,
) -> tuple[list[Estimate], list[Estimate]]:  # fmt: skip
    """Return the best plans, and all plans that were tried, one per mesh.

    If ``batch`` is 0, it is about four million tokens, rounded to a whole number of samples per GPU.
    """
    gpus, batch = whole("gpus", gpus, most=MOST_GPUS), whole("batch", batch, least=0)
    model = model_of(model, whole("seq", seq, least=0))
    batch = batch or max(1, round(4e6 / model.seq / gpus)) * gpus
    return search(model, gpus, device_of(device), batch, whole("best", best), **(fixed or {}))


def written(best: list[Estimate], path: str) -> str:
    """Write the fastest plan that ``dtlib train`` supports as its config; return a message for the user."""
    refused = []
    for each in best:
        try:
            text = json.dumps(for_dtlib(each.model, each.plan), indent=2) + "\n"
        except PlanError as problem:
            refused.append(problem)
            continue
        with writing(path), open(path, "w", encoding="utf-8", opener=open_nonblocking) as file:
            file.write(text)
        return f"{path}: {each.plan}, for dtlib train"
    raise refused[0]


def run(options: Namespace) -> int:
    """Run the command ``dtlib plan``; return its exit status."""
    fixed = fixed_of(options.fixed)
    best, tried = plan_for(options.model, options.gpus, options.device, options.batch, options.seq, fixed, options.best)
    if options.json:
        print(json.dumps([_as_json(each) for each in best], indent=1))
    else:
        _show(best, tried, options.tokens)
    if options.write:
        if not best:
            raise PlanError("Nothing fits, so there is no plan to write: the lines above say what would fit.")
        print(written(best, options.write), file=sys.stderr if options.json else sys.stdout)
    return 0


def _show(best: list[Estimate], tried: list[Estimate], tokens: float | None) -> None:
    from tabulate import tabulate

    print(report.summary(best, tried), "\n")
    if best:
        print(tabulate(report.best_rows(best), report.HEADERS, disable_numparse=True), "\n")
    rows, headers = report.map_rows(tried)
    print(tabulate(rows, headers, disable_numparse=True), "\n")
    if best:
        print(tabulate(report.details(best[0], tokens), tablefmt="plain", maxcolwidths=[None, 90]))


def _as_json(e: Estimate) -> dict:
    return {
        "plan": vars(e.plan), "seconds": e.seconds, "low": e.low, "high": e.high, "tokens_per_second": e.tokens,
        "mfu": e.mfu,
        "GiB": e.memory.total / GIB, "sent_bytes": e.sent, "outside": e.outside,
    }  # fmt: skip


def _fields(text: str, kind, what: str) -> dict:
    """Parse text such as ``a=1,b=full`` to values of the types of the fields of dataclass ``kind``."""
    made: dict = {}
    # The batch has a separate option.
    known = {name: field for name, field in kind.__dataclass_fields__.items() if name != "batch"}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in known:
            raise PlanError(f"{pair!r} is nothing of {what}: write name=value, with {', '.join(known)}.")
        if name in made:
            raise PlanError(f"{name} is in {text!r} twice: give it once.")
        wanted = type(known[name].default)  # required sizes have no default, so this is neither str nor bool
        if wanted is bool and value.lower() not in ("true", "false"):
            raise PlanError(f"{name} is {value!r}: pass true or false.")
        words = {str: value, bool: value.lower() == "true"}
        made[name] = words[wanted] if wanted in words else whole(name, read_number(value), known[name].default != 0)
    return made
