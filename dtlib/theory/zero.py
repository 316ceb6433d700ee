"""The closed formulas of ZeRO: what a rank holds, what is alive at a time, and what it sends (pure Python).

Data parallelism is stage 0. Each stage shares out one thing more among N ranks. With P parameters of p bytes, gradients
of g bytes, and K bytes a parameter for the optimizer (its states and the master weights), a rank holds, in bytes:

    stage    parameters   gradients   optimizer      in float32 with Adam    mixed precision, as in the paper
    0           P p          P g         P K          4 + 4 + 8               2 + 2 + 12
    1           P p          P g         P K / N      4 + 4 + 8/N             2 + 2 + 12/N
    2           P p          P g / N     P K / N      4 + (4 + 8)/N           2 + (2 + 12)/N
    3           P p / N      P g / N     P K / N      (4 + 4 + 8)/N           (2 + 2 + 12)/N

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020: the bytes in
sections 3.1 and 5 (figure 1 and table 1), what is sent in section 7.

A gigabyte (GB) is 10**9 bytes, as in the paper; a gibibyte (GiB) is 2**30, as in the data sheets of accelerators.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dtlib.theory.collectives import elements_sent

GB = 10**9
GIB = 2**30
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Scheme:
    """Bytes a parameter, in whole numbers."""

    parameters: int
    gradients: int
    master_weights: int
    optimizer_states: int

    @property
    def optimizer(self) -> int:
        """What is shared out from stage 1 on: K in the paper."""
        return self.master_weights + self.optimizer_states

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


SCHEMES = {
    "sgd": Scheme(4, 4, 0, 0),
    "sgd_momentum": Scheme(4, 4, 0, 4),
    "adam": Scheme(4, 4, 0, 8),
    "mixed_adam": Scheme(2, 2, 4, 8),  # 16 bytes, as in the paper
    "mixed_adam_float32_gradients": Scheme(2, 4, 4, 8),  # 18 bytes, as where gradients are added up in float32
    "mixed_adam_two_gradients": Scheme(2, 6, 4, 8),  # 20 bytes: a sum in float32 beside the 16 bits of each pass
}


def zero_bytes(
    parameters: int | Sequence[int], ranks: int, stage: int, scheme: str | Scheme = "mixed_adam", rank: int = 0,
    frozen: int | Sequence[int] = (),
) -> dict[str, int]:  # fmt: skip
    """Bytes of model states that one rank holds, exactly, by what they are for.

    A flat buffer is cut into equal shards of ceil(P / N) elements; what is missing at the end is padding. Rank 0, the
    default, holds most.

    Args:
        parameters: elements that are trained: how many, or how many in each flat buffer.
        scheme: a name in ``SCHEMES``, or a ``Scheme``.
        frozen: elements that are not trained, as for ``parameters``: no gradients, no states, shared out at stage 3.
    """
    scheme, sizes, frozen = _checked(parameters, ranks, stage, scheme, frozen)
    whole, own = sum(sizes), sum(_shard(size, ranks, rank) for size in sizes)
    frozen_held = sum(_shard(size, ranks, rank) if stage == 3 else size for size in frozen)
    missing_at_all = sum(-size % ranks for size in sizes)
    missing_here = sum(_ceil(size, ranks) - _shard(size, ranks, rank) for size in sizes)
    padding = {
        0: 0,
        1: missing_at_all * (scheme.parameters + scheme.gradients),
        2: missing_at_all * scheme.parameters + missing_here * scheme.gradients,
        3: missing_here * (scheme.parameters + scheme.gradients)
        + sum(_ceil(size, ranks) - _shard(size, ranks, rank) for size in frozen) * scheme.parameters,
    }[stage]
    return {
        "parameters": ((own if stage == 3 else whole) + frozen_held) * scheme.parameters,
        "gradients": (own if stage >= 2 else whole) * scheme.gradients,
        "master_weights": (own if stage else whole) * scheme.master_weights,
        "optimizer_states": (own if stage else whole) * scheme.optimizer_states,
        "padding": padding,
    }


def zero_peak_bytes(
    buckets: Sequence[Sequence[int]], ranks: int, stage: int, scheme: str | Scheme = "mixed_adam", rank: int = 0
) -> dict[str, dict[str, int]]:
    """What is alive on a rank at the largest moment of each phase of a step, in bytes, by what it is for.

    Beside the states between steps there are:

        gathered     stage 3: the parameters of the unit that computes
        new gradients  of the bucket that fills, as autograd computes them
        bucket       a copy of them in one flat memory; at stage 0 all so far. A single gradient that the ranks divide
                     travels from its own memory at stages 2 and 3, without a copy
        in flight    the bucket before, which is received while this one fills
        shards       this rank's averages so far
        scratch      where an all-reduce receives; a reduce-scatter receives where its shard will be
        float32      copies of 16-bit gradients for the master weights, one parameter after the other

    Between steps gradients have no memory, except at stage 1, which keeps all of it. Activations, and temporaries of
    an optimizer's step (a fused one has none), are not in it; nor is what has arrived earlier than it must.

    Args:
        buckets: sizes of parameters, by bucket (at stage 3 by unit), in the order of the backward pass.
        ranks, stage, scheme, rank: as for ``zero_bytes``.
    """
    sizes = [sum(bucket) for bucket in buckets]
    flat = sizes if stage >= 2 else [sum(sizes)]
    scheme, _, _ = _checked(flat, ranks, stage, scheme, ())
    g, padded, shards = scheme.gradients, [_ceil(n, ranks) * ranks for n in sizes], [_ceil(n, ranks) for n in sizes]
    states = zero_bytes(flat, ranks, stage, scheme if stage == 1 else replace(scheme, gradients=0), rank)
    flags = [sum(bucket) + len(bucket) + 1 for bucket in buckets]  # data parallelism's buckets, with their flags
    backward, step = [], []
    for i, bucket in enumerate(buckets):
        if stage == 0:
            scratch = flags[0] if i else 0
            backward.append({"new gradients": g * sizes[i], "bucket": g * sum(flags[: i + 1]), "scratch": g * scratch})
        elif stage == 1:
            backward.append({"new gradients": g * max(bucket)})
        else:
            fills = {"new gradients": g * sizes[i], "shards": g * sum(shards[:i])}
            gathered = {"gathered": scheme.parameters * padded[i]} if stage == 3 else {}
            flying = {"in flight": g * padded[i - 1], "shards": g * sum(shards[:i])} if i else {}
            backward.append({**fills, **gathered, **flying})
            if len(bucket) > 1 or padded[i] > sizes[i]:
                backward.append({**fills, "bucket": g * padded[i]})
            backward.append({"in flight": g * padded[i], "shards": g * sum(shards[: i + 1])})
    if stage == 0:
        backward.append({"bucket": g * sum(flags), "scratch": g * max(flags)})
    name, all_sent = ("bucket", sum(flags)) if stage == 0 else ("shards", sum(_ceil(n, ranks) for n in flat))
    step.append({name: g * all_sent})
    copied = sizes if stage == 0 else [_shard(n, ranks, rank) for n in flat]
    for i in reversed(range(len(copied))) if scheme.master_weights and g < 4 else ():  # the first layer first
        left = {0: sum(flags[: i + 1]), 1: 0, 2: sum(shards), 3: sum(shards[: i + 1])}[stage]
        step.append({name: g * left, "float32": 4 * sum(copied[i:])})
    forward = [{"gathered": scheme.parameters * max(padded) if stage == 3 else 0}]
    moments = {"forward": forward, "backward": backward, "step": step}
    return {phase: states | sorted(some, key=lambda terms: sum(terms.values()))[-1] for phase, some in moments.items()}


def zero_wire_elements(
    parameters: int | Sequence[int], ranks: int, stage: int, micro_steps: int = 1, reshard_after_forward: bool = True,
    rank: int = 0,
) -> int:  # fmt: skip
    """Elements that one rank sends in a step of ``micro_steps`` forward and backward passes, with rings.

        stage 0    all_reduce of gradients, once a step                            2 P (N-1)/N
        stage 1    reduce_scatter of gradients, all_gather of parameters, once     2 P (N-1)/N
        stage 2    reduce_scatter each micro step, all_gather once                 (M + 1) P (N-1)/N
        stage 3    two all_gathers and a reduce_scatter each micro step            3 M P (N-1)/N
                   one all_gather, if parameters stay after the forward pass       2 M P (N-1)/N

    Padding travels along: P is N ceil(P/N) from stage 1 on. ``parameters`` is as for ``zero_bytes``; ``rank`` matters
    to stage 0 alone, where shards differ by an element.
    """
    _, sizes, _ = _checked(parameters, ranks, stage, "adam", ())
    if stage == 0:
        return sum(elements_sent("all_reduce", "ring", ranks, rank, size) for size in sizes)
    once = sum((ranks - 1) * _ceil(size, ranks) for size in sizes)
    return once * {1: 2, 2: micro_steps + 1, 3: (3 if reshard_after_forward else 2) * micro_steps}[stage]


def fewest_ranks(parameters: int, budget_bytes: float, stage: int, scheme: str | Scheme = "mixed_adam") -> int | None:
    """The smallest number of ranks on which model states fit into ``budget_bytes`` a rank, or None if on none.

    Without padding, which is fewer than N elements. More ranks than parameters do not help.
    """

    scheme, _, _ = _checked(parameters, 1, stage, scheme, ())
    kinds = scheme.parameters, scheme.gradients, scheme.optimizer
    shared = sum(kinds[3 - stage :])  # a stage shares out so many of them, from the last one on

    def fits(ranks: int) -> bool:
        return parameters * ((scheme.total - shared) * ranks + shared) <= budget_bytes * ranks

    low, high = 1, max(1, parameters)
    if not fits(high):
        return None
    while low < high:  # by hand: ranges and bisect end at 2**31 in a web page
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _checked(parameters, ranks, stage, scheme, frozen):
    if stage not in STAGES or ranks < 1:
        raise ValueError(f"ZeRO stage {stage!r} on {ranks!r} ranks: the stage is 0 to 3, and ranks are at least 1.")
    if not isinstance(scheme, Scheme):
        if scheme not in SCHEMES:
            raise ValueError(f"There is no scheme {scheme!r}; there are {', '.join(SCHEMES)}.")
        scheme = SCHEMES[scheme]
    return scheme, _sizes(parameters), _sizes(frozen)


def _sizes(elements) -> list[int]:
    return list(elements) if isinstance(elements, Iterable) else [elements]


def _ceil(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _shard(size: int, ranks: int, rank: int) -> int:
    """Elements of a flat buffer that are this rank's, without padding."""
    length = _ceil(size, ranks)
    return min(max(size - rank * length, 0), length)
