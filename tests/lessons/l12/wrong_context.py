"""Plausible wrong answers to lesson 12's long sequences, and the mistake that the check must recognise in each."""

import torch
from torch.nn.functional import logsigmoid

from dtlib.parallel.context.plain import pass_on

# build: merge(out, lse, block_out, block_lse)


def shares(lse, block_lse):
    total = torch.logaddexp(lse, block_lse)
    return (lse - total).exp()[:, None], (block_lse - total).exp()[:, None], total


def merge_without_rescaling(out, lse, block_out, block_lse):
    _, block_share, total = shares(lse, block_lse)
    return out + block_share * block_out, total


def merge_with_a_whole_block(out, lse, block_out, block_lse):
    share, _, total = shares(lse, block_lse)
    return share * out + block_out, total


def merge_swapped(out, lse, block_out, block_lse):
    share, block_share, total = shares(lse, block_lse)
    return block_share * out + share * block_out, total


def merge_added(out, lse, block_out, block_lse):
    return out + block_out, shares(lse, block_lse)[2]


def merge_in_the_middle(out, lse, block_out, block_lse):
    return (out + block_out) / 2, shares(lse, block_lse)[2]


def merge_by_the_larger(out, lse, block_out, block_lse):
    total = torch.maximum(lse, block_lse)
    return (lse - total).exp()[:, None] * out + (block_lse - total).exp()[:, None] * block_out, total


def merge_that_tells_the_larger(out, lse, block_out, block_lse):
    share, block_share, _ = shares(lse, block_lse)
    return share * out + block_share * block_out, torch.maximum(lse, block_lse)


def merge_that_forgets(out, lse, block_out, block_lse):
    share, block_share, _ = shares(lse, block_lse)
    return share * out + block_share * block_out, lse


def merge_of_the_new_one(out, lse, block_out, block_lse):
    share, block_share, _ = shares(lse, block_lse)
    return share * out + block_share * block_out, block_lse


def merge_by_exponentials(out, lse, block_out, block_lse):
    total = lse.exp() + block_lse.exp()
    return (lse.exp() / total)[:, None] * out + (block_lse.exp() / total)[:, None] * block_out, total.log()


def merge_by_logsigmoid(out, lse, block_out, block_lse):
    """Well known from ring attention's forward loop, where the first block is taken as it is."""
    share = torch.sigmoid(block_lse - lse)[:, None]
    return out - share * (out - block_out), lse - logsigmoid(lse - block_lse)


def merge_as_it_was(out, lse, block_out, block_lse):
    """The stub."""
    return out, lse


def merge_above_a_least_score(out, lse, block_out, block_lse):
    """A usual stand-in for -inf, which scores far below zero are below."""
    lse = lse.clamp(min=-1e4)
    share, block_share, total = shares(lse, block_lse)
    return share * out + block_share * block_out, total


def merge_by_log1p(out, lse, block_out, block_lse):
    """Right in out, and total is infinite where a score is large."""
    total = lse + (block_lse - lse).exp().log1p()
    total = torch.where(lse.isinf(), block_lse, total)
    return (lse - total).exp()[:, None] * out + (block_lse - total).exp()[:, None] * block_out, total


def merge_one_thing(out, lse, block_out, block_lse):
    share, block_share, _ = shares(lse, block_lse)
    return share * out + block_share * block_out


# fix: add_block(scores, values, top, total, out)


def out_is_not_rescaled(scores, values, top, total, out):
    """The planted bug."""
    new_top = torch.maximum(top, scores.amax(-1))
    weights = (scores - new_top[:, None]).exp()
    total = total * (top - new_top).exp() + weights.sum(-1)
    return new_top, total, out + weights @ values


def total_is_not_rescaled(scores, values, top, total, out):
    new_top = torch.maximum(top, scores.amax(-1))
    weights = (scores - new_top[:, None]).exp()
    return new_top, total + weights.sum(-1), out * (top - new_top).exp()[:, None] + weights @ values


def nothing_is_rescaled(scores, values, top, total, out):
    new_top = torch.maximum(top, scores.amax(-1))
    weights = (scores - new_top[:, None]).exp()
    return new_top, total + weights.sum(-1), out + weights @ values


def rescaled_the_other_way(scores, values, top, total, out):
    new_top = torch.maximum(top, scores.amax(-1))
    weights, rescaled = (scores - new_top[:, None]).exp(), (new_top - top).exp()
    return new_top, total * rescaled + weights.sum(-1), out * rescaled[:, None] + weights @ values


def top_is_not_carried(scores, values, top, total, out):
    new_top = torch.maximum(top, scores.amax(-1))
    weights, rescaled = (scores - new_top[:, None]).exp(), (top - new_top).exp()
    return top, total * rescaled + weights.sum(-1), out * rescaled[:, None] + weights @ values


def without_a_top(scores, values, top, total, out):
    return top, total + scores.exp().sum(-1), out + scores.exp() @ values


def top_is_zero_at_least(scores, values, top, total, out):
    new_top = torch.maximum(top, scores.amax(-1)).clamp(min=0)
    weights, rescaled = (scores - new_top[:, None]).exp(), (top - new_top).exp()
    return new_top, total * rescaled + weights.sum(-1), out * rescaled[:, None] + weights @ values


def averaged_at_once(scores, values, top, total, out):
    new_top = torch.maximum(top, scores.amax(-1))
    weights, rescaled = (scores - new_top[:, None]).exp(), (top - new_top).exp()
    total = total * rescaled + weights.sum(-1)
    return new_top, total, (out * rescaled[:, None] + weights @ values) / total[:, None]


def two_are_returned(scores, values, top, total, out):
    return total, out


# fix: send_home(comm, summand)


def round_the_ring(comm, summand, hops, add=True):
    travelling = None
    for step in range(comm.size):
        here = summand((comm.rank - step) % comm.size)
        if step > 0:
            here = here + pass_on(comm, travelling)() if add else (pass_on(comm, travelling)(), here)[1]
        travelling = here
    for _ in range(hops):
        travelling = pass_on(comm, travelling)()
    return travelling


def no_last_hop(comm, summand):
    """The planted bug."""
    return round_the_ring(comm, summand, hops=0)


def a_hop_too_many(comm, summand):
    return round_the_ring(comm, summand, hops=2)


def nobody_adds(comm, summand):
    return round_the_ring(comm, summand, hops=1, add=False)


def stays_at_home(comm, summand):
    return summand(comm.rank)


def all_of_all(comm, summand):
    return comm.all_reduce(sum(summand(owner) for owner in range(comm.size)))


def averaged(comm, summand):
    return round_the_ring(comm, summand, hops=1) / comm.size


def everything_everywhere(comm, summand):
    mine = torch.stack([summand(owner) for owner in range(comm.size)])
    return comm.all_gather(mine.new_empty(comm.size, *mine.shape), mine)[:, comm.rank].sum(0)


def round_the_other_way(comm, summand):
    travelling = summand(comm.rank)
    for step in range(1, comm.size):
        travelling = summand((comm.rank + step) % comm.size) + pass_on(comm, travelling)()
    return pass_on(comm, travelling)()


def nothing_returned(comm, summand):
    no_last_hop(comm, summand)


def owner_one_earlier(comm, summand):
    """No last hop, and yet the right values: by keys that have not arrived."""
    travelling = None
    for step in range(comm.size):
        here = summand((comm.rank - 1 - step) % comm.size)
        travelling = here + pass_on(comm, travelling)() if step else here
    return travelling


def returns_the_handle(comm, summand):
    return pass_on(comm, round_the_ring(comm, summand, hops=0))


def last_hop_to_the_left(comm, summand):
    travelling = round_the_ring(comm, summand, hops=0)
    sending = comm.send(travelling, (comm.rank - 1) % comm.size, async_op=True)
    arrived = comm.recv(torch.empty_like(travelling), (comm.rank + 1) % comm.size)
    sending.wait()
    return arrived


def home_backwards(comm, summand):
    """Begins with the keys that are furthest from home, so that the last to add is their owner."""
    travelling = summand((comm.rank + 1) % comm.size) if comm.size > 1 else None
    for step in range(2, comm.size + 1):
        arrived = comm.recv(torch.empty_like(travelling), (comm.rank + 1) % comm.size, async_op=True)
        comm.send(travelling, (comm.rank - 1) % comm.size, async_op=True).wait()
        travelling = arrived.wait() + summand((comm.rank + step) % comm.size)
    return summand(comm.rank) if travelling is None else travelling


def merge_in_float32(out, lse, block_out, block_lse):
    share, block_share, total = shares(lse, block_lse)
    return (share * out + block_share * block_out).float(), total.float()


def travels_in_float32(comm, summand):
    travelling = None
    for step in range(comm.size):
        here = summand((comm.rank - step) % comm.size).float()
        travelling = here + pass_on(comm, travelling)() if step else here
    return pass_on(comm, travelling)().double()


WRONG = {
    "merge-build": {
        merge_without_rescaling: "old-not-rescaled",
        merge_with_a_whole_block: "new-not-rescaled",
        merge_swapped: "swapped",
        merge_added: "added",
        merge_in_the_middle: "mean",
        merge_by_the_larger: "largest",
        merge_that_forgets: "lse-not-carried",
        merge_that_tells_the_larger: "largest-lse",
        merge_of_the_new_one: "other-lse",
        merge_by_exponentials: "overflow",
        merge_by_logsigmoid: "no-number-at-first",
        merge_as_it_was: "left-out",
        merge_above_a_least_score: "least-score",
        merge_by_log1p: "overflow",
        merge_one_thing: "type",
        merge_in_float32: "rounded",
    },
    "rescaling-fix": {
        out_is_not_rescaled: "out-not-rescaled",
        total_is_not_rescaled: "total-not-rescaled",
        nothing_is_rescaled: "not-rescaled",
        rescaled_the_other_way: "no-number",
        top_is_not_carried: "top-not-carried",
        without_a_top: "overflow",
        top_is_zero_at_least: "least-score",
        averaged_at_once: "other-average",
        two_are_returned: "type",
    },
    "last-hop-fix": {
        no_last_hop: "one-hop-too-few",
        a_hop_too_many: "one-hop-too-many",
        nobody_adds: "overwritten",
        stays_at_home: "alone",
        all_of_all: "of-all",
        averaged: "divided",
        everything_everywhere: "too-many-bytes",
        round_the_other_way: "other-gradients",
        nothing_returned: "type",
        owner_one_earlier: "keys-not-there",
        home_backwards: "keys-not-there",
        returns_the_handle: "type",
        last_hop_to_the_left: "one-hop-too-many",
        travels_in_float32: "rounded",
    },
}
