"""Tiny random models with draft models for them, in the published formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB, HIDDEN, DRAFT_VOCAB = 97, 32, 40  # as many tokens as the fake grammars know
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def write_target(folder: Path, layers: int = 6, seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": layers, **changes})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _layer(inputs: int) -> dict[str, torch.Tensor]:
    inner = 48
    shapes = {
        "self_attn.q_proj": (HIDDEN, inputs),
        "self_attn.k_proj": (HIDDEN // 2, inputs),
        "self_attn.v_proj": (HIDDEN // 2, inputs),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
    }
    return {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}


def _norm() -> torch.Tensor:
    return 1 + 0.2 * torch.randn(HIDDEN)


def _write(folder: Path, architecture: str, tensors: dict[str, torch.Tensor], **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SIZES, "architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_eagle3(folder: Path, seed: int = 1, **fields: Any) -> Path:
    torch.manual_seed(seed)
    chosen = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    tensors = {f"midlayer.{name}": weight for name, weight in _layer(2 * HIDDEN).items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = _norm()
    tensors |= {
        "fc.weight": 0.3 * torch.randn(HIDDEN, 3 * HIDDEN),
        "norm.weight": _norm(),
        "lm_head.weight": 0.3 * torch.randn(DRAFT_VOCAB, HIDDEN),
        "d2t": chosen - torch.arange(DRAFT_VOCAB),
        "t2d": torch.isin(torch.arange(VOCAB), chosen),
    }
    return _write(folder, "LlamaForCausalLMEagle3", tensors, draft_vocab_size=DRAFT_VOCAB, **fields)


def write_eagle(folder: Path, target: Path, seed: int = 2) -> Path:
    torch.manual_seed(seed)
    tensors = {f"layers.0.{name}": weight for name, weight in _layer(HIDDEN).items()}
    tensors |= {
        "layers.0.post_attention_layernorm.weight": _norm(),
        "fc.weight": 0.3 * torch.randn(HIDDEN, 2 * HIDDEN),
        "fc.bias": 0.3 * torch.randn(HIDDEN),
        "embed_tokens.weight": load_file(target / "model.safetensors")["model.embed_tokens.weight"],
    }
    return _write(folder, "LlamaForCausalLMEagle", tensors)


MTP_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def write_deepseek(folder: Path, seed: int = 3) -> Path:
    """A model whose checkpoint has a layer for further tokens behind its last."""
    torch.manual_seed(seed)
    sizes = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": 16}
    latent = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 24}
    config = transformers.DeepseekV3Config(**sizes, **latent, **experts, n_group=1, topk_group=1)
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    last, behind = "model.layers.2.", "model.layers.3."
    further = {
        behind + name.removeprefix(last): 0.3 * torch.randn_like(w) if w.ndim > 1 else w.clone()
        for name, w in stored.items()
        if name.startswith(last)
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        further[f"{behind}{name}.weight"] = _norm()
    further[f"{behind}eh_proj.weight"] = 0.3 * torch.randn(HIDDEN, 2 * HIDDEN)
    further[f"{behind}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    further[f"{behind}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored | further, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def add_mtp(folder: Path, layer: int = 1, seed: int = 4) -> Path:
    """Gives a model of Qwen's, whose `layer` attends, a layer for further tokens, named as in published ones."""
    torch.manual_seed(seed)
    stored, own = load_file(folder / "model.safetensors"), f"layers.{layer}."
    hidden = stored["lm_head.weight"].shape[1]
    further = {
        f"mtp.layers.0.{name.partition(own)[2]}": 0.3 * torch.randn_like(weight)
        for name, weight in stored.items()
        if own in name and "visual" not in name
    }
    further |= {f"mtp.{name}.weight": 0.3 * torch.randn(hidden) for name in MTP_NORMS}
    further["mtp.fc.weight"] = 0.3 * torch.randn(hidden, 2 * hidden)
    save_file(stored | further, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
