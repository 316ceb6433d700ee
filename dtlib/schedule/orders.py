"""The orders in which the papers let ranks work: GPipe, 1F1B, interleaved 1F1B, ZB-H1.

Each function takes p ranks and m micro-batches and returns one list of actions a rank. In the drawings time runs to the
right; ``F1`` is the forward pass of micro-batch 1, ``--`` means that an action goes on, ``..`` that the rank is idle. A
whole backward pass takes twice as long as a forward pass, and each of its halves as long as one.
"""

from itertools import zip_longest

from dtlib.schedule.actions import Action, ScheduleError

Schedule = list[list[Action]]


def gpipe(p: int, m: int) -> Schedule:
    """All forward passes, then all backward passes: a rank holds the activations of all m micro-batches.

        rank 0  F0 F1 F2 .. .. .. B0 -- B1 -- B2 --
        rank 1  .. F0 F1 F2 B0 -- B1 -- B2 -- .. ..

    Y. Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019,
    section 2.2. Figure 2(c) there has the backward passes from the last micro-batch to the first; here, as in torch,
    they run from the first to the last, which takes the same time.
    """
    _refuse_fewer_than_one(p, m)
    return [_of(rank, "F", range(m)) + _of(rank, "B", range(m)) for rank in range(p)]


def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward, one backward: as soon as it can, a rank does a backward pass for each forward pass.

        rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..

    Ranks are idle for as long as with GPipe, but rank r holds the activations of p - r micro-batches at most. Fewer
    micro-batches than ranks are allowed: then no rank reaches the steady state.

    D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, section 3.2; with a
    flush after each batch, as here: the paper named below ``interleaved``, section 2.2.1.
    """
    _refuse_fewer_than_one(p, m)
    return [
        _one_each(_of(rank, "F", range(m)), [[action] for action in _of(rank, "B", range(m))], ahead=p - rank - 1)
        for rank in range(p)
    ]


def interleaved(p: int, m: int, v: int) -> Schedule:
    """1F1B with v stages a rank: stage s lives on rank s % p, and micro-batches go around the ranks v times.

        rank 0  0F0 0F1 2F0 2F1 ..  ..  2B0 --- ..  2B1 --- 0B0 --- 0B1 ---
        rank 1  ..  1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 --- ..  ..

    A stage takes 1/v of the time, so ranks are idle for 1/v of the time of 1F1B; messages are v times as many, and more
    activations are held. Micro-batches come in groups of p: a group passes a rank's first stage, then its second, until
    the last, and then the next group comes. With another m the last group would be smaller: ranks would be idle in the
    middle, and some would wait for each other in a circle (4 ranks with 5 micro-batches and 3 stages each), so that is
    refused. One stage a rank is 1F1B, with any m.

    D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
    section 2.2.2; the order is Megatron-LM's and torch's.
    """
    _refuse_fewer_than_one(p, m, v)
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ScheduleError(
            f"Interleaved stages take micro-batches in groups of {p}, one a rank, and {m} is no multiple of {p}: "
            f"take {m + -m % p} micro-batches, or one_f_one_b."
        )
    groups = [range(first, first + p) for first in range(0, m, p)]
    schedule = []
    for rank in range(p):
        own = range(rank, p * v, p)
        forwards = [action for group in groups for stage in own for action in _of(stage, "F", group)]
        backwards = [action for group in groups for stage in reversed(own) for action in _of(stage, "B", group)]
        # v - 1 stages of the first group come before the last one's; and what a rank hands on with its next action
        # reaches the last rank and returns within 2 (p - rank - 1) others.
        ahead = (v - 1) * p + 2 * (p - rank - 1)
        schedule.append(_one_each(forwards, [[action] for action in backwards], ahead))
    return schedule


def zero_bubble_h1(p: int, m: int) -> Schedule:
    """1F1B with the backward pass in two halves: the stage before waits for I alone, and W fills idle time at the end.

        rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r does the W of a micro-batch after r more I. So all ranks hold p micro-batches, as many as rank 0 does with
    1F1B: p - r between F and I, and r between I and W. Ranks are idle for a third of the time of 1F1B, if F, I and W
    take the same time. With fewer micro-batches than ranks it is more than a third, but nothing is impossible.

    P. Qi, X. Wan, G. Huang and M. Lin, "Zero bubble pipeline parallelism", ICLR 2024, section 2.1 (figure 3, top).
    """
    _refuse_fewer_than_one(p, m)
    schedule = []
    for rank in range(p):
        turns = [[Action(rank, "I", microbatch)] for microbatch in range(m)] + [[] for _ in range(rank)]
        for microbatch in range(m):
            turns[microbatch + rank].append(Action(rank, "W", microbatch))
        schedule.append(_one_each(_of(rank, "F", range(m)), turns, ahead=p - rank - 1))
    return schedule


def _one_each(forwards: list[Action], turns: list[list[Action]], ahead: int) -> list[Action]:
    """``ahead`` forward passes to warm up, then before each turn one more, until none is left."""
    actions = forwards[:ahead]
    for forward, turn in zip_longest(forwards[ahead:], turns):
        actions += ([forward] if forward else []) + turn
    return actions


def _of(stage: int, kind: str, microbatches) -> list[Action]:
    return [Action(stage, kind, microbatch) for microbatch in microbatches]


def _refuse_fewer_than_one(p: int, m: int, v: int = 1) -> None:
    for count, what in ((p, "ranks"), (m, "micro-batches"), (v, "stages a rank")):
        if not isinstance(count, int) or count < 1:
            raise ScheduleError(f"{count!r} {what} make no schedule: it takes a whole number, at least 1.")
