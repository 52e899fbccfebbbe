"""The encoders of a multi-modal checkpoint, as Transformers' modules: vision towers and what projects their output.

Transformers builds and fills them by its own rules, which know every layout that such checkpoints have had. It is
given the tensors of encoders alone, and a language model without layers, which is then dropped.

Encoders that take images of all sizes attend within each image or window of it. Transformers would compute these one by
one, and norms and rotations by many small kernels, which takes the host longer than the device; on a GPU each is one
kernel. Convolutions of patches that stand one by one are products: cuDNN has no fast kernel for them.
"""

import sys
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch.nn.functional import linear, pad, rms_norm

from bough.core.errors import ModelError
from bough.core.model_config import MediaConfig
from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.loader.locate import ModelFiles
from bough.loader.quantized import plain_source

# How the tensors of language models begin.
INNER = ("language_model.", "text_model.", "layers.", "norm.", "embed_tokens.")
TEXT = ("language_model.", "lm_head.", *(f"model.{name}" for name in INNER))
ROTATION = "apply_rotary_pos_emb_vision"  # a function that families of towers have
PACKED = "bough_flash"  # an attention by whose name Transformers knows that it takes items one behind the other


def load_encoder(
    files: ModelFiles, media: MediaConfig, dtype: torch.dtype, device: torch.device, *, dummy: bool
) -> Any:
    """A `…ForConditionalGeneration` that has encoders alone."""
    import transformers

    transformers.logging.set_verbosity_error()  # it would tell that the language model is missing
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(files.folder)
    if config.model_type == "kimi_k25":  # Transformers passes over the names in Moonshot's own files
        vision = config.vision_config
        for name in [name for name in vars(vision) if name.startswith(("vt_", "init_pos_"))]:
            setattr(vision, name.partition("_")[2], getattr(vision, name))
        config.projection_hidden_size = vision.hidden_size  # which it must be
    if hasattr(config, "vision_config") and config.model_type != "gemma4":
        config.audio_config = None  # no other is given sound beside images
    text = config.get_text_config()
    for each in (config, text):  # Transformers would want each format's own package
        vars(each).pop("quantization_config", None)
    for name, value in {"num_hidden_layers": 0, "layer_types": [], "vocab_size": 1, "pad_token_id": None}.items():
        if hasattr(text, name):
            setattr(text, name, value)
    kind = getattr(transformers, media.architecture)
    if dummy:
        model = kind._from_config(config, dtype=dtype)
    else:
        source = plain_source(files, dtype)
        state = {name: source.read(name) for name in source.names() if not name.startswith(TEXT)}
        options = {"config": config, "state_dict": state, "dtype": dtype, "output_loading_info": True}
        model, told = kind.from_pretrained(None, **options)
        missing = [name for name in told["missing_keys"] if not (name.startswith(TEXT) or "language_model." in name)]
        if missing:
            raise ModelError(f"{files.folder}: tensors of its encoder are missing, such as {sorted(missing)[0]}.")
    model.lm_head = None
    for name in ("language_model", "text_model"):
        if hasattr(model.model, name):
            setattr(model.model, name, None)
    if hasattr(model.model, "audio_tower") and not hasattr(model, "get_audio_features"):
        model.get_audio_features = partial(hear, model.model)
    visual = getattr(model.model, "visual", None)
    tower = model.model.vision_tower if config.model_type == "kimi_k25" else visual
    if tower is not None:
        tell_sizes(tower)
    if visual is not None and device.type == "cuda" and dtype.itemsize == 2:
        launch_less(visual)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv3d) and module.kernel_size == module.stride and module.groups == 1:
            module.__class__ = PatchProduct
    return model.to(device).eval().requires_grad_(False)


def tell_sizes(visual: Any) -> None:
    """Has a tower given what follows from the sizes of its images, where these are on the host: it would read them back
    from the device piece by piece."""
    known = lru_cache(maxsize=16)(partial(sizes_of, visual))  # the same sizes come again and again

    def add(_: Any, args: Any, given: dict[str, Any]) -> Any:
        grid = given.get("grid_thw")
        return None if grid is None or grid.is_cuda else (args, given | known(tuple(map(tuple, grid.tolist()))))

    visual.register_forward_pre_hook(add, with_kwargs=True)


def sizes_of(visual: Any, grid: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Of the patches of each image in time, height and width, under the names by which Transformers takes it."""
    sizes, family = torch.tensor(grid), sys.modules[type(visual).__module__]
    found: dict[str, Any] = {"grid_thw": sizes}
    if hasattr(family, "get_vision_attention_seqlens") and hasattr(visual, "blocks"):
        merge, (bounds, _) = visual.spatial_merge_size, family.get_vision_attention_seqlens(sizes, visual.config)
        found["position_ids"] = family.get_vision_position_ids(sizes, merge)
        found |= {"cu_seqlens": bounds, "max_seqlen": longest_of(bounds)}
        if hasattr(visual, "window_size"):
            index, windows = family.get_vision_window_index(sizes, merge, visual.window_size, visual.patch_size)
            found |= {"window_index": index, "cu_window_seqlens": windows, "max_window_seqlen": longest_of(windows)}
        if hasattr(visual, "num_grid_per_side"):  # of learned positions, which are interpolated
            how = visual.num_grid_per_side, visual.interpolation_mode, visual.interpolation_align_corners, merge
            taps = family.get_vision_interpolation_indices_and_weights(sizes, *how)
            found |= {"interp_indices": taps[0], "interp_weights": taps[1]}
    return {name: each if isinstance(each, int) else sent(each, visual.device) for name, each in found.items()}


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, which the host does not wait for."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def launch_less(visual: Any) -> None:
    """Replaces what a vision tower would compute by many small kernels."""
    import transformers

    transformers.AttentionInterface.register(PACKED, packed_attention)
    visual.config._attn_implementation = PACKED
    family = sys.modules[type(visual).__module__]
    theirs = getattr(family, ROTATION, None)
    if theirs is not None and not isinstance(theirs, partial):
        setattr(family, ROTATION, partial(rotate, theirs))
    for module in visual.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = partial(normalise, module)
        if hasattr(module, "gate_proj"):
            widen(module)


def normalise(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def widen(mlp: Any) -> None:
    """Fills the inner width up with zeros: tensor cores read rows slowly that do not begin at a multiple of 16."""
    more = -mlp.gate_proj.out_features % 16
    for layer, sides in ((mlp.gate_proj, (0, 0, 0, more)), (mlp.up_proj, (0, 0, 0, more)), (mlp.down_proj, (0, more))):
        layer.weight = torch.nn.Parameter(pad(layer.weight, sides))
        if layer.bias is not None and layer is not mlp.down_proj:
            layer.bias = torch.nn.Parameter(pad(layer.bias, (0, more)))


class PatchProduct(torch.nn.Conv3d):
    """A convolution whose input is patches of its kernel's size."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.shape[2:] != self.kernel_size:
            return super().forward(input)
        return linear(input.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None, None]


def hear(model: Any, input_features: torch.Tensor, **masks: torch.Tensor) -> Any:
    """What Gemma 4 and Qwen2-Audio make of recordings; Transformers has it within the pass of the whole model."""
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    if "input_features_mask" in masks:
        found = model.get_audio_features(input_features, **masks, return_dict=True)
        return BaseModelOutputWithPooling(pooler_output=found.pooler_output[found.attention_mask])
    tower, feature_attention_mask = model.audio_tower, masks["feature_attention_mask"]
    heard, kept = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    places = torch.arange(input_features.shape[-1] // 2, device=heard.device)
    empty = input_features.new_empty(len(heard), len(places), 1)
    mask = create_bidirectional_mask(tower.config, empty, (places < heard[:, None]).long())
    rows = model.multi_modal_projector(tower(input_features, attention_mask=mask).last_hidden_state)
    return BaseModelOutputWithPooling(pooler_output=rows[places[: rows.shape[1]] < kept[:, None]])


def packed_attention(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,  # where items begin, and the last one ends
    max_length_q: object = None,
    max_seqlen: object = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each token to all of its item."""
    from torch.nn.attention.varlen import varlen_attn  # a slow import, which models without images do not need

    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    known = [each for each in (max_length_q, max_seqlen) if isinstance(each, int)]
    longest = known[0] if known else longest_of(cu_seq_lens_q)
    return cast(torch.Tensor, varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest))[None], None


@lru_cache(maxsize=4)  # the same for many layers, and reading it waits for the device
def longest_of(bounds: torch.Tensor) -> int:
    return int(bounds.diff().max())


def rotate(
    theirs: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' rotation of queries and keys, in place where a token's keys stand behind its queries in memory,
    and its values behind those."""
    tokens, heads, width = q.shape
    strides = (3 * heads * width, width, 1)
    behind = k.data_ptr() - q.data_ptr() == heads * width * q.element_size()
    if q.element_size() != 2 or q.stride() != strides or not behind:
        return cast(tuple[torch.Tensor, torch.Tensor], theirs(q, k, cos, sin))
    from bough.kernels.norm_rope_store.triton import norm_rope_store_

    qkv = q.as_strided((tokens, 3 * heads, width), strides)
    half_cos, half_sin, places = half_turns(cos, sin)
    turns = QKNormRope(None, None, 0.0, False, half_cos, half_sin)
    norm_rope_store_(qkv, heads, heads, turns, places, places, qkv[:, heads : 2 * heads], qkv[:, 2 * heads :])
    return q, k


@lru_cache(maxsize=4)  # the same for all layers
def half_turns(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first = (slice(None), slice(cos.shape[1] // 2))
    return cos[first].float().contiguous(), sin[first].float().contiguous(), torch.arange(len(cos), device=cos.device)
