"""Live and peak bytes of tensor, context and expert parallelism, plain and full, against formulas of named terms."""

from dataclasses import dataclass

import torch
from torch import nn

from dtlib.measure.live import Live
from dtlib.parallel import expert, tensor
from dtlib.parallel.context import attention
from dtlib.parallel.context.plain import ring_attention
from dtlib.parallel.expert.plain import MixtureOfExperts
from dtlib.parallel.tensor.plain import ParallelMLP
from tests.models import without_collection
from tests.ranks import on_ranks

NUMBER = 4  # bytes
TOKENS, WIDTH, HIDDEN, HEADS = 48, 16, 192, 2
EXPERT_HIDDEN = 64
ACTIVATION = NUMBER * TOKENS * WIDTH  # bytes of what layers take and give


@dataclass
class Bytes:
    """Beyond parameters, their gradients and inputs: after the forward pass with its output, and the most of each."""

    kept: int
    forward: int
    backward: int


def counted(function, inputs, module=None) -> Bytes:
    """In the second of two steps, as the first makes gradients and a communicator's memory."""

    def step(live=None):
        output = function(*inputs)
        after_forward = live and (live.now, live.peak)
        if live:
            live.peak = live.now
        output.backward(torch.ones_like(output))
        for x in inputs:
            x.grad = None
        return after_forward

    step()
    states = [tensor for p in (module.parameters() if module else ()) for tensor in (p, p.grad)]
    with without_collection(), Live(*states, *inputs) as live:
        base = live.now
        kept, forward = step(live)
    return Bytes(kept - base, forward - base, live.peak - base)


@on_ranks(2, 3, 4, slow=(3,))
def test_tensor_parallelism_keeps_a_slice_of_what_lies_between_its_layers(world):
    slice_of_hidden = NUMBER * TOKENS * HIDDEN // world.size
    slice_of_weight = NUMBER * WIDTH * HIDDEN // world.size
    between = 2 * slice_of_hidden  # what the activation takes and gives
    output, gradient = ACTIVATION, ACTIVATION
    for kind, outputs in (
        (ParallelMLP, 2),
        (tensor.ParallelMLP, 3),
    ):  # the summand, the sum; in full before its bias too
        model, x = kind(WIDTH, HIDDEN, world.comm), torch.ones(TOKENS, WIDTH).requires_grad_()
        assert counted(model, [x], model) == Bytes(
            kept=between + output,
            forward=between + outputs * output,
            backward=between + output + gradient + slice_of_hidden + slice_of_weight,  # gradients of the second layer
        )


@on_ranks(2, 3, 4, slow=(3,))
def test_a_ring_keeps_its_tokens_and_needs_the_scores_of_a_block(world):
    """And as much as one process with as many tokens, but for messages."""
    alone, tokens = world.comm.split(world.rank), (128, 256)
    found = {(kind, count, size): ring(kind, comm, count)
             for kind in ("plain", "full") for count in tokens
             for size, comm in ((1, alone), (world.size, world.comm))}  # fmt: skip
    for kind, count in ((kind, count) for kind in ("plain", "full") for count in tokens):
        of_tokens = NUMBER * HEADS * count * WIDTH  # the queries, or keys, or values
        keys_and_values, half = 2 * of_tokens, count // 2
        mask = half * half
        ours, one = found[kind, count, world.size], found[kind, count, 1]
        output, sums = of_tokens, NUMBER * HEADS * count
        assert ours.kept == one.kept == output + sums
        assert ours.forward == one.forward + keys_and_values  # those that arrive
        # Keys and values that arrive, gradients that arrive, and, where these are passed on, those that leave.
        messages = keys_and_values * (2 if world.size == 2 else 3)
        no_mask = mask if kind == "full" else 0  # with keys of others
        # When messages come early, a single number may be gone at the peak.
        assert 0 <= one.backward + messages - no_mask - ours.backward <= 8
    for kind, copies in (("plain", 3), ("full", 5)):
        small, large = (found[kind, count, world.size] for count in tokens)
        pairs = (tokens[0] // 2) ** 2  # of a query and a key, in a block
        scores, mask = NUMBER * HEADS * pairs, pairs
        assert large.forward - 2 * small.forward == 2 * (copies * scores + mask)  # all else grows with tokens
        assert large.kept == 2 * small.kept


def ring(kind: str, comm, tokens: int) -> Bytes:
    inputs = [torch.ones(1, HEADS, tokens, WIDTH).requires_grad_() for _ in range(3)]
    if kind == "plain":
        return counted(lambda q, k, v: ring_attention(q, k, v, comm), inputs)
    sequence = attention.Sequence(comm, tokens * comm.size, "zigzag", causal=True)
    return counted(lambda q, k, v: attention.ring_attention(q, k, v, sequence), inputs)


@on_ranks(2, 3, 4, slow=(3,))
def test_experts_keep_the_rows_that_arrive(world):
    """As many as leave, where the gate is even: what one process has for all experts, and while an expert's backward
    pass runs, what it has for one expert and all rows."""
    comm, alone, count = world.comm, world.comm.split(world.rank), world.size
    rows = 4 * ACTIVATION  # that an expert takes, that come back, these times their weights, and the output
    hidden = 2 * NUMBER * TOKENS * EXPERT_HIDDEN  # what the activation takes and gives
    indices = 3 * 8 * TOKENS  # chosen experts, the order of rows, and their tokens
    gate = NUMBER * TOKENS * (count + 1)  # probabilities, and the chosen ones
    balance = NUMBER * (count + 1)
    plain = rows + hidden + indices + gate + balance
    counting = ACTIVATION + 8 * TOKENS  # tokens that are no padding, and where they are
    z_loss = NUMBER * TOKENS * (count + 1) + NUMBER  # logits, and their log-sums
    choices = 8 * count + NUMBER  # and how many tokens there are
    for kind, kept in ((MixtureOfExperts, plain), (expert.MixtureOfExperts, plain + counting + z_loss + choices)):
        ours, all_experts, one_expert = (experts(kind, *how) for how in ((comm, 1), (alone, count), (alone, 1)))
        assert ours.kept == all_experts.kept == kept
        assert ours.forward == all_experts.forward
        wider_gate = all_experts.kept - one_expert.kept
        assert ours.backward == one_expert.backward + wider_gate


def experts(kind, comm, count: int) -> Bytes:
    """Of a layer with so many experts on this rank, whose gate gives each as many tokens."""
    layers = [(nn.Linear(WIDTH, EXPERT_HIDDEN), nn.GELU(), nn.Linear(EXPERT_HIDDEN, WIDTH)) for _ in range(count)]
    model = kind(WIDTH, [nn.Sequential(*each) for each in layers], comm)
    nn.init.eye_(model.gate.weight)
    x = nn.functional.one_hot(torch.arange(TOKENS) % model.count, WIDTH).float().requires_grad_()
    return counted(model, [x], model)
