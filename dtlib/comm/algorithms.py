"""Collective algorithms built from sends and receives. The lessons show this code, and dtlib runs it.

Each algorithm is a generator. It starts non-blocking sends and receives, yields a list of requests, and continues once
all of these requests are complete. waiting.py drives the generators, so this file contains no waiting.

N is the number of ranks, and n the bytes of an array. ``link`` sends and receives. ``combine(a, b, out)`` reduces two
arrays element by element. ``chunks`` are ``size`` pieces of one flat array; their lengths differ by at most one
element, so a remainder needs no padding. An array is a numpy array, or a ``Numbers`` in plain Python (numbers.py): it
has a length, slices that are views, and ``array[...] = values``.

The algorithms and their costs follow R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtlib.comm.link_types import Array, Combine, Link, Steps


def chunks_of(array: Array, size: int) -> list[Array]:
    """Split a flat array into ``size`` consecutive views."""
    count = len(array)
    return [array[count * i // size : count * (i + 1) // size] for i in range(size)]


def pieces_of(array: Array, sizes: list[int]) -> list[Array]:
    """Split a flat array into consecutive views with the given sizes."""
    ends = list(accumulate(sizes))
    return [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]


# One to all, all to one


def tree_broadcast(link: Link[Array], array: Array, root: int) -> Steps:
    """Broadcast along a binomial tree: in every round, each rank with the values sends them to a rank without.

    Ranks are counted from the root. Eight ranks, three rounds:

        0 -> 4        0 -> 2, 4 -> 6        0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7
    """
    me = (link.rank - root) % link.size
    bit = 1
    # The lowest set bit of this rank decides the round in which it receives, and its parent in the tree.
    while bit < link.size:
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
    """Reduce along the broadcast's tree, backwards: in every round half of the remaining ranks send their partial sum.

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


# From all ranks to all ranks: small arrays, where the number of messages counts


def naive_all_reduce(link: Link[Array], array: Array, combine: Combine[Array]) -> Steps:
    """Send every array to rank 0, which adds them and sends the sum back: 2 (N-1) n bytes pass through rank 0."""
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
    """Reduce to rank 0, then broadcast from it: 2 log2 N rounds of n bytes."""
    yield from tree_reduce(link, array, 0, combine)
    yield from tree_broadcast(link, array, 0)


def recursive_doubling_all_reduce(link: Link[Array], array: Array, combine: Combine[Array]) -> Steps:
    """Exchange with the rank that differs in one bit, then in the next bit: log2 N rounds of n bytes.

        0 <-> 1, 2 <-> 3        0 <-> 2, 1 <-> 3

    If N is not a power of two, let P be the largest power of two below N. Ranks P to N-1 first send their values to a
    partner below P, and receive the result at the end.
    """
    whole = largest_power_of_two(link.size)
    received = link.scratch(array)
    if whole < link.size:
        yield from fold(link, array, whole, combine)
    bit = 1 if link.rank < whole else whole
    while bit < whole:
        partner = link.rank ^ bit
        yield [link.send(array, partner), link.recv(received, partner)]
        # Both partners add in the same order, so their rounded results are bitwise equal.
        first, second = (array, received) if link.rank < partner else (received, array)
        combine(first, second, array)
        bit *= 2
    if whole < link.size:
        yield from unfold(link, array, whole)


def largest_power_of_two(size: int) -> int:
    """Return the largest power of two that is at most ``size``."""
    return 1 << (size.bit_length() - 1)


def fold(link: Link[Array], array: Array, whole: int, combine: Combine[Array]) -> Steps:
    """Add the array of each rank r >= ``whole`` to the array of rank r - ``whole``."""
    if link.rank >= whole:
        yield [link.send(array, link.rank - whole)]
    elif link.rank + whole < link.size:
        received = link.scratch(array)
        yield [link.recv(received, link.rank + whole)]
        combine(array, received, array)


def unfold(link: Link[Array], array: Array, whole: int) -> Steps:
    """Send the result to ranks ``whole`` and above, which were idle since ``fold``."""
    if link.rank >= whole:
        yield [link.recv(array, link.rank - whole)]
    elif link.rank + whole < link.size:
        yield [link.send(array, link.rank + whole)]


# From all ranks to all ranks: large arrays, where the number of bytes counts


def ring_reduce_scatter_in_place(
    link: Link[Array], chunks: list[Array], combine: Combine[Array], buffer: Array | None = None
) -> Steps:
    """Send partial sums round the ring; after N-1 steps rank r holds the sum of chunk r, in place.

    Four ranks; rank 1 sends to rank 2 and receives from rank 0:

        step 0   send chunk 0, receive chunk 3, add it        chunk p starts at rank p+1,
        step 1   send chunk 3, receive chunk 2, add it        grows at every rank,
        step 2   send chunk 2, receive chunk 1, add it        and ends at rank p

    Every rank sends (N-1)/N of the array, for every N. Chunks are received into ``buffer``, or into scratch memory.
    """
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    for step in range(link.size - 1):
        outgoing, incoming = chunks[(link.rank - step - 1) % link.size], chunks[(link.rank - step - 2) % link.size]
        received = link.scratch(incoming) if buffer is None else buffer
        yield [link.send(outgoing, right), link.recv(received, left)]
        combine(incoming, received, incoming)


def ring_all_gather(link: Link[Array], chunks: list[Array]) -> Steps:
    """Send finished chunks round the ring: rank r starts with chunk r, and after N-1 steps every rank has all chunks.

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
    """Halve the summed part in every round, then double it. If N is 2^k: a ring's bytes in 2 k rounds, not 2 (N-1).

    Eight ranks; what rank 0 sends, and to whom:

        to 4: upper n/2   to 2: upper half of the rest, n/4   to 1: n/8 likewise   then it holds the sum of its n/8
        to 1: that n/8    to 2: the n/4 summed so far         to 4: its n/2        then every rank holds all

    R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, LNCS 3036.
    """
    whole = largest_power_of_two(link.size)
    yield from fold(link, array, whole, combine)
    halved, mine, bit = [], array, whole // 2 if link.rank < whole else 0
    # Reduce-scatter by halving: keep one half of `mine`, send the other half, and add the half received.
    while bit:
        partner = link.rank ^ bit
        lower, upper = chunks_of(mine, 2)
        mine, others = (upper, lower) if link.rank & bit else (lower, upper)
        received = link.scratch(mine)
        yield [link.send(others, partner), link.recv(received, partner)]
        combine(mine, received, mine)
        halved.append((partner, mine, others))
        bit //= 2
    # All-gather: repeat the same exchanges in reverse order, now with finished sums.
    for partner, mine, others in reversed(halved):
        yield [link.send(mine, partner), link.recv(others, partner)]
    yield from unfold(link, array, whole)


def ring_reduce_scatter(link: Link[Array], out: Array, chunks: list[Array], combine: Combine[Array]) -> Steps:
    """Reduce-scatter round the ring without changing the input: partial sums use two buffers and end in ``out``.

    If ``out`` is this rank's own chunk of the input, the reduction runs in place.
    """
    if same_memory(out, chunks[link.rank]):
        yield from ring_reduce_scatter_in_place(link, chunks, combine)
        return
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    if link.size == 1:
        out[...] = chunks[0]
        return
    outgoing = chunks[(link.rank - 1) % link.size]
    # Two buffers in turn: one is still being sent while the next partial sum arrives in the other.
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
    """Reduce-scatter round the ring and overwrite the input; no memory is needed besides the input and ``out``."""
    yield from ring_reduce_scatter_in_place(link, chunks, combine, out)
    out[...] = chunks[link.rank]


def same_memory(one: Array, other: Array) -> bool:
    """Return True if two arrays of equal size start at the same address."""
    return one.ctypes.data == other.ctypes.data


# Different data for each rank


def direct_scatter(link: Link[Array], out: Array, chunks: list[Array], root: int) -> Steps:
    """Send each rank its chunk from the root."""
    if link.rank != root:
        yield [link.recv(out, root)]
        return
    yield [link.send(chunks[other], other) for other in range(link.size) if other != root]
    # Copy last: `out` may overlap another rank's chunk, which has been sent by now.
    out[...] = chunks[root]


def direct_gather(link: Link[Array], chunks: list[Array], array: Array, root: int) -> Steps:
    """Send each rank's array to the root, which receives it in the rank's chunk."""
    if link.rank != root:
        yield [link.send(array, root)]
        return
    chunks[root][...] = array
    yield [link.recv(chunks[other], other) for other in range(link.size) if other != root]


def pairwise_all_to_all(link: Link[Array], out_chunks: list[Array], chunks: list[Array]) -> Steps:
    """Exchange in N-1 steps: in step s, rank r sends to rank r+s and receives from rank r-s."""
    out_chunks[link.rank][...] = chunks[link.rank]
    for step in range(1, link.size):
        to, source = (link.rank + step) % link.size, (link.rank - step) % link.size
        yield [link.send(chunks[to], to), link.recv(out_chunks[source], source)]


def dissemination_all_gather(link: Link[Array], rows: Array) -> Steps:
    """All-gather small chunks: each round doubles the number of chunks on every rank, so log2 N rounds are enough.

    ``rows[0]`` is this rank's chunk. At the end ``rows[i]`` is the chunk of the rank i places higher.

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
    """Signal the rank 2^k places higher in round k: after log2 N rounds every rank knows that all have arrived.

    D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
    """
    nothing = link.nothing()
    distance = 1
    while distance < link.size:
        to, source = (link.rank + distance) % link.size, (link.rank - distance) % link.size
        yield [link.send(nothing, to), link.recv(nothing, source)]
        distance *= 2
