"""Sizes, parameters and operations of a transformer, and a GPU by its data sheet.

    h hidden size       f MLP width     a heads     k heads of keys and values
    s tokens per sample     V vocabulary    L layers

    parameters per layer    h h (2 + 2 k/a) + 2 h f, with a gate 3 h f       matrices
                            2 h norms, or with biases (GPT) 9 h + 4 h        vectors: 13 h
    parameters in total     L layers, V h embedding, V h head if it is not tied, s h positions
    operations per token    6 per parameter of the matrices; 12 s h per layer for attention, forward and backward

With f = 4 h these are the formulas of Megatron-LM: P = 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)), and 72 s L h^2
(1 + s/(6 h) + V/(12 L h)) operations per sample (D. Narayanan et al., SC 2021, section 5.1, which has the factor 96
because it includes full recomputation).
"""

from dataclasses import dataclass

from dtlib.errors import DtlibError, number


class PlanError(DtlibError):
    """A model, a mesh or a batch is impossible; the message names the numbers."""


MOST = 10**9  # the largest number that is accepted


def whole(name: str, value: object, least: int = 1, most: int = MOST) -> int:
    """Return ``value`` as an int from ``least`` to ``most``; raise a ``PlanError`` otherwise."""
    return int(number(name, value, least, most, error=PlanError))


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder.

    Args:
        layers: number of layers.
        hidden: hidden size.
        heads: attention heads.
        vocab: size of the vocabulary.
        seq: tokens per sample.
        ffn: width of the MLP; 0 means ``4 * hidden``.
        kv_heads: heads of keys and values; 0 means ``heads``.
        gated: as in Llama, the MLP has a third matrix, norms have no biases, and positions have no parameters.
        tied: whether the head uses the embedding's matrix.
        experts: MLPs per layer, for a mixture of experts; 0 means a single MLP.
        active: experts per token.
        head_dim: size of a head; 0 means ``hidden / heads``.
        name: for messages.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    ffn: int = 0
    kv_heads: int = 0
    gated: bool = False
    tied: bool = True
    experts: int = 0
    active: int = 1
    head_dim: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq", "active"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("ffn", "kv_heads", "experts", "head_dim"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=0))
        if self.hidden % self.heads and not self.head_dim:
            raise PlanError(f"hidden is {self.hidden}, and {self.heads} heads do not divide it: change one of them.")
        if self.heads % self.kv:
            raise PlanError(f"{self.heads} heads are not a multiple of kv_heads={self.kv}: change one of them.")
        if self.active > max(1, self.experts):
            raise PlanError(f"A token uses {self.active} of {self.experts} experts: use at most as many.")

    @property
    def mlp(self) -> int:
        """The width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def kv(self) -> int:
        """The number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """The width of all heads together."""
        return self.heads * self.head_dim or self.hidden

    @property
    def kv_width(self) -> int:
        """The width of all keys, or all values."""
        return self.width * self.kv // self.heads

    @property
    def attention_parameters(self) -> int:
        """Parameters of the matrices of attention in a layer."""
        return 2 * self.hidden * (self.width + self.kv_width)

    @property
    def expert_parameters(self) -> int:
        """Parameters of the matrices of one MLP."""
        return (3 if self.gated else 2) * self.hidden * self.mlp

    @property
    def vectors(self) -> int:
        """Parameters of a layer's norms and biases, and of its router."""
        biases = 0 if self.gated else 4 * self.hidden + 2 * self.kv_width + self.mlp + self.hidden
        return 2 * self.hidden + biases + self.hidden * self.experts

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        return self.attention_parameters + max(1, self.experts) * self.expert_parameters + self.vectors

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        positions = 0 if self.gated else self.seq * self.hidden
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.embedding + positions

    def operations(self, tokens: float, again: bool = False) -> float:
        """Return the floating-point operations of the forward and backward passes of ``tokens`` tokens.

        ``again`` includes full recomputation. As is customary, attention is not halved for the causal mask.
        """
        matrices = self.attention_parameters + self.active * self.expert_parameters
        layer = (8 if again else 6) * (matrices + 2 * self.seq * self.width)
        return tokens * (self.layers * layer + 6 * self.embedding)


def from_transformers(config: dict, seq: int = 0) -> Model:
    """Create a ``Model`` from a transformers config, as a dictionary (``AutoConfig(...).to_dict()``).

    ``seq``, if not 0, overrides the sequence length.

    Raises:
        PlanError: if a size is missing, or the model has parts that the planner does not support.
    """

    def find(*names, default=None):
        for name in names:
            if config.get(name) is not None:
                return config[name]
        if default is None:
            raise PlanError(f"The config of the model has no {' nor '.join(names)}: pass sizes instead.")
        return default

    kind, activation = str(config.get("model_type", "")), str(find("hidden_act", "activation_function", default="gelu"))
    for key in ("kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size"):
        if config.get(key):
            raise PlanError(f"{kind or 'This model'} has {key}, which is not supported: pass sizes instead.")
    heads = find("num_attention_heads", "n_head")
    experts = find("num_local_experts", "num_experts", "n_routed_experts", default=0)
    return Model(
        layers=find("num_hidden_layers", "n_layer"), hidden=find("hidden_size", "n_embd"), heads=heads,
        vocab=find("vocab_size"), seq=seq or find("max_position_embeddings", "n_positions"),
        ffn=find(*["moe_intermediate_size"] * bool(experts), "intermediate_size", "n_inner", default=0),
        kv_heads=find("num_key_value_heads", default=heads), head_dim=find("head_dim", default=0),
        gated=kind.startswith("gemma") or any(name in activation for name in ("silu", "swiglu", "geglu")),
        tied=bool(config.get("tie_word_embeddings", True)), experts=experts,
        active=find("num_experts_per_tok", default=1), name=kind,
    )  # fmt: skip


MODELS = {
    "gpt3-175b": Model(96, 12288, 96, 51200, 2048, name="gpt3-175b"),
    "gpt-7.5b": Model(36, 4096, 32, 51200, 2048, name="gpt-7.5b"),
    "llama3-8b": Model(32, 4096, 32, 128256, 8192, 14336, 8, gated=True, tied=False, name="llama3-8b"),
    "llama3-70b": Model(80, 8192, 64, 128256, 8192, 28672, 8, gated=True, tied=False, name="llama3-70b"),
    "llama3-405b": Model(126, 16384, 128, 128256, 8192, 53248, 8, gated=True, tied=False, name="llama3-405b"),
    "mixtral-8x7b": Model(
        32, 4096, 32, 32000, 4096, 14336, 8, gated=True, tied=False, experts=8, active=2, name="mixtral-8x7b"
    ),
}


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet: 16-bit dense operations per second, bytes of memory, bytes per second of its memory.

    ``per_node`` is the number of GPUs per node.
    """

    name: str
    operations: float
    memory: int
    bandwidth: float
    per_node: int = 8


GIB = 2**30
DEVICES = {
    "v100": Device("v100", 125e12, 32 * GIB, 0.9e12),
    "a100": Device("a100", 312e12, 80 * GIB, 2.0e12),
    "h100": Device("h100", 989e12, 80 * GIB, 3.35e12),
    "h200": Device("h200", 989e12, 141 * 10**9, 4.8e12),
    "b200": Device("b200", 2250e12, 180 * 10**9, 8e12),
}
