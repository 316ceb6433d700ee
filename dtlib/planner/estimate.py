"""One plan, estimated: does it fit, how long does a step take, between which bounds; and the best plans of many.

An estimate lists in which respects a plan lies outside of its calibration. Its band is then drawn from rows of other
papers, on which nothing was fitted, and its time is marked."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import floor, isqrt, log10

from dtlib.planner.calibrated import CALIBRATIONS, OUTSIDE, OUTSIDE_PIPE, USABLE
from dtlib.planner.memory import Footprint, Memory, memory
from dtlib.planner.mesh import Plan, check
from dtlib.planner.model import GIB, Device, Model, PlanError
from dtlib.planner.time import Calibration, parts, work
from dtlib.planner.wire import step_bytes


@dataclass(frozen=True)
class Estimate:
    """``memory`` in bytes; ``seconds`` of a step, of which nine of ten are expected from ``low`` to ``high``; ``parts``
    of them; ``sent``: bytes a step of a rank of the first stage, by axis; ``mfu``: useful operations over the data
    sheet's; ``tokens``: a second; ``outside``: sentences on what was never measured; ``why_not``: one where it does not
    fit, else empty."""

    model: Model
    plan: Plan
    device: Device
    memory: Memory
    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    sent: dict[str, float]
    mfu: float
    tokens: float
    outside: tuple[str, ...]
    why_not: str

    @property
    def fits(self) -> bool:
        return not self.why_not

    def __str__(self) -> str:
        took, low, high = map(rounded if self.outside else "{:.3g}".format, (self.seconds, self.low, self.high))
        about = "about " if self.outside else ""
        says = f"{self.plan}: {about}{took} s a step ({low} to {high} s), {self.memory.total / GIB:.1f} GiB"
        return " ".join([says + ".", *([self.why_not] if self.why_not else []), *self.outside])


def estimate(
    model: Model, plan: Plan, device: Device, calibration: str | None = None, footprint: Footprint | None = None
) -> Estimate:
    """All of it in one call.

    Args:
        calibration: a name in ``CALIBRATIONS``; by default the one for this device and so many GPUs, or the nearest.
        footprint: bytes of the framework; by default ``Footprint(usable=USABLE)``.

    Raises:
        PlanError: for a plan that cannot be, with its numbers.
    """
    check(model, plan)
    footprint = footprint or Footprint(usable=USABLE)
    name = calibration or nearest(plan.gpus, device)
    if name not in CALIBRATIONS:
        raise PlanError(f"There is no calibration {name!r}: choose one of {', '.join(CALIBRATIONS)}.")
    known = CALIBRATIONS[name]
    outside = outside_of(known, model, plan, device)
    by_part = parts(work(model, plan, device), known.speeds)
    took = sum(by_part.values())
    band = known.band if not outside else OUTSIDE if plan.pipe <= known.seen["pipe"][1] else OUTSIDE_PIPE
    low, high = (took * factor for factor in band)
    held = memory(model, plan, footprint)
    return Estimate(
        model, plan, device, held, took, low, high, by_part, step_bytes(model, plan),
        mfu=model.operations(plan.batch * model.seq) / (took * plan.gpus * device.operations),
        tokens=plan.batch * model.seq / took, outside=outside, why_not=_why_not(model, plan, device, held, footprint),
    )  # fmt: skip


def nearest(gpus: int, device: Device) -> str:
    """The calibration of this device, or of the one most like it; within a node that of a node, where there is one."""
    own = [name for name, known in CALIBRATIONS.items() if known.device == device.name] or ["h100-cluster"]
    in_node = [name for name in own if CALIBRATIONS[name].seen["gpus"][1] <= device.per_node]
    return in_node[0] if in_node and gpus <= device.per_node else own[-1]


def outside_of(known: Calibration, model: Model, plan: Plan, device: Device) -> tuple[str, ...]:
    """What of this plan the calibration has never seen, as sentences."""
    said = []
    if device.name != known.device:
        said.append(
            f"Nothing was measured on {device.name}: the times are scaled from {known.device} by the data sheet."
        )
    asked = {"gpus": plan.gpus, "hidden": model.hidden, "seq": model.seq} | {
        name: getattr(plan, name) for name in ("data", "tensor", "pipe", "context", "expert", "zero", "micro_batch")
    }
    for name, value in asked.items():
        low, high = known.seen.get(name, (1, 1))
        if not low <= value <= high:
            said.append(f"{name} {value} is outside of what was measured ({low} to {high}).")
    if plan.recompute not in known.seen["recompute"]:
        said.append(f"Recompute {plan.recompute} was not measured (only {', '.join(known.seen['recompute'])}).")
    return tuple(said)


def _why_not(model, plan, device, held, footprint) -> str:
    room = device.memory * footprint.usable
    if held.total <= room:
        return ""
    name, most = next(iter(held.parts().items()))
    says = f"Does not fit: {held.total / GIB:.1f} GiB of {room / GIB:.1f}, {most / GIB:.1f} of them {name}."
    ways = []
    for change in _cures(plan):
        other = replace(plan, **change)
        try:
            total = memory(model, other, footprint).total
        except PlanError:
            continue
        if total <= room:
            ways.append(f"{_said(change)} ({total / GIB:.1f} GiB)")
    return f"{says} It would with {', or '.join(ways[:3])}." if ways else f"{says} Cut it over more GPUs."


def _cures(plan: Plan) -> list[dict]:
    """Changes on as many GPUs, the cheapest first."""
    cures: list[dict[str, int | str]] = [
        {"micro_batch": size}
        for size in (plan.micro_batch // 2, plan.micro_batch // 4, 1)
        if 1 <= size < plan.micro_batch
    ]
    order = ("none", "operators", "full")
    if plan.recompute in order:
        cures += [{"recompute": each} for each in order[order.index(plan.recompute) + 1 :]]
    cures += [{"zero": stage} for stage in range(plan.zero + 1, 4)] if plan.shards > 1 else []
    cures += [{"zero": 3, "recompute": "full", "micro_batch": 1}] if plan.shards > 1 else []
    for axis in ("tensor", "pipe"):
        cures += [
            {"data": plan.data // ways, axis: getattr(plan, axis) * ways} for ways in (2, 4, 8) if plan.data % ways == 0
        ]
    return cures


def _said(change: dict) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in change.items())


def rounded(value: float) -> str:
    """To two digits: 3.71 is 3.7, 0.0423 is 0.042, 87.7 is 88."""
    power = floor(log10(value)) - 1 if value > 0 else 0
    return f"{round(value / 10**power) * 10**power:.{max(0, -power)}f}"


def search(
    model: Model, gpus: int, device: Device, batch: int, best: int = 10, **fixed: int | str | bool
) -> tuple[list[Estimate], list[Estimate]]:
    """The fastest plans that fit, at most ``best``, one a mesh; and all that were tried, one a mesh: its fastest that
    fits, or the smallest that does not.

    Args:
        fixed: fields of ``Plan`` that are given, such as ``zero=1`` or ``recompute="full"``.

    Raises:
        PlanError: where no mesh divides the model and the batch.
    """
    found: dict[tuple, Estimate] = {}
    refused: Counter[str] = Counter()
    for plan in plans(model, gpus, device, batch, refused, **fixed):
        each = estimate(model, plan, device)
        mesh = (plan.data, plan.tensor, plan.pipe, plan.context, plan.expert)
        if mesh not in found or _rank(each) < _rank(found[mesh]):
            found[mesh] = each
    if not found:
        [[why, _], *_] = refused.most_common(1) or [("the fixed axes do not divide the GPUs.", 0)]
        raise PlanError(f"No plan for {gpus} GPUs and a batch of {batch}: {why}")
    tried = sorted(found.values(), key=_rank)
    return [each for each in tried if each.fits][:best], tried


def _rank(each: Estimate) -> tuple:
    return (not each.fits, each.seconds if each.fits else each.memory.total)


def plans(
    model: Model, gpus: int, device: Device, batch: int, refused: Counter[str], **fixed: int | str | bool
) -> Iterator[Plan]:
    """All plans that can be: every factorisation of the GPUs, powers of two as micro-batches, stages of ZeRO,
    recomputation. Tensor parallelism stays in a node, as across nodes it was never the fastest, and sequences of up to
    LONG tokens stay whole. ``refused`` counts why others cannot be."""
    contexts = [fixed["context"]] if "context" in fixed else [1, 2, 4, 8, 16][: 5 if model.seq > LONG else 1]
    for pipe in _divisors(gpus):
        for tensor in _divisors(gpus // pipe):
            for context in contexts:
                data, rest = divmod(gpus, pipe * tensor * int(context))
                if rest or (tensor > device.per_node and "tensor" not in fixed):
                    continue
                choices = {
                    "zero": (0, 1, 3) if pipe == 1 else (0, 1),
                    "recompute": ("none", "operators", "full"),
                    "micro_batch": tuple(2**power for power in range(7)),
                    "expert": tuple(e for e in _divisors(data) if model.experts and model.experts % e == 0) or (1,),
                }
                axes: dict = {"data": data, "tensor": tensor, "pipe": pipe, "context": context, "batch": batch}
                if any(axes.get(name, value) != value for name, value in fixed.items()):
                    continue
                yield from _checked(model, Plan(**axes), choices, fixed, refused)


LONG = 8192


def _checked(model, plan, choices, fixed, refused):
    variants = [plan]
    for name, values in choices.items():
        wanted = (fixed[name],) if name in fixed else values
        variants = [replace(each, **{name: value}) for each in variants for value in wanted]
    for each in variants:
        if each.data * each.context == 1 and each.zero and "zero" not in fixed:
            continue  # nothing to share out
        try:
            yield check(model, replace(each, **fixed))
        except PlanError as problem:
            refused[str(problem)] += 1


def _divisors(number: int) -> list[int]:
    small = [ways for ways in range(1, isqrt(number) + 1) if number % ways == 0]
    return sorted({*small, *(number // ways for ways in small)})
