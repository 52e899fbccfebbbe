"""Every family against transformers, from a folder of config.json and safetensors: the same logits, and the same tokens
through scheduler and executor, with prompts in chunks, pages of several tokens and cached prefixes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bough.core.errors import SettingsError
from bough.core.model_config import ModelConfig
from bough.distributed.group import ALONE, RankGroup
from bough.distributed.topology import Topology
from bough.executor.load_model import check_split
from bough.executor.native_tapes import why_not_recorded
from bough.layers.placement import SpreadExperts, SpreadOptions
from bough.loader.config import read_config
from bough.loader.load import check_biases, check_ends, load_weights, open_source
from bough.loader.locate import locate
from bough.messages.requests import LogprobRequest
from bough.models.registry import FAMILIES, build_model, find_family
from tests.fakes.forward import CPU, Forward
from tests.fakes.ranks import on_ranks
from tests.parity.engines import LocalEngine
from tests.parity.published_sizes import PUBLISHED_SIZES
from tests.parity.test_media import CASES as IMAGES

VOCAB, NEW, TOLERANCE = 97, 6, 1e-4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Case:
    """A tiny model. `without` are fields that its configuration does not have."""

    fields: dict[str, Any]
    native: bool = True  # whether the native kernels compute it
    model_type: str = ""  # where it is not the case's name
    without: tuple[str, ...] = ()
    rounding: float = 0.1  # how far logits in bfloat16 may be from those in float32, as a share of them


def longrope(original: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    return {"original_max_position_embeddings": original, "rope_parameters": rope}


GQA = ("num_key_value_heads",)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "n_groups": 2,
}
NEMOTRON_EXPERTS = {
    **NEMOTRON,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.7,
}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 56,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
}
KIMI = {
    "num_experts_per_token": 5,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "num_local_experts": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 12,
    "linear_num_heads": 6,
}
SHARED_EXPERTS = {**EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 56}
DELTA_NETS = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
CORRECTED = {**EXPERTS, "n_routed_experts": 6, "routed_scaling_factor": 1.7}
GEMMA4 = {  # its scores are not divided, so that rounding moves them far: those of transformers too
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 6,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 12,
    "final_logit_softcapping": 20.0,
}
ELSEWHERE = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")  # test_deepseek.py compares them
ENCODERS = ("bert", "roberta", "nomic_bert", "modernbert")  # test_encoders.py compares them
SPARSE = ("deepseek_v32", "glm_moe_dsa")  # the native kernels have no such attention
CASES: dict[str, Case] = {
    "llama": Case({}),
    "mistral": Case({"sliding_window": 9}),
    "ministral": Case({"head_dim": 16, "sliding_window": 9, "layer_types": WINDOWS}),
    "ministral3": Case({"head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4}}),
    "mistral3": Case(
        {
            "text_config": {**SIZES, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
            "tie_word_embeddings": False,
        },
        without=tuple(SIZES),
    ),
    "qwen2": Case({}),
    "qwen3": Case({"head_dim": 16}),
    "gemma": Case({"head_dim": 16}),
    "gemma2": Case({"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "attn_logit_softcapping": 4.0}),
    "gemma3_text": Case(  # which knows no soft cap of scores, whatever the file says
        {"head_dim": 16, "sliding_window": 9, "layer_types": WINDOWS, "attn_logit_softcapping": 2.0}
    ),
    "gemma4_text": Case({**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}, native=False, rounding=0.3),
    "gemma4-experts": Case(
        {
            **GEMMA4,
            **EXPERTS,
            "num_experts": 5,
            "top_k_experts": 2,
            "enable_moe_block": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
        },
        native=False,
        model_type="gemma4_text",
        rounding=0.3,
    ),
    "gemma4": Case(
        {"text_config": {**SIZES, **GEMMA4, "model_type": "gemma4_text"}, "vision_config": None, "audio_config": None},
        native=False,
        without=tuple(SIZES),
        rounding=0.3,
    ),
    "vaultgemma": Case({"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}),
    "phi": Case({}),
    "phi3": Case({"sliding_window": 9}),
    "phi3-long": Case(longrope(4), model_type="phi3"),
    "phi3-short": Case(longrope(128), model_type="phi3"),
    "glm": Case({"head_dim": 16, "attention_bias": True}),
    "glm4": Case({"head_dim": 16, "attention_bias": True}),
    "granite": Case(MULTIPLIERS),
    "olmo": Case({}),
    "olmo2": Case({}),
    "olmo3": Case({"sliding_window": 9, "layer_types": WINDOWS}),
    "smollm3": Case({"no_rope_layer_interval": 2}),
    "exaone4": Case({"sliding_window": 9, "layer_types": WINDOWS}),
    "exaone4-full": Case({"sliding_window": None, "layer_types": ["full_attention"] * 3}, model_type="exaone4"),
    "seed_oss": Case({"head_dim": 16, "attention_out_bias": True}),
    "hunyuan_v1_dense": Case(
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "ernie4_5": Case({"head_dim": 16, "use_bias": True}),
    "cohere": Case({}),
    "cohere2": Case({"sliding_window": 9, "layer_types": WINDOWS}),
    "starcoder2": Case({"sliding_window": 9}),
    "gpt2": Case({"n_inner": 80}, without=GQA),
    "gpt_neox": Case({}, without=GQA),
    "gpt_neox-serial": Case({"use_parallel_residual": False}, model_type="gpt_neox", without=GQA),
    "opt": Case({"ffn_dim": 80}, without=GQA),
    "stablelm": Case({"use_qkv_bias": True}),
    "stablelm-parallel": Case({"use_parallel_residual": True}, model_type="stablelm"),
    "nemotron": Case({}),
    "helium": Case({"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "arcee": Case({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "jais2": Case({"head_dim": 16}),
    "cwm": Case({"head_dim": 16, "sliding_window": 9, "layer_types": WINDOWS}),
    "mixtral": Case({"num_local_experts": 4, "intermediate_size": 64}),
    "mixtral-window": Case({"num_local_experts": 4, "sliding_window": 9}, model_type="mixtral"),
    "llama4_text": Case(
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 72,
            "num_local_experts": 5,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 9,
            "floor_scale": 8,
            "attn_scale": 0.5,
            "head_dim": 16,
        },
        native=False,
    ),
    "llama4": Case(
        {
            "text_config": {**SIZES, "model_type": "llama4_text", "num_local_experts": 4, "head_dim": 16},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "image_size": 28,
            },
        },
        native=False,
        without=tuple(SIZES),
    ),
    "qwen2_moe": Case({**EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 56}),
    "qwen3_moe": Case({**EXPERTS, "head_dim": 16, "num_experts": 5, "norm_topk_prob": True}),
    "qwen3_moe-dense-layers": Case(
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_experts": 5,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "attention_bias": True,
        },
        model_type="qwen3_moe",
    ),
    "gpt_oss": Case({"head_dim": 16, "num_local_experts": 5, "sliding_window": 9}),
    "gpt_oss-clamped": Case(
        {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_limit": 0.5},
        model_type="gpt_oss",
    ),
    "glm4_moe": Case(
        {
            **EXPERTS,
            "head_dim": 16,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
        }
    ),
    "glm4_moe-groups": Case(
        {
            **EXPERTS,
            "head_dim": 16,
            "n_routed_experts": 8,
            "n_shared_experts": 0,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
        model_type="glm4_moe",
    ),
    "olmoe": Case({"num_experts": 5, "num_experts_per_tok": 2}),
    "granitemoe": Case({**MULTIPLIERS, "num_local_experts": 5}),
    # Rounding decides between experts with nearly equal scores: in bfloat16 transformers is off by 0.04 to 0.33, too.
    "phimoe": Case({"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True}, rounding=0.3),
    "phimoe-near": Case({"num_local_experts": 5, "router_jitter_noise": 0.4, "sliding_window": 9}, model_type="phimoe"),
    "hunyuan_v1_moe": Case({"head_dim": 16, "num_experts": 5, "moe_topk": 2}),
    "ernie4_5_moe": Case(
        {
            "moe_intermediate_size": 24,
            "moe_num_experts": 5,
            "moe_k": 2,
            "num_hidden_layers": 4,
            "moe_layer_end_index": 2,
            "use_bias": False,
        }
    ),
    "ernie4_5_moe-biases": Case(
        {"moe_intermediate_size": 24, "moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 0, "use_bias": True},
        model_type="ernie4_5_moe",
    ),
    "dots1": Case(
        {
            **CORRECTED,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "sliding_window": 9,
            "layer_types": WINDOWS,
        }
    ),
    "solar_open": Case({**CORRECTED, "head_dim": 16, "attention_bias": True}),
    "hy_v3": Case({**EXPERTS, "num_experts": 6, "num_shared_experts": 2, "head_dim": 16}),
    "exaone_moe": Case({**EXPERTS, "num_experts": 6, "sliding_window": 9, "layer_types": WINDOWS}),
    "glm4_moe_lite": Case(
        {
            **CORRECTED,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
        },
    ),
    "flex_olmo": Case({"num_experts": 5, "num_experts_per_tok": 2}),
    "minimax_m2": Case(
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.34},  # 5 of 16
        },
    ),
    "granitemoehybrid": Case({**MULTIPLIERS, **MAMBA, "num_local_experts": 5, "mamba_n_groups": 2}, native=False),
    "granitemoehybrid-dense": Case(
        {
            **MULTIPLIERS,
            **MAMBA,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "time_step_limit": [0.3, 0.8],
        },
        native=False,
        model_type="granitemoehybrid",
    ),
    "granitemoehybrid-attention": Case(
        {**MULTIPLIERS, **MAMBA, "layer_types": ["full_attention"] * 3, "num_local_experts": 0},
        model_type="granitemoehybrid",
    ),
    "granitemoehybrid-mamba": Case(
        {**MULTIPLIERS, **MAMBA, "layer_types": ["linear_attention"] * 3, "num_local_experts": 0},
        native=False,
        model_type="granitemoehybrid",
    ),
    "nemotron_h": Case(
        {**NEMOTRON, "tie_word_embeddings": True},  # which transformers does not heed
        native=False,
        without=("num_hidden_layers",),
    ),
    "nemotron_h-experts": Case(NEMOTRON_EXPERTS, False, "nemotron_h", ("num_hidden_layers",)),
    "nemotron_h-latents": Case(
        {**NEMOTRON_EXPERTS, "moe_latent_size": 40}, False, "nemotron_h", ("num_hidden_layers",)
    ),
    "nemotron_h-groups": Case(
        {
            **NEMOTRON_EXPERTS,
            "layers_block_type": ["moe", "linear_attention", "mlp", "full_attention"],
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
        native=False,
        model_type="nemotron_h",
        without=("num_hidden_layers",),
    ),
    "lfm2": Case({"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}, native=False),
    "lfm2-biases": Case({"full_attn_idxs": [0], "conv_bias": True, "block_auto_adjust_ff_dim": False}, False, "lfm2"),
    "lfm2_moe": Case(
        {
            **EXPERTS,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 5,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.3,
        },
        native=False,
    ),
    "kimi_linear": Case(KIMI, native=False),
    "kimi_linear-queries": Case(
        {
            **KIMI,
            "q_lora_rank": 18,
            "mlp_layer_types": ["sparse"] * 3,
            "moe_renormalize": False,
            "tie_word_embeddings": True,  # which transformers does not heed
        },
        False,
        "kimi_linear",
    ),
    "qwen3_next": Case({**DELTA_NETS, **SHARED_EXPERTS, "norm_topk_prob": True}, native=False),
    "qwen3_next-dense-layers": Case(
        {**DELTA_NETS, **SHARED_EXPERTS, "linear_num_key_heads": 4, "mlp_only_layers": [0, 1], "attention_bias": True},
        native=False,
        model_type="qwen3_next",
    ),
    "qwen3_5_text": Case(DELTA_NETS, native=False),
    "qwen3_5": Case(
        {"text_config": {**SIZES, **DELTA_NETS}, "vision_config": {**VISION, "out_hidden_size": 64}},
        native=False,
        without=tuple(SIZES),
    ),
    "qwen3_5_moe_text": Case({**DELTA_NETS, **SHARED_EXPERTS}, native=False, without=("intermediate_size",)),
    "qwen3_5_moe": Case(
        {
            "text_config": {**SIZES, **DELTA_NETS, **SHARED_EXPERTS},
            "vision_config": {**VISION, "out_hidden_size": 64},
        },
        native=False,
        without=tuple(SIZES),
    ),
}


@dataclass(frozen=True)
class Model:
    folder: Path
    theirs: transformers.PreTrainedModel
    config: ModelConfig
    native: bool
    rounding: float
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # logits: the tests ask for the same

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        if (key := tuple(tokens)) not in self.known:
            self.known[key] = self.theirs(torch.tensor([tokens]), use_cache=False).logits[0]
        return self.known[key]

    def continued(self, prompt: list[int]) -> list[int]:
        """The most likely tokens, each of a pass over all that is before it."""
        tokens = list(prompt)
        for _ in range(NEW):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def make(name: str, folder: Path, case: Case | None = None) -> Model:
    case = case or CASES[name]
    fields = {name: value for name, value in {**SIZES, **case.fields}.items() if name not in case.without}
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(case.model_type or name, **fields)
    kind = transformers.AutoModelForImageTextToText if "text_config" in fields else transformers.AutoModelForCausalLM
    theirs = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():  # fresh norms are one and biases zero: make every weight count
        named = ("correction_bias", "expert_bias", "layer_scalar")
        buffers = [each for name, each in theirs.named_buffers() if name.endswith(named)]
        for weight in (*theirs.parameters(), *buffers):
            weight.add_(torch.randn_like(weight) * 0.1)
    theirs.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    return Model(folder, theirs, read_config(locate(str(folder))), case.native, case.rounding)


@pytest.fixture(scope="module", params=list(CASES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def forward(
    model: Model, dtype: torch.dtype = torch.float32, group: RankGroup = ALONE, spread: SpreadExperts | None = None
) -> Forward:
    ours = build_model(model.config, group.topology, dtype, CPU, group, spread=spread)
    source = open_source(locate(str(model.folder)), model.config)
    load_weights(ours.slots(), source, progress=False, device=CPU)
    if group.topology.has_ends:
        check_ends(ours.slots(), source)
    if group.topology.tp_rank == 0:
        check_biases(list(ours.slots()), source)
    return Forward(ours, page_size=4, dtype=dtype, topology=group.topology)


def in_chunks(forward: Forward, tokens: list[int], cuts: tuple[int, ...]) -> torch.Tensor:
    steps = pairwise((0, *cuts, len(tokens)))
    return torch.cat([forward.step({0: tokens[begin:end]})[0] for begin, end in steps])


@pytest.mark.slow
def test_logits_are_those_of_transformers(model: Model) -> None:
    tokens = prompt(50, seed=2)
    found = in_chunks(forward(model), tokens, (13, 14, 33, 48, 49))
    torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
def test_two_ranks_give_the_same(model: Model) -> None:
    compare_ranks(model, 2)


def compare_ranks(model: Model, size: int) -> None:
    check_split(model.config, size)
    tokens = prompt(50, seed=2)
    for found in on_ranks(size, lambda group: in_chunks(forward(model, group=group), tokens, (13, 14, 33, 48, 49))):
        torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
def test_two_stages_give_the_same_or_the_reason_why_they_cannot(model: Model) -> None:
    try:
        Topology(pp_size=2).layers_of(model.config)
    except SettingsError as error:
        assert "1 stages at most" in str(error) and model.config.layer_inputs
        return
    tokens, cuts = prompt(50, seed=2), (13, 14, 33, 48, 49)
    _, found = on_ranks(1, lambda group: in_chunks(forward(model, group=group), tokens, cuts), stages=2)
    torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [SpreadOptions(), SpreadOptions(redundant=1, all_to_all=True)])
def test_experts_on_two_ranks_give_the_same(model: Model, spread: SpreadOptions) -> None:
    if model.config.moe is None:
        pytest.skip("has no experts")
    check_split(model.config, 2, ep_size=2)
    tokens = prompt(50, seed=2)

    def logits(group: RankGroup) -> torch.Tensor:
        return in_chunks(forward(model, group=group, spread=SpreadExperts(group, spread)), tokens, (13, 14, 33, 48, 49))

    for found in on_ranks(2, logits, ep_size=2):
        torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmo2", "minimax_m2", "nemotron_h", "granitemoehybrid", "qwen3_next", "lfm2"])
def test_four_ranks_share_what_is_cut_in_two(tmp_path: Path, name: str) -> None:
    """Key heads, and parts of which a norm is taken, that there are fewer of than ranks."""
    compare_ranks(make(name, tmp_path), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "what"),
    [("kimi_linear", 4, r"recurrent key heads \(6\)"), ("lfm2", 3, r"recurrent heads \(64\)")],
)
def test_sizes_that_do_not_divide_recurrent_layers_are_refused(tmp_path: Path, name: str, size: int, what: str) -> None:
    with pytest.raises(SettingsError, match=f"--tp-size {size}: {what} cannot be divided among {size} ranks"):
        check_split(make(name, tmp_path).config, size)


@pytest.mark.slow
def test_bfloat16_stays_near(model: Model) -> None:
    tokens = prompt(50, seed=2)
    truth = model.logits(tokens)
    found = in_chunks(forward(model, torch.bfloat16), tokens, (13, 14, 33, 48, 49))
    assert (found.float() - truth).norm() / truth.norm() < model.rounding


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU interprets no kernels")
def test_kernels_of_gpus_give_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, interpreted: those that the layers choose, and attention."""
    from bough.attention.base import AttentionSpec
    from bough.attention.latent_prompts import LatentPrompts
    from bough.attention.triton_backend import TritonAttention
    from bough.kernels.decode_attention.work import DecodeWork
    from bough.kernels.invariant_attention import triton as invariant
    from bough.kernels.latent_attention import triton as expanded
    from bough.kernels.prefill_attention.triton import config_for
    from bough.kernels.triton_ops import TRITON
    from tests.fakes.triton_interpreter import INTERPRETED_PROGRAMS

    monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: TRITON)
    ours, config, tokens = forward(model), model.config, prompt(24, seed=2)
    latent = config.latent

    def make_work(layer: AttentionSpec) -> DecodeWork:
        width = layer.head_dim if latent is None else latent.rank
        shape = (1, layer.heads, layer.kv_heads, width, CPU)
        return DecodeWork(*shape, window=layer.window, chunked=layer.chunked, programs=INTERPRETED_PROGRAMS)

    kv_heads = math.lcm(*(count for count, _ in config.kv_shapes))
    prefill = config_for(config.num_heads, kv_heads, config.head_dim, torch.float32)
    prompts = None
    if latent is not None:
        short = invariant.config_for(config.num_heads, 1, latent.rank, torch.float32)
        prompts = LatentPrompts(torch.from_numpy, expanded.config_for(torch.float32), short)
    ours.attention = TritonAttention(torch.from_numpy, make_work, prefill, prompts)
    found = in_chunks(ours, tokens, (13, 14, 23))
    torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_tokens_are_those_of_transformers(model: Model, backend: str) -> None:
    if backend == "native" and not model.native:
        assert why_not_recorded(model.config) is not None
        return
    device = {"device": "cuda" if backend == "triton" else "cpu", "attention_backend": backend, "cpu_threads": 1}
    device["enable_multimodal"] = backend != "native"  # the kernels take no images
    sizes = {"context_length": None, "page_size": 4, "max_total_tokens": 400, "max_running_requests": 4}
    engine = LocalEngine(model.folder, new=NEW, dtype="float32", quantization="none", **device, **sizes)
    first = prompt(40, seed=3)
    prompts = [first, prompt(5, seed=4), [*first[:24], *prompt(9, seed=5)]]
    truth = [model.continued(tokens) for tokens in prompts]
    assert [output for output, _ in engine.ask(*prompts)] == truth
    again = [*first, *truth[0], 7]
    output, cached = engine.ask(again, logprobs=LogprobRequest())[0]
    # A state is kept where a chunk ended: behind the first prompt.
    assert (output, cached) == (model.continued(again), 44 if model.config.states is None else len(first))
    expected = model.logits([*again, *output]).log_softmax(-1)[len(again) - 1 : -1]
    scores = torch.tensor(engine.out.scores[len(prompts)])
    torch.testing.assert_close(
        scores, expected.gather(1, torch.tensor(output)[:, None])[:, 0], atol=TOLERANCE, rtol=TOLERANCE
    )


def test_the_page_tells_what_was_compared() -> None:
    """Its table has a line for each family, which has a case here."""
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    _, _, table = page.partition("|---|---|---|---|---|---|\n")
    assert table.partition("\n\n")[0].splitlines() == list(lines())


def lines() -> Iterator[str]:
    """The page's table."""
    for family in map(find_family, FAMILIES):
        cases = [case for name, case in CASES.items() if (case.model_type or name) in family.model_types]
        if family.model_types[0] in ELSEWHERE + ENCODERS:
            cases = [Case({}, native=family.model_types[0] not in (*SPARSE, "modernbert"))]
        # On one, docs/performance.md says; its Transformers computes Granite's hybrids with experts in another way.
        on_gpus = "interpreted" if family.model_types[0] == "granitemoehybrid" else "H200"
        if not cases and family.model_types[0] in IMAGES:
            cases = [Case({}, native=False)]
        if family.model_types[0] == "whisper":  # in test_whisper.py
            cases = [Case({}, native=False)]
        assert cases, f"{family.architectures} are not compared"
        columns = (
            ", ".join(f"`{name}`" for name in family.model_types),
            ", ".join(f"`{name}`" for name in family.architectures),
            PUBLISHED_SIZES[family.model_types[0]],
            "safetensors, GGUF" if family.gguf_architecture else "safetensors",
            "torch and native" if all(case.native for case in cases) else "torch",
            on_gpus,
        )
        yield f"| {' | '.join(columns)} |"
