"""The ranks' partial results add up to the whole: heads, key/value heads (replicated where scarce) and inner width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np
import pytest
import torch

from bough.attention.batch import AttentionBatch
from bough.attention.context import ForwardContext
from bough.attention.torch_backend import TorchAttention
from bough.core.errors import SettingsError
from bough.core.model_config import IndexConfig, LatentConfig, ModelConfig, MoEConfig, RopeConfig
from bough.distributed.group import RankGroup
from bough.distributed.topology import Topology
from bough.layers.attention import SelfAttention
from bough.layers.latent_attention import LatentAttention
from bough.layers.mlp import GatedMLP, MoE
from bough.layers.norm import Inputs, RmsNorm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot
from bough.loader.load import load_weights
from bough.loader.source import TensorSource
from bough.memory.pools.kv_pool import KVPool
from tests.fakes.context import NO_CONTEXT
from tests.fakes.placements import placed

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=24,
    intermediate_size=40,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    vocab_size=10,
    context_length=64,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
TOKENS = 7


class Layer(Protocol):
    def slots(self, prefix: str) -> Iterator[WeightSlot]: ...


def placement(topology: Topology) -> Placement:
    """Ranks are simulated one after the other: the test does the summing."""
    return placed(topology, torch.float32, CPU)


def fill(layer: Layer, checkpoint: dict[str, torch.Tensor]) -> None:
    for slot in layer.slots(""):
        slot.target.copy_(checkpoint[slot.name][slot.index])


def attention_of(config: ModelConfig, place: Placement) -> SelfAttention | LatentAttention:
    return (SelfAttention if config.latent is None else LatentAttention)(config, 0, place)


def checkpoint_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Whole tensors, drawn in the shapes of a single rank's slots."""
    torch.manual_seed(0)
    one = placement(Topology())
    layers: tuple[Layer, ...] = (attention_of(config, one), GatedMLP(config, one))
    return {slot.name: torch.randn(slot.target.shape) for layer in layers for slot in layer.slots("")}


def norm_of(config: ModelConfig) -> RmsNorm:
    norm = RmsNorm(config.hidden_size, config.norm_eps, config.norm_plus_one, placement(Topology()))
    norm.rms.weight.fill_(1.0)
    return norm


def attention_output(config: ModelConfig, topology: Topology, x: torch.Tensor) -> torch.Tensor:
    layer = attention_of(config, placement(topology))
    fill(layer, checkpoint_of(config))
    batch = AttentionBatch(
        rows=torch.tensor([0]),
        lengths=torch.tensor([TOKENS], dtype=torch.int32),
        decodes=0,
        query_lens=np.array([TOKENS], dtype=np.int32),
        query_starts=np.array([0, TOKENS], dtype=np.int32),
        context_lens=np.array([0], dtype=np.int32),
        page_tables=(torch.arange(1, TOKENS + 1, dtype=torch.int32)[None],),
        slots=(torch.arange(1, TOKENS + 1),),
        positions=torch.arange(TOKENS),
        page_size=1,
    )
    backend = TorchAttention()
    backend.prepare(batch)
    ctx = ForwardContext(backend, KVPool(config, (TOKENS,), 1, torch.float32, CPU, topology), batch)
    return layer(Inputs(x, None, norm_of(config)), ctx)[0]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_of_the_ranks_sums_to_the_whole(kv_heads: int, ranks: int) -> None:
    config = replace(CONFIG, num_kv_heads=kv_heads)
    x = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1))
    whole = attention_output(config, Topology(), x)
    parts = [attention_output(config, Topology(rank, ranks), x) for rank in range(ranks)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("query_rank", "index"), [(None, None), (12, None), (12, IndexConfig(6, 5, top=3))])
@pytest.mark.parametrize("value_dim", [3, 6])  # of either form of attention
def test_latent_attention_of_the_ranks_sums_to_the_whole(
    query_rank: int | None, index: IndexConfig | None, value_dim: int
) -> None:
    latent = LatentConfig(rank=6, rope_dim=2, nope_dim=4, value_dim=value_dim, query_rank=query_rank, index=index)
    config = replace(CONFIG, num_kv_heads=1, latent=latent)
    x = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1))
    parts = [attention_output(config, Topology(rank, 4), x) for rank in range(4)]
    torch.testing.assert_close(torch.stack(parts).sum(0), attention_output(config, Topology(), x), atol=1e-4, rtol=1e-4)


def test_mlp_of_the_ranks_sums_to_the_whole() -> None:
    x = torch.randn(TOKENS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))

    def output(topology: Topology) -> torch.Tensor:
        layer = GatedMLP(CONFIG, placement(topology))
        fill(layer, checkpoint_of(CONFIG))
        return layer(Inputs(x, None, norm_of(CONFIG)), NO_CONTEXT)[0]

    parts = [output(Topology(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], output(Topology()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("biases", [False, True])
def test_experts_of_the_ranks_sum_to_the_whole(biases: bool) -> None:
    """Routed and shared ones, with a gate; biases count once."""
    moe = MoEConfig(
        experts=5,
        per_token=2,
        intermediate_size=12,
        shared_size=16,
        shared_gate=True,
        biases=biases,
        clamped_gate=(1.7, 3.0) if biases else None,
    )
    config = replace(CONFIG, mlp_bias=False)
    x = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    checkpoint = {
        slot.name: torch.randn(slot.target.shape) * 0.3 for slot in MoE(config, moe, placement(Topology())).slots("")
    }

    def output(topology: Topology) -> torch.Tensor:
        layer = MoE(config, moe, placement(topology))
        fill(layer, checkpoint)
        return layer(Inputs(x, None, norm_of(config)), NO_CONTEXT)[0]

    parts = [output(Topology(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], output(Topology()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("ranks", "ep_size"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("biases", [False, True])
def test_experts_that_are_spread_sum_to_the_whole(ranks: int, ep_size: int, biases: bool) -> None:
    """Five of them, so that some are on two ranks; those that are shared are cut as without."""
    gate = (1.7, 3.0) if biases else None
    moe = MoEConfig(5, 2, 12, shared_size=24, biases=biases, clamped_gate=gate)
    config = replace(CONFIG, mlp_bias=False)
    x = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    plain = replace(moe, shared_gate=True)  # keeps them apart, as spread ones do
    slots = MoE(config, plain, placement(Topology())).slots("")
    checkpoint = {slot.name: torch.randn(slot.target.shape) * 0.3 for slot in slots}

    def layer_of(topology: Topology) -> MoE:
        layer = MoE(config, moe, placement(topology))
        load_weights(layer.slots(""), TensorSource(checkpoint), progress=False, device=CPU)
        return layer

    whole = layer_of(Topology())(Inputs(x, None, norm_of(config)), NO_CONTEXT)[0]
    layers = [layer_of(Topology(rank, ranks, ep_size)) for rank in range(ranks)]
    for layer in layers:
        held = {slot.name.split(".")[1] for slot in layer.slots("") if slot.name.startswith("experts.")}
        assert len(held) == -(-5 // ep_size)  # a rank reads no others
    parts = [layer(Inputs(x, None, norm_of(config)), NO_CONTEXT)[0] for layer in layers]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, atol=1e-4, rtol=1e-4)


def test_partial_results_pass_through_the_given_reduction() -> None:
    class Doubling(RankGroup):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    doubled = placed(Topology(), torch.float32, CPU, ranks=Doubling())
    plain, reduced = GatedMLP(CONFIG, placement(Topology())), GatedMLP(CONFIG, doubled)
    for layer in (plain, reduced):
        fill(layer, checkpoint_of(CONFIG))
    x = Inputs(torch.randn(2, CONFIG.hidden_size), None, norm_of(CONFIG))
    torch.testing.assert_close(reduced(x, NO_CONTEXT)[0], plain(x, NO_CONTEXT)[0] * 2)


def test_uneven_shares_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="num_heads"):
        SelfAttention(CONFIG, 0, placement(Topology(0, 3)))
