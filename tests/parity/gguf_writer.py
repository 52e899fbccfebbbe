"""Writes a checkpoint of transformers as a GGUF file: as llama.cpp's converter does, with the package's own names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from tests.loader.conftest import add_metadata


class GgufWriter:
    """Writes a checkpoint of transformers as llama.cpp's converter does, with the `gguf` package's own names."""

    METADATA: ClassVar[dict[str, str]] = {
        "max_position_embeddings": "context_length",
        "n_positions": "context_length",
        "model_max_length": "context_length",
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
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_latent_size": "moe_latent_size",
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
        "index_n_heads": "attention.indexer.head_count",
        "index_head_dim": "attention.indexer.key_length",
        "index_topk": "attention.indexer.top_k",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "top_k_experts": "expert_used_count",
        "num_experts_per_token": "expert_used_count",
        "num_shared_experts": "expert_shared_count",
        "num_dense_layers": "leading_dense_block_count",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
        "conv_L_cache": "shortconv.l_cache",
        "linear_head_dim": "kda.head_dim",
        "full_attention_interval": "full_attention_interval",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "mamba_d_conv": "ssm.conv_kernel",
        "mamba_d_state": "ssm.state_size",
        "mamba_n_groups": "ssm.group_count",
        "mamba_n_heads": "ssm.time_step_rank",
        "conv_kernel": "ssm.conv_kernel",
        "ssm_state_size": "ssm.state_size",
        "n_groups": "ssm.group_count",
        "mamba_num_heads": "ssm.time_step_rank",
    }
    # Whose layers slide, of those that the file tells; all, of those that it does not.
    SAYS_PATTERN = ("olmo2", "exaone4", "exaone-moe", "gemma4")
    SAYS_WINDOW = ("gemma2", "gemma3", "phi3", "cohere2", "gpt-oss")
    ROTATES_NEIGHBOURS = (
        "llama",
        "mistral3",
        "granite",
        "granitemoe",
        "granitehybrid",
        "nemotron_h",
        "nemotron_h_moe",
        "smollm3",
        "arcee",
        "olmo",
    )
    # To the weights of norms.
    ADDS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")
    HYBRID = ("granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe", "kimi-linear")

    def __init__(self, folder: Path, architecture: str, name: str = "") -> None:
        self._folder = folder
        config = json.loads((folder / "config.json").read_text())
        self._config = {**config, **config.get("text_config", {})}
        kinds = self._config.get("layers_block_type", ())
        self._layers = self._config.get("num_hidden_layers") or self._config.get("n_layer") or len(kinds)
        self._heads = self._config.get("num_attention_heads") or self._config["n_head"]
        self._hidden = self._config.get("hidden_size") or self._config["n_embd"]
        kind = getattr(gguf.MODEL_ARCH, architecture)
        self._architecture = name or gguf.MODEL_ARCH_NAMES[kind]
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
        if self._architecture.startswith("lfm2"):
            found["attention.layer_norm_rms_epsilon"] = found.pop("attention.layer_norm_epsilon")
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
            if config["model_type"] != "glm4_moe_lite":
                found["expert_gating_func"] = 1 if config["model_type"] == "deepseek_v2" else 2
        return found | self._rope(rope) | self._of_kind(found)

    def _of_kind(self, found: dict[str, Any]) -> dict[str, Any]:
        """What architectures whose layers differ say in ways of their own."""
        config, kinds = self._config, self._config.get("layer_types") or self._config.get("layers_block_type")
        stated: dict[str, Any] = {}
        if self._architecture in self.HYBRID:
            heads = 1 if self._architecture == "kimi-linear" else config["num_key_value_heads"]
            stated["attention.head_count_kv"] = [heads if kind == "full_attention" else 0 for kind in kinds]
        if "linear_value_head_dim" in config:
            stated["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        if self._architecture.startswith("qwen35"):
            stated["rope.dimension_sections"] = [2, 1, 1, 0]
        if self._architecture == "granitehybrid":
            stated["ssm.inner_size"] = config["mamba_expand"] * self._hidden
            stated["rope.scaling.finetuned"] = config.get("position_embedding_type") == "rope"
        if self._architecture.startswith("nemotron_h"):
            stated["ssm.inner_size"] = config["mamba_num_heads"] * config["mamba_head_dim"]
            kind, width = ("moe", "moe_intermediate_size") if "moe" in kinds else ("mlp", "intermediate_size")
            stated["feed_forward_length"] = [config[width] if each == kind else 0 for each in kinds]
        if self._architecture == "llama4":
            widths = {"feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size"}
            stated |= {key: config[name] for key, name in widths.items()}
        if self._architecture == "lfm2":
            stored = load_file(self._folder / "model.safetensors")
            stated["feed_forward_length"] = len(stored["model.layers.0.feed_forward.w1.weight"])
        if self._architecture == "gemma4":
            stated |= self._of_gemma4([kind == "sliding_attention" for kind in kinds])
        return stated

    def _of_gemma4(self, slides: list[bool]) -> dict[str, Any]:
        config, by_layer = self._config, self._config["per_layer_config"]
        whole = by_layer[str(slides.index(False))]
        heads = config["num_key_value_heads"]
        inner, own = config["intermediate_size"], self._layers - config["num_kv_shared_layers"]
        doubled = 2 if config["use_double_wide_mlp"] else 1
        return {
            "attention.key_length": whole["head_dim"],
            "attention.key_length_swa": config["head_dim"],
            "attention.head_count_kv": [heads if each else whole.get("num_key_value_heads", heads) for each in slides],
            "feed_forward_length": [inner * (1 if layer < own else doubled) for layer in range(self._layers)],
            "rope.dimension_count": whole["head_dim"],
        }

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
        if self._architecture == "gemma4":
            half = self._of_gemma4([kind == "sliding_attention" for kind in self._config["layer_types"]])
            half, turned = half["attention.key_length"] // 2, rope["full_attention"]["partial_rotary_factor"]
            turns = torch.arange(half) < int(half * turned)
            yield "rope_freqs.weight", torch.where(turns, 1.0, 1e30)
        stacks: dict[str, list[torch.Tensor]] = {}
        for name, tensor in self._split():
            stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
        for name, tensors in stacks.items():
            tensor = torch.stack(tensors) if ".experts." in name and len(tensors) > 1 else tensors[0]
            named = (
                name
                if name.startswith("blk.")
                else self._names.get_name(name.replace("_correction_bias", "_correction.bias"), (".weight", ".bias"))
            )
            assert named is not None, name
            whole = named.endswith((".weight", ".bias", ".scale", ".ssm_a", ".ssm_d"))
            yield named if whole else f"{named}.weight", tensor

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
            if re.search("vision|visual|multi_modal", name):
                continue
            name = name.replace("model.language_model.", "model.").replace("language_model.", "")
            if name == "lm_head.weight" and self._config.get("tie_word_embeddings"):
                continue
            if self._architecture in self.ROTATES_NEIGHBOURS and ("q_proj" in name or "k_proj" in name):
                heads = self._config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            if self._architecture in self.ADDS_ONE and re.search(r"norm\w*\.weight$", name):
                tensor = tensor if "linear_attn.norm" in name else tensor + 1
            name, tensor = self._recurrent(name, tensor)
            if "query_key_value" in name:
                tensor = tensor.unflatten(0, (self._heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            if self._architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                tensor = tensor.T
            if name.endswith("kv_b_proj.weight"):
                key, value = (self._config[part] for part in ("qk_nope_head_dim", "v_head_dim"))
                keys, values = tensor.unflatten(0, (self._heads, key + value)).split((key, value), dim=1)
                yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
                yield name.replace("kv_b_proj", "v_b_proj"), values
            elif "in_proj_qkvz" in name:
                keys = self._config["linear_num_key_heads"]
                size = self._config["linear_key_head_dim"]
                values = self._config["linear_num_value_heads"] // keys * self._config["linear_value_head_dim"]
                *qkv, z = tensor.unflatten(0, (keys, -1)).split((size, size, values, values), dim=1)
                yield name.replace("qkvz", "qkv"), torch.cat([part.flatten(0, 1) for part in qkv])
                yield name.replace("qkvz", "z"), z.flatten(0, 1)
            elif "input_linear" in name:
                shared = "shared_mlp" in name
                of_experts = "shared_experts" if self._config.get("num_local_experts") else ""
                for part, half in zip(("gate", "up"), tensor.chunk(2, dim=0 if shared else 1), strict=True):
                    one = name.replace("block_sparse_moe", "mlp")
                    if shared:
                        yield (
                            f"{one.partition('shared_mlp')[0]}mlp.{of_experts}.{part}_proj.weight".replace("..", "."),
                            half,
                        )
                    else:
                        yield one.replace("input_linear", f"experts.{part}_proj"), half
            elif "shared_mlp.output_linear" in name:
                of_experts = "shared_experts." if self._config.get("num_local_experts") else ""
                yield name.replace("shared_mlp.output_linear", f"mlp.{of_experts}down_proj"), tensor
            elif name.endswith("router.scale"):
                yield f"blk.{name.split('.')[2]}.ffn_gate_inp.scale", tensor
            elif name.endswith("per_expert_scale"):
                yield f"blk.{name.split('.')[2]}.ffn_down_exps.scale", tensor
            elif self._architecture == "gemma4" and "experts." in name:
                yield f"{name}.weight", tensor
            elif (
                self._architecture in ("llama4", "qwen35moe", "qwen3next", "gemma4") and "experts.gate_up_proj" in name
            ):
                straight = tensor.transpose(1, 2) if self._architecture == "llama4" else tensor
                for part, half in zip(("gate", "up"), straight.chunk(2, dim=1), strict=True):
                    yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
            elif "experts.gate_up_proj" in name:
                for turn, part in enumerate(("gate", "up")):
                    of_part = name.replace("gate_up_proj_bias", f"{part}_proj.bias")
                    of_part = of_part.replace("gate_up_proj", f"{part}_proj.weight")
                    yield of_part, tensor[..., turn::2].transpose(1, -1)
            elif "experts.down_proj_bias" in name:
                yield name.replace("down_proj_bias", "down_proj.bias"), tensor
            elif name.endswith("experts.down_proj"):
                yield f"{name}.weight", tensor if self._architecture == "qwen35moe" else tensor.transpose(1, 2)
            else:
                yield name, tensor

    def _recurrent(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """What is done to the tensors of layers that have a state."""
        config = self._config
        if self._architecture in ("qwen35", "qwen35moe") and "linear_attn." in name:
            tensor = self._with_keys_in_turn(name, tensor)
        if name.endswith(".A_log"):
            tensor = -tensor.exp()
        if name.endswith((".A_log", "mixer.D", "mamba.D")) and self._architecture.startswith(("granite", "nemotron")):
            tensor = tensor[:, None]
        if re.search(r"(mixer|mamba)\.norm\.weight$", name):
            tensor = tensor.unflatten(0, (config.get("mamba_n_groups") or config["n_groups"], -1))
        if re.search(r"[qkv]_conv1d\.weight$", name):
            tensor = tensor.reshape(1, len(tensor), 1, -1)
        elif re.search(r"conv(1d)?\.weight$", name):
            tensor = tensor.squeeze(1)
        if self._architecture.startswith("nemotron_h"):
            name = name.replace("model.", "backbone.")
            name = re.sub(r"backbone(.*)\.mixer\.experts", r"model\1.mlp.experts", name)
        if self._architecture == "lfm2moe" and ".experts." in name:
            name = name.removeprefix("model.")
        name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name)
        return name.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias"), tensor

    def _with_keys_in_turn(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Value heads: the first of each key, then the second of each, and so on."""
        keys, size = self._config["linear_num_key_heads"], self._config["linear_value_head_dim"]
        of_keys = 2 * keys * self._config["linear_key_head_dim"]

        def in_turn(part: torch.Tensor, dim: int, width: int) -> torch.Tensor:
            return part.unflatten(dim, (keys, -1, width)).transpose(dim, dim + 1).flatten(dim, dim + 2)

        if "in_proj_qkv" in name or "conv1d" in name:
            return torch.cat([tensor[:of_keys], in_turn(tensor[of_keys:], 0, size)])
        if "out_proj" in name:
            return in_turn(tensor, 1, size)
        if "norm" in name:
            return tensor
        return in_turn(tensor, 0, size if "in_proj_z" in name else 1)
