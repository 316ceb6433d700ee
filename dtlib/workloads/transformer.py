"""An encoder-decoder transformer that can copy words of its source, as a list of layers.

    source, prefix -> Embedding -> Encoder ... Encoder -> Decoder ... Decoder -> Pointer -> log-probabilities

Each layer passes one tuple ``(x, y, source)`` to the next layer. ``x`` are the states of the source, (batch, S, width).
``y`` are the states of the summary so far, (batch, T, width). ``source`` are the source's tokens, (batch, S), from
which the last layer copies. So a pipeline can divide the list into stages at any place.

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
    """Return the position encoding, (length, width): sines and cosines with wavelengths from 2 pi to 20,000 pi."""
    wave = torch.exp(torch.arange(0, width, 2, device=like.device) * (-math.log(10_000) / width))
    angles = torch.arange(length, device=like.device)[:, None] * wave
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class Embedding(nn.Module):
    """An embedding of source and summary tokens.

    A source token's vector also includes the vector of the previous token, shifted by half the width. So attention can
    find the word that follows a given word in the source, which copying needs.
    """

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
        """Return the vectors of tokens (batch, T), with positions: (batch, T, width)."""
        width = self.weight.shape[1]
        vectors = functional.embedding(tokens, self.weight) * width**0.5
        return vectors + positions(tokens.shape[1], width, vectors)


class Attention(nn.Module):
    """Attention with queries from y (batch, T, width), and keys and values from x (batch, S, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        # Small initial weights: with residual connections, a deep network is at first close to the identity.
        nn.init.normal_(self.out.weight, std=0.1 * width**-0.5)

    def forward(self, y: Tensor, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = (
            each.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for each in (self.query(y), *self.key_value(x).chunk(2, dim=2))
        )
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(found.transpose(1, 2).flatten(2))


def visible(source: Tensor) -> Tensor:
    """Return the attention mask of a source, (batch, 1, 1, S): False at padding."""
    return (source != PAD)[:, None, None]


class FeedForward(nn.Sequential):
    """A norm and a perceptron with small initial weights."""

    def __init__(self, width: int):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        nn.init.normal_(self.get_parameter("3.weight"), std=0.05 * width**-0.5)


class Encoder(nn.Module):
    """An encoder layer: self-attention of the source."""

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
    """A decoder layer: causal self-attention of the summary, then attention to the source."""

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
    """The last layer: log-probabilities of the next token, (batch, T, vocabulary), from a mixture of two distributions.

    The first is over the vocabulary, by the tied embedding. The second is over the source's tokens, by attention: the
    weights of all positions with the same token are added. A gate weights the two. The initial parameters copy the
    token that follows the summary's last token in the source; training adapts them.
    """

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width).normal_(std=width**-0.5))  # tied to the embedding
        self.norm, self.norm_source = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.gate = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        with torch.no_grad():
            self.query.weight.copy_(torch.eye(width))
            self.key.weight.copy_(torch.eye(width).roll(width // 2, 1))  # undo the shift of ``Embedding.before``

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
    """Convert a 16-bit tensor to float32, because sums over a vocabulary need the precision."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class Summarizer(Chain):
    """The layers on one rank, with methods for beam search that encode each source only once."""

    def encode(self, source: Tensor) -> Tensor:
        """Return the source's states after the last encoder layer, (batch, S, width)."""
        values = self.layers["0"]((source, source[:, :1]))
        for layer in self.layers.values():
            values = layer(values) if isinstance(layer, Encoder) else values
        return values[0]

    def next(self, x: Tensor, source: Tensor, prefix: Tensor) -> Tensor:
        """Return log-probabilities of the token after the prefix (batch, T): (batch, vocabulary)."""
        first = self.layers["0"]
        assert isinstance(first, Embedding)
        values = x, first.embed(prefix), source
        *_, pointer = self.layers.values()
        for layer in self.layers.values():
            values = layer(values) if isinstance(layer, Decoder) else values
        x, y, _ = values
        return pointer((x, y[:, -1:], source))[:, 0]


def layers(vocabulary: int, width: int, heads: int, encoders: int, decoders: int, dropout: float) -> list[LayerSpec]:
    """Return the layers of the model; first and last share the embedding."""
    return [
        TiedLayerSpec("embedding", Embedding, vocabulary, width, dropout),
        *[LayerSpec(Encoder, width, heads, dropout) for _ in range(encoders)],
        *[LayerSpec(Decoder, width, heads, dropout) for _ in range(decoders)],
        TiedLayerSpec("embedding", Pointer, vocabulary, width),
    ]
