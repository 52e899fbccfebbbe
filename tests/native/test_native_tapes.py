"""Recorded models give what torch computes, for every architecture, in every ragged step, on one thread or several."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from bough.core.errors import ResourceError
from bough.core.model_config import LatentConfig, ModelConfig, MoEConfig, RopeConfig
from bough.distributed.topology import Topology
from bough.kernels.quant_linear.packed import Format
from bough.loader.load import TABLES, load_weights, packed_size
from bough.loader.source import DummySource
from bough.models.registry import build_model
from bough.native.tape import MAX_THREADS, ThreadPool
from tests.fakes.forward import CPU, Forward
from tests.fakes.native_forward import NativeForward

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=67,
    context_length=512,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
)
CONFIGS = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, architecture="Qwen2ForCausalLM", qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(LLAMA, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=48),
    "mistral": replace(LLAMA, architecture="MistralForCausalLM", sliding_window=7, sliding_layers=(True, True)),
    "gemma3": replace(
        LLAMA,
        architecture="Gemma3ForCausalLM",
        qk_norm=True,
        norm_plus_one=True,
        activation="gelu_tanh",
        sliding_window=9,
        sliding_layers=(True, False),
        local_rope=RopeConfig(1000.0),
        attention_softcap=3.0,
        logit_softcap=2.0,
        embedding_scale=8.0,
        tied_embeddings=True,
        head_dim=128,
    ),
    "odd sizes": replace(LLAMA, hidden_size=50, head_dim=10, intermediate_size=75, num_heads=3, num_kv_heads=1),
    "experts": replace(LLAMA, architecture="MixtralForCausalLM", moe=MoEConfig(5, 2, 96)),
    "shared experts": replace(
        LLAMA,
        architecture="Qwen2MoeForCausalLM",
        moe=MoEConfig(7, 3, 32, renormalise=False, shared_size=64, shared_gate=True, dense_layers=(True, False)),
    ),
    "biased experts": replace(
        LLAMA, architecture="Qwen3MoeForCausalLM", moe=MoEConfig(5, 2, 48, biases=True, clamped_gate=(1.702, 0.01))
    ),
    "layer norms": replace(
        LLAMA,
        norm="layer",
        norm_bias=True,
        norm_plus_one=True,
        mlp="plain",
        activation="gelu",
        rope=RopeConfig(10000.0, partial_rotary_factor=0.5),
        learned_positions=True,
        logit_scale=0.5,
        head_bias=True,
    ),
    "side by side": replace(
        LLAMA, architecture="CohereForCausalLM", norm="layer", norm_weight=False, mlp="plain", activation="relu2"
    ),
    "norms behind": replace(
        LLAMA,
        architecture="Olmo2ForCausalLM",
        qk_norm=True,
        qk_norm_whole=True,
        mlp="plain",
        activation="gelu_tanh",
        hidden_size=50,
        head_dim=10,
    ),
    "rotation first": replace(
        LLAMA, qk_norm=True, qk_norm_last=True, query_growth=(0.3, 4, 1), mlp="plain", activation="silu"
    ),
    "sparse mixer": replace(
        LLAMA, architecture="MixtralForCausalLM", moe=MoEConfig(5, 2, 96, scores="sparsemixer", jitter=0.3)
    ),
    "latents": replace(LLAMA, num_kv_heads=1, head_dim=18, latent=LatentConfig(21, 6, 12, 10, query_rank=20)),
    "wide latents": replace(LLAMA, num_kv_heads=1, head_dim=96, latent=LatentConfig(512, 64, 32, 80)),
    "many heads": replace(LLAMA, num_heads=40, num_kv_heads=1, mlp_bias=True, output_bias=True),
}


class Pair:
    """The same model twice: computed by torch, and by the tapes."""

    def __init__(self, library: ctypes.CDLL, config: ModelConfig, threads: int = 1, page_size: int = 1) -> None:
        source = DummySource(config)
        model = build_model(config, Topology(), torch.float32, CPU)
        load_weights(model.slots(), source, progress=False, device=CPU)
        self.torch = Forward(model, page_size=page_size)
        self.native = NativeForward(library, config, source, threads=threads, page_size=page_size)
        self._ids = np.random.default_rng(1)

    def step(self, counts: dict[int, int], ends_only: bool = False) -> None:
        """New tokens for each row; compares all logits, or those of the rows' ends."""
        tokens = {row: self._ids.integers(0, 67, count).tolist() for row, count in counts.items()}
        expected = self.torch.step(tokens)
        found = self.native.step_of_ends(tokens) if ends_only else self.native.step(tokens)
        for row in counts:
            torch.testing.assert_close(
                found[row], expected[row][-1] if ends_only else expected[row], rtol=1e-4, atol=2e-5
            )


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_and_decodes(any_tier: ctypes.CDLL, name: str) -> None:
    pair = Pair(any_tier, CONFIGS[name])
    pair.step({0: 13})
    pair.step({0: 1})
    pair.step({0: 1, 2: 1, 1: 40})
    pair.step({1: 1, 0: 1, 2: 5}, ends_only=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("name", "page_size"), [("gemma3", 1), ("gemma3", 4), ("latents", 4)])
def test_long_rows_are_cut_between_threads(library: ctypes.CDLL, name: str, threads: int, page_size: int) -> None:
    pair = Pair(library, CONFIGS[name], threads, page_size)
    for count in (80, 80, 80, 60):
        pair.step({3: count}, ends_only=True)
    pair.step({3: 1})
    pair.step({3: 1, 1: 3})
    pair.step({1: 1, 3: 1}, ends_only=True)


def test_a_thread_pool_has_room_for_so_many(library: ctypes.CDLL) -> None:
    assert ThreadPool(library, MAX_THREADS).threads == MAX_THREADS
    with pytest.raises(ResourceError, match="--cpu-threads"):
        ThreadPool(library, MAX_THREADS + 1)


def test_many_rows_at_once(library: ctypes.CDLL) -> None:
    pair = Pair(library, CONFIGS["mistral"], threads=2)
    pair.step(dict.fromkeys(range(8), 9))
    pair.step(dict.fromkeys(range(8), 1))
    pair.step({**dict.fromkeys(range(7), 1), 7: 30}, ends_only=True)


def test_a_step_of_which_nothing_is_wanted(library: ctypes.CDLL) -> None:
    pair = Pair(library, LLAMA, threads=2)
    first = {0: [1, 2, 3, 4, 5]}
    pair.torch.step(first)
    batch = pair.native._batch(first)
    pair.native._run(pair.native.tapes.last_tokens, first, batch, [])
    pair.step({0: 2})


@pytest.mark.parametrize("name", ["llama", "latents", "wide latents"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_caches_of_sixteen_bits(any_tier: ctypes.CDLL, name: str, dtype: torch.dtype, error: float) -> None:
    config, tokens = CONFIGS[name], {0: list(range(40))}
    source = DummySource(config)
    wide, narrow = (NativeForward(any_tier, config, source, dtype=kind) for kind in (torch.float32, dtype))
    expected, found = wide.step(tokens)[0], narrow.step(tokens)[0]
    assert 0 < (found - expected).norm() / expected.norm() < error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_sixteen_bit_weights_stay_so(any_tier: ctypes.CDLL, dtype: torch.dtype) -> None:
    source, tokens = DummySource(LLAMA, dtype), {0: list(range(6))}
    wide = NativeForward(any_tier, LLAMA, source, quantization="none")
    narrow = NativeForward(any_tier, LLAMA, source, quantization="auto")
    torch.testing.assert_close(narrow.step(tokens)[0], wide.step(tokens)[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2", "shared experts", "latents"])
@pytest.mark.parametrize("quantization", ["auto", "none", "int8", "int4"])
def test_what_was_loaded_takes_what_was_foretold(library: ctypes.CDLL, name: str, quantization: str) -> None:
    source = DummySource(CONFIGS[name], torch.float16)
    slots = list(NativeForward(library, CONFIGS[name], source, quantization=quantization).model.slots())
    assert packed_size(source, quantization)[0] == sum(slot.nbytes for slot in slots)


def test_with_4_bits_tables_have_8(library: ctypes.CDLL) -> None:
    model = NativeForward(library, LLAMA, DummySource(LLAMA), quantization="int4").model
    formats = {slot.name: slot.packing.weight.format for slot in model.slots() if slot.packing is not None}
    assert {formats.pop(name) for name in TABLES} == {Format.Q8}
    assert set(formats.values()) == {Format.Q4_MIN}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_at_load(library: ctypes.CDLL, quantization: str) -> None:
    source = DummySource(LLAMA)
    plain = NativeForward(library, LLAMA, source)
    packed = NativeForward(library, LLAMA, source, quantization=quantization)
    tokens = {0: list(range(20))}
    expected, found = plain.step(tokens)[0], packed.step(tokens)[0]
    assert 1e-4 < (found - expected).norm() / expected.norm() < {"int8": 0.02, "int4": 0.2}[quantization]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_latents_do_not_depend_on_chunks_or_company(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    config, prompt = CONFIGS["wide latents"], list(range(45))
    whole, parts = (NativeForward(library, config, DummySource(config), threads=2, dtype=dtype) for _ in range(2))
    expected = whole.step({0: prompt})[0]
    cut = [
        parts.step({0: prompt[:20], 1: [3, 4]}),
        parts.step({1: [5], 0: prompt[20:44]}),
        parts.step({0: [44], 1: [6]}),
    ]
    assert torch.equal(torch.cat([step[0] for step in cut]), expected)
