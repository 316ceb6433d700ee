"""The schedules of the papers: GPipe, 1F1B, interleaved 1F1B, ZB-H1.

Each function returns one list of actions per rank, for p ranks and m micro-batches. In the drawings time runs to the
right. ``F1`` is the forward pass of micro-batch 1, ``--`` continues an action, and in ``..`` the rank is idle. A full
backward pass takes twice as long as a forward pass; its halves I and W each take as long as a forward pass.
"""

from itertools import zip_longest

from dtlib.schedule.actions import Action, ScheduleError

Schedule = list[list[Action]]


def gpipe(p: int, m: int) -> Schedule:
    """Run all forward passes, then all backward passes; a rank stores the activations of all m micro-batches.

        rank 0  F0 F1 F2 .. .. .. B0 -- B1 -- B2 --
        rank 1  .. F0 F1 F2 B0 -- B1 -- B2 -- .. ..

    Y. Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019,
    section 2.2. In its figure 2(c) the backward passes run from the last micro-batch to the first. Here, as in torch,
    they run from the first to the last, which takes the same time.
    """
    _refuse_fewer_than_one(p, m)
    return [_of(rank, "F", range(m)) + _of(rank, "B", range(m)) for rank in range(p)]


def one_f_one_b(p: int, m: int) -> Schedule:
    """Alternate one forward pass and one backward pass on each rank, as soon as the first gradients arrive.

        rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..

    Ranks are idle for as long as with GPipe, but rank r stores the activations of at most p - r micro-batches. With
    fewer micro-batches than ranks, the first ranks never reach the steady state.

    D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.2. The
    form with a flush after each batch, as here, is in section 2.2.1 of the paper cited in ``interleaved``.
    """
    _refuse_fewer_than_one(p, m)
    return [
        _one_each(_of(rank, "F", range(m)), [[action] for action in _of(rank, "B", range(m))], ahead=p - rank - 1)
        for rank in range(p)
    ]


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Run 1F1B with v stages per rank: stage s is on rank s % p, and micro-batches pass all ranks v times.

        rank 0  0F0 0F1 2F0 2F1 ..  ..  2B0 --- ..  2B1 --- 0B0 --- 0B1 ---
        rank 1  ..  1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 --- ..  ..

    A stage takes 1/v of the time, so ranks are idle for 1/v of the time of 1F1B. The price is v times as many messages,
    and more stored activations. Micro-batches run in groups of p: a group passes all stages of a rank before the next
    group starts. If p does not divide m, the last group is smaller. Then ranks would be idle in the middle, and some
    would deadlock (4 ranks with 5 micro-batches and 3 stages each), so ``ScheduleError`` is raised. If each rank has
    one stage, the result is 1F1B, for any m.

    D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
    section 2.2.2. Megatron-LM and torch use the same order.
    """
    _refuse_fewer_than_one(p, m, v)
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ScheduleError(
            f"Interleaved stages process micro-batches in groups of {p}, one per rank, but {m} is not a multiple of "
            f"{p}: use {m + -m % p} micro-batches, or one_f_one_b."
        )
    groups = [range(first, first + p) for first in range(0, m, p)]
    schedule = []
    for rank in range(p):
        own = range(rank, p * v, p)
        forwards = [action for group in groups for stage in own for action in _of(stage, "F", group)]
        backwards = [action for group in groups for stage in reversed(own) for action in _of(stage, "B", group)]
        # Warm-up: the first group passes v - 1 stages before the last stage. After that, a micro-batch needs
        # 2 (p - rank - 1) actions to reach the last rank and return as a gradient.
        ahead = (v - 1) * p + 2 * (p - rank - 1)
        schedule.append(_one_each(forwards, [[action] for action in backwards], ahead))
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    """Run 1F1B with split backward passes: the previous stage waits for I only, and W fills idle time at the end.

        rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r delays W by r micro-batches: it runs r more I before the W of a micro-batch. So all ranks store the
    activations of p micro-batches, as rank 0 does with 1F1B: p - r between F and I, and r between I and W. Ranks are
    idle for a third of the time of 1F1B, if F, I and W take the same time. With fewer micro-batches than ranks, idle
    time is more than a third.

    P. Qi, X. Wan, G. Huang and M. Lin, "Zero bubble pipeline parallelism", ICLR 2024, section 2.1 (figure 3, top).
    """
    _refuse_fewer_than_one(p, m)
    schedule = []
    for rank in range(p):
        groups = [[Action(rank, "I", microbatch)] for microbatch in range(m)] + [[] for _ in range(rank)]
        for microbatch in range(m):
            groups[microbatch + rank].append(Action(rank, "W", microbatch))
        schedule.append(_one_each(_of(rank, "F", range(m)), groups, ahead=p - rank - 1))
    return schedule


def _one_each(forwards: list[Action], groups: list[list[Action]], ahead: int) -> list[Action]:
    """Return ``ahead`` forward passes (the warm-up), then one forward pass before each of ``groups``."""
    actions = forwards[:ahead]
    for forward, group in zip_longest(forwards[ahead:], groups):
        actions += ([forward] if forward else []) + group
    return actions


def _of(stage: int, kind: str, microbatches) -> list[Action]:
    return [Action(stage, kind, microbatch) for microbatch in microbatches]


def _refuse_fewer_than_one(p: int, m: int, v: int = 1) -> None:
    for count, what in ((p, "ranks"), (m, "micro-batches"), (v, "stages a rank")):
        if not isinstance(count, int) or count < 1:
            raise ScheduleError(f"{count!r} {what} cannot form a schedule: pass a whole number, at least 1.")
