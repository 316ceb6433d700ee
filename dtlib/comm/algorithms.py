"""Collectives from sends and receives: what is taught is what runs.

Each algorithm is a generator. It starts non-blocking sends and receives, yields the requests that it must wait for,
and goes on when they are complete; who waits, and how, is somebody else's business (waiting.py). ``link`` sends and
receives; ``combine(a, b, out)`` is the reduction, element by element. ``chunks`` are ``size`` pieces of one flat array,
of equal length or one element apart, so that a remainder needs no padding. An array is numpy's, or plain numbers
(numbers.py): it has a length, slices that are views, and ``array[...] = values``.

The algorithms and their costs are those of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtlib.comm.link_types import Array, Combine, Link, Steps


def chunks_of(array: Array, size: int) -> list[Array]:
    """``size`` consecutive pieces of a flat array, as views."""
    count = len(array)
    return [array[count * i // size : count * (i + 1) // size] for i in range(size)]


def pieces_of(array: Array, sizes: list[int]) -> list[Array]:
    """Consecutive pieces of a flat array, of these sizes, as views."""
    ends = list(accumulate(sizes))
    return [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]


# One to all, all to one


def tree_broadcast(link: Link[Array], array: Array, root: int) -> Steps:
    """A binomial tree: in every round, who has the values gives them to one who has not.

    Ranks are counted from the root. Eight ranks, three rounds:

        0 -> 4        0 -> 2, 4 -> 6        0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7
    """
    me = (link.rank - root) % link.size
    bit = 1
    while bit < link.size:  # my lowest bit says in which round I receive, and from whom
        if me & bit:
            yield [link.recv(array, (me - bit + root) % link.size)]
            break
        bit *= 2
    sends = []
    while bit > 1:
        bit //= 2
        if me + bit < link.size:
            sends.append(link.send(array, (me + bit + root) % link.size))
    yield sends


def tree_reduce(link: Link[Array], array: Array, root: int, combine: Combine[Array]) -> Steps:
    """The broadcast's tree backwards: in every round half of those that still have a sum give it to the other half.

        1 -> 0, 3 -> 2, 5 -> 4, 7 -> 6        2 -> 0, 6 -> 4        4 -> 0

    ``array`` holds the result on ``root`` and partial results elsewhere.
    """
    me = (link.rank - root) % link.size
    received = link.scratch(array)
    bit = 1
    while bit < link.size:
        if me & bit:
            yield [link.send(array, (me - bit + root) % link.size)]
            return
        if me + bit < link.size:
            yield [link.recv(received, (me + bit + root) % link.size)]
            combine(array, received, array)
        bit *= 2


# All to all: small arrays, where the number of messages counts


def naive_all_reduce(link: Link[Array], array: Array, combine: Combine[Array]) -> Steps:
    """Everybody sends to rank 0, which adds and sends the sum back: rank 0 carries 2 (N-1) n bytes alone."""
    if link.rank > 0:
        yield [link.send(array, 0)]
        yield [link.recv(array, 0)]
        return
    received = link.scratch(array)
    for other in range(1, link.size):
        yield [link.recv(received, other)]
        combine(array, received, array)
    yield [link.send(array, other) for other in range(1, link.size)]


def tree_all_reduce(link: Link[Array], array: Array, combine: Combine[Array]) -> Steps:
    """Up the tree to rank 0 and down again: 2 log2 N rounds of n bytes."""
    yield from tree_reduce(link, array, 0, combine)
    yield from tree_broadcast(link, array, 0)


def recursive_doubling_all_reduce(link: Link[Array], array: Array, combine: Combine[Array]) -> Steps:
    """Exchange with the rank whose number differs in one bit, then in the next bit: log2 N rounds of n bytes.

        0 <-> 1, 2 <-> 3        0 <-> 2, 1 <-> 3

    Where N is no power of two the ranks beyond it first give their values to a partner and get the result at the end.
    """
    whole = largest_power_of_two(link.size)
    received = link.scratch(array)
    if whole < link.size:
        yield from fold(link, array, whole, combine)
    bit = 1 if link.rank < whole else whole
    while bit < whole:
        partner = link.rank ^ bit
        yield [link.send(array, partner), link.recv(received, partner)]
        # The same order on both sides, so that both round alike.
        first, second = (array, received) if link.rank < partner else (received, array)
        combine(first, second, array)
        bit *= 2
    if whole < link.size:
        yield from unfold(link, array, whole)


def largest_power_of_two(size: int) -> int:
    """The largest power of two that is no larger than ``size``."""
    return 1 << (size.bit_length() - 1)


def fold(link: Link[Array], array: Array, whole: int, combine: Combine[Array]) -> Steps:
    """Ranks from ``whole`` on give their values to the rank ``whole`` places before, and then have nothing to do."""
    if link.rank >= whole:
        yield [link.send(array, link.rank - whole)]
    elif link.rank + whole < link.size:
        received = link.scratch(array)
        yield [link.recv(received, link.rank + whole)]
        combine(array, received, array)


def unfold(link: Link[Array], array: Array, whole: int) -> Steps:
    """The ranks from ``whole`` on get the result."""
    if link.rank >= whole:
        yield [link.recv(array, link.rank - whole)]
    elif link.rank + whole < link.size:
        yield [link.send(array, link.rank + whole)]


# All to all: large arrays, where the number of bytes counts


def ring_reduce_scatter_in_place(
    link: Link[Array], chunks: list[Array], combine: Combine[Array], room: Array | None = None
) -> Steps:
    """Partial sums travel round the ring; after N-1 steps rank r holds the sum of chunk r, in place.

    Four ranks; what rank 1 does (send to 2, receive from 0):

        step 0   send chunk 0, receive chunk 3, add it        chunk p starts at rank p+1,
        step 1   send chunk 3, receive chunk 2, add it        collects at every stop,
        step 2   send chunk 2, receive chunk 1, add it        and ends at rank p

    Every rank sends (N-1)/N of the array, whatever N is. What arrives is received in ``room``, or in scratch memory.
    """
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    for step in range(link.size - 1):
        outgoing, incoming = chunks[(link.rank - step - 1) % link.size], chunks[(link.rank - step - 2) % link.size]
        received = link.scratch(incoming) if room is None else room
        yield [link.send(outgoing, right), link.recv(received, left)]
        combine(incoming, received, incoming)


def ring_all_gather(link: Link[Array], chunks: list[Array]) -> Steps:
    """Finished chunks travel round the ring: rank r starts with chunk r, and after N-1 steps everybody has all.

    step 0   send chunk r, receive chunk r-1
    step 1   send chunk r-1, receive chunk r-2 ...
    """
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    for step in range(link.size - 1):
        outgoing, incoming = chunks[(link.rank - step) % link.size], chunks[(link.rank - step - 1) % link.size]
        yield [link.send(outgoing, right), link.recv(incoming, left)]


def ring_all_reduce(link: Link[Array], array: Array, combine: Combine[Array]) -> Steps:
    """Reduce-scatter, then all-gather: 2 (N-1) steps, in which every rank sends 2 (N-1)/N of the array.

    P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
    """
    chunks = chunks_of(array, link.size)
    yield from ring_reduce_scatter_in_place(link, chunks, combine)
    yield from ring_all_gather(link, chunks)


def rabenseifner_all_reduce(link: Link[Array], array: Array, combine: Combine[Array]) -> Steps:
    """Halve what is summed in every round, then double it back: the ring's bytes in 2 log2 N rounds instead of 2 (N-1).

    Eight ranks, n elements; rank 0's partners and what it sends them:

        4: its upper half    2: the upper half of the rest    1: again          rank 0 holds the sum of its n/8
        1: that n/8          2: the n/4 that it has now       4: its half       everybody holds all

    R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, LNCS 3036.
    """
    whole = largest_power_of_two(link.size)
    yield from fold(link, array, whole, combine)
    halved, mine, bit = [], array, whole // 2 if link.rank < whole else 0
    while bit:
        partner = link.rank ^ bit
        lower, upper = chunks_of(mine, 2)
        mine, others = (upper, lower) if link.rank & bit else (lower, upper)
        received = link.scratch(mine)
        yield [link.send(others, partner), link.recv(received, partner)]
        combine(mine, received, mine)
        halved.append((partner, mine, others))
        bit //= 2
    for partner, mine, others in reversed(halved):
        yield [link.send(mine, partner), link.recv(others, partner)]
    yield from unfold(link, array, whole)


def ring_reduce_scatter(link: Link[Array], out: Array, chunks: list[Array], combine: Combine[Array]) -> Steps:
    """The ring that leaves its input alone: what travels is added to in two buffers, and ends in ``out``.

    Where ``out`` is this rank's chunk itself, everything happens in place.
    """
    if same_memory(out, chunks[link.rank]):
        yield from ring_reduce_scatter_in_place(link, chunks, combine)
        return
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    if link.size == 1:
        out[...] = chunks[0]
        return
    outgoing = chunks[(link.rank - 1) % link.size]
    buffers = [link.scratch(out, number) for number in range(2)]
    for step in range(link.size - 1):
        last = step == link.size - 2
        incoming = out if last else buffers[step % 2]
        yield [link.send(outgoing, right), link.recv(incoming, left)]
        combine(chunks[(link.rank - step - 2) % link.size], incoming, incoming)
        outgoing = incoming


def ring_reduce_scatter_over_input(
    link: Link[Array], out: Array, chunks: list[Array], combine: Combine[Array]
) -> Steps:
    """The ring that overwrites its input, and needs no memory beside it and ``out``."""
    yield from ring_reduce_scatter_in_place(link, chunks, combine, out)
    out[...] = chunks[link.rank]


def same_memory(one: Array, other: Array) -> bool:
    """True if two arrays of one size are the same memory."""
    return one.ctypes.data == other.ctypes.data


# Different data for everybody


def direct_scatter(link: Link[Array], out: Array, chunks: list[Array], root: int) -> Steps:
    """The root sends each rank its chunk."""
    if link.rank != root:
        yield [link.recv(out, root)]
        return
    yield [link.send(chunks[other], other) for other in range(link.size) if other != root]
    out[...] = chunks[root]  # last, as out may lie where another rank's chunk was


def direct_gather(link: Link[Array], chunks: list[Array], array: Array, root: int) -> Steps:
    """Each rank sends its array to the root."""
    if link.rank != root:
        yield [link.send(array, root)]
        return
    chunks[root][...] = array
    yield [link.recv(chunks[other], other) for other in range(link.size) if other != root]


def pairwise_all_to_all(link: Link[Array], out_chunks: list[Array], chunks: list[Array]) -> Steps:
    """In step s every rank sends to the rank s places on and receives from the one s places back."""
    out_chunks[link.rank][...] = chunks[link.rank]
    for step in range(1, link.size):
        to, source = (link.rank + step) % link.size, (link.rank - step) % link.size
        yield [link.send(chunks[to], to), link.recv(out_chunks[source], source)]


def dissemination_all_gather(link: Link[Array], rows: Array) -> Steps:
    """Small chunks: in round k every rank passes on all that it has, and so has twice as much: log2 N rounds.

    ``rows[0]`` is this rank's chunk; at the end ``rows[i]`` is that of the rank i places on.

    J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
    IEEE TPDS 8(11), 1997.
    """
    have = 1
    while have < link.size:
        count = min(have, link.size - have)
        to, source = (link.rank - have) % link.size, (link.rank + have) % link.size
        yield [link.send(rows[:count], to), link.recv(rows[have : have + count], source)]
        have += count


def dissemination_barrier(link: Link[Array]) -> Steps:
    """In round k every rank tells the rank 2^k places on that it has arrived: after log2 N rounds all know of all.

    D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
    """
    nothing = link.nothing()
    distance = 1
    while distance < link.size:
        to, source = (link.rank + distance) % link.size, (link.rank - distance) % link.size
        yield [link.send(nothing, to), link.recv(nothing, source)]
        distance *= 2
