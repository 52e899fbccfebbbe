"""Layouts in which checkpoints of multi-modal families have come: each gives the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from bough.core.errors import ModelError
from bough.core.plan import MediaLimits
from bough.native.library import load_library
from tests.parity.test_media import engine_of, make, text

LAYOUT = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.vision_model.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


@pytest.mark.slow
def test_experts_are_read_either_way_round(tmp_path: Path) -> None:
    model = make("qwen3_vl_moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    fused = [name for name in weights if ".experts." in name]
    assert len(fused) == 4
    save_file({**weights, **{name: weights[name].mT.contiguous() for name in fused}}, tmp_path / "model.safetensors")
    words = text(12, 3)
    assert engine_of(model).ask(words)[0][0] == model.continued(words, [])[0]


@pytest.mark.slow
def test_the_first_layout_of_paddleocr_is_read(tmp_path: Path) -> None:
    model = make("paddleocr_vl", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    older = {"model.language_model.": "model.", "model.visual.": "visual.", "model.projector.": "mlp_AR."}
    begins = {name: next((new for new in older if name.startswith(new)), "") for name in weights}
    moved = {older.get(new, "") + name.removeprefix(new): weights[name] for name, new in begins.items()}
    assert moved.keys().isdisjoint(name for name, new in begins.items() if new)
    save_file(moved, tmp_path / "model.safetensors")
    ids, spans = model.prompt(text(9, 1), model.case.images)
    tokens, media = model.media(tmp_path, ids, spans, model.case.images)
    assert engine_of(model).ask(tokens, media=[media])[0][0] == model.continued(ids, model.case.images)[0]


@pytest.mark.slow
def test_layouts_of_other_transformers_are_read_and_what_is_missing_is_told(tmp_path: Path) -> None:
    model = make("llava", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    begins = {name: next(old for old in LAYOUT if name.startswith(old)) for name in weights}
    moved = {LAYOUT[old] + name.removeprefix(old): weights[name] for name, old in begins.items()}
    save_file(moved, tmp_path / "model.safetensors")
    ids, spans = model.prompt(text(9, 1), model.case.images)
    tokens, media = model.media(tmp_path, ids, spans, model.case.images)
    assert engine_of(model).ask(tokens, media=[media])[0][0] == model.continued(ids, model.case.images)[0]
    del moved["model.multi_modal_projector.linear_2.bias"]
    save_file(moved, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"encoder are missing, such as model.multi_modal_projector.linear_2.bias"):
        engine_of(model)
    save_file(
        {name: value for name, value in moved.items() if "language" in name or "lm_head" in name},
        tmp_path / "model.safetensors",
    )
    limits = engine_of(model, enable_multimodal=False).limits
    assert limits.media == MediaLimits(0, 4 * 64, width=64)  # as of a text model: vectors for tokens, and no images


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_native_kernels_rotate_a_text_as_transformers(tmp_path: Path, name: str) -> None:
    if load_library() is None:
        pytest.skip("the CPU kernels are not compiled")
    model, words = make(name, tmp_path), text(12, 3)
    engine = engine_of(model, enable_multimodal=False, attention_backend="native", quantization="none")
    assert engine.ask(words)[0][0] == model.continued(words, [])[0]
