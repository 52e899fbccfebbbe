"""GGUF files of all families that llama.cpp knows, written from checkpoints of transformers as llama.cpp's converter
writes them, with the `gguf` package's own names: the same logits, greedy tokens, and experts that stay quantised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from bough.core.errors import ModelError
from bough.distributed.group import ALONE, RankGroup
from bough.kernels.quant_linear.packed import Format
from bough.loader.config import read_config
from bough.loader.load import load_weights, open_source
from bough.loader.locate import locate
from bough.models.base import CausalLM
from bough.models.registry import FAMILIES, build_model, find_family
from bough.native.library import load_library
from tests.fakes.forward import CPU, Forward
from tests.fakes.native_forward import NativeForward
from tests.fakes.ranks import on_ranks
from tests.loader.conftest import add_metadata
from tests.parity.engines import LocalEngine
from tests.parity.test_families import CASES, NEW, TOLERANCE, YARN, Case, Model, make, prompt


@dataclass(frozen=True)
class File:
    """What is written of a case of `test_families`."""

    architecture: str  # the `gguf` package's name
    changes: dict[str, Any] = field(default_factory=dict)  # of the case: what such a file cannot say
    case: str = ""  # where it is not the file's name


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
    "glm4_moe-groups": File("GLM4_MOE"),
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
}


def make_checkpoint(name: str, folder: Path) -> Model:
    file = FILES[name]
    base = file.case or name
    case = CASES.get(base, Case({}))
    fields = {**case.fields, **file.changes}
    return make(name, folder, replace(case, fields=fields, model_type=case.model_type or base))


class GgufWriter:
    """Writes a checkpoint of transformers as llama.cpp's converter does, with the `gguf` package's own names."""

    METADATA: ClassVar[dict[str, str]] = {
        "max_position_embeddings": "context_length",
        "n_positions": "context_length",
        "hidden_size": "embedding_length",
        "n_embd": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "n_inner": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "n_head": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "layer_norm_epsilon": "attention.layer_norm_epsilon",
        "norm_epsilon": "attention.layer_norm_epsilon",
        "norm_eps": "attention.layer_norm_epsilon",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "use_parallel_residual": "use_parallel_residual",
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "logit_scale": "logit_scale",
        "num_local_experts": "expert_count",
        "num_experts": "expert_count",
        "n_routed_experts": "expert_count",
        "moe_num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_k": "expert_used_count",
        "moe_topk": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "n_shared_experts": "expert_shared_count",
        "moe_num_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "moe_layer_start_index": "leading_dense_block_count",
        "moe_layer_interval": "interleave_moe_layer_step",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "v_head_dim": "attention.value_length_mla",
        "qk_rope_head_dim": "rope.dimension_count",
    }
    # Whose layers slide, of those that the file tells; all, of those that it does not.
    SAYS_PATTERN, SAYS_WINDOW = ("olmo2", "exaone4"), ("gemma2", "gemma3", "phi3", "cohere2", "gpt-oss")
    ROTATES_NEIGHBOURS = ("llama", "mistral3", "granite", "granitemoe", "smollm3", "arcee", "olmo")
    ADDS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")  # to the weights of norms

    def __init__(self, folder: Path, architecture: str) -> None:
        self._folder = folder
        config = json.loads((folder / "config.json").read_text())
        self._config = {**config, **config.get("text_config", {})}
        self._layers = self._config.get("num_hidden_layers") or self._config["n_layer"]
        self._heads = self._config.get("num_attention_heads") or self._config["n_head"]
        self._hidden = self._config.get("hidden_size") or self._config["n_embd"]
        kind = getattr(gguf.MODEL_ARCH, architecture)
        self._architecture = gguf.MODEL_ARCH_NAMES[kind]
        self._names = gguf.get_tensor_name_map(kind, self._layers)

    def write(
        self, path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, split_max_tensors: int = 0
    ) -> Path:
        """Matrices of `kind`, where their rows are long enough for it."""
        writer = gguf.GGUFWriter(path, self._architecture, split_max_tensors=split_max_tensors)
        for key, value in self._metadata().items():
            add_metadata(writer, f"{self._architecture}.{key}", value)
        writer.add_token_list([f"<{token}>" for token in range(self._config["vocab_size"])])
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        for name, tensor in self._tensors():
            stored = kind if tensor.dim() > 1 and tensor.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F32
            data = np.ascontiguousarray(gguf.quants.quantize(tensor.float().numpy(), stored))
            writer.add_tensor(name, data, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _metadata(self) -> dict[str, Any]:
        config, rope = self._config, self._config.get("rope_parameters") or {}
        found = {key: config[field] for field, key in self.METADATA.items() if config.get(field) is not None}
        found["block_count"] = self._layers
        if self._architecture == "olmo":
            found["attention.layer_norm_epsilon"] = 1e-5
        windows = (*self.SAYS_WINDOW, *self.SAYS_PATTERN)
        if config.get("sliding_window") and self._architecture in windows:
            found["attention.sliding_window"] = config["sliding_window"]
        if "attention.sliding_window" in found and self._architecture in self.SAYS_PATTERN:
            slides = [kind == "sliding_attention" for kind in config["layer_types"]]
            found["attention.sliding_window_pattern"] = slides
        if "attention.kv_lora_rank" in found:
            head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
            rank = config["kv_lora_rank"]
            found |= {"attention.key_length_mla": head, "attention.key_length": rank + config["qk_rope_head_dim"]}
            found |= {"attention.value_length": rank, "attention.head_count_kv": 1}
            found["expert_gating_func"] = 2 if config["model_type"] == "deepseek_v3" else 1
        return found | self._rope(rope)

    def _rope(self, rope: dict[str, Any]) -> dict[str, Any]:
        dim = self._config.get("head_dim") or self._hidden // self._heads
        local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
        found: dict[str, Any] = {} if local is None else {"rope.freq_base_swa": local["rope_theta"]}
        if rope.get("alpha"):
            found["rope.freq_base"] = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
        elif rope:
            found["rope.freq_base"] = rope["rope_theta"]
        if rope.get("partial_rotary_factor"):
            found["rope.dimension_count"] = int(dim * rope["partial_rotary_factor"])
        if rope.get("rope_type") == "yarn":
            found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
            found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
            if rope.get("mscale_all_dim"):
                part = 0.1 if self._architecture == "deepseek2" else 1.0
                found["rope.scaling.yarn_log_multiplier"] = part * rope["mscale_all_dim"]
            if rope.get("llama_4_scaling_beta"):
                found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        if rope.get("rope_type") == "longrope":
            original, longest = rope["original_max_position_embeddings"], self._config["max_position_embeddings"]
            found["rope.scaling.original_context_length"] = original
            factor = longest / original
            sharper = (1 + np.log(factor) / np.log(original)) ** 0.5 if factor > 1 else 1.0
            found["rope.scaling.attn_factor"] = float(sharper)
        return found

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        rope = self._config.get("rope_parameters") or {}
        for part in ("long", "short"):
            if f"{part}_factor" in rope:
                yield f"rope_factors_{part}.weight", torch.tensor(rope[f"{part}_factor"])
        if rope.get("rope_type") == "llama3":
            yield "rope_freqs.weight", self._stretched(rope)
        stacks: dict[str, list[torch.Tensor]] = {}
        for name, tensor in self._split():
            stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
        for name, tensors in stacks.items():
            tensor = torch.stack(tensors) if ".experts." in name and len(tensors) > 1 else tensors[0]
            named = self._names.get_name(name.replace("_correction_bias", "_correction.bias"), (".weight", ".bias"))
            assert named is not None, name
            yield named if named.endswith((".weight", ".bias")) else f"{named}.weight", tensor

    def _stretched(self, rope: dict[str, Any]) -> torch.Tensor:
        """The divisors of the frequencies, from transformers' own frequencies."""
        config = transformers.AutoConfig.from_pretrained(self._folder)
        dim = config.head_dim
        plain = rope["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        return plain / scaled

    def _split(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint with one matrix for each part of each expert, in the order of the experts, and with the
        changes that llama.cpp makes to the numbers."""
        stored = load_file(self._folder / "model.safetensors")
        in_order = sorted(stored, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")])
        for name in in_order:
            tensor = stored[name]
            if "vision" in name or "multi_modal" in name:
                continue
            name = name.replace("model.language_model.", "model.").replace("language_model.", "")
            if name == "lm_head.weight" and self._config.get("tie_word_embeddings"):
                continue
            if self._architecture in self.ROTATES_NEIGHBOURS and ("q_proj" in name or "k_proj" in name):
                heads = self._config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            if self._architecture in self.ADDS_ONE and re.search(r"norm\w*\.weight$", name):
                tensor = tensor + 1
            if "query_key_value" in name:
                tensor = tensor.unflatten(0, (self._heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            if self._architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                tensor = tensor.T
            if name.endswith("kv_b_proj.weight"):
                key, value = (self._config[part] for part in ("qk_nope_head_dim", "v_head_dim"))
                keys, values = tensor.unflatten(0, (self._heads, key + value)).split((key, value), dim=1)
                yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
                yield name.replace("kv_b_proj", "v_b_proj"), values
            elif "input_linear" in name:
                for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                    yield name.replace("input_linear", f"experts.{part}_proj").replace("block_sparse_moe", "mlp"), half
            elif "experts.gate_up_proj" in name:
                for turn, part in enumerate(("gate", "up")):
                    of_part = name.replace("gate_up_proj_bias", f"{part}_proj.bias")
                    of_part = of_part.replace("gate_up_proj", f"{part}_proj.weight")
                    yield of_part, tensor[..., turn::2].transpose(1, -1)
            elif "experts.down_proj_bias" in name:
                yield name.replace("down_proj_bias", "down_proj.bias"), tensor
            elif name.endswith("experts.down_proj"):
                yield f"{name}.weight", tensor.transpose(1, 2)
            else:
                yield name, tensor


def load(path: Path, group: RankGroup = ALONE) -> CausalLM:
    files = locate(str(path))
    config = read_config(files)
    model = build_model(config, group.topology, torch.float32, CPU, group)
    load_weights(list(model.slots()), open_source(files, config), progress=False, device=CPU)
    return model


QUICK = ("llama", "phi3-long", "gpt_neox", "mixtral", "deepseek_v3")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FILES]
)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokens = make_checkpoint(name, tmp_path), prompt(30, seed=9)
    path = GgufWriter(tmp_path, FILES[name].architecture).write(tmp_path / "model.gguf")
    found = Forward(load(path)).step({0: tokens})[0]
    torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_on_two_ranks_are_read_from_the_file(name: str, tmp_path: Path) -> None:
    model, tokens = make_checkpoint(name, tmp_path), prompt(30, seed=9)
    path = GgufWriter(tmp_path, FILES[name].architecture).write(tmp_path / "model.gguf")
    for found in on_ranks(2, lambda g: Forward(load(path, g), topology=g.topology).step({0: tokens})[0], ep_size=2):
        torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen2", "starcoder2", "gpt2", "stablelm", "nemotron", "minimax_m2"])
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0])
def test_transformers_reads_the_same_from_the_file(name: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Its own reader, of those architectures that it has."""
    make_checkpoint(name, tmp_path)
    path = GgufWriter(tmp_path, FILES[name].architecture).write(tmp_path / "model.gguf", kind)
    compare_with_reader(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K])
def test_k_quants(kind: gguf.GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `gguf` package reads them but cannot make them: the matrices are random blocks."""

    def random_blocks(matrix: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        if kind == gguf.GGMLQuantizationType.F32:
            return matrix
        size, width = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(matrix.shape).integers(0, 256, (matrix.size // size, width), dtype=np.uint8)
        places = {gguf.GGMLQuantizationType.Q4_K: (0, 2), gguf.GGMLQuantizationType.Q6_K: (208,)}[kind]
        for place in places:
            blocks[:, place : place + 2] = np.array([2e-4], np.float16).view(np.uint8)
        return blocks.reshape(*matrix.shape[:-1], -1)

    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "sliding_window": None}
    make("mistral", tmp_path, Case(sizes))
    monkeypatch.setattr(gguf.quants, "quantize", random_blocks)
    path = GgufWriter(tmp_path, "LLAMA").write(tmp_path / "model.gguf", kind)
    assert {tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors} == {kind, gguf.GGMLQuantizationType.F32}
    compare_with_reader(path)


def compare_with_reader(path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    if config.model_type == "gpt2":  # its positions are read into a field that the model does not look at
        config.n_positions = config.n_ctx
    read = transformers.AutoModelForCausalLM.from_pretrained
    options = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    theirs = read(path.parent, gguf_file=path.name, **options).eval()
    tokens = prompt(30, seed=9)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.1
    found = Forward(load(path)).step({0: tokens})[0]
    torch.testing.assert_close(found, expected, atol=TOLERANCE * float(expected.abs().max()), rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "phi3", "glm4", "gpt2", "granitemoe", "deepseek_v3"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokens = make_checkpoint(name, tmp_path), prompt(20, seed=3)
    path = GgufWriter(tmp_path, FILES[name].architecture).write(tmp_path / "model.gguf")
    sizes = {"context_length": None, "page_size": 4, "max_total_tokens": 400, "max_running_requests": 4}
    engine = LocalEngine(path, new=NEW, dtype="float32", quantization="none", device="cpu", cpu_threads=1, **sizes)
    assert [output for output, _ in engine.ask(tokens)] == [model.continued(tokens)]


def test_every_family_with_a_gguf_architecture_is_compared() -> None:
    compared = {(FILES[name].case or name).partition("-")[0] for name in FILES}
    for family in map(find_family, FAMILIES):
        assert bool(family.gguf_architecture) == any(kind in compared for kind in family.model_types), family


def test_a_split_model_is_read_from_all_its_files(tmp_path: Path) -> None:
    model, tokens = make_checkpoint("mixtral", tmp_path), prompt(30, seed=9)
    folder = tmp_path / "split"
    folder.mkdir()
    GgufWriter(tmp_path, "LLAMA").write(folder / "model.gguf", split_max_tensors=9)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"model-0000{number}-of-00004.gguf" for number in (1, 2, 3, 4)]
    for path in (folder, parts[0]):
        found = Forward(load(path)).step({0: tokens})[0]
        torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(ModelError, match=r"-00001-of-00004\.gguf"):
        load(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"model-00003-of-00004\.gguf: No such file"):
        load(folder)


def test_tensors_without_a_place_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving them out would give another model."""
    make_checkpoint("llama", tmp_path)
    writer = GgufWriter(tmp_path, "LLAMA")
    tensors = [*writer._tensors(), ("blk.1.attn_sub_norm.weight", torch.ones(64))]
    monkeypatch.setattr(writer, "_tensors", lambda: tensors)
    with pytest.raises(ModelError, match=r"model\.gguf.* blk\.1\.attn_sub_norm\.weight"):
        load(writer.write(tmp_path / "model.gguf"))


def test_shared_experts_of_granite_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("granitemoe", tmp_path)
    writer = GgufWriter(tmp_path, "GRANITE_MOE")
    metadata = {**writer._metadata(), "expert_shared_feed_forward_length": 32}
    monkeypatch.setattr(writer, "_metadata", lambda: metadata)
    with pytest.raises(ModelError, match="shared experts"):
        load(writer.write(tmp_path / "model.gguf"))


def test_quantised_experts_stay_so(tmp_path: Path) -> None:
    library = load_library()
    if library is None:
        pytest.skip("the CPU kernels are not compiled")
    make_checkpoint("mixtral", tmp_path)
    writer = GgufWriter(tmp_path, "LLAMA")
    path = writer.write(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    ours = load(path)
    source = open_source(locate(str(path)), ours.config)
    native = NativeForward(library, ours.config, source, quantization="auto")
    formats = {slot.packing.weight.format for slot in native.model.slots() if ".experts." in slot.name and slot.packing}
    assert formats == {Format.Q8}
    tokens = {0: prompt(20, seed=10)}
    expected, found = Forward(ours).step(tokens)[0], native.step(tokens)[0]
    assert (found - expected).norm() / expected.norm() < 0.02
