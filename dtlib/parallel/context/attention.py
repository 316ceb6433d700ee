"""Ring attention and Ulysses for real models: grouped heads, sequences of any length and order, 16 bits.

plain.py explains the idea. Here, keys and values may have fewer heads than queries (grouped-query attention), and
slices may differ in length. For 16-bit inputs, outputs, log-sum-exps and gradients are float32 until they are complete,
including the gradients that are sent.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from dtlib.comm import Communicator
from dtlib.comm.waiting import advance_all
from dtlib.comm.watch.recorder import phase
from dtlib.errors import DtlibError
from dtlib.parallel.context.order import positions_of, runs_of

# Number of queries in a block with a mask. Shorter blocks compute fewer masked scores, but need more kernel calls.
SHORT = 256


class Sequence:
    """The distribution of sequences of ``length`` over ``comm``: the order, and the positions of each rank's tokens."""

    def __init__(self, comm: Communicator, length: int, order: str, causal: bool):
        self.comm, self.length, self.causal = comm, length, causal
        self.positions = [positions_of(rank, comm.size, length, order) for rank in range(comm.size)]

    def blocks(self, owner: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield blocks of work: rows of this rank's queries, rows of ``owner``'s keys, and a mask of later keys.

        The mask is None if no key of the block is later than a query.
        """
        mine, theirs = self.positions[self.comm.rank], self.positions[owner]
        for run in runs_of(mine):
            for columns in runs_of(theirs):
                for rows in self._rows(run, mine, theirs[columns]):
                    query, key = mine[rows], theirs[columns]
                    # Positions ascend, so the keys that are later than all queries are at the end.
                    if self.causal:
                        key = key[key <= query[-1]]
                    if not len(key):
                        continue
                    later = key > query[:, None] if self.causal and key[-1] > query[0] else None
                    seen = len(query) * len(key) - (0 if later is None else int(later.sum()))
                    with phase(f"{seen} pairs with rank {owner}'s keys", self.comm.world_rank):
                        yield rows, slice(columns.start, columns.start + len(key)), later
                    advance_all()

    def _rows(self, run: slice, mine, key):
        """Divide a run of queries into short runs if it needs a mask, so that few masked scores are computed."""
        masked = self.causal and mine[run][0] < key[-1] and key[0] <= mine[run][-1]
        step = SHORT if masked else run.stop - run.start
        return [slice(first, min(first + step, run.stop)) for first in range(run.start, run.stop, step)]

    def pass_on(self, pair: Tensor, next_owner: int, tag: int = 0) -> Callable[[], Tensor]:
        """Start to send a pair to the next rank and to receive ``next_owner``'s pair.

        The function that is returned waits for both and returns the received pair.
        """
        comm, buffers = self.comm, pair.new_empty(*pair.shape[:-2], len(self.positions[next_owner]), pair.shape[-1])
        arriving = comm.recv(buffers, (comm.rank - 1) % comm.size, tag, async_op=True)
        leaving = comm.send(pair, (comm.rank + 1) % comm.size, tag, async_op=True)
        return lambda: (leaving.wait(), arriving.wait())[1]

    def round(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank's index and its keys and values, in ring order, starting with this rank.

        The next pair is in flight while the caller works on the current pair.
        """
        for step in range(self.comm.size):
            owner = (self.comm.rank - step) % self.comm.size
            last = step == self.comm.size - 1
            following = None if last else self.pass_on(kv, (owner - 1) % self.comm.size)
            yield owner, kv
            if following:
                kv = following()


def _scores(q, k, later, scale):
    scores = q.to(_wide(q)) @ k.to(_wide(k)).mT * scale
    return scores if later is None else scores.masked_fill(later.to(scores.device), -torch.inf)


def _wide(x) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _exact(function: Callable) -> Callable:
    """Disable autocast, so that scores are computed in float32, as in torch's attention."""

    def computed(ctx, first, *rest):
        with torch.autocast(first.device.type, enabled=False):
            return function(ctx, first, *rest)

    return computed


class _Ring(torch.autograd.Function):
    """q is (batch, key heads, queries per key head, tokens, width), k and v (batch, key heads, 1, tokens, width)."""

    @staticmethod
    @_exact
    def forward(ctx, q, k, v, sequence, scale):
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=_wide(q), device=q.device)
        lse = out.new_full(q.shape[:-1], -torch.inf)
        for owner, (k_there, v_there) in sequence.round(torch.stack([k, v])):
            for rows, columns, later in sequence.blocks(owner):
                scores = _scores(q[..., rows, :], k_there[..., columns, :], later, scale)
                # A query of a masked block may see none of its keys. Then its sum is 0 and its log is -inf.
                highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
                weights = (scores - highest).exp_()
                total = weights.sum(-1)
                block_lse = total.log() + highest[..., 0]
                # Merge the softmax of this block into the softmax of the earlier blocks: rescale both to the common
                # log-sum-exp.
                merged = torch.logaddexp(lse[..., rows], block_lse)
                out[..., rows, :] *= (lse[..., rows] - merged).exp()[..., None]
                scaled = weights * (highest[..., 0] - merged).exp()[..., None]
                out[..., rows, :] += scaled @ v_there[..., columns, :].to(out.dtype)
                lse[..., rows] = merged
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = sequence, scale
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    @_exact
    def backward(ctx, d_out):  # type: ignore[override]  # _exact keeps the signature
        (q, k, v, out, lse), (sequence, scale) = ctx.saved_tensors, ctx.rest
        # delta is the row sum of d_out * out; the backward pass of a softmax subtracts it from every score's gradient.
        d_out = d_out.to(out.dtype)
        d_q, delta, arriving = torch.zeros_like(q, dtype=out.dtype), (d_out * out).sum(-1, keepdim=True), None
        for owner, kv in sequence.round(torch.stack([k, v])):
            d_kv = torch.zeros_like(kv, dtype=out.dtype)
            for rows, columns, later in sequence.blocks(owner):
                q_here, d_here = q[..., rows, :].to(out.dtype), d_out[..., rows, :]
                k_there, v_there = kv[..., columns, :].to(out.dtype)
                # Recompute the softmax over all keys from the saved log-sum-exp.
                p = (_scores(q_here, k_there, later, scale) - lse[..., rows, None]).exp_()
                d_scores = p * (d_here @ v_there.mT - delta[..., rows, :]) * scale
                d_q[..., rows, :] += d_scores @ k_there
                d_kv[0][..., columns, :] += (d_scores.mT @ q_here).sum(-3, keepdim=True)
                d_kv[1][..., columns, :] += (p.mT @ d_here).sum(-3, keepdim=True)
            # The gradients of keys and values follow their tensors around the ring, one step behind, and each rank adds
            # its part.
            if arriving:
                d_kv += arriving()
            arriving = sequence.pass_on(d_kv, (owner - 1) % sequence.comm.size, tag=1)
        assert arriving  # there is one rank at least
        d_k, d_v = arriving()
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, sequence: Sequence, scale: float | None = None) -> Tensor:
    """Compute softmax(scale Q K^T) V over the tokens of all ranks, for this rank's queries; the shape is q's.

    ``q`` is (batch, heads, tokens, width). The heads of ``q`` are a multiple of the heads of ``k`` and ``v``. All three
    have the same width. ``scale`` defaults to 1 / sqrt(width).
    """
    if torch.is_autocast_enabled(q.device.type):  # as torch's attention does
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    groups = k.shape[1]
    grouped = q.unflatten(1, (groups, q.shape[1] // groups))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(grouped, k.unsqueeze(2), v.unsqueeze(2), sequence, scale).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Exchange heads for tokens, or the reverse; x is (batch, heads, tokens, width), in the order of ``sequence``."""

    @staticmethod
    def forward(ctx, x, sequence, whole: bool):
        ctx.rest = sequence, not whole
        comm, here = sequence.comm, len(sequence.positions[sequence.comm.rank])
        lengths = [len(positions) for positions in sequence.positions]
        place = torch.cat(sequence.positions).to(x.device)
        batch, heads, width = x.shape[0], x.shape[1], x.shape[-1]
        if whole:  # from all heads of some tokens to all tokens of some heads
            pieces = x.unflatten(1, (comm.size, -1)).movedim(1, 0).contiguous()
            mine = batch * (heads // comm.size) * width
            received = x.new_empty(mine * sequence.length)
            comm.all_to_all(received, pieces.flatten(), [mine * n for n in lengths], [mine * here] * comm.size)
            parts = [
                part.view(batch, heads // comm.size, n, width)
                for part, n in zip(received.split([mine * n for n in lengths]), lengths, strict=True)
            ]
            return torch.cat(parts, 2)[:, :, place.argsort()]
        pieces, mine = x[:, :, place].split(lengths, 2), batch * heads * width
        sent = torch.cat([piece.flatten() for piece in pieces])
        received = x.new_empty(comm.size, batch, heads, here, width)
        comm.all_to_all(received.view(-1), sent, [mine * here] * comm.size, [mine * n for n in lengths])
        return received.movedim(0, 1).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _Exchange.apply(gradient, *ctx.rest), None, None


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, sequence: Sequence, scale: float | None = None) -> Tensor:
    """Compute the same with exchanges: each rank computes ordinary attention over whole sequences for some heads.

    Raises:
        DtlibError: if the heads of queries or of keys are not divisible by the ranks.
    """
    ranks = sequence.comm.size
    if q.shape[1] % ranks or k.shape[1] % ranks:
        raise DtlibError(
            f"Ulysses divides heads among {ranks} ranks, but there are {q.shape[1]} of queries and {k.shape[1]} of "
            f'keys: use multiples of {ranks}, or method="ring".'
        )
    q, k, v = (_Exchange.apply(x, sequence, True) for x in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    out = scaled_dot_product_attention(q, k, v, is_causal=sequence.causal, scale=scale, enable_gqa=grouped)
    return _Exchange.apply(out, sequence, False)
