"""Every family with experts against transformers, from tiny random checkpoints that transformers itself has written:
the same logits however a text is cut and batched, from safetensors files and, where llama.cpp has the family, GGUF."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from bough.distributed.topology import Topology
from bough.executor.native_tapes import why_not_recorded
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

VOCAB = 211
TOLERANCE = 1e-4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Family:
    name: str  # of the classes in transformers
    fields: dict[str, Any]
    gguf: str = ""  # its name in the `gguf` package


FAMILIES = {
    "qwen3_moe": Family(
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        "QWEN3MOE",
    ),
    "qwen3_moe-dense-layers": Family(
        "Qwen3Moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "LLAMA"),
    "mixtral-window": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
    "qwen2_moe": Family(
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
        },
        "QWEN2MOE",
    ),
    "gpt_oss": Family(
        "GptOss",
        {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7},
        "GPT_OSS",
    ),
    "gpt_oss-clamped": Family(
        "GptOss", {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_limit": 0.5}
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        "GLM4_MOE",
    ),
    "glm4_moe-groups": Family(
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    ),
}


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here."""

    theirs: transformers.PreTrainedModel
    ours: CausalLM
    folder: Path

    @torch.inference_mode()
    def truth(self, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.theirs(torch.tensor([tokens])).logits[0]
        return logits


def make_theirs(family: Family) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{family.name}Config")(**{**SIZES, **family.fields})
    theirs = getattr(transformers, f"{family.name}ForCausalLM")(config).float().eval()
    # Fresh models have norm weights of one (or zero) and small matrices: make every weight count.
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in (*theirs.named_parameters(), *theirs.named_buffers()):
            if "inv_freq" not in name and weight.is_floating_point():
                weight.add_(torch.randn_like(weight) * 0.15)
    return theirs


def load(folder: str | Path) -> CausalLM:
    files = locate(str(folder))
    config = read_config(files)
    model = build_model(config, Topology(), torch.float32, CPU)
    load_weights(list(model.slots()), open_source(files, config), progress=False, device=CPU)
    return model


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs = make_theirs(FAMILIES[request.param])
    theirs.save_pretrained(folder)
    return Pair(theirs, load(folder), folder)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_full_prefill(pair: Pair) -> None:
    tokens = prompt(40, seed=2)
    truth = pair.truth(tokens)
    assert_same(Forward(pair.ours).step({3: tokens})[3], truth)
    assert truth.std() > 0.1, "the weights count"


def test_uneven_chunks_then_decode(pair: Pair) -> None:
    tokens = prompt(53, seed=3)
    truth = pair.truth(tokens)
    forward = Forward(pair.ours, page_size=16, pages=64)
    start = 0
    for size in (5, 1, 17, 2, 20, *[1] * 8):
        assert_same(forward.step({0: tokens[start : start + size]})[0], truth[start : start + size])
        start += size
    assert start == len(tokens)


def test_prefix_that_another_row_of_the_same_step_writes(pair: Pair) -> None:
    shared = prompt(32, seed=4)
    first, second = shared + prompt(3, seed=5), shared + prompt(6, seed=6)
    forward = Forward(pair.ours, page_size=16, pages=128)
    forward.reserve(1, len(first))
    forward.share(1, 0, len(shared))
    results = forward.step({0: second[32:], 1: first})
    assert_same(results[1], pair.truth(first))
    assert_same(results[0], pair.truth(second)[32:])


@pytest.fixture(params=["torch", "native"])
def forward(request: pytest.FixtureRequest, pair: Pair) -> Forward:
    """A fresh cache, computed by torch or by the native CPU kernels, as far as these have the family."""
    if request.param == "torch":
        return Forward(pair.ours)
    config = pair.ours.config
    library = load_library()
    if library is None:
        pytest.skip("the CPU kernels are not compiled")
    if (reason := why_not_recorded(config)) is not None:
        assert config.attention_sinks or config.rope.partial_rotary_factor < 1, reason
        pytest.skip(reason)
    return NativeForward(library, config, open_source(locate(str(pair.folder)), config), threads=2)


def test_greedy_tokens(pair: Pair, forward: Forward) -> None:
    start = prompt(9, seed=8)
    asked = torch.tensor([start])
    theirs = pair.theirs.generate(asked, do_sample=False, max_new_tokens=12, min_new_tokens=12)[0, len(start) :]
    tokens, found = start, []
    for _ in range(12):
        logits = forward.step({0: tokens})[0][-1].clone()
        logits[2] = -torch.inf  # the end, which `min_new_tokens` forbids
        found.append(int(logits.argmax()))
        tokens = found[-1:]
    assert found == theirs.tolist()


def test_every_tensor_of_the_checkpoint_is_read(pair: Pair) -> None:
    files = locate(str(pair.folder))
    source = open_source(files, pair.ours.config)
    assert set(source.names()) == {slot.name for slot in pair.ours.slots()}


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


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.gguf])
def test_gguf(name: str, tmp_path: Path) -> None:
    theirs = make_theirs(FAMILIES[name])
    theirs.save_pretrained(tmp_path)
    GgufWriter(tmp_path, FAMILIES[name].gguf).write(tmp_path / "model.gguf")
    ours, tokens = load(tmp_path / "model.gguf"), prompt(30, seed=9)
    with torch.inference_mode():
        assert_same(Forward(ours).step({0: tokens})[0], theirs(torch.tensor([tokens])).logits[0])


def test_quantised_experts_of_a_gguf_stay_so(tmp_path: Path) -> None:
    library = load_library()
    if library is None:
        pytest.skip("the CPU kernels are not compiled")
    family = FAMILIES["qwen3_moe"]
    wide = {**family.fields, "hidden_size": 64, "moe_intermediate_size": 32}
    make_theirs(Family(family.name, wide)).save_pretrained(tmp_path)
    path = tmp_path / "model.gguf"
    GgufWriter(tmp_path, family.gguf).write(path, gguf.GGMLQuantizationType.Q8_0)
    ours = load(path)
    source = open_source(locate(str(path)), ours.config)
    native = NativeForward(library, ours.config, source, quantization="auto")
    formats = {slot.packing.weight.format for slot in native.model.slots() if ".experts." in slot.name and slot.packing}
    assert formats == {Format.Q8}
    tokens = {0: prompt(20, seed=10)}
    expected, found = Forward(ours).step(tokens)[0], native.step(tokens)[0]
    assert (found - expected).norm() / expected.norm() < 0.02
