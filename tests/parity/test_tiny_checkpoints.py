"""Every architecture against transformers, on tiny random weights: same logits however a text is cut and batched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import transformers

from bough.core.model_config import ModelConfig, RopeConfig
from bough.models.base import CausalLM
from tests.fakes.forward import Forward, load_model

VOCAB = 211
TOLERANCE = 1e-4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    context_length=512,
    norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
)


def llama(tied: bool) -> tuple[transformers.PreTrainedModel, ModelConfig]:
    theirs = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied, rope_parameters=LLAMA3)
    rope = RopeConfig(10000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)
    return transformers.LlamaForCausalLM(theirs), replace(BASE, rope=rope, tied_embeddings=tied)


def llama_with_biases() -> tuple[transformers.PreTrainedModel, ModelConfig]:
    theirs = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    return transformers.LlamaForCausalLM(theirs), replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True)


def qwen2() -> tuple[transformers.PreTrainedModel, ModelConfig]:
    theirs = transformers.Qwen2Config(**{**SIZES, "hidden_size": 96}, tie_word_embeddings=False)
    ours = replace(BASE, architecture="Qwen2ForCausalLM", hidden_size=96, qkv_bias=True)
    return transformers.Qwen2ForCausalLM(theirs), ours


def qwen3() -> tuple[transformers.PreTrainedModel, ModelConfig]:
    theirs = transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)
    ours = replace(BASE, architecture="Qwen3ForCausalLM", qk_norm=True, tied_embeddings=True)
    return transformers.Qwen3ForCausalLM(theirs), ours


def mistral() -> tuple[transformers.PreTrainedModel, ModelConfig]:
    theirs = transformers.MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=7)
    ours = replace(BASE, architecture="MistralForCausalLM", sliding_window=7, sliding_layers=(True,) * 3)
    return transformers.MistralForCausalLM(theirs), ours


def gemma3(softcap: float | None) -> tuple[transformers.PreTrainedModel, ModelConfig]:
    theirs = transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        tie_word_embeddings=True,
        sliding_window=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=24,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
        final_logit_softcapping=softcap,
    )
    ours = replace(
        BASE,
        architecture="Gemma3ForCausalLM",
        num_layers=4,
        rope=RopeConfig(10000.0, "linear", factor=4.0),
        local_rope=RopeConfig(100.0),
        activation="gelu_tanh",
        qk_norm=True,
        tied_embeddings=True,
        sliding_window=7,
        sliding_layers=(True, True, False, True),
        query_scale=24**-0.5,
        logit_softcap=softcap,
        embedding_scale=48**0.5,
        norm_plus_one=True,
    )
    return transformers.Gemma3ForCausalLM(theirs), ours


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here."""

    theirs: transformers.PreTrainedModel
    ours: CausalLM

    @torch.inference_mode()
    def truth(self, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.theirs(torch.tensor([tokens])).logits[0]
        return logits


FAMILIES: dict[str, Callable[[], tuple[transformers.PreTrainedModel, ModelConfig]]] = {
    "llama-untied": lambda: llama(tied=False),
    "llama-tied": lambda: llama(tied=True),
    "llama-biases": llama_with_biases,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral-window": mistral,
    "gemma3": lambda: gemma3(softcap=None),
    "gemma3-softcap": lambda: gemma3(softcap=3.0),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest) -> Pair:
    torch.manual_seed(1)
    theirs, config = FAMILIES[request.param]()
    theirs = theirs.float().eval()
    # Fresh models have norm weights of one (or zero) and small matrices: make every weight count.
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    return Pair(theirs, load_model(config, theirs.state_dict()))


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_full_prefill(pair: Pair) -> None:
    tokens = prompt(40, seed=2)
    assert_same(Forward(pair.ours).step({3: tokens})[3], pair.truth(tokens))


@pytest.mark.parametrize("page_size", [1, 16])
def test_uneven_chunks_then_decode(pair: Pair, page_size: int) -> None:
    tokens = prompt(53, seed=3)
    truth = pair.truth(tokens)
    forward = Forward(pair.ours, page_size, pages=64)
    start = 0
    for size in (5, 1, 17, 2, 20, *[1] * 8):
        assert_same(forward.step({0: tokens[start : start + size]})[0], truth[start : start + size])
        start += size
    assert start == len(tokens)


@pytest.mark.parametrize("page_size", [1, 16])
def test_decodes_and_prefills_of_ragged_rows_in_one_batch(pair: Pair, page_size: int) -> None:
    sequences = {row: prompt(length, seed=row) for row, length in {0: 90, 5: 9, 2: 31, 7: 12}.items()}
    truths = {row: pair.truth(tokens) for row, tokens in sequences.items()}
    forward = Forward(pair.ours, page_size, pages=256)
    # Decodes stand first, prefill chunks after them, and rows of very different lengths meet.
    for step in ({0: 80}, {5: 7}, {0: 1, 5: 1, 2: 20}, {5: 1, 0: 1, 2: 3, 7: 10}, {2: 1, 7: 1, 0: 1}, {7: 1, 2: 1}):
        cut = {row: slice(forward.lengths[row], forward.lengths[row] + count) for row, count in step.items()}
        results = forward.step({row: sequences[row][part] for row, part in cut.items()})
        for row, part in cut.items():
            assert_same(results[row], truths[row][part])


@pytest.mark.parametrize("page_size", [1, 16])
def test_prefix_that_another_row_of_the_same_step_writes(pair: Pair, page_size: int) -> None:
    shared = prompt(32, seed=4)
    first, second = shared + prompt(3, seed=5), shared + prompt(6, seed=6)
    forward = Forward(pair.ours, page_size, pages=128)
    forward.reserve(1, len(first))
    forward.share(1, 0, len(shared))
    # The reader stands before the writer: only storing all rows first makes this right.
    results = forward.step({0: second[32:], 1: first})
    assert_same(results[1], pair.truth(first))
    assert_same(results[0], pair.truth(second)[32:])
    follow_up = prompt(1, seed=7)
    decoded = forward.step({0: follow_up, 1: follow_up})
    assert_same(decoded[0], pair.truth(second + follow_up)[-1:])
    assert_same(decoded[1], pair.truth(first + follow_up)[-1:])


def test_slots_take_every_tensor_of_the_checkpoint_once(pair: Pair) -> None:
    expected = set(pair.theirs.state_dict())
    if pair.ours.config.tied_embeddings:
        expected.discard("lm_head.weight")
    names = [slot.name for slot in pair.ours.slots()]
    assert len(names) == len(set(names))
    assert set(names) == expected


def test_bfloat16_stays_near(pair: Pair) -> None:
    """16-bit weights and cache: the distribution agrees as far as that type can tell."""
    tokens = prompt(24, seed=8)
    model = load_model(pair.ours.config, pair.theirs.state_dict(), dtype=torch.bfloat16)
    forward = Forward(model, page_size=16, pages=16, dtype=torch.bfloat16)
    logits = torch.cat([forward.step({0: tokens[:20]})[0], *(forward.step({0: [t]})[0] for t in tokens[20:])])
    truth = pair.truth(tokens)
    assert (logits.float() - truth).norm() / truth.norm() < 0.05
