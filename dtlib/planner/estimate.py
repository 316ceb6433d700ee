"""Estimate one plan: memory, step time and its bounds. Search many plans for the best.

If a plan is outside the range of its calibration, the estimate says in which respects. Its bounds are then from rows of
other papers, which were not used for fitting, and its time is marked.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import floor, isqrt, log10

from dtlib.planner.calibrated import CALIBRATIONS, OUTSIDE, OUTSIDE_PIPE, USABLE
from dtlib.planner.memory import Memory, memory
from dtlib.planner.mesh import Plan, check
from dtlib.planner.model import GIB, Device, Model, PlanError
from dtlib.planner.time import Calibration, parts, work
from dtlib.planner.wire import step_bytes


@dataclass(frozen=True)
class Estimate:
    """The estimate of one plan.

    Args:
        model: the model.
        plan: the plan.
        device: the GPU.
        memory: on the rank with the most, in bytes.
        seconds: per step.
        low: lower bound; nine of ten steps are expected between ``low`` and ``high`` seconds.
        high: upper bound.
        parts: the seconds by purpose, such as compute and messages.
        outside: for each respect in which the plan is outside the measured range, one sentence.
    """

    model: Model
    plan: Plan
    device: Device
    memory: Memory
    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    outside: tuple[str, ...]

    @property
    def usable_memory(self) -> float:
        """The usable memory of a GPU, in bytes."""
        return self.device.memory * USABLE

    @property
    def fits(self) -> bool:
        """Whether the plan fits into the usable memory."""
        return self.memory.total <= self.usable_memory

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: useful operations per second over the peak rate of the data sheet."""
        useful = self.model.operations(self.plan.batch * self.model.seq)
        return useful / (self.seconds * self.plan.gpus * self.device.operations)

    @property
    def tokens(self) -> float:
        """Tokens per second, on all GPUs."""
        return self.plan.batch * self.model.seq / self.seconds

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a rank of the first stage sends per step, by axis."""
        return step_bytes(self.model, self.plan)

    @property
    def why_not(self) -> str:
        """A message that says what is too large and which changes would fit; empty if the plan fits."""
        if self.fits:
            return ""
        total, limit, (name, most) = self.memory.total, self.usable_memory, next(iter(self.memory.parts().items()))
        says = f"Does not fit: {total / GIB:.1f} GiB of {limit / GIB:.1f}, {most / GIB:.1f} of them {name}."
        ways = []
        for change in _cures(self.plan):
            with suppress(PlanError):
                if (total := memory(self.model, replace(self.plan, **change)).total) <= limit:
                    said = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in change.items())
                    ways.append(f"{said} ({total / GIB:.1f} GiB)")
        return f"{says} It would with {', or '.join(ways[:3])}." if ways else f"{says} Cut it over more GPUs."

    def said(self, value: float) -> str:
        """Format a number of this estimate: two digits if the plan is outside the measured range, else three."""
        return rounded(value) if self.outside else f"{value:.0f}" if value >= 100 else f"{value:.3g}"

    def __str__(self) -> str:
        took, low, high = map(self.said, (self.seconds, self.low, self.high))
        about = "about " if self.outside else ""
        says = f"{self.plan}: {about}{took} s a step ({low} to {high} s), {self.memory.total / GIB:.1f} GiB."
        return " ".join([says, *filter(None, [self.why_not]), *self.outside])


def estimate(model: Model, plan: Plan, device: Device) -> Estimate:
    """Estimate a plan with the nearest calibration for its device and number of GPUs.

    Raises:
        PlanError: if the plan is impossible; the message has its numbers.
    """
    known = CALIBRATIONS[nearest(plan.gpus, device)]
    outside, held = outside_of(known, model, plan, device), memory(model, plan)
    by_part = parts(work(model, plan, device), known.speeds)
    took = sum(by_part.values())
    band = known.band if not outside else OUTSIDE if plan.pipe <= known.seen["pipe"][1] else OUTSIDE_PIPE
    return Estimate(model, plan, device, held, took, took * band[0], took * band[1], by_part, outside)


def nearest(gpus: int, device: Device) -> str:
    """Return the name of the calibration for this device, or of ``h100-cluster`` if it has none.

    If the GPUs fit into one node, a calibration on one node is preferred.
    """
    own = [name for name, known in CALIBRATIONS.items() if known.device == device.name] or ["h100-cluster"]
    in_node = [name for name in own if CALIBRATIONS[name].seen["gpus"][1] <= device.per_node]
    return in_node[0] if in_node and gpus <= device.per_node else own[-1]


def outside_of(known: Calibration, model: Model, plan: Plan, device: Device) -> tuple[str, ...]:
    """Return one sentence for each respect in which a plan is outside the calibration's measured range."""
    said = []
    if device.name != known.device:
        said.append(
            f"There is no measurement for {device.name}: the times are scaled from {known.device} with the data sheet."
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


def _cures(plan: Plan) -> list[dict]:
    """Return changes of a plan that need less memory on the same number of GPUs; from the cheapest."""
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


def rounded(value: float) -> str:
    """Format a number with two digits: 3.71 as 3.7, 0.0423 as 0.042, 87.7 as 88."""
    power = floor(log10(value)) - 1 if value > 0 else 0
    return f"{round(value / 10**power) * 10**power:.{max(0, -power)}f}"


def search(
    model: Model, gpus: int, device: Device, batch: int, best: int = 10, **fixed: int | str | bool
) -> tuple[list[Estimate], list[Estimate]]:
    """Return the fastest plans that fit, and the best plan of each mesh that was tried.

    The best plan of a mesh is the fastest that fits, or if none fits, the smallest. The first list has at most ``best``
    plans, one per mesh.

    Args:
        model: the model to train.
        gpus: the number of GPUs.
        device: the GPU.
        batch: samples per step, on all GPUs.
        best: the largest number of plans in the first list.
        fixed: fields of ``Plan`` that must not vary, such as ``zero=1`` or ``recompute="full"``.

    Raises:
        PlanError: if no mesh divides the model and the batch, or if there are more than ``MOST_PLANS`` plans.
    """
    found: dict[tuple, Estimate] = {}
    refused: Counter[str] = Counter()
    for number, plan in enumerate(plans(model, gpus, device, batch, refused, **fixed)):
        if number == MOST_PLANS:
            raise PlanError(f"{gpus} GPUs have more than {MOST_PLANS:,} plans: fix some axes, such as tensor=8,pipe=4.")
        each = estimate(model, plan, device)
        # Keep the best plan of each mesh.
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
    """Yield all possible plans; count in ``refused`` why others are impossible.

    They vary the factorisation of the GPUs, the micro-batch (powers of two), the ZeRO stage, recomputation and the
    expert axis. Two limits keep the number small. Tensor parallelism stays inside a node, because across nodes it was
    never the fastest. Sequences of at most ``LONG`` tokens are not divided.
    """
    contexts = [fixed["context"]] if "context" in fixed else [1, 2, 4, 8, 16][: 5 if model.seq > LONG else 1]
    for pipe in _divisors(gpus):
        for tensor, context in product(_divisors(gpus // pipe), contexts):
            data, rest = divmod(gpus, pipe * tensor * int(context))
            axes: dict = {"data": data, "tensor": tensor, "pipe": pipe, "context": context, "batch": batch}
            # The last condition is true if ``fixed`` has another value for an axis.
            if rest or (tensor > device.per_node and "tensor" not in fixed) or axes | fixed != fixed | axes:
                continue
            try:
                plan = check(model, Plan(**axes | fixed))
            except PlanError as problem:
                refused[str(problem)] += 1
                continue
            rounds = pipe if plan.schedule == "interleaved" else 1  # the number of micro-batches is a multiple of this
            choices: dict = {
                "zero": (0,) if plan.shards == 1 else (0, 1) if pipe > 1 else (0, 1, 3),
                "recompute": ("none", "operators", "full"),
                "micro_batch": [size for size in (1, 2, 4, 8, 16, 32, 64) if batch // data % (size * rounds) == 0],
                "expert": [e for e in _divisors(data) if model.experts % e == 0] if model.experts else [1],
            }
            names = [name for name in choices if name not in fixed]
            for values in product(*(choices[name] for name in names)):
                yield replace(plan, **dict(zip(names, values, strict=True)))


LONG = 8192  # tokens
MOST_PLANS = 40_000


def _divisors(number: int) -> list[int]:
    small = [ways for ways in range(1, isqrt(number) + 1) if number % ways == 0]
    return sorted({*small, *(number // ways for ways in small)})
