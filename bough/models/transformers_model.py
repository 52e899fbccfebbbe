"""Runs a decoder of `transformers` through its own modules, with our attention and cache instead of its own.

`transformers` lets others register an attention function and a mask function. Ours ask what stands in `_attending`
while the decoder runs. `Probe`, in a run without weights, notes how each layer attends: that decides the shape of the
cache, and whether the model can be served at all. `PoolAttention` stores keys and values in the pool and attends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.logging import disable_progress_bar

from bough.attention.base import AttentionSpec
from bough.attention.context import AdaptedRows, ForwardContext
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.kernels.norm_rope_store.reference import store_kv
from bough.layers.weights import WeightSlot

NAME = "bough"  # of our attention, in transformers' registry
FAR = 1 << 20  # a position beyond every window
HARMLESS = ("position_ids", "cache_position")  # tensors that attention functions are given and need not look at


class LayerAttention(NamedTuple):
    """What is constant about one layer's attention, as its module calls for it."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    sinks: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model turns out to be when it runs."""

    config: PreTrainedConfig
    layers: tuple[LayerAttention, ...]
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Stands for a mask, which nobody needs to build: a causal one, of a window if there is one."""

    window: int | None


_attending: ContextVar[Probe | PoolAttention] = ContextVar("attending")  # what answers while a decoder runs


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelError(f"its {type(module).__name__} does not tell the number of its layer")
    return _attending.get().attend(int(layer), query, key, value, attention_mask, options), None


def _mask(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> Mask:
    return _attending.get().mask(mask_function)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


class Probe:
    """Notes how each layer attends, and raises where our attention cannot do that."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerAttention] = {}

    def mask(self, sees: Callable[..., torch.Tensor]) -> Mask:
        zero, keys = torch.tensor(0), torch.arange(FAR)
        queries = torch.arange(FAR - 2, FAR)[:, None]
        seen = sees(zero, zero, queries, keys).broadcast_to(2, FAR)
        window = int(seen[-1].sum())
        if not torch.equal(seen, (keys <= queries) & (keys > queries - window)):
            raise ModelError("it has a mask that is neither causal nor a sliding window")
        return Mask(None if window == FAR else window)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, options: Mapping[str, Any]
    ) -> torch.Tensor:
        """All have [1, heads, tokens, head_dim]; gives [1, tokens, heads, head_dim] back."""
        if layer in self.layers:
            raise ModelError("one of its layers attends more than once")
        if not isinstance(mask, Mask):
            raise ModelError("it masks attention in a way of its own")
        if k.shape != v.shape or q.shape[0] != 1 or q.shape[2:] != k.shape[2:]:
            raise ModelError("its queries, keys and values differ in their number or width")
        others = options.keys() - {"s_aux", *HARMLESS}
        if strange := [name for name in others if isinstance(options[name], torch.Tensor)]:
            raise ModelError(f"its attention takes {sorted(strange)[0]}")
        self.layers[layer] = LayerAttention(
            q.shape[1], k.shape[1], q.shape[3], mask.window, options.get("softcap"), options.get("s_aux") is not None
        )
        return q.transpose(1, 2)


class PoolAttention:
    """Our attention, for one step."""

    def __init__(self, config: ModelConfig, ctx: ForwardContext) -> None:
        self._config, self._ctx = config, ctx

    def mask(self, sees: Callable[..., torch.Tensor]) -> Mask:
        return Mask(None)  # the window is in our configuration

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, options: Mapping[str, Any]
    ) -> torch.Tensor:
        config, ctx, scale = self._config, self._ctx, options.get("scaling")
        spec = AttentionSpec(
            layer=layer,
            scale=config.head_dim**-0.5 if scale is None else float(scale),
            window=config.sliding_window if config.slides(layer) else None,
            group=config.kv_group(layer),
            softcap=config.attention_softcap,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            sinks=options.get("s_aux"),
        )
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
        pool = ctx.pool
        scales = pool.key_scales[layer], pool.value_scales[layer]
        store_kv(k, v, pool.keys[layer], pool.values[layer], ctx.batch.slots[spec.group], *scales)
        ctx.wait_for(layer)
        return ctx.attention.run(q, k, v, spec, pool)[None]


@dataclass
class Hidden(MoeModelOutputWithPast):  # type: ignore[misc]
    """What a decoder gives, with all that heads may look for."""

    cross_attentions: None = None


class Given(torch.nn.Module):
    """Stands in the place of a decoder, whose hidden states there are already: what `transformers` does behind it (a
    head, a scale, a cap) then gives logits of those alone."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Hidden:
        return Hidden(last_hidden_state=inputs_embeds)


class TransformersModel:
    """A `CausalLM` made of `transformers`' modules."""

    label_head = None

    def __init__(self, config: ModelConfig, fields: str, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        whole = _build(_read(fields), dtype, device)
        # Tied weights have several names.
        stored = whole.state_dict(keep_vars=True)
        self._weights = {name: stored[name].detach() for name in {id(t): name for name, t in stored.items()}.values()}
        self._decoder, self._head = _split(whole)

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden = _run(self._decoder, token_ids, ctx.batch.positions, PoolAttention(self.config, ctx))
        return hidden if ctx.logits_indices is None else hidden.index_select(0, ctx.logits_indices)

    def logits(self, hidden: torch.Tensor, adapted: AdaptedRows | None = None) -> torch.Tensor:
        return _logits(self._head, hidden)

    def slots(self) -> Iterator[WeightSlot]:
        for name, weight in self._weights.items():
            yield WeightSlot(name, _with_rows(weight))


def probe(fields: str) -> Shape:
    """Runs a model without its weights. `fields` are those of its config.json."""
    try:
        return _probe(fields)
    except ModelError:
        raise
    except Exception as error:  # whatever the model's own code may raise
        told = (str(error).splitlines() or [""])[0].rstrip(".:")
        cause = "" if told == repr(NAME) else f" ({type(error).__name__}: {told})"  # of a model with its own list
        raise ModelError(f"its modules do not run with another attention than their own{cause}") from error


def _probe(fields: str) -> Shape:
    config, meta = _read(fields), torch.device("meta")
    _refuse_states(config)
    config._experts_implementation = "batched_mm"  # the one that does not look at what the router chose
    decoder, head = _split(_build(config, torch.float32, meta))
    if any(isinstance(module, torch.nn.Conv1d) for module in decoder.modules()):
        raise ModelError("it has convolutions along the text, whose state the cache does not keep")
    tokens, seen = torch.zeros(2, dtype=torch.int64, device=meta), Probe()
    hidden = _run(decoder, tokens, tokens, seen)
    vocab_size = _logits(head, hidden).shape[-1]
    if not seen.layers or sorted(seen.layers) != list(range(config.num_hidden_layers)):
        raise ModelError(f"{len(seen.layers)} of its {config.num_hidden_layers} layers let their attention be replaced")
    return Shape(config, tuple(seen.layers[layer] for layer in sorted(seen.layers)), hidden.shape[-1], vocab_size)


def convert(fields: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint as the modules have them: some are renamed, others are joined."""
    config = _read(fields)
    disable_progress_bar()  # the loader has its own
    model, told = _class_of(config).from_pretrained(
        None, config=config, state_dict=dict(tensors), dtype="auto", output_loading_info=True
    )
    if missing := sorted(told["missing_keys"]):
        text = f"The checkpoint lacks {len(missing)} tensors that the model needs, among them {missing[0]}"
        raise ModelError(f"{text}; it is incomplete or belongs to another configuration.")
    if wrong := sorted(map(str, told["mismatched_keys"])):
        raise ModelError(f"The weights and the configuration do not belong together: {wrong[0]} differs in shape.")
    return {name: _with_rows(tensor) for name, tensor in model.state_dict().items()}


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The loader reads rows, which a single number has none of."""
    return tensor.view(tensor.shape or (1,))


def _read(fields: str) -> PreTrainedConfig:
    # Transformers writes what JSON has no number for as an object.
    given = json.loads(fields, object_hook=lambda part: float(part["__float__"]) if "__float__" in part else part)
    kind = given.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"transformers does not know the model type {kind!r}")
    config = CONFIG_MAPPING[kind].from_dict(given, attn_implementation=NAME)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{kind} is no text decoder")
    if config.get_text_config() is not config:
        raise ModelError("it is more than a text decoder")
    return config


def _class_of(config: PreTrainedConfig) -> Any:
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _refuse_states(config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelError("it has an encoder")
    if getattr(_class_of(config), "_is_stateful", False):
        raise ModelError("its layers keep a state, which the cache does not hold")
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (ropes, *ropes.values()) if isinstance(part, dict)]
    if {"dynamic", "longrope"} & set(kinds):
        raise ModelError("its rotation depends on the length of the longest text in a batch")


def _build(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The whole model, with memory for its weights; what it computes for itself, such as frequencies, is there."""
    with no_init_weights(), torch.device(device):
        model = _class_of(config)._from_config(config, dtype=dtype, attn_implementation=NAME)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def _split(whole: Any) -> tuple[Any, Any]:
    """The decoder, and what comes behind it."""
    decoder = whole.get_decoder()
    if decoder is whole:
        raise ModelError("transformers do not say which part of it is the decoder")
    whole.set_submodule(next(name for name, module in whole.named_modules() if module is decoder), Given())
    return decoder, whole


def _run(
    decoder: Any, token_ids: torch.Tensor, positions: torch.Tensor, attending: Probe | PoolAttention
) -> torch.Tensor:
    token = _attending.set(attending)
    try:
        # With a mask of its own for padding, a model does not look for several texts in one.
        out = decoder(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=torch.ones_like(token_ids)[None],
            use_cache=False,
        )
    finally:
        _attending.reset(token)
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def _logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = head(inputs_embeds=hidden[None]).logits[0]
    return logits
