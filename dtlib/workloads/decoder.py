"""A decoder that predicts text byte by byte. Its sizes are those of ``dtlib.planner``, so that plans can be run.

    bytes (batch, seq) -> Embedding -> Block ... Block -> Head -> logits (batch, seq, 256)

It has ``planner.Model(layers, hidden, heads, 256, seq, tied=False).parameters`` parameters. There are norms before
attention and MLP, and none before the head. With a ``tensor`` communicator each layer is divided over its ranks, as in
parallel/tensor, and computes the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from dtlib.errors import DtlibError, number
from dtlib.measure.trace import phase
from dtlib.parallel.expert import MixtureOfExperts
from dtlib.parallel.pipeline.layers import LayerSpec
from dtlib.parallel.tensor import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from dtlib.workloads import stories
from dtlib.workloads.workload import Chain, Workload, settings, shared_mean

if TYPE_CHECKING:
    from dtlib.comm import Communicator
    from dtlib.workloads.shared_tokens import Shared


VOCABULARY = 256
DEFAULTS = {
    "layers": 8, "hidden": 128, "heads": 4, "seq": 64, "recompute": "none", "seed": 0, "test_samples": 64,
    "experts": 0, "top": 1, "balance": 0.01,
}  # fmt: skip
RECOMPUTE = ("none", "selective", "full")


class Attention(nn.Module):
    """Causal self-attention on one rank, with the parameter names and values of ``ParallelAttention``."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads_here, self.head_width, self.causal = heads, width // heads, True
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    forward, mixed = ParallelAttention.forward, ParallelAttention.mixed


class MLP(nn.Module):
    """A perceptron with one hidden layer and GELU: (..., width) to (..., width)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(functional.gelu(self.linear1(x)))


class Embedding(nn.Module):
    """An embedding of bytes and their positions: (batch, seq) to (batch, seq, width)."""

    def __init__(self, seq: int, width: int, tensor: Communicator | None = None, context: Shared | None = None):
        super().__init__()
        self.context = context
        self.bytes = VocabParallelEmbedding(VOCABULARY, width, tensor) if tensor else nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.1 * torch.randn(seq, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.context is None:
            return self.bytes(x) + self.places
        return self.bytes(self.context.tokens(x)) + self.places[self.context.positions(x.shape[1])]


class Block(nn.Module):
    """A transformer block: (batch, seq, width) to (batch, seq, width).

    ``recompute`` is what the backward pass recomputes: ``selective`` the core of attention, ``full`` the whole block.
    """

    def __init__(
        self, width: int, heads: int, recompute: str = "none", tensor: Communicator | None = None,
        context: Shared | None = None, experts: Callable[[int], nn.Module] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = ParallelAttention(width, heads, tensor, causal=True) if tensor else Attention(width, heads)
        if experts:
            self.mlp = experts(width)
        else:
            self.mlp = ParallelMLP(width, 4 * width, tensor) if tensor else MLP(width, 4 * width)
        # Replace the core of attention of this instance only; its projections work on each rank's tokens as before.
        if context is not None:
            vars(self.attention)["mixed"] = partial(context_attention, self.attention, context)
        self.attention.recompute, self.recompute = recompute == "selective", recompute == "full"

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.inside, x, use_reentrant=False, preserve_rng_state=False)
        return self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        """Compute the block without recomputation."""
        with phase("forward"):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))


def context_attention(attention: nn.Module, context: Shared, of_heads: Tensor) -> Tensor:
    """Compute the core of attention over the tokens of all ranks of a context axis."""
    by_heads = of_heads.unflatten(-1, (attention.heads_here, 3, attention.head_width))
    mixed = context.attention(*(each.transpose(-3, -2) for each in by_heads.unbind(-2)))
    return mixed.transpose(-3, -2).flatten(-2)


class Mixture(nn.Module):
    """A mixture of experts in one process, with the parameter names and values of ``MixtureOfExperts``.

    It computes every expert for every token, and is used for models that are not trained.
    """

    def __init__(self, width: int, experts: list, top: int):
        super().__init__()
        self.experts, self.top = nn.ModuleDict({f"{number}": expert for number, expert in enumerate(experts)}), top
        self.gate = nn.Linear(width, len(experts), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True) if self.top > 1 else weights
        experts = enumerate(self.experts.values())
        return sum((weights * (chosen == number)).sum(-1, keepdim=True) * expert(x) for number, expert in experts)


def experts_of(
    width: int, count: int, top: int, expert: Communicator | None = None, copies: Communicator | None = None
) -> nn.Module:
    """Return a layer of ``count`` experts; with ``expert``, a communicator, the layer has this rank's experts only.

    Every rank initialises all experts and drops those of other ranks. So initial values do not depend on the number of
    ranks.
    """
    experts = [MLP(width, 4 * width) for _ in range(count)]
    if expert is None:
        return Mixture(width, experts, top)
    here = count // expert.size
    return MixtureOfExperts(width, experts[here * expert.rank :][:here], expert, top, data=copies)


class Decoder(Chain):
    """The layers on one rank; each is a unit that ZeRO stage 3 shards."""

    def __init__(self, specs: Iterable[LayerSpec], seed: int):
        super().__init__(specs, seed)
        self.layers = nn.ModuleList(self.layers.values())  # type: ignore[assignment]  # a ModuleDict in Chain

    def forward(self, *inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
        (value,) = inputs
        for layer in self.layers.children():
            value = layer(value)
        assert isinstance(value, Tensor)
        return value


def head(width: int, tensor: Communicator | None = None) -> LayerSpec:
    """Return the last layer, (batch, seq, width) to logits; with ``tensor``, each rank has a part of the vocabulary."""
    if tensor is None:
        return LayerSpec(nn.Linear, width, VOCABULARY, bias=False)
    return LayerSpec(ColumnParallelLinear, width, VOCABULARY, tensor, bias=False, gather_output=False)


class Windows(Dataset):
    """Windows of a text: pairs of ``seq`` bytes and the byte after each of them, both (seq,) int64."""

    def __init__(self, text: bytes, seq: int):
        self.bytes, self.seq = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), seq

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.seq

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        window = self.bytes[place * self.seq : (place + 1) * self.seq + 1]
        return window[:-1], window[1:]


def loss_fn(
    outputs: Tensor, targets: Tensor, tensor: Communicator | None = None, context: Shared | None = None,
    layers: Iterable[MixtureOfExperts] = (), balance: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the mean of -log p over all bytes, plus ``balance`` times the balance loss of each layer of experts."""
    if context is not None:
        targets = context.tokens(targets)
    if layers:
        return loss_fn(outputs, targets) + balance * sum(layer.balance for layer in layers)
    if tensor is not None:
        return vocab_parallel_cross_entropy(outputs, targets, tensor, reduction="mean")
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def workload(
    config: dict, tensor: Communicator | None = None, context: Shared | None = None, expert: Communicator | None = None,
    copies: Communicator | None = None,
) -> Workload:  # fmt: skip
    """Return the decoder workload. Its text are the function descriptions of the workload ``summarization``, as bytes.

    Args:
        config: ``layers``, ``hidden``, ``heads`` and ``seq`` are the sizes of the model. ``recompute`` is ``none``,
            ``selective`` or ``full``. ``experts`` is the number of experts that replace each MLP, ``top`` the number
            of experts per token, and ``balance`` the weight of the balance loss. ``test_samples`` is the number of
            samples in an evaluation. ``seed`` initialises the parameters.
        tensor: the communicator of the ranks that divide each layer.
        context: the context axis, whose ranks share each sequence (shared_tokens.py).
        expert: the communicator of the ranks among which experts are divided.
        copies: the communicator of the ranks with the same experts.

    Raises:
        DtlibError: for an unknown key, and for impossible sizes.
    """
    config = settings(config, DEFAULTS, "decoder")
    for key in ("layers", "hidden", "heads", "seq", "test_samples"):
        number(f"{key} of the decoder workload", config[key])
    hidden, heads, seq = config["hidden"], config["heads"], config["seq"]
    if hidden % heads:
        raise DtlibError(f"hidden of the decoder workload is {hidden}, which is not a multiple of {heads} heads.")
    if config["recompute"] not in RECOMPUTE:
        raise DtlibError(
            f"recompute of the decoder workload is {config['recompute']!r}: choose one of {', '.join(RECOMPUTE)}."
        )
    count, top, experts = config["experts"], config["top"], None
    if count and not 1 <= top <= min(2, count):
        raise DtlibError(f"top of the decoder workload is {top}, of {count} experts: give 1 or 2.")
    if count:
        experts = partial(experts_of, count=count, top=top, expert=expert, copies=copies)
    if context is not None:
        context.check(seq, heads)
    block = LayerSpec(Block, hidden, heads, config["recompute"], tensor, context, experts)
    layers = [
        LayerSpec(Embedding, seq, hidden, tensor, context),
        *[block] * config["layers"],
        head(hidden, tensor),
    ]
    train, test = (
        Windows("\n".join(each.article for each in stories.embedded(split)).encode(), seq)
        for split in ("train", "test")
    )
    model, loss = Decoder(layers, config["seed"]), loss_fn
    if any(axis is not None for axis in (tensor, context, expert)):
        mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        loss = partial(loss_fn, tensor=tensor, context=context, layers=mixtures, balance=config["balance"])
    return Workload(
        name="decoder", model=model, layers=layers, experts=count, seed=config["seed"], train=train,
        test=test, collate=None, loss_fn=loss,
        evaluate=partial(evaluate, data=test, samples=config["test_samples"]),
    )  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, comm: Communicator, data: Windows, samples: int) -> dict:
    """Return ``test_loss``: the mean -log p per byte, over ``samples`` samples at equal distances in the test data."""
    count = min(samples, len(data))
    device, lost = next(model.parameters()).device, []
    for at in range(comm.rank, count, comm.size):
        x, y = (each[None].to(device) for each in data[at * len(data) // count])
        lost.append(float(loss_fn(model(x), y)))
    return {"test_loss": shared_mean(lost, comm)}
