"""Reads LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors` in a folder.

Tensors are named after modules of the Transformers model. They become changes of the matrices of our model: one of a
fused module is cut, and its rows are put in our order, as the matrix itself is when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.layers.adapters import Adapter, LowRank
from bough.loader.source import SafetensorsSource
from bough.models.names import find_tensors
from bough.models.registry import find_family

PREFIX = "base_model.model."
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
# Fields of the configuration that ask for something that is not done here.
REFUSED = {
    "use_dora": "DoRA adapters",
    "modules_to_save": "adapters with whole modules (modules_to_save)",
    "lora_bias": "adapters with biases (lora_bias)",
    "layer_replication": "adapters that repeat layers (layer_replication)",
    "target_parameters": "adapters of single parameters such as experts (target_parameters)",
    "trainable_token_indices": "adapters with tokens of their own (trainable_token_indices)",
    "use_qalora": "QALoRA adapters",
    "alora_invocation_tokens": "activated LoRA adapters (alora_invocation_tokens)",
    "arrow_config": "Arrow routers over adapters",
}
# Ways to begin a training that change the model's own weights, too.
CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq")


class ReadAdapter(NamedTuple):
    matrices: Adapter
    content: str  # what its files hash to


def read_adapter(
    path: str,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_rank: int,
    targets: Collection[str],
) -> ReadAdapter:
    """The adapter, for matrices that have these outputs and inputs. `targets` are the modules that it may change, by
    the last part of their names; all if there are none."""
    folder = Path(path).expanduser()
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} is no adapter: {file.name} is missing; give a folder that PEFT has saved.")
    given = _read_config(files[0])
    source = SafetensorsSource([files[1]])
    sides: dict[str, dict[str, str]] = {}
    for name in source.names():
        match = TENSOR.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise ModelError(f"{files[1]}: {name!r} cannot be used; only lora_A and lora_B of linear layers can.")
        sides.setdefault(match["module"], {})[match["side"]] = name
    found: dict[str, LowRank] = {}
    stored = find_tensors(
        find_family(config.architecture).names(config), [f"{module}.weight" for module in sides], keep_others=True
    )
    for target, at in stored.items():
        module = at.name.removesuffix(".weight")
        shape = shapes.get(target.removesuffix(".weight"))
        if shape is None or at.plane is not None or at.parts:
            raise ModelError(
                f"{folder} changes {module!r}, which adapters cannot change here; linear layers outside of experts, "
                "embeddings and the head can be changed. Train the adapter for those, or merge it into the model."
            )
        if targets and module.rpartition(".")[2] not in targets:
            raise ModelError(f"{folder} changes {module!r}, which --lora-target-modules does not name.")
        if len(sides[module]) < 2:
            raise ModelError(f"{folder}: of {module!r} only lora_{''.join(sides[module])} is there; fetch it again.")
        down, up = (source.read(sides[module][side]).to(device, torch.float32) for side in "AB")
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
            raise ModelError(f"{folder}: the shapes of {module!r} do not fit: A {[*down.shape]}, B {[*up.shape]}.")
        rank = down.shape[0]
        if rank > max_rank:
            raise ModelError(f"{folder} has rank {rank}, and at most {max_rank} is allowed (--max-lora-rank, to 256).")
        rows = at.rows
        if rows is not None:
            taken = range(len(up))[rows] if isinstance(rows, slice) else rows
            up = up[list(taken)] if max(taken, default=-1) < len(up) else up[:0]
        if (len(up), down.shape[1]) != shape:
            raise ModelError(
                f"{folder} does not fit this model: {module!r} would be {len(up)} x {down.shape[1]} and is "
                f"{shape[0]} x {shape[1]}; use the model that the adapter was trained for."
            )
        found[target.removesuffix(".weight")] = LowRank(down.to(dtype), (up * _scale(given, module, rank)).to(dtype))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return ReadAdapter(found, digest.hexdigest())


def _read_config(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); fetch it again.") from None
    if not isinstance(given, dict) or given.get("peft_type", "LORA") != "LORA":
        kind = given.get("peft_type") if isinstance(given, dict) else given
        raise ModelError(f"{file}: peft_type is {kind!r}; only LORA adapters can be loaded.")
    for name, what in REFUSED.items():
        if given.get(name):
            raise ModelError(f"{file}: {what} cannot be loaded; merge it into the model, or train one without.")
    if given.get("bias", "none") != "none":
        raise ModelError(f"{file}: bias is {given['bias']!r}; adapters that change biases cannot be loaded.")
    start = given.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGE_WEIGHTS):
        raise ModelError(
            f"{file}: init_lora_weights {start!r} changes the model's own weights; convert it to a plain LoRA "
            "with PEFT (path_initial_model_for_weight_conversion)."
        )
    if not isinstance(given.get("lora_alpha", 8), int | float):
        raise ModelError(f"{file}: lora_alpha must be a number, got {given['lora_alpha']!r}.")
    return given


def _scale(given: Mapping[str, Any], module: str, rank: int) -> float:
    """PEFT's: patterns in `alpha_pattern` mean the ends of modules' names."""
    patterns = (given.get("alpha_pattern") or {}).items()
    own = (alpha for pattern, alpha in patterns if re.match(rf"(.*\.)?({pattern})$", module))
    alpha = float(next(own, given.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if given.get("use_rslora") else rank)
