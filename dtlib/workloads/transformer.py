"""An encoder-decoder transformer that can copy words of its source, as a list of layers.

    source, prefix -> Embedding -> Encoder ... Encoder -> Decoder ... Decoder -> Pointer -> log-probabilities

Between layers goes one tuple ``(x, y, source)``: the source's states (batch, S, width), those of the summary so far
(batch, T, width), and the numbers of the source's tokens (batch, S), which the last layer copies from. So the list may
be cut anywhere into stages of a pipeline.

A. Vaswani et al., "Attention is all you need", 2017; A. See et al., "Get to the point: summarization with
pointer-generator networks", 2017.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtlib.parallel.pipeline.layers import LayerSpec, TiedLayerSpec
from dtlib.workloads.workload import Chain

PAD = 0


def positions(length: int, width: int, like: Tensor) -> Tensor:
    """Sines and cosines of wavelengths from 2 pi to 20,000 pi: (length, width)."""
    wave = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(10_000) / width))
    angles = torch.arange(length, device=like.device)[:, None] * wave
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class Embedding(nn.Module):
    """Tokens to vectors. A source token also has the vector of the one before it in its own, moved out of the way by
    half the width: so "which word follows this one in the source?" can be looked up, which is what copying takes."""

    def __init__(self, vocabulary: int, width: int, dropout: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width) * width**-0.5)
        self.before = nn.Linear(width, width, bias=False)
        self.before.weight = nn.Parameter(torch.eye(width).roll(width // 2, 0))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        source, prefix = inputs
        x, y = self.embed(source), self.embed(prefix)
        x = x + functional.pad(self.before(x)[:, :-1], (0, 0, 1, 0))
        return self.dropout(x), self.dropout(y), source

    def embed(self, tokens: Tensor) -> Tensor:
        width = self.weight.shape[1]
        vectors = functional.embedding(tokens, self.weight) * width**0.5
        return vectors + positions(tokens.shape[1], width, vectors)


class Attention(nn.Module):
    """y looks at x: (batch, T, width) and (batch, S, width) to (batch, T, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        nn.init.normal_(self.out.weight, std=0.1 * width**-0.5)  # a deep net begins close to the identity

    def forward(self, y: Tensor, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = (
            each.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for each in (self.query(y), *self.key_value(x).chunk(2, dim=2))
        )
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(found.transpose(1, 2).flatten(2))


def visible(source: Tensor) -> Tensor:
    """Where a source is not padding, as a mask of attention: (batch, 1, 1, S)."""
    return (source != PAD)[:, None, None]


class FeedForward(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        nn.init.normal_(self.get_parameter("3.weight"), std=0.05 * width**-0.5)


class Encoder(nn.Module):
    """The source looks at itself."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), Attention(width, heads), FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, y, source = inputs
        seen = self.norm(x)
        x = x + self.dropout(self.attention(seen, seen, visible(source)))
        return x + self.dropout(self.mlp(x)), y, source


class Decoder(nn.Module):
    """The summary looks back at itself, then at the source."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm, self.itself = nn.LayerNorm(width), Attention(width, heads)
        self.norm_source, self.at_source = nn.LayerNorm(width), Attention(width, heads)
        self.mlp, self.dropout = FeedForward(width), nn.Dropout(dropout)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, y, source = inputs
        seen = self.norm(y)
        y = y + self.dropout(self.itself(seen, seen, causal=True))
        y = y + self.dropout(self.at_source(self.norm_source(y), x, visible(source)))
        return x, y + self.dropout(self.mlp(y)), source


class Pointer(nn.Module):
    """Log-probabilities of the next token, (batch, T, vocabulary): a mixture of two distributions.

    Over the vocabulary, by the tied embedding; and over the source's places, by an attention whose weights are
    added up for each token that stands there. A gate says how much of each. At first it copies what comes after the
    places where the source has the summary's last token; the rest is learnt.
    """

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width).normal_(std=width**-0.5))  # tied to the embedding's
        self.norm, self.norm_source = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.gate = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        with torch.no_grad():
            self.query.weight.copy_(torch.eye(width))
            self.key.weight.copy_(torch.eye(width).roll(width // 2, 1))  # back from where the embedding moved it

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, source = inputs
        y = self.norm(y)
        scores = self.query(y) @ self.key(self.norm_source(x)).transpose(1, 2) / y.shape[2] ** 0.5
        scores, logits, gate = (_whole(each) for each in (scores, functional.linear(y, self.weight), self.gate(y)))
        places = scores.masked_fill((source == PAD)[:, None], -torch.inf).log_softmax(2)
        copied = (places + functional.logsigmoid(-gate)).exp()
        written = (logits.log_softmax(2) + functional.logsigmoid(gate)).exp()
        return (written.scatter_add(2, source[:, None].expand_as(copied), copied) + 1e-9).log()


def _whole(tensor: Tensor) -> Tensor:
    """In float32 where it has 16 bits: sums over a vocabulary need them."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class Summarizer(Chain):
    """The layers on one rank. While a summary is written its source is encoded once."""

    def encode(self, source: Tensor) -> Tensor:
        """The source's states behind the last encoder: (batch, S, width)."""
        values = self.layers["0"]((source, source[:, :1]))
        for layer in self.layers.values():
            values = layer(values) if isinstance(layer, Encoder) else values
        return values[0]

    def next(self, x: Tensor, source: Tensor, prefix: Tensor) -> Tensor:
        """Log-probabilities of the token behind the prefix (batch, T): (batch, vocabulary)."""
        first = self.layers["0"]
        assert isinstance(first, Embedding)
        values = x, first.embed(prefix), source
        *_, pointer = self.layers.values()
        for layer in self.layers.values():
            values = layer(values) if isinstance(layer, Decoder) else values
        x, y, _ = values
        return pointer((x, y[:, -1:], source))[:, 0]


def layers(vocabulary: int, width: int, heads: int, encoders: int, decoders: int, dropout: float) -> list[LayerSpec]:
    return [
        TiedLayerSpec("embedding", Embedding, vocabulary, width, dropout),
        *[LayerSpec(Encoder, width, heads, dropout) for _ in range(encoders)],
        *[LayerSpec(Decoder, width, heads, dropout) for _ in range(decoders)],
        TiedLayerSpec("embedding", Pointer, vocabulary, width),
    ]
