"""The shape of a model, as far as running it needs to know: one form for Hugging Face configs and GGUF metadata alike.

A model's family fills it (`bough.models`), layers read it; nothing else in the engine looks into a checkpoint's own
configuration. A family whose blocks need more fields subclasses `ModelConfig`.
"""

import math
from dataclasses import dataclass
from typing import Literal

from bough.core.pooling import VectorConfig
from bough.core.speech import SpeechConfig

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]  # gated MLPs have the first two


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. `factors` are per-frequency divisors, when the checkpoint stores them."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True  # YaRN blends between whole coordinates
    factors: tuple[float, ...] | None = None
    short_factors: tuple[float, ...] | None = None  # longrope: instead of `factors`, up to the original context
    partial_rotary_factor: float = 1.0  # the share of each head that rotates, its first coordinates
    apart: bool = False  # coordinates that rotate as a pair stand half a head apart, as kernels take them
    sections: tuple[int, ...] | None = None  # pairs of coordinates that rotate by the first, second, third position
    alternating: bool = False  # those of the sections stand in turn, the first has what the others leave

    def rotary_dim(self, head_dim: int) -> int:
        width = int(head_dim * self.partial_rotary_factor)  # half a pair counts as one, as in transformers
        return width - width % 2 if self.kind == "proportional" else width + width % 2


NO_ROPE = RopeConfig(theta=1.0, partial_rotary_factor=0.0, apart=True)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A kind of layers, by what of a sequence they keep: all tokens, a window of them, or a state that stands for all
    tokens before."""

    kind: Literal["full", "window", "state"] = "full"
    window: int | None = None  # tokens that a query of a window group sees, its own included

    def __post_init__(self) -> None:
        assert (self.kind == "window") == (self.window is not None)

    def row_pages(self, page_size: int) -> int:
        """The most pages that a row holds of a window or state group between two steps."""
        if self.window is None:
            return 1  # its state
        # Windows begin inside a page, and rows keep a page more than they read, to be cut back by some tokens.
        return -(-self.window // page_size) + 3


FULL_ATTENTION = KVGroup()


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The experts of a layer, and how its router chooses among them for each token."""

    experts: int
    per_token: int
    intermediate_size: int  # of one expert
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: float = 0.0  # SparseMixer weighs an expert among those whose logits are not further below its own
    renormalise: bool = True  # the weights of a token's experts sum to one, before `scale`
    scale: float = 1.0
    groups: int = 1  # experts are chosen from the best `top_groups` of so many groups
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"  # of its experts
    correction_bias: bool = False  # a number for each expert that counts when choosing only
    biases: bool = False  # the router and the experts' matrices have biases
    clamped_gate: tuple[float, float] | None = None  # with biases, GPT-OSS's gate: its slope and limit
    gated: bool = True  # else an expert is a plain MLP: up, its activation and down
    latent_size: int = 0  # of what experts are given and give, a product of the hidden states; 0: these themselves
    shared_size: int = 0  # inner width of the experts that every token passes; 0: there are none
    scales_inputs: bool = False  # the weight of a token's one expert multiplies what that is given, not its result
    beside_mlp: bool = False  # the layer has an MLP as well; both have norms of their own, and so has the router
    shared_gate: bool = False  # their result is scaled by a gate of its own
    appended: int = 0  # shared experts whose matrices stand behind the others'; each token passes them, weight one
    dense_layers: tuple[bool, ...] = ()  # per layer; empty: all have experts
    simulate: Literal["", "uniform"] = ""  # for benchmarks with random weights: experts are drawn evenly

    @property
    def inputs(self) -> tuple[str, ...]:
        """The matrices of an expert that take its rows."""
        return ("gate_proj", "up_proj") if self.gated else ("up_proj",)


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Sparse attention: small heads score the tokens that a query could see, and it attends to the best of them."""

    heads: int  # that share one key for each token
    head_dim: int
    top: int  # tokens that a query attends to
    layers: tuple[bool, ...] = ()  # which ones choose; the others take the choice of the one before; empty: all choose

    def chooses(self, layer: int) -> bool:
        return not self.layers or self.layers[layer]


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention: a token keeps one vector for all heads, of which their keys and values are products, and one
    rotated key that they share."""

    rank: int  # of that vector
    rope_dim: int
    nope_dim: int  # of a head's own key, which does not rotate
    value_dim: int  # of a head
    query_rank: int | None = None  # of the vector that the queries are products of; None: of the hidden states
    interleaved: bool = True  # checkpoints have the rotated coordinates in neighbouring pairs
    index: IndexConfig | None = None  # None: queries attend to all tokens that they can see

    @property
    def width(self) -> int:
        """Numbers that a token keeps in a layer."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Layers that keep a state instead of all tokens: the last inputs of a convolution, and of each head a matrix in
    which keys find values. Without keys there is the convolution alone."""

    layers: tuple[bool, ...]  # which layers of the model have one
    heads: int
    value_dim: int  # of a head
    conv_width: int  # tokens that the convolution sees, its own included
    key_heads: int = 1  # each serves several heads
    key_dim: int = 0
    conv_bias: bool = False
    bias: bool = False  # of the projections
    norm_eps: float = 1e-6  # Mamba: of that norm
    step_limits: tuple[float, float] = (0.0, math.inf)  # Mamba: between which a token's rate may be

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def size(self) -> int:
        """Numbers that a sequence keeps in a layer."""
        return (self.conv_width - 1) * self.channels + self.heads * self.key_dim * self.value_dim

    @property
    def page_bytes(self) -> int:
        """What a sequence keeps in all layers, in float32."""
        return 4 * sum(self.layers) * self.size


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A model that makes drafts from hidden states of another, its target."""

    taps: tuple[int, ...] = ()  # layers of the target whose inputs it reads; none: what the last layer gives, normed
    vocab_size: int | None = None  # its own tokens, a choice of the target's; None: all of these, by the target's head
    bias: bool = False  # of the product that takes hidden states in
    layer: int | None = None  # its number among the target's layers, in whose checkpoint it stands


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """The encoders of a multi-modal checkpoint, which are Transformers' modules."""

    architecture: str  # Transformers' class that has them
    placeholder: int  # the token that stands for them in texts
    whole: bool = False  # tokens of an item attend to each other, those behind them too
    whole_in_windows: bool = False  # but only in layers with a sliding window
    deep_layers: int = 0  # the first so many layers get further features of an item, added to their hidden states


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # the Hugging Face class name, the key of the model registry
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # sliding-window layers, where they differ
    unrotated_layers: tuple[bool, ...] = ()  # per layer; empty: all rotate
    activation: Activation = "silu"
    mlp: Literal["gated", "plain"] = "gated"
    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True  # of layer norms
    norm_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    moe: MoEConfig | None = None
    recurrent: RecurrentConfig | None = None
    attention_layers: tuple[bool, ...] = ()  # per layer; empty: all that have no recurrent state
    attention_gate: bool = False  # what the heads find is scaled by gates of its own size
    latent: LatentConfig | None = None  # of all layers; `num_kv_heads` is then 1, and `head_dim` that of queries
    qk_norm: bool = False
    qk_norm_whole: bool = False  # of all heads at once, not of each
    qk_norm_last: bool = False  # after the rotation
    qk_unit_norm: bool = False  # of heads that rotate, without a weight
    tied_embeddings: bool = False
    sliding_window: int | None = None  # tokens a sliding layer sees, its own included
    sliding_layers: tuple[bool, ...] = ()  # per layer; empty: none slides
    chunked: bool = False  # windows do not slide: each begins where the one before it ends
    full_kv_heads: int | None = None  # of layers that do not slide, where theirs differ from those that do
    full_head_dim: int | None = None
    full_keys_as_values: bool = False  # in these layers one projection gives both
    value_norm: bool = False  # value heads are normalised, without a weight
    shared_kv_layers: int = 0  # the last so many have no keys and values of their own (`kv_source`)
    query_scale: float | None = None  # None: head_dim ** -0.5
    # (b, n, o): queries times 1 + b * ln(1 + (position + o) // n), in unrotated layers if there are some
    query_growth: tuple[float, int, int] | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False  # each head has a logit that joins its softmax
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False  # logits have one
    embedding_scale: float = 1.0
    layer_inputs: int = 0  # width of the vector that each layer has for each token, beside the hidden states
    layer_scales: bool = False  # a number for each layer multiplies what it gives
    learned_positions: bool = False  # each position of the context has a vector, added to the token's
    causal: bool = True  # False: an encoder. Tokens see those behind them too, in one step, and keep nothing for others
    token_types: int = 0  # each has a vector, added to those of positions
    embedding_norm: bool = False
    final_norm: bool = True
    vectors: VectorConfig | None = None  # what comes of a sequence in the place of tokens
    speech: SpeechConfig | None = None  # each layer attends to what an encoder has heard, too
    norm_plus_one: bool = False  # the checkpoint stores norm weights minus one
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # what the checkpoint was saved in
    draft: DraftConfig | None = None  # of a model that only makes drafts for another
    media: MediaConfig | None = None  # None: it reads text alone

    def experts_of(self, layer: int) -> MoEConfig | None:
        """Those of one layer; None: it has a plain MLP."""
        dense = self.moe is None or (self.moe.dense_layers and self.moe.dense_layers[layer])
        return None if dense else self.moe

    @property
    def choosing_layers(self) -> list[int]:
        """Those that choose tokens, of a model with sparse attention."""
        index = None if self.latent is None else self.latent.index
        return [] if index is None else [layer for layer in range(self.num_layers) if index.chooses(layer)]

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer that a token is multiplied with."""
        attention, inner = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim, self.intermediate_size
        if self.moe is not None:
            inner = self.moe.per_token * self.moe.intermediate_size + self.moe.shared_size
        return self.hidden_size * (attention + 3 * inner)

    @property
    def positions(self) -> int:
        """That tokens may have: where positions are learned, those of each token type stand behind the others'."""
        return self.context_length * (max(1, self.token_types) if self.learned_positions else 1)

    def slides(self, layer: int) -> bool:
        return bool(self.sliding_layers) and self.sliding_layers[layer]

    @property
    def states(self) -> RecurrentConfig | None:
        """What recurrent layers keep of a sequence; None: the model has no such layer."""
        return self.recurrent if self.recurrent is not None and any(self.recurrent.layers) else None

    def recurs(self, layer: int) -> bool:
        return self.recurrent is not None and self.recurrent.layers[layer]

    def attends(self, layer: int) -> bool:
        return self.attention_layers[layer] if self.attention_layers else not self.recurs(layer)

    @property
    def attention_groups(self) -> tuple[KVGroup, ...]:
        """What attention keeps of a sequence. A window that no sequence can leave is full attention."""
        window = self.sliding_window if self.causal and any(self.sliding_layers) else None
        if window is None or window >= self.context_length:
            return (FULL_ATTENTION,)
        return (FULL_ATTENTION, KVGroup("window", window))

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """What the layers keep of a sequence; states come last."""
        return self.attention_groups if self.states is None else (*self.attention_groups, KVGroup("state"))

    def kv_group(self, layer: int) -> int:
        """That of the layer's keys and values."""
        return int(self.slides(layer) and len(self.attention_groups) > 1)

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """The key-value heads of a layer, and how wide its heads are."""
        if self.slides(layer):
            return self.num_kv_heads, self.head_dim
        return self.full_kv_heads or self.num_kv_heads, self.full_head_dim or self.head_dim

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Those that there are."""
        return tuple({self.kv_shape(layer): None for layer in range(self.num_layers)})

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values it reads: itself, or the last of its kind that has some. The layers of an
        encoder take turns in one place, because none of them is read in a later step."""
        if not self.causal:
            return 0
        own = range(self.num_layers - self.shared_kv_layers)
        return layer if layer in own else max(other for other in own if self.slides(other) == self.slides(layer))

    def stands_alone(self, layer: int) -> bool:
        """Whether this layer and all behind it need nothing of those before but their hidden states."""
        index = None if self.latent is None else self.latent.index
        if self.layer_inputs or not (index is None or index.chooses(layer)):
            return False
        return all(self.kv_source(other) >= layer for other in range(layer, self.num_layers))

    def rope_of(self, layer: int) -> RopeConfig:
        if self.unrotated_layers and self.unrotated_layers[layer]:
            return NO_ROPE
        return self.local_rope if self.local_rope is not None and self.slides(layer) else self.rope
