"""Every quantised format against the tool that defines it: matrices packed and dequantised by the public tools.

`quantised/make_fixtures.py` has written the files, and says with which versions.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors import safe_open
from safetensors.torch import save_file

from bough.core.errors import ModelError
from bough.kernels.experts.fp4 import VALUES, FloatRows, powers_of_two
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.layers.weights import Form, KeptRows
from bough.loader.locate import ModelFiles
from bough.loader.quantization import Quantization, quantization_of
from bough.loader.quantized import QuantizedSource
from bough.loader.source import NamedSource, SafetensorsSource, dequantize
from bough.models.names import Stored

FIXTURES = sorted((Path(__file__).parent / "quantised").glob("*.safetensors"))
# What the native CPU kernels are given, where that is not floats.
KEPT = {
    "awq": GGMLQuantizationType.Q4_1,
    "gptq": GGMLQuantizationType.Q4_1,
    "gptq_v2": GGMLQuantizationType.Q4_1,
    "gptq_sym": GGMLQuantizationType.Q4_0,
    "gptq_8": GGMLQuantizationType.Q8_0,
    "ct_int4": GGMLQuantizationType.Q4_0,
    "ct_int4_zeros": GGMLQuantizationType.Q4_1,
    "ct_int8": GGMLQuantizationType.Q8_0,
    "ct_int8_packed": GGMLQuantizationType.Q8_0,
    "auto_round": GGMLQuantizationType.Q4_1,
    "auto_round_gptq": GGMLQuantizationType.Q4_1,
    "quark_int8": GGMLQuantizationType.Q8_0,
}


class Fixture:
    """A file of the public tools, as a checkpoint of one matrix."""

    def __init__(self, path: Path, folder: Path) -> None:
        with safe_open(path, "pt") as held:
            config = held.metadata()["quantization_config"]
            self.expected = held.get_tensor("expected")
        (folder / "config.json").write_text(json.dumps({"quantization_config": json.loads(config)}))
        found = quantization_of(ModelFiles(path.stem, folder, config=folder / "config.json"))
        assert found is not None
        self.quantization = found
        self.source = QuantizedSource(SafetensorsSource([path]), found, torch.bfloat16)
        self.name = next(name for name in self.source.names() if name != "expected")


@pytest.fixture(params=FIXTURES, ids=lambda path: path.stem)
def fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Fixture:
    return Fixture(request.param, tmp_path)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order in which a tool multiplies: two roundings of float32."""
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)


def test_values_are_those_of_the_tool(fixture: Fixture) -> None:
    assert len(fixture.source.names()) == 2, "parts of a quantised tensor are no tensors of the model"
    assert fixture.source.shape(fixture.name) == fixture.expected.shape
    close(fixture.source.read(fixture.name), fixture.expected)


@pytest.mark.parametrize("index", [(slice(5, 30),), (slice(5, 14), slice(3, 39)), (slice(None), slice(32, 64))])
def test_parts_are_parts_of_the_values(fixture: Fixture, index: tuple[slice, ...]) -> None:
    close(fixture.source.read(fixture.name, index), fixture.expected[index])


def kept_values(rows: KeptRows) -> torch.Tensor:
    if isinstance(rows, QuantizedRows):
        return rows.dequantize()
    codes = rows.codes.view(len(rows.codes), rows[1].shape[1], -1)
    if isinstance(rows, FloatRows):
        return (VALUES[codes.int()] * powers_of_two(rows.powers)[:, :, None]).flatten(1)
    return ((codes.float() - rows.zeros[:, :, None]) * rows.scales[:, :, None]).flatten(1)


def test_columns_are_kept_in_whole_groups(fixture: Fixture) -> None:
    form = fixture.source.form(fixture.name)
    if form is None:
        pytest.skip("is dequantised")
    plane = None if fixture.expected.ndim == 2 else 1
    expected = fixture.expected if plane is None else fixture.expected[plane].T
    step = 32 if form.group in (0, form.inputs) else form.group
    for columns in (slice(0, step), slice(step, form.inputs), slice(None)):
        index = (slice(5, 14), columns)
        own = form.cut(index)
        assert own is not None
        found = kept_values(fixture.source.read_kept(fixture.name, index, plane))
        assert found.shape[1] == own.inputs
        close(found, expected[index])


def test_only_the_blocks_of_some_columns_are_read(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    form, inputs = fixture.source.form(fixture.name), fixture.expected.shape[1]
    if form is None or form.group == inputs:
        pytest.skip("nothing to save")
    counts: list[int] = []
    read = SafetensorsSource.read

    def counted(self: SafetensorsSource, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        found = read(self, name, index)
        counts.append(found.nbytes)
        return found

    monkeypatch.setattr(SafetensorsSource, "read", counted)
    columns = slice(form.group, 2 * form.group) if form.group else slice(inputs // 4, inputs // 2)
    reads = [lambda index: fixture.source.read(fixture.name, index)]
    if fixture.expected.ndim == 2:
        reads.append(lambda index: fixture.source.read_kept(fixture.name, index))
    for some in reads:
        some(())
        counts.clear()
        some(())
        whole = sum(counts)
        counts.clear()
        some((slice(None), columns))
        share = (columns.stop - columns.start) / inputs
        assert sum(counts) <= whole * (share + 0.1), "but for scales and zero points of all"


def test_rows_in_another_order(fixture: Fixture) -> None:
    """As families store fused or rotated projections."""
    order = (7, 3, 31, 4) if fixture.expected.ndim == 2 else (2, 0)
    named = NamedSource(fixture.source, {"some": Stored(fixture.name, order)})
    close(named.read("some"), fixture.expected[list(order)])


def test_what_the_cpu_kernels_get(fixture: Fixture, request: pytest.FixtureRequest) -> None:
    if fixture.expected.ndim == 3:
        pytest.skip("experts are no matrix")
    stem = request.node.callspec.id
    kind = fixture.source.stored_type(fixture.name)
    assert kind == KEPT.get(stem, GGMLQuantizationType.BF16)
    rows, stored = fixture.source.read_stored(fixture.name, (slice(3, 27),))
    assert stored == kind
    expected = fixture.expected[3:27]
    found = dequantize(np.ascontiguousarray(rows), kind).float()
    if kind == GGMLQuantizationType.BF16:
        assert torch.equal(found, expected.bfloat16().float())
    else:  # scales and offsets are rounded to float16
        assert (found - expected).abs().max() <= expected.abs().max() * 2**-10


def test_a_part_of_the_columns_is_given_as_floats(fixture: Fixture) -> None:
    if fixture.expected.ndim == 3:
        pytest.skip("experts are no matrix")
    rows, stored = fixture.source.read_stored(fixture.name, (slice(3, 27), slice(0, 32)))
    assert stored == GGMLQuantizationType.BF16
    found = dequantize(np.ascontiguousarray(rows), stored).float()
    assert torch.equal(found, fixture.expected[3:27, :32].bfloat16().float())


def test_scales_of_any_stored_type(tmp_path: Path) -> None:
    """DeepSeek's, in blocks whose last ones are ragged; as float32 and as powers of two."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 150, generator=draw).to(torch.float8_e4m3fn)
    powers = torch.randint(-8, 0, (2, 2), generator=draw)
    scales = torch.exp2(powers.float())
    expected = weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :150]
    section = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    quantization = quantization_of(ModelFiles("tiny", tmp_path, config=tmp_path / "config.json"))
    assert quantization is not None and quantization.title == "FP8 in blocks of 128 x 128"
    for stored in (scales, scales.to(torch.float8_e8m0fnu)):
        path = tmp_path / "model.safetensors"
        save_file({"a.weight": weight, "a.weight_scale_inv": stored, "a.bias": torch.ones(200)}, path)
        source = QuantizedSource(SafetensorsSource([path]), quantization, torch.float32)
        assert sorted(source.names()) == ["a.bias", "a.weight"]
        assert torch.equal(source.read("a.weight"), expected)
        assert torch.equal(source.read("a.weight", (slice(120, 140), slice(100, 150))), expected[120:140, 100:])
        rows = source.read_kept("a.weight", (slice(120, 140),))
        assert isinstance(rows, QuantizedRows) and torch.equal(rows.dequantize(), expected[120:140])
        rows = source.read_kept("a.weight", (slice(120, 140), slice(128, 150)))
        assert isinstance(rows, QuantizedRows) and torch.equal(rows.dequantize(), expected[120:140, 128:])


@pytest.mark.parametrize(
    ("blocks", "shape", "group"),
    [
        ((128, 128), (200, 150), 128),
        ((64, 128), (200, 150), 128),
        ((128, 128), (200, 100), 0),  # a row has one scale
        ((128, 64), (200, 150), None),
    ],
)
def test_which_blocks_can_be_kept(
    blocks: tuple[int, int], shape: tuple[int, int], group: int | None, tmp_path: Path
) -> None:
    counts = [-(-side // block) for side, block in zip(shape, blocks, strict=True)]
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": weight, "a.weight_scale_inv": torch.rand(*counts)}, path)
    source = QuantizedSource(SafetensorsSource([path]), Quantization("fp8", "", blocks=blocks), torch.float32)
    form = source.form("a.weight")
    assert form == (None if group is None else Form("fp8", shape[1], group))
    if form is not None:
        rows = source.read_kept("a.weight", (slice(5, 190),))
        assert isinstance(rows, QuantizedRows) and rows.group == group
        assert torch.equal(rows.dequantize(), source.read("a.weight", (slice(5, 190),)))


def test_integers_in_the_order_of_their_weight(tmp_path: Path) -> None:
    """compressed-tensors' act-order: `weight_g_idx` has the group of each input."""
    draw = torch.Generator().manual_seed(0)
    codes, scales = torch.randint(0, 16, (8, 64), generator=draw), torch.rand(8, 2, generator=draw)
    groups = (torch.randperm(64, generator=draw) // 32).int()
    words = (codes.view(8, 8, 8) << torch.arange(0, 32, 4)).sum(2)
    tensors = {"weight_packed": words.to(torch.int32), "weight_scale": scales, "weight_g_idx": groups}
    path, shape = tmp_path / "model.safetensors", torch.tensor([8, 64])
    save_file({f"a.{name}": value for name, value in {**tensors, "weight_shape": shape}.items()}, path)
    source = QuantizedSource(SafetensorsSource([path]), Quantization("compressed-tensors", ""), torch.float32)
    expected = torch.stack([(codes[:, i] - 8) * scales[:, group] for i, group in enumerate(groups.tolist())], dim=1)
    close(source.read("a.weight"), expected)
    assert source.stored_type("a.weight") == GGMLQuantizationType.F32


def test_modules_that_are_not_quantised_are_plain(tmp_path: Path) -> None:
    """Beside quantised ones, whatever the list of them says."""
    path = tmp_path / "model.safetensors"
    plain, quantised = torch.randn(4, 32), torch.randn(4, 32).to(torch.float8_e4m3fn)
    save_file({"a.weight": plain, "b.weight": quantised, "b.weight_scale": torch.tensor(2.0)}, path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    quantization = quantization_of(ModelFiles("tiny", tmp_path, config=tmp_path / "config.json"))
    assert quantization is not None
    source = QuantizedSource(SafetensorsSource([path]), quantization, torch.bfloat16)
    assert torch.equal(source.read("a.weight"), plain)
    assert source.stored_type("a.weight") == GGMLQuantizationType.F32
    assert torch.equal(source.read("b.weight"), quantised.float() * 2)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"a.weight": torch.zeros(4, 32, dtype=torch.float8_e4m3fn)}, "a.weight has numbers of type F8_E4M3 without"),
        (
            {
                "a.weight": torch.zeros(4, 32, dtype=torch.float8_e4m3fn),
                "a.weight_scale": torch.ones(3, 2),
            },
            r"scales of shape \[3, 2\] do not fit a weight of 4 x 32",
        ),
        (
            {"a.weight": torch.zeros(4, 32), "a.pre_quant_scale": torch.ones(32)},
            "a scale for each input are not supported",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor], text: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}')
    quantization = quantization_of(ModelFiles("tiny", tmp_path, config=tmp_path / "config.json"))
    assert quantization is not None
    with pytest.raises(ModelError, match=text):
        QuantizedSource(SafetensorsSource([path]), quantization, torch.bfloat16)
