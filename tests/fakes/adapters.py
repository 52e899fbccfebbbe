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
EXPERTS = ("gate_proj", "up_proj", "down_proj")
ROUTER = "mlp.gate"
FIRST = ".mlp.experts.0.gate_proj.weight"  # by which a layer with experts is known


def write_adapter(
    folder: Path,
    base: Path,
    seed: int,
    *,
    rank: int = 4,
    modules: tuple[str, ...] = LINEAR,
    layers: tuple[int, ...] | None = None,
    strength: float = 0.3,
    fused: bool = False,
    **config: Any,
) -> Path:
    """An adapter for the checkpoint in the folder `base`; `config` lies over its own configuration. If it is `fused`,
    it changes the experts of all layers, too, in the form that PEFT gives parameters of Transformers' modules."""
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
    if fused:
        for name in [name for name in weights if name.endswith(FIRST)]:
            layer = name.removesuffix(FIRST)
            experts = sum(
                key.startswith(f"{layer}.mlp.experts.") and key.endswith(".up_proj.weight") for key in weights
            )
            inner, hidden = weights[name].shape
            # As PEFT wraps both parameters of the module: gate_up_proj, and around that down_proj.
            for wrapped, outputs, inputs in ((".base_layer", 2 * inner, hidden), ("", hidden, inner)):
                of_module = f"base_model.model.{layer}.mlp.experts{wrapped}"
                tensors[f"{of_module}.lora_A.weight"] = torch.randn(rank * experts, inputs, generator=draw) * strength
                tensors[f"{of_module}.lora_B.weight"] = torch.randn(outputs, rank * experts, generator=draw) * strength
        config["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
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
            if ".mlp.experts.lora_B" in name or ".mlp.experts.base_layer." in name:
                _merge_fused(weights, target.partition(".mlp.")[0], "base_layer" in name, down, up, config)
                continue
            weights[target] = weights[target] + config["lora_alpha"] / rank * (up @ down)
    save_file(weights, folder / "model.safetensors")
    stated = {**json.loads((base / "config.json").read_text()), "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def _merge_fused(
    weights: dict[str, torch.Tensor],
    layer: str,
    upwards: bool,
    down: torch.Tensor,
    up: torch.Tensor,
    config: dict[str, Any],
) -> None:
    """`ParamWrapper.get_delta_weight` of PEFT."""
    experts = len(down) // config["r"]
    products = torch.einsum("ore,eri->eoi", up.view(len(up), -1, experts), down.view(experts, -1, down.shape[1]))
    for expert, product in enumerate(products * config["lora_alpha"] / config["r"]):
        parts = zip(EXPERTS[:2], product.chunk(2), strict=True) if upwards else [(EXPERTS[2], product)]
        for part, own in parts:
            weights[f"{layer}.mlp.experts.{expert}.{part}.weight"] += own


def load_weights(base: Path) -> dict[str, torch.Tensor]:
    """Those of a checkpoint, with the head under its own name."""
    weights = load_file(base / "model.safetensors")
    return {f"{HEAD}.weight": weights[f"{EMBEDDING}.weight"].clone(), **weights}
