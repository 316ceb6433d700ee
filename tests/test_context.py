# ruff: noqa: E501
"""Ring attention and Ulysses beside their values (test_parity.py): bytes, refusals, and mistakes that are noticed."""

import math

import torch

import dtlib
from dtlib.parallel.context import plain
from dtlib.parallel.context.plain import CHUNKS, my_tokens, ring_attention
from dtlib.parallel.context.plain_ulysses import ulysses_attention
from tests.cases import broken_modules, refuses
from tests.models import EXACT
from tests.models import apart as absolute
from tests.ranks import on_ranks

BATCH, HEADS, WIDTH = 2, 12, 5  # heads divide by 2, 3 and 4


def whole_tensors(tokens, scale=1.0, heads=HEADS, seed=3):
    """q, k, v and the cotangent of the output, of whole sequences; the same on all ranks."""
    torch.manual_seed(seed)
    q, k, v, cotangent = torch.randn(4, BATCH, heads, tokens, WIDTH, dtype=torch.float64).unbind()
    return q * scale, k, v, cotangent


def alone(q, k, v, cotangent, causal):
    """One process, written as the definition is: output, dq, dk, dv."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ v
    out.backward(cotangent)
    return out.detach(), q.grad, k.grad, v.grad


def apart(ours, theirs) -> float:
    """The largest difference, relative where numbers are large."""
    return absolute(ours, theirs) / max(1.0, float(theirs.abs().max()))


def shared(comm, attention, whole, order, causal):
    """Output, dq, dk, dv of this rank, and its events."""
    q, k, v, cotangent = (my_tokens(x, comm, order, dim=2) for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with dtlib.trace() as forward:
        out = attention(q, k, v, comm, causal)
    with dtlib.trace() as backward:
        out.backward(cotangent)
    return (out, q.grad, k.grad, v.grad), forward.events, backward.events


def in_ring(order):
    return lambda q, k, v, comm, causal: ring_attention(q, k, v, comm, causal, order)


WAYS = {"contiguous": in_ring("contiguous"), "zigzag": in_ring("zigzag"), "ulysses": ulysses_attention}


def sent(events, operation, dtype="float64"):
    """Messages and bytes of an operation; notes are integers or bytes."""
    found = [event for event in events if (event.kind, event.name, event.dtype) == ("operation", operation, dtype)]
    return sum(event.messages for event in found), sum(event.bytes for event in found)


@on_ranks(1, 2, 3, 4, slow=(1,))
def test_messages_and_bytes_are_those_of_the_formulas(world):
    comm, n = world.comm, world.size
    whole = whole_tensors(4 * n)
    slice_bytes = whole[0].nbytes // n
    for order in CHUNKS:
        _, forward, backward = shared(comm, WAYS[order], whole, order, True)
        assert sent(forward, "send") == (n - 1, (n - 1) * 2 * slice_bytes)
        hops = 2 * n - 1 if n > 1 else 0
        assert sent(backward, "send") == (hops, hops * 2 * slice_bytes)
        # A step ends when the last rank has computed its blocks: the longest of each step, added up.
        for events in (forward, backward):
            everyone = comm.all_gather_object([of_step(events, comm, order, step) for step in range(n)])
            path = sum(max(work) for work in zip(*everyone, strict=True))
            assert path == (4 * n - 2 if order == "contiguous" else 2 * n)
            assert sum(map(sum, everyone)) == 2 * n * n  # the same work in either order
    _, forward, backward = shared(comm, WAYS["ulysses"], whole, "contiguous", True)
    for events in (forward, backward):
        assert sent(events, "all_to_all") == (2 * (n - 1), 4 * slice_bytes * (n - 1) // n)


def of_step(events, comm, order, step) -> float:
    """Quarter blocks that this rank computed in a step, from the recorded phases; half a one on the diagonal."""
    here = {f"chunk {chunk}" for chunk in CHUNKS[order]((comm.rank - step) % comm.size, comm.size)}
    looks = [event.name.split(" looks at ") for event in events if event.kind == "phase"]
    assert all(event.rank == comm.world_rank for event in events)
    return sum(0.5 if query == key else 1.0 for query, key in looks if key in here)


@on_ranks(2, 3)
def test_what_lies_outside_of_the_contract_is_refused_on_every_rank(world):
    comm, x = world.comm, torch.ones(1, 6, 4, 2)
    for why, call in {
        "do not make .* equal chunks": lambda: my_tokens(torch.ones(1, 4 * comm.size + 1), comm),
        "q, k, v, causal, order. .*: pass equal ones, order": lambda: ring_attention(x, x[:, :2], x, comm),
        "causal, order. .*: pass equal ones": lambda: ring_attention(
            *[torch.ones(1, 6, 4 + 2 * comm.rank, 2)] * 3, comm
        ),
        "'stripes'": lambda: ring_attention(x, x, x, comm, order="stripes"),
        "3 tokens of torch.float32 per rank": lambda: ring_attention(*[x[:, :, :3]] * 3, comm),
        "of torch.bfloat16": lambda: ring_attention(*[x.bfloat16()] * 3, comm),
        "pass the same everywhere": lambda: ulysses_attention(x, x, x, comm, causal=comm.rank > 0),
        "5 heads do not divide": lambda: ulysses_attention(*[x[:, :5]] * 3, comm),
    }.items():
        refuses(why, call)
    comm.barrier()


# Mistakes that somebody makes: what stands in plain.py once, what stands there instead, and what is right all the same.
PERFECT = "output is right"
MISTAKES = {
    "a merge that does not rescale what was there": ("(lse - total).exp()[..., None] * out", "out", ""),
    "a merge that keeps the first sum": ("* block_out, total", "* block_out, lse", ""),
    "the larger in place of the sum": ("torch.logaddexp(lse, block_lse)", "torch.maximum(lse, block_lse)", ""),
    "no scale": ("(q @ k.mT * q.shape[-1] ** -0.5)", "(q @ k.mT)", ""),
    "a query does not see itself": (".triu(1)", ".triu(0)", ""),
    "a query sees the next one": (".triu(1)", ".triu(2)", ""),
    "later keys are seen": ("causal and key == query).triu", "False).triu", ""),
    "earlier blocks are left out": ("key <= query", "key == query", ""),
    "the owner counted the other way round": ("(group.rank() - step) % group.size(), kv", "(group.rank() + step) % group.size(), kv", ""),
    "chunks of zigzag one off": ("2 * ranks - 1 - r)", "2 * ranks - 2 - r)", ""),
    "keys of the first step in the backward pass": (
        "(k_there, v_there) = q[..., rows, :], d_out[..., rows, :], kv[..., columns, :]",
        "(k_there, v_there) = q[..., rows, :], d_out[..., rows, :], torch.stack([k, v])[..., columns, :]",
        PERFECT,
    ),
    "gradients of keys stay with the last rank": ("return d_q, *arriving()", "return d_q, *d_kv", PERFECT),
    "gradients of keys go back to the wrong rank": (
        "return d_q, *arriving()", "return d_q, *pass_on(group, arriving(), 2)()", PERFECT,
    ),
    "gradients of keys without the other ranks'": ("d_kv + arriving() if arriving else d_kv", "(arriving and arriving(), d_kv)[1]", PERFECT),
    "the last summand only twice": ("d_kv + arriving() if arriving else d_kv", "d_kv + (arriving() if arriving else d_kv)", PERFECT),
    "softmax of a block in place of all": ("- lse[..., rows, None]).exp()", "- 0).softmax(-1)", PERFECT),
    "no delta": ("(d_here @ v_there.mT - delta[..., rows, :])", "(d_here @ v_there.mT)", PERFECT),
    "delta of this block's rows in the wrong place": ("delta[..., rows, :]", "delta[..., columns, :]", PERFECT),
    "the scale forgotten in the gradient": ("delta[..., rows, :]) * q.shape[-1] ** -0.5", "delta[..., rows, :])", PERFECT),
    "dq of the last block alone": ("d_q[..., rows, :] += d_scores", "d_q[..., rows, :] = d_scores", PERFECT),
    "dq in the rows of the keys": ("d_q[..., rows, :] +=", "d_q[..., columns, :] +=", PERFECT),
    "dk and dv of the last block alone": ("d_kv[:, ..., columns, :] +=", "d_kv[:, ..., columns, :] =", PERFECT),
    "dk and dv mixed up": ("torch.stack([d_scores.mT @ q_here, p.mT @ d_here])", "torch.stack([p.mT @ d_here, d_scores.mT @ q_here])", PERFECT),
    "dv by the scores' gradient": ("p.mT @ d_here", "d_scores.mT @ d_here", PERFECT),
}  # fmt: skip


@on_ranks(3)
def test_every_planted_mistake_is_noticed_most_of_them_with_a_perfect_output(world):
    for mistake, broken, kept in broken_modules(plain, MISTAKES):
        found = worst_of(broken, world.comm.split(0))
        everyones = world.comm.all_gather_object(found)
        worst = {name: max(one.get(name, math.inf) for one in everyones) for name in NAMES}
        assert not max(worst.values()) <= EXACT, mistake
        assert (worst["output"] <= EXACT) == (kept == PERFECT), (mistake, worst)
    assert sum(kept == PERFECT for *_, kept in MISTAKES.values()) > len(MISTAKES) / 2


NAMES = "output", "dq", "dk", "dv"


def worst_of(module, comm) -> dict[str, float]:
    """Of ring attention in a module, over both orders: the largest error of each of the four; nothing if it fails."""
    worst = dict.fromkeys(NAMES, 0.0)
    whole = whole_tensors(4 * comm.size, heads=1)
    expected = alone(*whole, True)
    for order in CHUNKS:

        def ring(q, k, v, comm, causal, order=order):
            return module["ring_attention"](q, k, v, comm.group, causal, order)

        try:
            ours, *_ = shared(comm, ring, whole, order, True)
        except (RuntimeError, IndexError):
            return {}
        for name, mine, theirs in zip(NAMES, ours, expected, strict=True):
            worst[name] = max(worst[name], apart(mine, my_tokens(theirs, comm, order, dim=2)))
    return worst
