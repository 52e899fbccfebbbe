"""Layouts in which checkpoints of multi-modal families have come: each gives the tokens of transformers."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.core.errors import ModelError
from bough.core.plan import MediaLimits
from bough.native.library import load_library
from tests.fakes.quantised import write_quantised
from tests.multimodal.checkpoints import as_moonshot
from tests.parity.test_media import engine_of, make, text

LAYOUT = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.vision_model.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def set_values(theirs: Any, values: Mapping[str, torch.Tensor]) -> None:
    """Has a model of Transformers these values, by the names that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.config.save_pretrained(folder)
        save_file(dict(values), f"{folder}/model.safetensors", {"format": "pt"})
        theirs.load_state_dict(type(theirs).from_pretrained(folder, dtype=torch.float32).state_dict())


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


PUBLISHED = (  # names of Moonshot's tensors
    r"language_model\.(lm_head|model\.(embed_tokens|norm|layers\.\d+\.(self_attn|mlp|\w+norm)[\w.]*))\.\w+",
    r"vision_tower\.patch_embed\.(proj\.(weight|bias)|pos_emb\.weight)",
    r"vision_tower\.encoder\.(final_layernorm|blocks\.\d+\.(norm[01]|wqkv|wo|mlp\.fc[01]))\.(weight|bias)",
    r"mm_projector\.(pre_norm|proj\.[02])\.(weight|bias)",
)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["language_model.model.", "language_model."], ids=["moonshot", "nvidia"])
@pytest.mark.parametrize("quantised", [False, True])
def test_kimi_is_read_as_it_is_published(tmp_path: Path, inner: str, quantised: bool) -> None:
    model = make("kimi_k25", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {name for name in weights if not any(re.fullmatch(each, name) for each in PUBLISHED)} == set()
    images = model.case.images
    as_moonshot(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if quantised:  # as the experts are, which only the text's part of the configuration says
        values = write_quantised(tmp_path, config, weights, "fp8-channel", only=".experts.")
        rewritten = json.loads((tmp_path / "config.json").read_text())
        rewritten["text_config"]["quantization_config"] = rewritten.pop("quantization_config")
        (tmp_path / "config.json").write_text(json.dumps(rewritten))
        weights = load_file(tmp_path / "model.safetensors")
        set_values(model.theirs, values)
    moved = {
        inner + name.removeprefix("language_model.model.") if ".layers." in name else name: weights[name]
        for name in weights
    }
    save_file(moved, tmp_path / "model.safetensors")
    ids, spans = model.prompt(text(9, 1), images)
    tokens, media = model.media(tmp_path, ids, spans, images)
    assert engine_of(model).ask(tokens, media=[media])[0][0] == model.continued(ids, images)[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8-tensor", "bnb-nf4"])
def test_quantised_checkpoints_are_read_with_their_encoders(tmp_path: Path, form: str) -> None:
    model = make("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    values = write_quantised(tmp_path, config, load_file(tmp_path / "model.safetensors"), form)
    set_values(model.theirs, values)
    ids, spans = model.prompt(text(9, 1), model.case.images)
    tokens, media = model.media(tmp_path, ids, spans, model.case.images)
    assert engine_of(model).ask(tokens, media=[media])[0][0] == model.continued(ids, model.case.images)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_native_kernels_rotate_a_text_as_transformers(tmp_path: Path, name: str) -> None:
    if load_library() is None:
        pytest.skip("the CPU kernels are not compiled")
    model, words = make(name, tmp_path), text(12, 3)
    engine = engine_of(model, enable_multimodal=False, attention_backend="native", quantization="none")
    assert engine.ask(words)[0][0] == model.continued(words, [])[0]
