"""GGUF files of families with experts, written from checkpoints of transformers as llama.cpp's converter writes them:
the same logits, and experts that stay quantised."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bough.distributed.topology import Topology
from bough.kernels.quant_linear.packed import Format
from bough.loader.config import read_config
from bough.loader.load import load_weights, open_source
from bough.loader.locate import locate
from bough.models.base import CausalLM
from bough.models.registry import build_model
from bough.native.library import load_library
from tests.fakes.forward import CPU, Forward
from tests.fakes.native_forward import NativeForward
from tests.loader.conftest import add_metadata
from tests.parity.test_families import TOLERANCE, make, prompt

FAMILIES = {  # the names of transformers, and of the `gguf` package
    "mixtral": "LLAMA",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_moe": "QWEN3MOE",
    "gpt_oss": "GPT_OSS",
    "glm4_moe": "GLM4_MOE",
    "olmoe": "OLMOE",
}


class GgufWriter:
    """Writes a checkpoint of transformers as llama.cpp's converter does, with the `gguf` package's own names."""

    METADATA: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "sliding_window": "attention.sliding_window",
        "num_local_experts": "expert_count",
        "num_experts": "expert_count",
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
    }

    def __init__(self, folder: Path, architecture: str) -> None:
        self._folder = folder
        self._config = json.loads((folder / "config.json").read_text())
        kind = getattr(gguf.MODEL_ARCH, architecture)
        self._architecture = gguf.MODEL_ARCH_NAMES[kind]
        self._names = gguf.get_tensor_name_map(kind, self._config["num_hidden_layers"])

    def write(self, path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> None:
        writer = gguf.GGUFWriter(path, self._architecture)
        for key, value in self._metadata().items():
            add_metadata(writer, f"{self._architecture}.{key}", value)
        for name, tensor in self._tensors().items():
            stored = kind if tensor.dim() == 3 else gguf.GGMLQuantizationType.F32
            data = np.ascontiguousarray(gguf.quants.quantize(tensor.numpy(), stored))
            writer.add_tensor(name, data, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _metadata(self) -> dict[str, Any]:
        rope = self._config["rope_parameters"]
        found = {key: self._config[field] for field, key in self.METADATA.items() if self._config.get(field)}
        found["rope.freq_base"] = rope["rope_theta"]
        if "partial_rotary_factor" in rope:
            found["rope.dimension_count"] = int(self._config["head_dim"] * rope["partial_rotary_factor"])
        if rope["rope_type"] == "yarn":
            found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
            found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        return found

    def _tensors(self) -> dict[str, torch.Tensor]:
        stacks: dict[str, list[torch.Tensor]] = {}
        for name, tensor in self._split().items():
            stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
        found = {}
        for name, tensors in stacks.items():
            tensor = torch.stack(tensors) if ".experts." in name and len(tensors) > 1 else tensors[0]
            named = self._names.get_name(name.replace("_correction_bias", "_correction.bias"), (".weight", ".bias"))
            assert named is not None, name
            found[named if named.endswith((".weight", ".bias")) else f"{named}.weight"] = tensor.squeeze()
        return found

    def _split(self) -> dict[str, torch.Tensor]:
        """The checkpoint with one matrix for each part of each expert, in the order of the experts, and heads as
        llama.cpp rotates them."""
        found = {}
        for name, tensor in sorted(load_file(self._folder / "model.safetensors").items()):
            if self._architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = self._config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            if "experts.gate_up_proj" in name:
                for turn, part in enumerate(("gate", "up")):
                    of_part = name.replace("gate_up_proj_bias", f"{part}_proj.bias")
                    of_part = of_part.replace("gate_up_proj", f"{part}_proj.weight")
                    found[of_part] = tensor[..., turn::2].transpose(1, -1).contiguous()
            elif "experts.down_proj_bias" in name:
                found[name.replace("down_proj_bias", "down_proj.bias")] = tensor
            elif name.endswith("experts.down_proj"):
                found[f"{name}.weight"] = tensor.transpose(1, 2).contiguous()
            else:
                found[name] = tensor
        return found


def load(path: Path) -> CausalLM:
    files = locate(str(path))
    config = read_config(files)
    model = build_model(config, Topology(), torch.float32, CPU)
    load_weights(list(model.slots()), open_source(files, config), progress=False, device=CPU)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, path, tokens = make(name, tmp_path), tmp_path / "model.gguf", prompt(30, seed=9)
    GgufWriter(tmp_path, FAMILIES[name]).write(path)
    found = Forward(load(path)).step({0: tokens})[0]
    torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


def test_quantised_experts_stay_so(tmp_path: Path) -> None:
    library = load_library()
    if library is None:
        pytest.skip("the CPU kernels are not compiled")
    make("mixtral", tmp_path)
    path = tmp_path / "model.gguf"
    GgufWriter(tmp_path, FAMILIES["mixtral"]).write(path, gguf.GGMLQuantizationType.Q8_0)
    ours = load(path)
    source = open_source(locate(str(path)), ours.config)
    native = NativeForward(library, ours.config, source, quantization="auto")
    formats = {slot.packing.weight.format for slot in native.model.slots() if ".experts." in slot.name and slot.packing}
    assert formats == {Format.Q8}
    tokens = {0: prompt(20, seed=10)}
    expected, found = Forward(ours).step(tokens)[0], native.step(tokens)[0]
    assert (found - expected).norm() / expected.norm() < 0.02
