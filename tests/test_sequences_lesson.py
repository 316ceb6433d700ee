"""Lesson 12: right answers in other words are accepted on any number of ranks; the table of axes is of one model."""

import pytest
import torch

from dtlib.lessons.l12 import axes, judge_context, judge_home, work
from dtlib.lessons.l12b import judge_experts
from dtlib.parallel.context import plain
from dtlib.parallel.expert import plain as expert_plain
from tests.ranks import on_ranks

# Right answers, each in other words than the solution's.


def by_sigmoid(out, lse, block_out, block_lse):
    share = torch.sigmoid(block_lse - lse)[:, None]
    return torch.lerp(out, block_out, share), torch.stack([lse, block_lse]).logsumexp(0)


def by_the_larger(out, lse, block_out, block_lse):
    top = torch.maximum(lse, block_lse)
    a, b = (lse - top).exp(), (block_lse - top).exp()
    return (a[:, None] * out + b[:, None] * block_out) / (a + b)[:, None], top + (a + b).log()


def take_in_by_softmax(scores, values, top, total, out):
    """The block's own softmax, merged by the log of both sums."""
    lse, block_lse = top + total.log(), scores.logsumexp(-1)
    new_top = torch.logaddexp(lse, block_lse)
    kept, added = (lse - new_top).exp(), (block_lse - new_top).exp()
    average = torch.where(total[:, None] > 0, out / total[:, None], 0.0)
    new = kept[:, None] * average + added[:, None] * (scores.softmax(-1) @ values)
    return new_top, torch.ones_like(total), new


def home_by_reduce_scatter(comm, summand):
    parts = {owner: summand(owner) for owner in [(comm.rank - step) % comm.size for step in range(comm.size)]}
    mine = torch.stack([parts[owner] for owner in range(comm.size)])
    return comm.reduce_scatter(torch.empty_like(mine[:1]), mine)[0]


def balance_by_counts(comm, probabilities, chosen):
    tokens, experts = probabilities.shape
    counts = torch.nn.functional.one_hot(chosen, experts).sum((0, 1)).double()
    share = comm.all_reduce(counts) / (chosen.numel() * comm.size)
    return experts / tokens * (probabilities @ share).sum()


def dispatch_by_messages(comm, x, chosen, expert):
    """Rank by rank, by send and recv, without a sort."""
    out, counts = torch.empty_like(x), comm.all_gather_object(chosen.bincount(minlength=comm.size).tolist())
    for source in range(comm.size):
        for there in range(comm.size):
            at = (chosen == there).nonzero()[:, 0]
            if source == there == comm.rank:
                out[at] = expert(x[at])
            elif source == comm.rank and counts[source][there]:
                comm.send(x[at], there)
                out[at] = comm.recv(x.new_empty(len(at), x.shape[1]), there)
            elif there == comm.rank and counts[source][there]:
                rows = comm.recv(x.new_empty(counts[source][there], x.shape[1]), source)
                comm.send(expert(rows), source)
    return out


RIGHT = {
    "merge-build": [by_sigmoid, by_the_larger], "rescaling-fix": [take_in_by_softmax],
    "last-hop-fix": [home_by_reduce_scatter], "balance-fix": [balance_by_counts],
    "dispatch-build": [dispatch_by_messages],
}  # fmt: skip


def test_each_exercise_has_a_right_answer_here():
    assert RIGHT.keys() == {**judge_context.EXERCISES, **judge_home.EXERCISES, **judge_experts.EXERCISES}.keys()


@on_ranks(4, slow=(4,))
def test_each_axis_trains_the_same_model(world):
    seen = {axis: axes.measured(axis, world.comm) for axis in axes.AXES}
    for axis, of_axis in seen.items():
        whole = seen["one process, experts" if "expert" in axis else "one process"]
        assert of_axis["loss"] == pytest.approx(whole["loss"], abs=1e-12), axis
        assert max(of_axis[name] for name in axes.HELD) > 0 and (of_axis["sent"] > 0) == (axis[:3] != "one"), axis
    gradients = seen["one process"]["gradients"]
    assert seen["data"]["sent"] <= 2 * gradients * 3 // 4 * 1.35  # one bucket; halves that do not divide by ranks
    assert seen["context, ring"]["forward"] == {"send": 3 * axes.BLOCKS}
    assert seen["context, ring"]["backward"] == {"send": 7 * axes.BLOCKS, "all_reduce": 1}
    assert seen["sequence"]["forward"] == {"all_gather": 2 * axes.BLOCKS, "reduce_scatter": 2 * axes.BLOCKS}
    assert seen["expert"]["forward"]["all_to_all"] == seen["expert"]["backward"]["all_to_all"] == 2 * axes.BLOCKS


def test_work_is_counted_and_each_order_does_all_of_it():
    for ranks in (1, 2, 3, 4, 8):
        for order, longest in (("contiguous", 4 * ranks - 2), ("zigzag", 2 * ranks)):
            counted = work.quarter_blocks(order, ranks)
            assert work.path(counted) == longest and sum(map(sum, counted)) == 2 * ranks**2
    assert plain.CHUNKS.keys() == {"contiguous", "zigzag"}


@on_ranks(3)
def test_what_the_lecture_shows_of_experts_is_what_it_says(world):
    """Rows without the layer's division: an expert's gradient is that of the sum of all losses."""
    comm, n = world.comm, world.size
    torch.manual_seed(0)
    tokens, expert = torch.randn(n, 2 * n, 5).double(), torch.nn.Linear(5, 5, bias=False).double()
    each = [2] * n
    back = expert_plain.Rows.apply(
        expert_plain.Rows.apply(tokens[comm.rank], comm.group, each, each), comm.group, each, each
    )
    assert torch.equal(back, tokens[comm.rank])
    there = expert_plain.Rows.apply(tokens[comm.rank].clone().requires_grad_(), comm.group, each, each)
    expert_plain.Rows.apply(expert(there), comm.group, each, each).square().mean().backward()
    on_ranks_, expert.weight.grad = expert.weight.grad, None
    mine = tokens[:, 2 * comm.rank : 2 * comm.rank + 2]
    (expert(mine).square().sum() / tokens.numel()).backward()
    assert (on_ranks_ - n * expert.weight.grad).abs().max() < 1e-12
