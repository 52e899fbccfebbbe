"""Small LoRA adapters of random numbers, as PEFT saves them, and the same merged into a checkpoint by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEAR = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def write_adapter(
    folder: Path,
    base: Path,
    seed: int,
    *,
    rank: int = 4,
    modules: tuple[str, ...] = LINEAR,
    layers: tuple[int, ...] | None = None,
    strength: float = 0.3,
    **config: Any,
) -> Path:
    """An adapter for the checkpoint in the folder `base`; `config` lies over its own configuration."""
    folder.mkdir(exist_ok=True)
    weights, draw = load_weights(base), torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith(modules) or (layers is not None and int(name.split(".")[2]) not in layers):
            continue
        of_module, (outputs, inputs) = f"base_model.model.{module}", weight.shape
        if module == EMBEDDING:  # as PEFT names and turns them, beside the model's own weight
            tensors[f"{of_module}.lora_embedding_A"] = torch.randn(rank, outputs, generator=draw) * strength
            tensors[f"{of_module}.lora_embedding_B"] = torch.randn(inputs, rank, generator=draw) * strength
            tensors[f"{of_module}.base_layer.weight"] = weight
            continue
        tensors[f"{of_module}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * strength
        tensors[f"{of_module}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * strength
    targets = sorted({module.rpartition(".")[2] for module in modules})
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**plain, "task_type": "CAUSAL_LM", **config}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """A checkpoint with the adapter added to its weights, which are not tied any more."""
    folder.mkdir(exist_ok=True)
    weights, tensors = load_weights(base), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, up in tensors.items():
        if ".lora_embedding_B" in name:
            down = tensors[name.replace("_B", "_A")]
            target = f"{EMBEDDING}.weight"
            weights[target] = weights[target] + config["lora_alpha"] / len(down) * (up @ down).T
        if ".lora_B." in name:
            down = tensors[name.replace(".lora_B.", ".lora_A.")]
            rank = math.sqrt(len(down)) if config.get("use_rslora") else len(down)
            target = name.removeprefix("base_model.model.").replace(".lora_B", "")
            weights[target] = weights[target] + config["lora_alpha"] / rank * (up @ down)
    save_file(weights, folder / "model.safetensors")
    stated = {**json.loads((base / "config.json").read_text()), "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def load_weights(base: Path) -> dict[str, torch.Tensor]:
    """Those of a checkpoint, with the head under its own name."""
    weights = load_file(base / "model.safetensors")
    return {f"{HEAD}.weight": weights[f"{EMBEDDING}.weight"].clone(), **weights}
