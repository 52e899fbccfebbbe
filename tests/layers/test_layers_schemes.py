"""Models with 8-bit weights: nearly what plain ones give, quantised as they are filled, plain where they must be."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bough.core.model_config import ModelConfig, MoEConfig, RopeConfig
from bough.distributed.topology import Topology
from bough.kernels.quantize_rows.reference import quantize_rows
from bough.kernels.registry import fp8_ops_for, w4_ops_for
from bough.layers.linear import RowLinear
from bough.layers.schemes.base import Part
from bough.layers.schemes.plain import PlainExperts, PlainWeight
from bough.layers.schemes.stored import Fp8Scheme, Fp8Weight, Int8Head, StoredScheme, W4Scheme, makers_for
from bough.layers.weights import Form
from bough.loader.load import load_weights
from bough.loader.locate import ModelFiles
from bough.loader.quantization import quantization_of
from bough.loader.quantized import QuantizedSource
from bough.loader.source import DummySource, SafetensorsSource
from bough.models.base import CausalLM
from bough.models.registry import build_model
from tests.fakes.context import NO_CONTEXT
from tests.fakes.forward import Forward
from tests.fakes.held_values import held_values
from tests.fakes.placements import placed
from tests.fakes.quantised import write_quantised
from tests.fakes.ranks import ThreadGroup, on_ranks

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=60,
    context_length=128,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    qkv_bias=True,
)
PROMPT = {0: [1, 2, 3, 4, 5, 6, 7, 8]}


def loaded(config: ModelConfig, quantization: str) -> CausalLM:
    model = build_model(config, Topology(), torch.float32, CPU, quantization=quantization)
    load_weights(model.slots(), DummySource(config), progress=False, device=CPU)
    return model


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, activation="gelu_tanh", architecture="Gemma3ForCausalLM", qk_norm=True, norm_plus_one=True),
        replace(CONFIG, intermediate_size=88),  # gate and up can be multiplied, down cannot
    ],
    ids=["llama", "gemma", "mixed"],
)
def test_logits_are_near_those_of_plain_weights(config: ModelConfig) -> None:
    expected = Forward(loaded(config, "none")).step(PROMPT)[0]
    found = Forward(loaded(config, "fp8")).step(PROMPT)[0]
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.15


def test_linear_layers_have_8_bits_and_the_ends_of_a_model_do_not() -> None:
    slots = {
        slot.name: slot.target
        for slot in build_model(CONFIG, Topology(), torch.float32, CPU, quantization="fp8").slots()
    }
    small = {name for name, target in slots.items() if target.dtype == torch.float8_e4m3fn}
    assert small == {name for name in slots if name.endswith("proj.weight")}
    assert len(small) == 2 * 7


MIXTURE = replace(
    CONFIG,
    architecture="Qwen3MoeForCausalLM",
    qkv_bias=False,
    qk_norm=True,
    moe=MoEConfig(experts=6, per_token=2, intermediate_size=48, simulate="uniform"),
)


def test_experts_have_8_bits_and_their_router_does_not() -> None:
    slots = list(loaded(MIXTURE, "fp8").slots())
    small = {slot.name for slot in slots if slot.target.dtype == torch.float8_e4m3fn}
    assert small == {slot.name for slot in slots if slot.name.endswith("proj.weight")}
    assert sum("experts." in name for name in small) == 2 * 6 * 3
    of_expert = next(slot for slot in slots if "experts.5.down_proj" in slot.name)
    assert of_expert.nbytes == 64 * 48 + 64 * 4, "the scales are counted, and given back with the values"


@pytest.mark.parametrize("biases", [False, True])
def test_logits_of_experts_are_near_those_of_plain_ones(biases: bool) -> None:
    assert MIXTURE.moe is not None
    config = replace(MIXTURE, moe=replace(MIXTURE.moe, biases=biases, clamped_gate=(1.7, 0.01) if biases else None))
    expected = Forward(loaded(config, "none")).step(PROMPT)[0]
    found = Forward(loaded(config, "fp8")).step(PROMPT)[0]
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.15


def test_weights_of_4_bits() -> None:
    wide = replace(MIXTURE, moe=MoEConfig(experts=6, per_token=2, intermediate_size=96, simulate="uniform"))
    slots = list(loaded(wide, "int4").slots())
    attention = [slot for slot in slots if slot.name.endswith("q_proj.weight")]
    assert all(slot.nbytes == 64 * (64 + 2 + 1) for slot in attention), "64 inputs fill half of their bytes"
    assert all(slot.held for slot in slots if "experts." in slot.name)
    assert [slot.name for slot in slots if slot.held and not slot.name.endswith("proj.weight")] == ["lm_head.weight"]
    expected = Forward(loaded(wide, "none")).step(PROMPT)[0]
    found = Forward(loaded(wide, "int4")).step(PROMPT)[0]
    assert 1e-3 < (found - expected).norm() / expected.norm() < 0.3


def test_a_head_of_8_bits_beside_weights_of_4() -> None:
    """Where it is no table for the embedding, too."""
    slots = {slot.name: slot for slot in loaded(CONFIG, "int4").slots()}
    assert slots["lm_head.weight"].nbytes == 60 * 64 + 60 * 4
    tied = loaded(replace(CONFIG, tied_embeddings=True), "int4").slots()
    assert "lm_head.weight" not in {slot.name for slot in tied}
    expected = Forward(loaded(CONFIG, "none")).step(PROMPT)[0]
    assert 1e-3 < (Forward(loaded(CONFIG, "int4")).step(PROMPT)[0] - expected).norm() / expected.norm() < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_logits_of_8_bits(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.layers.schemes.stored.BAND", 24)  # the last band is shorter
    weight = torch.randn(60, 64) * torch.logspace(-4, 1, 60)[:, None]
    weight[7] = 0
    head = Int8Head(60, 64, placed(Topology(), dtype, CPU))
    (slot,) = head.slots("lm_head.")
    assert slot.name == "lm_head.weight" and slot.store is not None
    for first in (0, 40):
        slot.store(first, weight[first : first + 40].to(dtype))
    hidden = torch.randn(rows, 64)
    expected, found = hidden @ weight.t(), head.logits(hidden.to(dtype)).float()
    lengths = hidden.norm(dim=1)[:, None] * weight.norm(dim=1).clamp(min=1e-9)
    errors = (found - expected).abs() / lengths
    assert found.shape == (rows, 60) and (found[:, 7] == 0).all() and 0 < errors.max() < 0.01
    vectors = head.embed(torch.tensor([3, 50]), 2.0).float()
    assert (vectors - 2.0 * weight[[3, 50]]).norm() / vectors.norm() < 0.01


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU interprets no kernels")
def test_kernels_of_gpus_multiply_experts_that_were_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a benchmark of a model's shape runs them: random weights, experts drawn evenly."""
    from bough.kernels.triton_ops import TRITON

    expected = Forward(loaded(MIXTURE, "fp8")).step(PROMPT)[0]
    monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: TRITON)
    found = Forward(loaded(MIXTURE, "fp8")).step(PROMPT)[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU interprets no kernels")
@pytest.mark.parametrize("name", ["w4a16-zeros", "w4a16-64", "awq-128", "gptq-128-symmetric", "fp8-blocks"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_kernels_of_gpus_multiply_the_columns_of_ranks(
    name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr("bough.layers.schemes.stored.w4_ops_for", lambda device: w4_ops_for(gpu))
    monkeypatch.setattr("bough.layers.schemes.stored.fp8_ops_for", lambda device: fp8_ops_for(gpu))
    torch.manual_seed(0)
    values = write_quantised(tmp_path, {}, {"o_proj.weight": torch.randn(48, 512)}, name)["o_proj.weight"]
    quantization = quantization_of(ModelFiles("tiny", tmp_path, config=tmp_path / "config.json"))
    assert quantization is not None
    source = QuantizedSource(SafetensorsSource([tmp_path / "model.safetensors"]), quantization, torch.float32)
    x, total = torch.randn(rows, 512), torch.zeros(rows, 48)
    for rank in range(2):
        scheme, topology = StoredScheme(source.form, PlainWeight, PlainExperts), Topology(rank, 2)
        held = topology.slice_of(512, "inputs")
        layer = RowLinear("o_proj", held, 48, False, placed(topology, torch.float32, CPU, make_weight=scheme))
        load_weights(layer.slots(""), source, progress=False, device=CPU)
        assert [slot.form is not None for slot in layer.slots("")] == [True]
        total += layer(x[:, held].contiguous(), NO_CONTEXT)
    expected = x @ values.T
    rounded = name == "fp8-blocks" and rows == 20  # activations are quantised
    assert (total - expected).norm() / expected.norm() < (0.05 if rounded else 1e-4)


@pytest.mark.parametrize("config", [CONFIG, MIXTURE], ids=["llama", "experts"])
@pytest.mark.parametrize(("quantization", "most"), [("fp8", 0.06), ("int4", 0.15)])
def test_ranks_quantise_their_columns(config: ModelConfig, quantization: str, most: float) -> None:
    moe = None if config.moe is None else replace(config.moe, intermediate_size=128)
    wide = replace(config, head_dim=32, intermediate_size=256, moe=moe)
    source, expected = DummySource(wide), Forward(loaded(wide, "none")).step(PROMPT)[0]

    def on_rank(group: ThreadGroup) -> tuple[CausalLM, torch.Tensor]:
        model = build_model(wide, group.topology, torch.float32, CPU, group, quantization=quantization)
        load_weights(model.slots(), source, progress=False, device=CPU)
        return model, Forward(model, topology=group.topology).step(PROMPT)[0]

    for model, logits in on_ranks(2, on_rank):
        assert 1e-4 < (logits - expected).norm() / expected.norm() < 2 * most
        projections = [slot for slot in model.slots() if slot.name.endswith("_proj.weight")]
        assert all(slot.held for slot in projections)
        for slot in projections:
            values = source.read(slot.name, slot.index)
            assert (held_values(slot) - values).norm() / values.norm() < most


@pytest.mark.parametrize(
    ("form", "columns", "own"),
    [
        (Form("fp8", 512), slice(256, 512), Form("fp8", 256)),
        (Form("fp8", 512, 128), slice(256, 512), Form("fp8", 256, 128)),
        (Form("fp8", 512, 128), slice(128, 256), Form("fp8", 128)),  # one scale for each row
        (Form("fp8", 320, 128), slice(0, 160), None),
        (Form("fp8", 320, 128), slice(160, 320), None),
        (Form("fp8", 320, 128), slice(256, 320), Form("fp8", 64)),
        (Form("int4", 192, 32), slice(96, 192), Form("int4", 96, 32)),
        (Form("int4", 192, 64), slice(96, 192), None),
        (Form("int4", 512, 512), slice(256, 512), Form("int4", 256, 256)),
        (Form("fp4", 320, 32), slice(0, 160), Form("fp4", 160, 32)),
    ],
)
def test_forms_of_columns(form: Form, columns: slice, own: Form | None) -> None:
    assert form.cut((slice(None), columns)) == own
    assert form.cut((slice(3, 5),)) == form.cut(()) == form


def test_bands_are_quantised_as_they_come() -> None:
    """A matrix in bands of rows, in parts that stand one below the other, equals the whole one."""
    torch.manual_seed(0)
    placement = placed(Topology(), torch.float32, CPU)
    parts = [Part("a", 32, (slice(0, 32),)), Part("b", 16, (slice(16, 32), slice(0, 64)))]
    matrices = {"x.a.weight": torch.randn(32, 64), "x.b.weight": torch.randn(16, 64)}
    weight = Fp8Weight(64, parts, False, placement)
    for slot in weight.slots("x."):
        for first in range(0, slot.target.shape[0], 5):
            slot.fill(first, matrices[slot.name][first : first + 5])
    x = torch.randn(3, 64)
    product = weight.linear(x, NO_CONTEXT)
    expected = x @ torch.cat(list(matrices.values())).T
    assert (product - expected).norm() / expected.norm() < 0.05
    assert torch.equal(weight.linear(quantize_rows(x), NO_CONTEXT), product)


def test_layers_that_do_not_fit_stay_plain_and_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    placement, scheme = placed(Topology(), torch.float32, CPU), Fp8Scheme()
    part = Part("o_proj", 24, (slice(None),))
    with caplog.at_level(logging.WARNING):
        made = [scheme(64, [part], False, placement) for _ in range(3)]
    assert all(isinstance(weight, PlainWeight) for weight in made)
    assert [record.getMessage() for record in caplog.records] == [
        "o_proj: 24 x 64 are no multiples of 16; these weights stay torch.float32"
    ]


def test_what_is_not_quantised_to_4_bits_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    moe = MoEConfig(experts=2, per_token=1, intermediate_size=96)
    with caplog.at_level(logging.WARNING):
        for topology in (Topology(), Topology(0, 2)):
            placement, scheme = placed(topology, torch.float32, CPU), W4Scheme()
            for _ in range(2):
                RowLinear("o_proj", topology.slice_of(96, "inputs"), 64, False, replace(placement, make_weight=scheme))
                scheme.experts(64, moe, placement)
    assert [record.getMessage() for record in caplog.records] == [
        "o_proj: 48 inputs are no multiple of 32; these weights stay torch.float32",
        "experts: 64 and 48 inputs are no multiple of 32; these weights stay torch.float32",
    ]


def test_auto_and_none_are_plain() -> None:
    assert makers_for("auto")[0] is makers_for("none")[0] is PlainWeight
    assert isinstance(makers_for("fp8")[0], Fp8Scheme)
