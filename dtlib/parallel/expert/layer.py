"""A mixture of experts for real models; plain.py explains the idea.

Ranks may have different numbers of tokens, and padding tokens, which use no expert capacity. The auxiliary losses are
means over the tokens of all ranks without padding: ``balance``, and ``z_loss``, which keeps logits small (B. Zoph et
al., "ST-MoE", arXiv:2202.08906, section 3). Capacity and balance: W. Fedus et al., "Switch transformers",
arXiv:2101.03961.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

from dtlib.comm import AnyCommunicator, as_communicator
from dtlib.errors import DtlibError
from dtlib.gradients.same_model import check_same_arguments, check_same_values
from dtlib.gradients.shard_info import info_of, note
from dtlib.parallel.expert.plain import through_experts


class MixtureOfExperts(nn.Module):
    """``moe(x)`` for this rank's tokens, of shape (..., width). In ``moe(x, mask)``, False marks padding (output 0).

        mesh = world.mesh(data=2, expert=2)
        moe = MixtureOfExperts(64, [mlp() for _ in range(4)], mesh["expert"], top=2, data=mesh["data"])
        model = DataParallel(Block(moe), mesh["data", "expert"])        # averages all parameters except the experts'
        loss = mean_over_tokens(losses, mesh["data", "expert"]) + 0.01 * moe.balance + 0.001 * moe.z_loss

    Args:
        width: features of a token.
        experts: this rank's modules, from (rows, width) to (rows, width). Number and shapes are equal on all ranks.
            Create them after ``torch.manual_seed(rank)``: with one seed for all ranks, ranks would have equal experts.
            Experts that are frozen now must stay frozen.
        comm: the ranks over which experts are sharded: rank r has the experts from number r * len(experts) on.
        top: experts per token, 1 or 2. With 1, the output is weighted by the gate's probability; with 2, by the two
            probabilities divided by their sum.
        capacity: each expert accepts ``ceil(capacity * top * tokens / number of experts)`` tokens of each rank. Tokens
            beyond that are dropped, second choices first. None: all tokens are accepted.
        data: the ranks with copies of the same experts. The experts' gradients are averaged over these ranks when the
            backward pass has computed them.

    After a forward pass, ``balance`` (1 if all experts receive the same number of tokens) and ``z_loss`` are this
    rank's parts of means over the tokens of all ranks. Add them to the loss; its gradients are averaged over ranks.
    ``choices`` is the number of choices per expert on all ranks. ``dropped`` is the number of this rank's choices that
    were dropped.

    ``state_dict()`` names experts by their numbers, and ``whole_state_dict`` contains all experts.
    dtlib.checkpoint loads them on any number of ranks.

    Raises:
        DtlibError: on every rank, if arguments differ between ranks or are invalid.
    """

    communicates_in_forward = True  # read by code that lets ranks stop early, such as DataParallel.join

    def __init__(self, width: int, experts: Iterable[nn.Module], comm: AnyCommunicator, top: int = 1,
                 capacity: float | None = None, data: AnyCommunicator | None = None):  # fmt: skip
        super().__init__()
        self.comm, self.data = as_communicator(comm), None if data is None else as_communicator(data)
        experts = list(experts)
        self.top, self.capacity, self.count = top, capacity, len(experts) * self.comm.size
        shapes = [[(name, tuple(p.shape)) for name, p in expert.named_parameters()] for expert in experts]
        who = type(self).__name__
        check_same_arguments(self.comm, who, width=width, experts=shapes, top=top, capacity=capacity)
        if not experts or not 1 <= top <= min(2, self.count):
            raise DtlibError(f"{who}(top={top}) of {self.count} experts: use 1, or 2 if count > 1.")
        if capacity is not None and not capacity > 0:
            raise DtlibError(f"{who}(capacity={capacity}): a number above 0, or None for all tokens.")
        if any(info_of(parameter).experts for expert in experts for parameter in expert.parameters()):
            raise DtlibError(
                "MixtureOfExperts: these experts are already in a MixtureOfExperts, so their gradients would be "
                "divided twice: create new experts, also if you run a cell again."
            )
        first = self.comm.rank * len(experts)
        self.experts = nn.ModuleDict({str(first + number): expert for number, expert in enumerate(experts)})
        self.gate = nn.Linear(width, self.count, bias=False)
        for comm in filter(None, (self.comm, self.data)):
            comm.broadcast(self.gate.weight.data)
        for parameter in self.experts.parameters():
            copy = (self.data.rank if self.data else 0) if self.comm.size > 1 or self.data is not None else None
            # A checkpoint saves only the first copy of an expert.
            note(parameter, experts=self.comm.members, expert_copy=copy)
            if parameter.requires_grad:
                # An expert's gradient is already the sum over all ranks' losses, so divide once for the mean.
                parameter.register_hook(lambda gradient: gradient / self.comm.size)
            if self.data is not None:
                self.data.broadcast(parameter.data)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter) -> None:
        assert self.data is not None
        self.data.all_reduce(parameter.grad, op="mean")

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            check_same_values(self, [self.gate.weight], self.comm, "the gate")
        tokens = x.flatten(0, -2)
        counting = torch.ones(len(tokens), dtype=torch.bool, device=x.device) if mask is None else mask.flatten()
        if mask is not None and len(counting) != len(tokens):
            raise DtlibError(f"MixtureOfExperts: mask has shape {tuple(mask.shape)}, x needs {tuple(x.shape[:-1])}.")
        index = counting.nonzero()[:, 0]
        kept = tokens[index]
        logits = self._logits(kept)
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(self.top)
        if self.top > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        self._take_losses(logits, probabilities, chosen)
        # Sort choices by expert; for each expert, first choices before second choices, each in the order of tokens.
        expert, token, weight = chosen.T.flatten(), index.repeat(self.top), weights.T.flatten()
        order = expert.argsort(stable=True)
        expert, token, weight = expert[order], token[order], weight[order]
        counts = expert.bincount(minlength=self.count)
        if self.capacity is not None:
            places = math.ceil(self.capacity * self.top * len(index) / self.count)
            # A choice's position in its expert's queue; positions beyond the capacity are dropped.
            place = torch.arange(len(expert), device=x.device) - (counts.cumsum(0) - counts)[expert]
            token, weight, counts = token[place < places], weight[place < places], counts.clamp(max=places)
        self.dropped = len(expert) - len(token)
        back = through_experts(tokens[token], counts, self.experts.values(), self.comm.group) * weight[:, None].to(
            x.dtype
        )
        return torch.zeros_like(tokens).index_add(0, token, back).view_as(x)

    def _logits(self, tokens):
        # Compute the gate in float32, because a 16-bit softmax could choose other experts.
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            return functional.linear(tokens.to(wide), self.gate.weight.to(wide))

    def _take_losses(self, logits, probabilities, chosen) -> None:
        """Store the auxiliary losses: this rank's parts of means over the tokens of all ranks.

        Gradients are averaged over ranks afterwards, so each part is multiplied by the number of ranks.
        """
        ranks = self.comm.size * (self.data.size if self.data is not None else 1)
        of_all = chosen.flatten().bincount(minlength=self.count).double()
        for comm in filter(None, (self.comm, self.data)):
            of_all = comm.all_reduce(of_all)
        tokens = of_all.sum().clamp(min=1) / self.top
        share = (of_all / (tokens * self.top)).to(probabilities.dtype)
        factor = (ranks / tokens).to(probabilities.dtype)
        self.choices = of_all.long()
        self.balance = self.count * (share * probabilities.sum(0)).sum() * factor
        self.z_loss = logits.logsumexp(-1).square().sum() * factor


def whole_state_dict(model: nn.Module, comm: AnyCommunicator) -> dict[str, torch.Tensor]:
    """Return ``model.state_dict()`` with the experts of all ranks of ``comm``, the expert axis, on every rank.

    All ranks call it.
    """
    ours = {name for name, parameter in model.named_parameters() if info_of(parameter).experts}
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    experts = as_communicator(comm).all_gather_object({name: state[name] for name in state if name in ours})
    return state | {name: value for one in experts for name, value in one.items()}
