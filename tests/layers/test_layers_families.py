"""What other families need of the layers, against transformers' own modules or torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from bough.attention.context import ForwardContext
from bough.core.model_config import NO_ROPE, ModelConfig, RopeConfig
from bough.distributed.topology import Topology
from bough.kernels.norm_rope_store.reference import QKNormRope, norm_rope_store_
from bough.kernels.ops import Activation, NormedSum
from bough.layers.blocks import ParallelBlock, PreNormBlock
from bough.layers.embedding import Head
from bough.layers.mlp import PlainMLP
from bough.layers.norm import Inputs, LayerNorm
from bough.layers.placement import Placement
from bough.layers.rope import rope_table
from bough.layers.schemes.base import Gate, LinearWeight, Part, Rows
from bough.layers.schemes.plain import PlainTable, PlainWeight
from bough.models.decoder import Decoder
from tests.fakes.context import NO_CONTEXT
from tests.fakes.forward import Forward, load_model
from tests.fakes.placements import placed

CPU = torch.device("cpu")
PLACEMENT = placed(Topology(), torch.float32, CPU)
CONFIG = ModelConfig("LlamaForCausalLM", 24, 40, 2, 4, 2, 8, 60, 64, 1e-5, RopeConfig(10000.0))
PROMPT = [5, 9, 3, 3, 41, 17, 2]


def random_weights(model: Decoder) -> None:
    generator = torch.Generator().manual_seed(0)
    for slot in model.slots():
        slot.target.copy_(torch.randn(slot.target.shape, generator=generator) * 0.3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_layer_norm_is_torchs(bias: bool, with_residual: bool) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(5, 12), torch.randn(5, 12) if with_residual else None
    norm, theirs = LayerNorm(12, 1e-3, bias, PLACEMENT), torch.nn.LayerNorm(12, 1e-3, bias=bias)
    for slot in norm.slots("norm."):
        slot.target.normal_()
        getattr(theirs, slot.name.removeprefix("norm.")).data.copy_(slot.target)
    total = x if residual is None else x + residual
    normed, summed = norm(x, residual, NO_CONTEXT)
    torch.testing.assert_close(normed, theirs(total).detach())
    assert torch.equal(summed, total)


@pytest.mark.parametrize(
    ("activation", "name"),
    [("gelu", "gelu"), ("gelu_tanh", "gelu_new"), ("relu", "relu"), ("relu2", "relu2"), ("silu", "silu")],
)
def test_plain_mlps(activation: Any, name: str) -> None:
    torch.manual_seed(0)
    mlp = PlainMLP(replace(CONFIG, activation=activation, mlp="plain", mlp_bias=True), PLACEMENT)
    tensors = {slot.name: slot.target.normal_() for slot in mlp.slots("")}
    x = torch.randn(3, 24)
    inner = x @ tensors["up_proj.weight"].T + tensors["up_proj.bias"]
    activate = transformers.activations.ACT2FN[name]
    expected = activate(inner) @ tensors["down_proj.weight"].T + tensors["down_proj.bias"]
    torch.testing.assert_close(mlp(Inputs(x), NO_CONTEXT)[0], expected, atol=1e-4, rtol=1e-4)


def rotated(rope: RopeConfig, positions: torch.Tensor, qkv: torch.Tensor, head_dim: int) -> torch.Tensor:
    table, tokens = rope_table(rope, head_dim, 64, CPU), len(qkv)
    caches = torch.zeros(2, tokens, 1, head_dim)
    slots = torch.arange(tokens)
    turn = QKNormRope(None, None, 1e-6, False, table.cos, table.sin)
    norm_rope_store_(qkv, 2, 1, turn, positions, slots, *caches, axes=table.axes)
    assert torch.equal(caches[0], qkv[:, 2:3]) and torch.equal(caches[1], qkv[:, 3:])
    return qkv


def test_rotation_over_three_axes_is_that_of_qwen2_vl() -> None:
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, apply_rotary_pos_emb  # seconds

    torch.manual_seed(0)
    positions, sections = torch.randint(60, (3, 7)), [2, 3, 3]
    qkv = torch.randn(7, 4, 16)
    rope = RopeConfig(10000.0, sections=tuple(sections))
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    theirs = SimpleNamespace(max_position_embeddings=64, rope_parameters=parameters, head_dim=16)
    cos, sin = Qwen2VLRotaryEmbedding(theirs)(qkv, positions[:, None])
    q, k = (part.transpose(0, 1)[None] for part in (qkv[:, :2], qkv[:, 2:3]))
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    found = rotated(rope, positions, qkv.clone(), 16)
    torch.testing.assert_close(found[:, :2], expected[0][0].transpose(0, 1))
    torch.testing.assert_close(found[:, 2:3], expected[1][0].transpose(0, 1))
    plain = rotated(replace(rope, sections=None), positions[0], qkv.clone(), 16)
    assert torch.equal(rotated(rope, positions[:1].expand(3, -1), qkv.clone(), 16), plain), "text has three equal axes"


def test_a_part_of_each_head_rotates_or_none() -> None:
    torch.manual_seed(0)
    positions, qkv = torch.randint(60, (7,)), torch.randn(7, 4, 16)
    part = rotated(RopeConfig(10000.0, partial_rotary_factor=0.5), positions, qkv.clone(), 16)
    whole = rotated(RopeConfig(10000.0), positions, qkv[..., :8].contiguous(), 8)
    assert torch.equal(part[..., :8], whole) and torch.equal(part[..., 8:], qkv[..., 8:])
    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]  # pairs half a head apart
    apart = RopeConfig(10000.0, partial_rotary_factor=0.5, apart=True)
    assert torch.equal(rotated(apart, positions, qkv[..., order].clone(), 16), part[..., order])
    assert torch.equal(rotated(NO_ROPE, positions, qkv.clone(), 16), qkv)


def test_layers_without_rotation_ignore_order() -> None:
    """Without positions, and seeing all that came before, a layer's last token does not know their order."""
    config = replace(CONFIG, num_layers=1)
    shapes = {slot.name: slot.target.shape for slot in load_model_slots(config)}
    tensors = {name: torch.randn(shape, generator=torch.Generator().manual_seed(7)) for name, shape in shapes.items()}
    swapped = [*PROMPT[1::-1], *PROMPT[2:]]
    for unrotated, same in (((True,), True), ((), False)):
        model = load_model(replace(config, unrotated_layers=unrotated), tensors)
        logits = [Forward(model).step({0: tokens})[0][-1] for tokens in (PROMPT, swapped)]
        assert torch.allclose(*logits, atol=1e-4) is same


def load_model_slots(config: ModelConfig) -> Any:
    return Decoder(config, PLACEMENT, PreNormBlock).slots()


def test_logits_are_scaled_before_they_are_capped() -> None:
    table = PlainTable(3, 3, PLACEMENT)
    table.weight.copy_(torch.eye(3) * 10)
    hidden = torch.tensor([[1.0, -2.0, 0.5]])
    torch.testing.assert_close(Head(table, None, PLACEMENT, 0.25)(hidden), hidden * 2.5)
    torch.testing.assert_close(Head(table, 3.0, PLACEMENT, 0.25)(hidden), 3 * torch.tanh(hidden * 2.5 / 3))


def test_a_parallel_block_with_one_norm_is_that_of_cohere() -> None:
    """Layer norm without a bias, logits with a scale, heads of which neighbours rotate (laid out as halves)."""
    torch.manual_seed(0)
    theirs = transformers.CohereForCausalLM(
        transformers.CohereConfig(
            vocab_size=60,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            logit_scale=0.3,
            layer_norm_eps=1e-5,
            pad_token_id=0,
            attn_implementation="eager",
        )
    ).eval()
    rope = RopeConfig(theirs.config.rope_parameters["rope_theta"])
    config = replace(CONFIG, head_dim=6, norm="layer", logit_scale=0.3, tied_embeddings=True, rope=rope)
    ours = Decoder(config, PLACEMENT, lambda *args: ParallelBlock(*args, one_norm=True))
    stored = theirs.state_dict()
    for slot in ours.slots():
        tensor = stored[slot.name].normal_(std=0.3)
        if "q_proj" in slot.name or "k_proj" in slot.name:
            tensor = tensor.view(-1, 3, 2, 24).transpose(1, 2).reshape(-1, 24)
        slot.target.copy_(tensor)
    with torch.inference_mode():
        truth = theirs(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(Forward(ours).step({0: PROMPT})[0], truth, atol=1e-4, rtol=1e-4)


class Adapted:
    """A weight that adds an adapter's product for the rows of the requests that asked for it, as LoRA does."""

    def __init__(self, inner: LinearWeight, in_features: int, outputs: int) -> None:
        self._inner = inner
        self.delta = torch.randn(outputs, in_features, generator=torch.Generator().manual_seed(outputs)) * 0.1
        self.gate, self.slots = inner.gate, inner.slots

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        rows = ctx.batch.rows.repeat_interleave(torch.from_numpy(ctx.batch.query_lens))
        rows = rows if ctx.logits_indices is None or len(rows) == len(x) else rows[ctx.logits_indices]
        return self._inner.linear(x, ctx) + (x @ self.delta.T) * (rows == 1)[:, None]

    def after_norm(self, inputs: NormedSum, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = inputs.taken(PLACEMENT.ops)
        return self.linear(normed, ctx), total

    def gated_after_norm(
        self, inputs: NormedSum, activation: Activation, gate: Gate, ctx: ForwardContext
    ) -> tuple[Rows, torch.Tensor]:
        gate_up, total = self.after_norm(inputs, ctx)
        return gate(gate_up, activation), total


def test_every_linear_layer_knows_whose_rows_it_multiplies() -> None:
    """A weight that depends on the request gives what a model with that weight merged in gives."""
    made: list[Adapted] = []

    def adapted(in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
        inner = PlainWeight(in_features, parts, bias, placement)
        made.append(Adapted(inner, in_features, sum(part.outputs for part in parts)))
        return made[-1]

    model = Decoder(CONFIG, replace(PLACEMENT, make_weight=adapted), PreNormBlock)
    plain, merged = Decoder(CONFIG, PLACEMENT, PreNormBlock), Decoder(CONFIG, PLACEMENT, PreNormBlock)
    for each in (model, plain, merged):
        random_weights(each)
    assert len(made) == 4 * CONFIG.num_layers
    targets = [slot.target for slot in merged.slots() if slot.name.endswith("proj.weight")]
    for target, delta in zip(targets, split_deltas(made), strict=True):
        target += delta
    step = {0: PROMPT, 1: PROMPT[::-1]}
    found = Forward(model).step(step)
    torch.testing.assert_close(found[0], Forward(plain).step(step)[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], Forward(merged).step(step)[1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[1], Forward(plain).step(step)[1], atol=1e-2)


def split_deltas(made: list[Adapted]) -> list[torch.Tensor]:
    """The parts of each layer's delta, in the order of the layer's slots."""
    return [part for weight in made for part in weight.delta.split([slot.target.shape[0] for slot in weight.slots("")])]
