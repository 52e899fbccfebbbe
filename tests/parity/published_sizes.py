"""The sizes in which each family is published, by its first model type; of experts with those that a token uses. They
are here for orientation in docs/models.md and were not checked one by one: what is compared are tiny checkpoints with
random weights."""

from __future__ import annotations

PUBLISHED_SIZES = {
    "llama": "1B–405B", "mistral": "7B–123B", "ministral": "8B", "mistral3": "24B", "ministral3": "3B–14B",
    "qwen2": "0.5B–72B", "qwen3": "0.6B–32B", "gemma": "2B, 7B", "gemma2": "2B–27B", "vaultgemma": "1B",
    "gemma3": "270M–27B", "gemma4": "E2B–31B", "phi": "1.3B, 2.7B", "phi3": "3.8B–14B", "glm": "1.5B–9B",
    "glm4": "9B, 32B", "granite": "2B–34B", "olmo": "1B, 7B", "olmo2": "1B–32B", "olmo3": "7B, 32B", "smollm3": "3B",
    "exaone4": "1.2B, 32B", "seed_oss": "36B", "hunyuan_v1_dense": "0.5B–7B", "ernie4_5": "0.3B", "helium": "2B",
    "cohere": "35B, 104B", "cohere2": "7B, 111B", "starcoder2": "3B–15B", "gpt2": "124M–1.5B",
    "gpt_neox": "70M–20B", "opt": "125M–66B", "stablelm": "1.6B–12B", "nemotron": "4B–340B", "arcee": "4.5B",
    "jais2": "8B, 70B", "cwm": "32B", "mixtral": "8x7B, 8x22B", "llama4": "109B-A17B, 400B-A17B",
    "qwen2_moe": "14B-A2.7B, 57B-A14B", "qwen3_moe": "30B-A3B, 235B-A22B", "gpt_oss": "20B, 120B",
    "glm4_moe": "106B-A12B, 355B-A32B", "olmoe": "7B-A1B", "flex_olmo": "37B-A20B", "granitemoe": "1B-A400M, 3B-A800M",
    "phimoe": "42B-A6.6B", "hunyuan_v1_moe": "80B-A13B", "ernie4_5_moe": "21B-A3B, 300B-A47B",
    "minimax_m2": "230B-A10B", "deepseek_v2": "16B-A2.4B, 236B-A21B", "deepseek_v3": "671B-A37B, 1T-A32B (Kimi K2)",
    "dots1": "142B-A14B", "solar_open": "102B-A12B", "hy_v3": "–", "exaone_moe": "236B-A23B",
    "deepseek_v32": "671B-A37B", "glm_moe_dsa": "744B-A40B", "glm4_moe_lite": "30B-A3B", "qwen3_next": "80B-A3B",
    "qwen3_5": "0.8B–27B", "qwen3_5_moe": "35B-A3B–397B-A17B", "granitemoehybrid": "350M–32B-A9B",
    "nemotron_h": "4B–56B, 30B-A3B, 120B-A12B", "lfm2": "350M–2.6B", "lfm2_moe": "8B-A1B", "kimi_linear": "48B-A3B",
    "bert": "4M–335M",
    "roberta": "125M–560M", "nomic_bert": "137M", "modernbert": "149M, 395M", "llava": "7B, 13B",
    "llava_next": "7B–34B", "llava_onevision": "0.5B–72B", "internvl": "1B–78B", "idefics3": "8B",
    "smolvlm": "256M–2.2B", "qwen2_vl": "2B–72B", "qwen2_5_vl": "3B–72B", "qwen3_vl": "2B–32B",
    "qwen3_vl_moe": "30B-A3B, 235B-A22B", "glm4v": "9B", "glm4v_moe": "106B-A12B", "glm_ocr": "0.9B",
    "paddleocr_vl": "0.9B", "minicpmv4_6": "–", "deepseek_ocr2": "3B", "kimi_k25": "1T-A32B", "qwen2_audio": "7B",
    "whisper": "39M–1.5B",
}  # fmt: skip
