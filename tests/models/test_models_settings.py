"""Every field that a family's Transformers class has either changes what the family reads, or is refused, or is known
to change nothing of what is computed: none is ignored in silence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from bough.core.errors import ModelError
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.registry import FAMILIES, find_family
from bough.models.transformers_family import transformers_source

TRAINING = """activation_dropout apply_spec_augment attention_dropout attention_probs_dropout_prob attn_pdrop
    classifier_dropout decoder_layerdrop dropout embd_pdrop embedding_dropout encoder_layerdrop hidden_dropout
    hidden_dropout_prob init_std initializer_cutoff_factor initializer_range input_jitter_noise layerdrop
    mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob
    mlp_dropout output_router_logits pretraining_tp rescale_prenorm_residual resid_pdrop residual_dropout
    router_aux_loss_coef router_jitter_noise summary_first_dropout time_step_floor time_step_max"""
# How it is computed, not what.
WAYS = """chunk_size deterministic_flash_attn enable_moe_fp32_combine mamba_chunk_size mamba_ssm_cache_dtype
    moe_shared_expert_overlap num_logits_to_keep reorder_and_upcast_attn residual_in_fp32 use_cache use_mamba_kernels"""
TOKENS = "bos_token_id cls_token_id eod_token_id eos_token_id pad_token_id sep_token_id"
# Layers that are not served, what others read (`bough.loader`, encoders), and sizes that tensors have anyway.
ELSEWHERE = """add_cross_attention classifier_activation classifier_bias classifier_pooling classifier_proj_size
    decoder_bias is_encoder_decoder mtp_layers_block_type num_mtp_layers num_nextn_predict_layers
    sparse_pred_ignore_index sparse_prediction summary_activation summary_proj_to_labels summary_type summary_use_proj
    use_bidirectional_attention use_weighted_layer_sum vocab_size_per_layer_input"""
KNOWN = {*TRAINING.split(), *WAYS.split(), *TOKENS.split(), *ELSEWHERE.split()}
KNOWN_HERE = {
    "deepseek_v32": {"layer_types"},  # which transformers does not read either
    "gemma3": {"attn_logit_softcapping"},
    "glm_moe_dsa": {"layer_types"},
    "gpt_neox": {"is_decoder"},  # it always is one
    "granitemoehybrid": {"mamba_d_head"},  # follows from others, or transformers raises
    "kimi_linear": {"tie_word_embeddings"},
    # which transformers does not read either
    "nemotron_h": {"expand", "mamba_proj_bias", "sliding_window", "tie_word_embeddings"}
    | {"time_step_min"},  # which it has in prompts, and not behind them
}
SIZES = {"hidden_size": 7680, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 120}
LENGTHS = {"vocab_size": 97, "max_position_embeddings": 4096}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CHOICES = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": CHOICES | {"topk_method": "group_limited_greedy"},
    "deepseek_v2": CHOICES | {"topk_method": "group_limited_greedy"},
    "dots1": CHOICES,
    "gemma4": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8, **LAYERS},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "granitemoehybrid": {"num_local_experts": 4},
    "nemotron_h": {"hybrid_override_pattern": "M-E*"},
    "whisper": {
        "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 80,
        "max_target_positions": 128, "num_attention_heads": 4,
    },
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl"), SECTIONS),
}  # fmt: skip
# Some fields count only beside others.
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"use_sliding_window": True, "sliding_window": 8},
    {"attention_k_eq_v": True},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
    {"num_local_experts": 0},
)
ODD = ({"odd": 1}, False, 0, 3)


def fields_of(model_type: str) -> Iterator[str]:
    """Those of the class, of a multimodal model those of its language model."""
    name = model_type.replace("-", "_")
    found: dict[str, list[str]] = {}
    for node in ast.parse(transformers_source(f"models/{name}/configuration_{name}.py")).body:
        if isinstance(node, ast.ClassDef):
            kinds = [each for each in node.body if isinstance(each, ast.Assign)]
            kind = next((ast.literal_eval(k.value) for k in kinds if ast.unparse(k.targets[0]) == "model_type"), "")
            found[kind] = [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]
    yield from found.get(f"{model_type}_text", found.get(model_type, ()))


def outcome(family: ModelFamily, values: dict[str, Any]) -> Any:
    try:
        return family.read_config(Fields("config.json", values))
    except (ModelError, TypeError, ValueError, AttributeError, KeyError) as error:
        return repr(error)


@pytest.mark.parametrize(
    "model_type", [name for name, stated in FAMILIES.items() if "text" not in stated and name != "mistral3"]
)  # of those, the families of their language models know
def test_no_setting_is_ignored(model_type: str) -> None:
    family = find_family(model_type)
    heads = {"num_attention_heads": 120, "num_key_value_heads": family.defaults.get("num_key_value_heads", 120)}
    heads["num_attention_heads"] = 2 * heads["num_key_value_heads"]
    sizes = {**family.defaults, **SIZES, **heads, **LENGTHS, **NEEDED.get(model_type, {})}
    if model_type in ("gpt2", "whisper"):
        sizes.pop("num_key_value_heads")
    bases = [(values, outcome(family, values)) for values in ({**sizes, **beside} for beside in BESIDE)]
    assert not isinstance(bases[0][1], str), bases[0][1]
    known = KNOWN | KNOWN_HERE.get(model_type, set())
    names = [name for name in fields_of(model_type) if name not in known]
    assert names, "the class has no fields"
    ignored = [
        name for name in names if all(outcome(family, {**v, name: odd}) == was for v, was in bases for odd in ODD)
    ]
    assert not ignored, f"{ignored} of {model_type}: read them, or refuse them (`only` in families.toml)"
