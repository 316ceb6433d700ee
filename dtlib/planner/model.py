"""A transformer as the planner sees it: sizes, parameters and operations; what a GPU is by its data sheet.

    h hidden    f of the MLP    a heads, of which k for keys and values    s tokens a sample    V vocabulary    L layers

    parameters of a layer   h h (2 + 2 k/a) + 2 h f, with a gate 3 h f       matrices
                            2 h norms, or with biases (GPT) 9 h + 4 h        vectors: 13 h
    of the whole            L layers, V h of the embedding, as much again for a head that is not tied, s h positions
    operations a token      6 a parameter of the matrices; 12 s h a layer for attention, forward and backward

With f = 4 h these are Megatron-LM's: P = 12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)), and 72 s L h^2 (1 + s/(6 h)
+ V/(12 L h)) operations a sample (D. Narayanan et al., SC 2021, section 5.1; there with full recomputation, 96).
"""

from dataclasses import dataclass

from dtlib.errors import DtlibError, number


class PlanError(DtlibError):
    """A model, a mesh or a batch that cannot be, with its numbers."""


MOST = 10**9  # of anything that is counted


def whole(name: str, value: object, least: int = 1, most: int = MOST) -> int:
    """``number``, for plans."""
    return int(number(name, value, least, most, error=PlanError))


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder.

    ``ffn`` 0 means 4 ``hidden``, ``kv_heads`` 0 as many as ``heads``, ``head_dim`` 0 ``hidden / heads``. ``gated``: the
    MLP has a third matrix, norms have no biases, positions no parameters (Llama). ``experts``: MLPs of a layer, of
    which a token uses ``active``.
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
        return self.ffn or 4 * self.hidden

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Of all heads together."""
        return self.heads * self.head_dim or self.hidden

    @property
    def kv_width(self) -> int:
        return self.width * self.kv // self.heads

    @property
    def attention_parameters(self) -> int:
        return 2 * self.hidden * (self.width + self.kv_width)

    @property
    def expert_parameters(self) -> int:
        """One MLP's matrices."""
        return (3 if self.gated else 2) * self.hidden * self.mlp

    @property
    def vectors(self) -> int:
        """Norms and biases of a layer, and the router's matrix."""
        biases = 0 if self.gated else 4 * self.hidden + 2 * self.kv_width + self.mlp + self.hidden
        return 2 * self.hidden + biases + self.hidden * self.experts

    @property
    def layer_parameters(self) -> int:
        return self.attention_parameters + max(1, self.experts) * self.expert_parameters + self.vectors

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        positions = 0 if self.gated else self.seq * self.hidden
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.embedding + positions

    def operations(self, tokens: float, again: bool = False) -> float:
        """Floating-point operations of forward and backward passes, and with ``again`` of full recomputation;
        attention is not halved for its mask, as is customary."""
        matrices = self.attention_parameters + self.active * self.expert_parameters
        layer = (8 if again else 6) * (matrices + 2 * self.seq * self.width)
        return tokens * (self.layers * layer + 6 * self.embedding)


def from_transformers(config: dict, seq: int = 0) -> Model:
    """A model from the dictionary of a transformers config (``config.json``, or ``AutoConfig(...).to_dict()``)."""

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
            raise PlanError(f"{kind or 'This model'} has {key}, which is not planned here: give sizes instead.")
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
    """An accelerator by its data sheet: operations a second (16 bits, dense), bytes, bytes a second."""

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
