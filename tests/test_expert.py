# ruff: noqa: E501
"""Mixtures of experts beside their values (test_parity.py): bytes, refusals, and mistakes that are noticed."""

import math

import pytest
import torch
from torch import nn

import dtlib
from dtlib.parallel.expert import plain
from dtlib.parallel.expert.plain import MixtureOfExperts
from tests.cases import broken_modules, refuses
from tests.devices import of_one_process
from tests.models import EXACT, apart
from tests.ranks import on_ranks

WIDTH, TOKENS, HERE = 6, 13, 2  # tokens of a rank, experts of a rank
WEIGHT = 0.3  # of the auxiliary loss
CASES = {
    "top 1": {"top": 1},
    "top 2": {"top": 2},
    "top 2, capacity 0.5": {"top": 2, "capacity": 0.5},
    "top 2, three experts without tokens": {"top": 2, "unwanted": 3},
    "top 1, one expert with all tokens": {"top": 1, "unwanted": -1},
    "top 1, capacity 1, one expert wanted by all": {"top": 1, "capacity": 1.0, "unwanted": -1},
}


def expert_of(number):
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)).double()


def data_of(ranks, unwanted=0):
    """Tokens of all ranks, cotangents of their outputs, and the weight of the gate."""
    torch.manual_seed(7)
    x, cotangent = torch.randn(2, ranks, TOKENS, WIDTH, dtype=torch.float64)
    gate = torch.randn(ranks * HERE, WIDTH, dtype=torch.float64)
    x[..., 0], gate[:, 0] = 1.0, 0.0  # a bias
    gate[: min(unwanted, ranks * HERE - 2) if unwanted >= 0 else ranks * HERE - 1, 0] = -50.0
    return x, cotangent, gate


def places_of(case, count):
    return TOKENS if case.get("capacity") is None else math.ceil(case["capacity"] * case["top"] * TOKENS / count)


@of_one_process
def alone(ranks, name):
    """One process that goes from token to token: the mean over ranks of their losses."""
    case = CASES[name]
    x, cotangent, gate = data_of(ranks, case.get("unwanted", 0))
    x, gate = x.requires_grad_(), gate.requires_grad_()
    experts = [expert_of(number) for number in range(len(gate))]
    probabilities = (x @ gate.mT).softmax(-1)
    choices, outputs, chances = [0.0] * len(gate), [], probabilities.tolist()
    for rank in range(ranks):
        rows, taken = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(TOKENS)], [0] * len(gate)
        best = [sorted(range(len(gate)), key=lambda e, own=own: -own[e]) for own in chances[rank]]
        for choice in range(case["top"]):
            for t in range(TOKENS):
                e, others = best[t][choice], sum(probabilities[rank, t, o] for o in best[t][: case["top"]])
                choices[e] += 1
                taken[e] += 1
                if taken[e] <= places_of(case, len(gate)):
                    weight = probabilities[rank, t, e] / (others if case["top"] > 1 else 1)
                    rows[t] = rows[t] + weight * experts[e](x[rank, t])
        outputs.append(torch.stack(rows))
    out, choices = torch.stack(outputs), torch.tensor(choices, dtype=torch.float64)
    balance = len(gate) * (choices / choices.sum() * probabilities.mean((0, 1))).sum()
    ((out * cotangent).sum() / ranks + WEIGHT * balance).backward()
    of_experts = [[torch.zeros_like(p) if p.grad is None else p.grad for p in e.parameters()] for e in experts]
    return out.detach(), x.grad, gate.grad, of_experts, balance.detach(), choices


def errors_of(kind, comm, name) -> dict[str, float]:
    """How far a class is from one process, in each of the five, on this rank."""
    case, (out, d_x, d_gate, d_experts, balance, _) = CASES[name], alone(comm.size, name)
    whole, cotangent, gate = data_of(comm.size, case.get("unwanted", 0))
    mine = range(comm.rank * HERE, (comm.rank + 1) * HERE)
    moe = kind(WIDTH, [expert_of(number) for number in mine], comm, case["top"], case.get("capacity")).double()
    with torch.no_grad():
        moe.gate.weight.copy_(gate)
    x = whole[comm.rank].requires_grad_()
    y = moe(x)
    ((y * cotangent[comm.rank]).sum() + WEIGHT * moe.balance).backward()
    comm.all_reduce(moe.gate.weight.grad, op="mean")
    here = [parameter.grad for parameter in moe.experts.parameters()]
    theirs = [gradient for number in mine for gradient in d_experts[number]]
    return {
        "output": apart(y, out[comm.rank]),
        "input": apart(x.grad / comm.size, d_x[comm.rank]),
        "gate": apart(moe.gate.weight.grad, d_gate),
        "experts": max(apart(a, b) for a, b in zip(here, theirs, strict=True)),
        "balance": apart(comm.all_reduce(moe.balance.detach().clone(), op="mean"), balance),
    }


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_cases_have_the_experts_that_their_names_promise(ranks):
    for name, case in CASES.items():
        choices = alone(ranks, name)[-1]
        if unwanted := case.get("unwanted", 0):
            unwanted = min(unwanted, len(choices) - 2) if unwanted > 0 else len(choices) - 1
            assert (choices[:unwanted] == 0).all() and choices.sum() == case["top"] * TOKENS * ranks, name


@on_ranks(1, 2, 3, 4, slow=(1, 4))
def test_messages_and_bytes_are_those_of_the_choices(world):
    comm, n = world.comm, world.size
    for case in CASES.values():
        x, cotangent, gate = data_of(n, case.get("unwanted", 0))
        moe = MixtureOfExperts(WIDTH, [expert_of(i) for i in range(HERE)], comm, case["top"], case.get("capacity"))
        moe.double()
        moe.gate.weight.data.copy_(gate)
        with dtlib.trace() as trace:
            (moe(x[comm.rank].clone().requires_grad_()) * cotangent[comm.rank]).sum().backward()
        sent = {}
        for event in trace.events:
            if event.name == "all_to_all":
                messages, count = sent.get(event.dtype, (0, 0))
                sent[event.dtype] = messages + event.messages, count + event.bytes
        assert sent["int64"] == (n - 1, (n - 1) * HERE * 8)
        chosen = (x @ gate.mT).topk(case["top"]).indices.flatten(1) // HERE  # by rank: ranks that have the experts
        if case.get("capacity") is None:
            leave, arrive = (
                (chosen[comm.rank] != comm.rank).sum(),
                (chosen == comm.rank).sum() - (chosen[comm.rank] == comm.rank).sum(),
            )
        else:
            leave = arrive = (n - 1) * HERE * places_of(case, n * HERE)
        # There and back, forward and backward: this rank's rows leave twice, and the others' rows twice.
        assert sent["float64"] == (4 * (n - 1), 2 * int(leave + arrive) * WIDTH * 8)


@on_ranks(2, 3)
def test_what_lies_outside_of_the_contract_is_refused_on_every_rank(world):
    comm = world.comm

    def made(top=1, capacity=None, width=WIDTH, experts=HERE):
        return MixtureOfExperts(width, [expert_of(i) for i in range(experts)], comm, top, capacity)

    for why, call in {
        "top=3 of": lambda: made(top=3),
        "capacity=0": lambda: made(capacity=0),
        "experts is 1 on rank 0 and 2 on rank 1": lambda: made(experts=1 + comm.rank),
        "Pass the same": lambda: made(top=1 + (comm.rank > 0)),
        "use equal ones": lambda: made().double()(torch.ones(3 + comm.rank, WIDTH).double()),
        r"Ranks have .*\{\(0, ": lambda: made().double()(torch.ones(0, WIDTH).double()),
    }.items():
        refuses(why, call)
    moe, x = made().double(), torch.ones(3, WIDTH).double() * (1 + comm.rank)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    moe(x).sum().backward()
    optimizer.step()  # of gradients of the gate that nobody has averaged
    refuses("average gate gradients", moe, x)
    comm.barrier()


# What stands in plain.py once, what stands there instead, and what is right all the same.
PERFECT = "output is right"
MISTAKES = {
    "expert gradients are sums": ("lambda gradient: gradient / self.size", "lambda gradient: gradient", PERFECT),
    "expert gradients divided twice": ("gradient / self.size", "gradient / self.size**2", PERFECT),
    "expert gradients divided by experts": ("gradient / self.size", "gradient / self.count", PERFECT),
    "a balance of this rank's choices": ("dist.all_reduce(share, group=self.group)", "share = share * self.size", PERFECT),
    "a balance of summed shares": ("(share / self.size *", "(share *", PERFECT),
    "a balance of other experts": ("return self.count * (share", "return len(self.experts) * (share", PERFECT),
    "a balance that is not attached": ("probabilities.mean(0)).sum()", "probabilities.detach().mean(0)).sum()", PERFECT),
    "shares of tokens, not of choices": ("/ chosen.numel()", "/ len(chosen)", PERFECT),
    "the gate learns nothing of the output": ("back * weight[:, None]", "back * weight[:, None].detach()", PERFECT),
    "gradients of rows in another order": ("Rows.apply(gradient, *ctx", "Rows.apply(gradient.flip(0), *ctx", PERFECT),
    "no gradient through the tokens": ("back = through_experts(x[token],", "back = through_experts(x[token].detach(),", PERFECT),
    "weights not normalized": ("if self.top > 1 else", "if False else", ""),
    "weights normalized for one choice": ("if self.top > 1 else", "if True else", ""),
    "first choices alone": ("order % len(x)", "order // self.top", ""),
    "weights in the order of tokens": ("weights.T.flatten()", "weights.flatten()", ""),
    "an order that mixes choices": ("expert, token, weight = expert[order], order % len(x), weight[order]", "expert, token = expert[order], order % len(x)", ""),
    "capacity of one choice": ("self.capacity * self.top * len(x)", "self.capacity * len(x)", ""),
    "capacity rounded down": ("math.ceil(", "math.floor(", ""),
    "one place too many": ("kept = place < places", "kept = (place <= places) & (expert * places + place < self.count * places)", ""),
    "an expert gets the rows of another": ("expert(torch.cat(arrived[e::here]))", "experts[-1 - e](torch.cat(arrived[e::here]))", ""),
    "the last one wins": (".index_add(0, token, back * weight[:, None])", ".index_copy(0, token, back * weight[:, None])", ""),
    "not weighted": ("back * weight[:, None]", "back", ""),
}  # fmt: skip


@on_ranks(3)
def test_every_planted_mistake_is_noticed_half_of_them_with_a_perfect_output(world):
    for mistake, broken, kept in broken_modules(plain, MISTAKES):

        def made(width, experts, comm, *rest, kind=broken["MixtureOfExperts"]):
            return kind(width, experts, comm.group, *rest)

        worst = {}
        for name in ("top 1", "top 2", "top 2, capacity 0.5"):  # each hides mistakes of the others
            try:
                found = errors_of(made, world.comm.split(0), name)
            except RuntimeError:
                found = {}
            for error in world.comm.all_gather_object(found):
                for part in ("output", "input", "gate", "experts", "balance"):
                    worst[part] = max(worst.get(part, 0.0), error.get(part, math.inf))
        assert not max(worst.values()) <= EXACT, mistake
        assert (worst["output"] <= EXACT) == (kept == PERFECT), (mistake, worst)
