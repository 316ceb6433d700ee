"""Checks for plain.py and plain_ulysses.py, which import only torch. Importing this module adds the checks.

With these checks, ``group`` may also be a dtlib communicator, and ``dtlib.trace()`` records the blocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dtlib.comm import AnyCommunicator, Communicator
from dtlib.comm.waiting import advance_all
from dtlib.comm.watch import recorder
from dtlib.errors import DtlibError
from dtlib.gradients.preconditions import around, group_and_communicator
from dtlib.parallel.context import plain, plain_ulysses


def _my_tokens(original, x, group: AnyCommunicator, order="zigzag", dim=1):
    group, comm = group_and_communicator(group)
    if x.shape[dim] % (2 * comm.size):
        raise DtlibError(f"{x.shape[dim]} tokens do not make {2 * comm.size} equal chunks: pad or use ContextParallel.")
    return original(x, group, order, dim)


def _ring_attention(original, q, k, v, group: AnyCommunicator | None = None, causal=True, order="zigzag"):
    group, comm = group_and_communicator(group)
    asked = _asked(comm, q, k, v, causal, order)
    if set(asked) != {(*((tuple(q.shape), q.dtype),) * 3, causal, order)} or q.dim() != 4 or order not in plain.CHUNKS:
        raise DtlibError(f"Ranks have (q, k, v, causal, order) {set(asked)}: pass equal ones, order {[*plain.CHUNKS]}.")
    if q.shape[2] % 2 or q.dtype not in (torch.float32, torch.float64):
        raise DtlibError(
            f"{q.shape[2]} tokens of {q.dtype} per rank: use an even number and float32 or float64, or attention.py."
        )
    return original(q, k, v, group, causal, order)


def _ulysses_attention(original, q, k, v, group: AnyCommunicator | None = None, causal=True):
    group, comm = group_and_communicator(group)
    asked = set(_asked(comm, q, k, v, causal))
    if len(asked) > 1 or len({*next(iter(asked))[:3]}) > 1 or q.dim() != 4:
        raise DtlibError(f"Ranks pass q, k, v, causal {asked}: pass the same everywhere; q, k, v have four dimensions.")
    if q.shape[1] % comm.size:
        raise DtlibError(f"{q.shape[1]} heads do not divide into {comm.size} equal groups: use ring_attention.")
    return original(q, k, v, group, causal)


def _asked(comm: Communicator, q, k, v, *rest) -> list[tuple]:
    return comm.all_gather_object((*((tuple(x.shape), x.dtype) for x in (q, k, v)), *rest))


def _blocks(original, group: AnyCommunicator, *rest):
    group, comm = group_and_communicator(group)

    @contextmanager
    def recorded(what: str) -> Iterator[None]:
        with recorder.phase(what, comm.world_rank):
            yield
        advance_all()  # poll, so that pending messages progress

    plain.record_function = recorded  # type: ignore[misc, assignment]
    return original(group, *rest)


def _pass_on(original, group: AnyCommunicator, tensor, tag=0):
    return original(group_and_communicator(group)[0], tensor, tag)


around(plain, "my_tokens", _my_tokens)
around(plain, "ring_attention", _ring_attention)
around(plain, "blocks", _blocks)
around(plain, "pass_on", _pass_on)
around(plain_ulysses, "ulysses_attention", _ulysses_attention)
