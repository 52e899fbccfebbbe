"""Latent attention by every back end: on a tiny model they give what torch's gives, whatever a step is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from bough.attention import latent_prompts
from bough.attention.base import AttentionBackend, AttentionSpec
from bough.attention.invariant_backend import InvariantAttention
from bough.attention.latent_prompts import LatentPrompts
from bough.attention.split_backend import SplitAttention
from bough.attention.torch_backend import TorchAttention
from bough.attention.triton_backend import TritonAttention
from bough.core.model_config import IndexConfig, LatentConfig, ModelConfig, RopeConfig
from bough.distributed.topology import Topology
from bough.kernels.decode_attention.work import DecodeWork
from bough.kernels.invariant_attention import triton as invariant
from bough.kernels.latent_attention import triton as expanded
from bough.kernels.lora.triton import lora_
from bough.kernels.ops import REFERENCE, Ops
from bough.kernels.prefill_attention import triton as prefill
from bough.kernels.triton_ops import INVARIANT
from bough.layers.adapters import AdapterSlots
from bough.models.llama import Llama
from tests.fakes.forward import CPU, Forward, Step, load_model
from tests.fakes.placements import placed
from tests.fakes.triton_interpreter import INTERPRETED_PROGRAMS

LATENT = LatentConfig(rank=20, rope_dim=8, nope_dim=12, value_dim=10)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=1,
    head_dim=20,
    vocab_size=60,
    context_length=128,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    tied_embeddings=True,
    latent=LATENT,
)
# The second layer takes the choice of the first.
INDEX = IndexConfig(heads=9, head_dim=14, top=18, layers=(True, False))
SPARSE = replace(CONFIG, num_layers=2, latent=replace(LATENT, query_rank=16, index=INDEX))
LONG = [1 + 7 * i % 59 for i in range(41)]
STEPS: list[Step] = [
    {0: [1, 2, 3, 4, 5], 1: [9, 8]},
    {0: [6], 1: [7]},
    {0: [3], 1: [4], 2: LONG, 3: [5, 6]},
    {1: [2], 0: [1, 2], 2: [5, 7, 8], 3: LONG[:30]},
    {0: [3], 1: [2], 2: [1], 3: [9]},
]
SPARSE_STEPS: list[Step] = [
    {0: [1, 2], 2: [4, 3]},
    {0: [3], 1: LONG[:24]},
    {0: [6], 1: [7]},
    {1: [2], 0: LONG[:19]},
    {0: [1], 1: [3]},
]


def to_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def triton_backend() -> AttentionBackend:
    def make_work(layer: AttentionSpec) -> DecodeWork:
        return DecodeWork(8, CONFIG.num_heads, 1, LATENT.rank, CPU, programs=INTERPRETED_PROGRAMS)

    short = invariant.config_for(CONFIG.num_heads, 1, LATENT.rank, torch.float32)
    small = replace(expanded.config_for(torch.float32), block_m=16)
    own = prefill.config_for(CONFIG.num_heads, 1, CONFIG.head_dim, torch.float32)
    return TritonAttention(to_device, make_work, own, LatentPrompts(to_device, small, short))


def invariant_backend() -> AttentionBackend:
    shape = (CONFIG.num_heads, 1, LATENT.rank, torch.float32)
    tile = replace(invariant.config_for(*shape), chunk=16)
    return InvariantAttention(to_device, 8, tile, tile, CPU)


def split_backend() -> AttentionBackend:
    return SplitAttention(prefill=triton_backend(), decode=invariant_backend())


CONFIGS = [pytest.param(CONFIG, id="full"), pytest.param(SPARSE, id="sparse", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.kernels.sparse_index.triton.PROGRAMS", INTERPRETED_PROGRAMS)


def weights(config: ModelConfig = CONFIG) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    slots = Llama().build(config, placed(Topology(), torch.float32, CPU)).slots()
    return {slot.name: torch.randn(slot.target.shape, generator=generator) * 0.2 for slot in slots}


BACK_ENDS = [(triton_backend, 1), (triton_backend, 4), (invariant_backend, 4), (split_backend, 1)]


@pytest.mark.parametrize(
    ("make", "page_size", "config"),
    [
        *((*each, CONFIG) for each in BACK_ENDS),
        *(pytest.param(*each, SPARSE, marks=pytest.mark.slow) for each in BACK_ENDS[1:3]),
        *(pytest.param(*each, SPARSE, marks=pytest.mark.long) for each in BACK_ENDS[::3]),
    ],
)
def test_back_ends_agree(make: Callable[[], AttentionBackend], page_size: int, config: ModelConfig) -> None:
    plain, fast = (Forward(load_model(config, weights(config)), page_size) for _ in range(2))
    fast.attention = make()
    for step in STEPS if config is CONFIG else SPARSE_STEPS:
        expected, found = plain.step(step), fast.step(step)
        for row in step:
            torch.testing.assert_close(found[row], expected[row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "page_size", "config", "made"),
    [
        (TorchAttention, 4, CONFIG, None),
        (TorchAttention, 1, CONFIG, 2000),
        (triton_backend, 1, CONFIG, None),
        (triton_backend, 4, CONFIG, 2000),
        (lambda: SplitAttention(prefill=triton_backend(), decode=TorchAttention()), 1, CONFIG, None),
        pytest.param(TorchAttention, 1, SPARSE, None, marks=pytest.mark.slow),
        pytest.param(triton_backend, 1, SPARSE, None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("ops", [REFERENCE, replace(REFERENCE, lora_=lora_)], ids=["torch", "triton"])
def test_rows_with_adapters_have_what_merged_weights_give(
    make: Callable[[], AttentionBackend],
    page_size: int,
    config: ModelConfig,
    made: int | None,
    ops: Ops,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the matrix that makes keys and values, of two ranks; cached tokens and new ones, with some of the heads at
    once and with all."""
    if made is not None:
        monkeypatch.setattr("bough.attention.torch_backend.MAX_EXPANDED", made)
        monkeypatch.setattr(latent_prompts, "MAX_EXPANDED", made)
    monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: ops)
    slots, source = AdapterSlots(3), weights(config)
    forward = Forward(load_model(config, source, adapters=slots), page_size)
    forward.attention, forward.adapters[[0, 2, 3]] = make(), (3, 1, 3)
    slots.reserve(8)
    drawn = torch.Generator().manual_seed(0)  # not torch's own, from which threads of other tests may draw, too
    merged, names = [dict(source) for _ in range(4)], [name for name in source if "kv_b_proj" in name]
    assert len(names) == config.num_layers
    for slot, rank in ((1, 2), (3, 16)):
        both = {
            name: (torch.randn(rank, 20, generator=drawn), torch.randn(88, rank, generator=drawn) * 0.1)
            for name in names
        }
        slots.place(slot, {name.removesuffix(".weight"): of for name, of in both.items()})
        merged[slot] |= {name: source[name] + up @ down for name, (down, up) in both.items()}
    plain = [Forward(load_model(config, each), page_size) for each in merged]
    for step in STEPS if config is CONFIG else SPARSE_STEPS:
        expected, found = [each.step(step) for each in plain], forward.step(step)
        for row in step:
            own = expected[forward.adapters[row]][row]
            assert not forward.adapters[row] or not torch.allclose(own, expected[0][row], atol=1e-3)
            torch.testing.assert_close(found[row], own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.float16, CONFIG),
        (torch.float8_e4m3fn, CONFIG),
        pytest.param(torch.float8_e4m3fn, SPARSE, marks=pytest.mark.slow),
    ],
)
def test_a_pool_of_fewer_bits_costs_some_accuracy_and_nothing_else(dtype: torch.dtype, config: ModelConfig) -> None:
    model = load_model(config, weights(config))
    scales = [(0.02, 0.5)] * config.num_layers if dtype.itemsize == 1 else None
    plain, small = Forward(model), Forward(model, dtype=dtype, scales=scales)
    small.attention = triton_backend()
    for step in STEPS if config is CONFIG else SPARSE_STEPS:
        expected, found = plain.step(step), small.step(step)
        for row in step:
            error = float((found[row] - expected[row]).norm() / expected[row].norm())
            assert error < (2e-3 if dtype.itemsize == 2 else 0.06)


@pytest.mark.parametrize(("gathered", "made"), [(1, 1 << 28), (100, 2000), (1 << 17, 1)])
def test_what_is_gathered_and_made_at_once_is_bounded(
    gathered: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and heads in parts give the same."""
    seen: list[tuple[int, int]] = []

    def attend(q: torch.Tensor, of: torch.Tensor, *rest: object, **options: object) -> None:
        seen.append((len(of), of.shape[1]))
        expanded.expanded_attention(q, of, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(latent_prompts, "MAX_GATHERED", gathered)
    monkeypatch.setattr(latent_prompts, "MAX_EXPANDED", made)
    monkeypatch.setattr(latent_prompts, "expanded_attention", attend)
    plain, fast = (Forward(load_model(CONFIG, weights())) for _ in range(2))
    fast.attention = triton_backend()
    step: Step = {0: [7, 5, 6], 1: LONG, 2: [3, 4]}
    for forward in (plain, fast):
        forward.step({0: LONG[:30], 1: [4, 5]})
        seen.clear()
    expected, found = plain.step(step), fast.step(step)
    for row in step:
        torch.testing.assert_close(found[row], expected[row], atol=1e-4, rtol=1e-4)
    of_key = LATENT.nope_dim + LATENT.rope_dim + LATENT.value_dim
    for keys, heads in seen:
        assert keys <= max(gathered, 43) and (heads == 1 or keys * heads * of_key <= made)
    assert len(seen) > CONFIG.num_layers


def test_torch_makes_keys_of_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Forward(load_model(CONFIG, weights())).step({0: LONG})[0]
    monkeypatch.setattr("bough.attention.torch_backend.MAX_EXPANDED", 2000)
    torch.testing.assert_close(Forward(load_model(CONFIG, weights())).step({0: LONG})[0], expected)


@pytest.mark.slow
def test_some_tokens_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sparse attention would take much memory for all: scores, and queries that attend to latents."""
    plain, fast = (Forward(load_model(SPARSE, weights(SPARSE))) for _ in range(2))
    fast.attention = triton_backend()
    monkeypatch.setattr("bough.attention.triton_backend.MOST_ABSORBED", 16)
    monkeypatch.setattr("bough.attention.torch_backend.MAX_SCORES", 1000)
    expected, found = (forward.step({0: LONG[:25], 1: [3, 4]}) for forward in (plain, fast))
    for row in expected:
        torch.testing.assert_close(found[row], expected[row], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_bits_do_not_depend_on_chunks_cache_or_company(config: ModelConfig) -> None:
    def deterministic() -> Forward:
        model = Llama().build(config, placed(Topology(), torch.float32, CPU, ops=INVARIANT))
        source = weights(config)
        for slot in model.slots():
            slot.target.copy_(source[slot.name])
        forward = Forward(model)
        forward.attention = invariant_backend()
        return forward

    prompt, other = (LONG, LONG[9:32]) if config is CONFIG else (LONG[:25], LONG[9:22])
    whole = deterministic().step({0: prompt})[0]
    expected = Forward(load_model(config, weights(config))).step({0: prompt})[0]
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    chunked = deterministic()
    steps: list[Step] = [
        {1: other[:9], 0: prompt[:13]}, {1: [other[9]], 0: prompt[13:-1]}, {0: prompt[-1:], 1: other[10:]}
    ]  # fmt: skip
    assert torch.equal(torch.cat([chunked.step(step)[0] for step in steps]), whole)
    cached = deterministic()
    cached.step({0: prompt[:-6]})
    cached.share(0, 1, len(prompt) - 6)
    assert torch.equal(cached.step({1: prompt[-6:]})[1], whole[-6:])
