"""The tiny checkpoints that are written as GGUF files, by family: what such a file cannot say is changed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf

from tests.parity.gguf_writer import GgufWriter
from tests.parity.test_families import CASES, DELTA_NETS, KIMI, SIZES, YARN, Case, Model, make


@dataclass(frozen=True)
class File:
    """What is written of a case of `test_families`."""

    architecture: str  # the `gguf` package's name
    changes: dict[str, Any] = field(default_factory=dict)  # of the case: what such a file cannot say
    case: str = ""  # where it is not the file's name
    name: str = ""  # of an architecture that the package does not have yet, and whose tensors are named as another's


LEADING_DENSE = ["dense", "sparse", "sparse"]
INDEX = {"index_n_heads": 9, "index_head_dim": 14, "index_topk": 11}
KIMI_HEADS = {
    "linear_num_heads": KIMI["num_key_value_heads"],
    "first_k_dense_replace": 1,
    "mlp_layer_types": LEADING_DENSE,
}
# What the file does not say, and is in all published models.
LLAMA4 = {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
NETS = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4, "full_attention_interval": 2}
DEEPSEEK = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
}
# One number says how much attention is sharpened.
DEEPSEEK_YARN = {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}}
FILES = {
    "llama": File("LLAMA", {"attention_bias": True, "head_dim": 24}),
    "llama3-rope": File(
        "LLAMA",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        "llama",
    ),
    "mistral": File("LLAMA", {"sliding_window": None}),
    "mistral3": File("MISTRAL3"),
    "ministral3": File(
        "MISTRAL3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "qwen2": File("QWEN2"),
    "qwen3": File("QWEN3"),
    "gemma": File("GEMMA"),
    "gemma2": File("GEMMA2", {"query_pre_attn_scalar": 16}),
    "gemma3_text": File(
        "GEMMA3", {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 3, "rope_theta": 1e6}
    ),
    "phi": File("PHI2", {"num_key_value_heads": 4, "intermediate_size": 256}),
    "phi3": File("PHI3"),
    "phi3-long": File("PHI3"),
    "phi3-short": File("PHI3"),
    "glm": File("CHATGLM"),
    "glm4": File("GLM4"),
    "granite": File("GRANITE"),
    "olmo": File("OLMO"),
    "olmo2": File("OLMO2"),
    "olmo3": File("OLMO2"),
    "smollm3": File("SMOLLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "exaone4": File("EXAONE4"),
    "exaone4-full": File("EXAONE4"),
    "seed_oss": File("SEED_OSS"),
    "hunyuan_v1_dense": File("HUNYUAN_DENSE"),
    "ernie4_5": File("ERNIE4_5"),
    "cohere": File("COMMAND_R"),
    "cohere2": File("COHERE2", {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "starcoder2": File("STARCODER2", {"sliding_window": None}),
    "gpt2": File("GPT2", {"n_inner": 256}),
    "gpt_neox": File("GPTNEOX"),
    "gpt_neox-serial": File("GPTNEOX"),
    "stablelm": File("STABLELM"),
    "stablelm-parallel": File("STABLELM"),
    "nemotron": File("NEMOTRON"),
    "arcee": File("ARCEE"),
    "jais2": File("JAIS2"),
    "mixtral": File("LLAMA"),
    "qwen2_moe": File("QWEN2MOE"),
    "qwen3_moe": File("QWEN3MOE"),
    "gpt_oss": File("GPT_OSS"),
    "glm4_moe": File("GLM4_MOE"),
    "glm4_moe-groups": File("GLM4_MOE", {"n_shared_experts": 1}),
    "olmoe": File("OLMOE"),
    "granitemoe": File("GRANITE_MOE"),
    "phimoe": File("PHIMOE"),
    "hunyuan_v1_moe": File("HUNYUAN_MOE"),
    "ernie4_5_moe": File("ERNIE4_5_MOE", {"moe_layer_end_index": -1, "num_hidden_layers": 3}),
    "minimax_m2": File("MINIMAXM2"),
    "deepseek_v2": File("DEEPSEEK2", {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", **DEEPSEEK_YARN}),
    "deepseek_v2-groups": File(
        "DEEPSEEK2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
        "deepseek_v2",
    ),
    "deepseek_v3": File(
        "DEEPSEEK2", {**DEEPSEEK, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, **DEEPSEEK_YARN}
    ),
    "glm4_moe_lite": File("DEEPSEEK2", {"first_k_dense_replace": 1, "mlp_layer_types": LEADING_DENSE}),
    "deepseek_v32": File("GLM_DSA", {**DEEPSEEK, **INDEX, "n_group": 4, "topk_group": 2}, name="deepseek32"),
    "glm_moe_dsa": File("GLM_DSA", {**DEEPSEEK, **INDEX, "indexer_types": ["full"] * 3}),
    "glm_moe_dsa-shared": File(
        "GLM_DSA",
        {**DEEPSEEK, **INDEX, "indexer_types": ["full", "shared", "full"], "norm_topk_prob": False},
        "glm_moe_dsa",
    ),
    "kimi_linear": File("KIMI_LINEAR", KIMI_HEADS),
    "kimi_linear-queries": File(
        "KIMI_LINEAR",
        {**KIMI_HEADS, "moe_renormalize": True, "mlp_layer_types": None, "tie_word_embeddings": False},
    ),
    "dots1": File("DOTS1", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "solar_open": File("GLM4_MOE"),
    "exaone_moe": File("EXAONE_MOE"),
    "gemma4_text": File("GEMMA4"),
    "gemma4-experts": File("GEMMA4"),
    "llama4_text": File("LLAMA4", LLAMA4),
    "llama4": File("LLAMA4"),
    "qwen3_next": File("QWEN3NEXT", NETS),
    "qwen3_next-dense-layers": File("QWEN3NEXT", {**NETS, "norm_topk_prob": True, "mlp_only_layers": []}),
    "qwen3_5_text": File("QWEN35", {**NETS, "linear_num_value_heads": 6}),
    "qwen3_5": File("QWEN35", {"text_config": {**SIZES, **DELTA_NETS, **NETS}}),
    "qwen3_5_moe_text": File("QWEN35MOE", NETS),
    "granitemoehybrid": File("GRANITE_HYBRID"),
    "granitemoehybrid-dense": File("GRANITE_HYBRID", {"time_step_limit": [0.0, float("inf")]}),
    "nemotron_h": File("NEMOTRON_H", {"tie_word_embeddings": False}),
    "nemotron_h-experts": File("NEMOTRON_H_MOE"),
    "nemotron_h-latents": File("NEMOTRON_H_MOE"),
    "lfm2": File("LFM2"),
    "lfm2-biases": File("LFM2"),
    "lfm2_moe": File("LFM2MOE", {"routed_scaling_factor": 1.0}),
}


def make_checkpoint(name: str, folder: Path) -> Model:
    file = FILES[name]
    base = file.case or name
    case = CASES.get(base, Case({}))
    fields = {**case.fields, **file.changes}
    return make(name, folder, replace(case, fields=fields, model_type=case.model_type or base))


def write(name: str, folder: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> Path:
    """The checkpoint of a folder, as the file of that name."""
    return GgufWriter(folder, FILES[name].architecture, FILES[name].name).write(folder / "model.gguf", kind)
