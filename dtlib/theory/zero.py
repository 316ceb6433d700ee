"""Closed formulas of ZeRO: memory of a rank, and elements that it sends (pure Python).

Data parallelism is stage 0. Each stage shards one more kind of state over N ranks. A model has P parameters of p bytes,
gradients of g bytes, and K bytes per parameter for the optimizer (its states and the master weights). Bytes per rank:

    stage    parameters   gradients   optimizer      in float32 with Adam    mixed precision, as in the paper
    0           P p          P g         P K          4 + 4 + 8               2 + 2 + 12
    1           P p          P g         P K / N      4 + 4 + 8/N             2 + 2 + 12/N
    2           P p          P g / N     P K / N      4 + (4 + 8)/N           2 + (2 + 12)/N
    3           P p / N      P g / N     P K / N      (4 + 4 + 8)/N           (2 + 2 + 12)/N

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020: memory is in
sections 3.1 and 5 (figure 1 and table 1), communication in section 7.

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
    """Bytes per parameter, in whole numbers."""

    parameters: int
    gradients: int
    master_weights: int
    optimizer_states: int

    @property
    def optimizer(self) -> int:
        """Bytes that are sharded from stage 1 on: K in the paper."""
        return self.master_weights + self.optimizer_states

    @property
    def total(self) -> int:
        """Bytes per parameter of all states without sharding."""
        return self.parameters + self.gradients + self.optimizer


SCHEMES = {
    "sgd": Scheme(4, 4, 0, 0),
    "sgd_momentum": Scheme(4, 4, 0, 4),
    "adam": Scheme(4, 4, 0, 8),
    "mixed_adam": Scheme(2, 2, 4, 8),  # 16 bytes, as in the paper
    "mixed_adam_float32_gradients": Scheme(2, 4, 4, 8),  # 18 bytes: gradients are accumulated in float32
    "mixed_adam_two_gradients": Scheme(2, 6, 4, 8),  # 20 bytes: a float32 sum, and 16 bits per pass
}


def zero_bytes(
    parameters: int | Sequence[int], ranks: int, stage: int, scheme: str | Scheme = "mixed_adam", rank: int = 0,
    frozen: int | Sequence[int] = (),
) -> dict[str, int]:  # fmt: skip
    """Return the exact bytes of model states on one rank, by kind of state.

    A flat buffer is split into equal shards of ceil(P / N) elements; the last ones are padded. Rank 0, the default, has
    the largest shard.

    Args:
        parameters: number of trained elements, in total or for each flat buffer.
        scheme: a name in ``SCHEMES``, or a ``Scheme``.
        frozen: number of elements that are not trained, in total or for each flat buffer. They have no gradients and no
            optimizer states, and are sharded in stage 3 only.
    """
    scheme, sizes, frozen = _checked(parameters, ranks, stage, scheme, frozen)
    whole, own = sum(sizes), sum(_shard(size, ranks, rank) for size in sizes)
    frozen_held = sum(_shard(size, ranks, rank) if stage == 3 else size for size in frozen)
    # Padding of whole buffers, and of this rank's shards.
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
    """Return the elements that one rank sends in a step of M = ``micro_steps`` micro-steps, with rings.

        stage 0    all_reduce of gradients, once per step                          2 P (N-1)/N
        stage 1    reduce_scatter of gradients, all_gather of parameters, once     2 P (N-1)/N
        stage 2    reduce_scatter each micro-step, all_gather once                 (M + 1) P (N-1)/N
        stage 3    two all_gathers and a reduce_scatter each micro-step            3 M P (N-1)/N
                   one all_gather, if not resharded after the forward pass         2 M P (N-1)/N

    Padding is sent, too: from stage 1 on P is N ceil(P/N). ``parameters`` is as for ``zero_bytes``. ``rank`` matters in
    stage 0 only, because chunks there may differ by one element.
    """
    _, sizes, _ = _checked(parameters, ranks, stage, "adam", ())
    if stage == 0:
        return sum(elements_sent("all_reduce", "ring", ranks, rank, size) for size in sizes)
    once = sum((ranks - 1) * _ceil(size, ranks) for size in sizes)
    return once * {1: 2, 2: micro_steps + 1, 3: (3 if reshard_after_forward else 2) * micro_steps}[stage]


def fewest_ranks(parameters: int, budget_bytes: float, stage: int, scheme: str | Scheme = "mixed_adam") -> int | None:
    """Return the smallest number of ranks on which model states fit into ``budget_bytes`` per rank, or None.

    Padding, less than N elements, is not counted. The search ends at one rank per parameter.
    """

    scheme, _, _ = _checked(parameters, 1, stage, scheme, ())
    kinds = scheme.parameters, scheme.gradients, scheme.optimizer
    # Stage k shards the last k kinds.
    shared = sum(kinds[3 - stage :])

    def fits(ranks: int) -> bool:
        return parameters * ((scheme.total - shared) * ranks + shared) <= budget_bytes * ranks

    low, high = 1, max(1, parameters)
    if not fits(high):
        return None
    # A binary search by hand, because ranges and bisect are limited to 2**31 in a web page.
    while low < high:
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
    """Return the number of elements in this rank's shard of a flat buffer, without padding."""
    length = _ceil(size, ranks)
    return min(max(size - rank * length, 0), length)
