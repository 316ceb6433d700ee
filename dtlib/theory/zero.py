"""The closed formulas of ZeRO: what a rank holds, and what it sends (pure Python).

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
from dataclasses import dataclass

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
