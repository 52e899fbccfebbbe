"""GGUF files of all families that llama.cpp knows, written from checkpoints of transformers as llama.cpp's converter
writes them, with the `gguf` package's own names: the same logits, greedy tokens, and experts that stay quantised."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

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
from tests.parity.engines import LocalEngine
from tests.parity.gguf_files import FILES, make_checkpoint, write
from tests.parity.gguf_writer import GgufWriter
from tests.parity.test_families import NEW, TOLERANCE, Case, make, prompt


def load(path: Path, group: RankGroup = ALONE) -> CausalLM:
    files = locate(str(path))
    config = read_config(files)
    model = build_model(config, group.topology, torch.float32, CPU, group)
    load_weights(list(model.slots()), open_source(files, config), progress=False, device=CPU)
    return model


# Whose layers are of several kinds, or choose what they see.
NEWER = (
    "gemma4_text", "llama4_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "nemotron_h",
    "lfm2", "lfm2_moe", "kimi_linear", "deepseek_v32", "glm_moe_dsa-shared", "glm4_moe_lite", "dots1", "solar_open",
    "exaone_moe",
)  # fmt: skip
READ_TOO = ("lfm2", "qwen3_5_text", "qwen3_5_moe_text")
QUICK = ("llama", "phi3-long", "gpt_neox", "mixtral", "deepseek_v3")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FILES]
)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokens = make_checkpoint(name, tmp_path), prompt(30, seed=9)
    path = write(name, tmp_path)
    found = Forward(load(path)).step({0: tokens})[0]
    torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen3_5_moe_text", "gemma4-experts", "granitemoehybrid"])
def test_experts_on_two_ranks_are_read_from_the_file(name: str, tmp_path: Path) -> None:
    model, tokens = make_checkpoint(name, tmp_path), prompt(30, seed=9)
    path = write(name, tmp_path)
    for found in on_ranks(2, lambda g: Forward(load(path, g), topology=g.topology).step({0: tokens})[0], ep_size=2):
        torch.testing.assert_close(found, model.logits(tokens), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mistral", "qwen2", "starcoder2", "gpt2", "stablelm", "nemotron", "minimax_m2", *READ_TOO]
)
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0])
def test_transformers_reads_the_same_from_the_file(name: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Its own reader, of those architectures that it has."""
    make_checkpoint(name, tmp_path)
    path = write(name, tmp_path, kind)
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
@pytest.mark.parametrize("name", ["gemma2", "phi3", "glm4", "gpt2", "granitemoe", "deepseek_v3", *NEWER])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, tokens = make_checkpoint(name, tmp_path), prompt(20, seed=3)
    path = write(name, tmp_path)
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
