"""Encoders whose items are packed attend as Transformers' own attention does, one item or window after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from bough.core.model_config import MediaConfig
from bough.loader import encoders
from bough.loader.locate import ModelFiles
from tests.multimodal.checkpoints import LANGUAGE, SEEING, TEXT, write_checkpoint

KINDS = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begins: torch.Tensor, _: Any, longest: int, __: int
) -> torch.Tensor:
    """What the kernel computes, of [tokens, heads, head_dim]."""
    sizes = begins.diff().tolist()
    assert max(sizes) == longest
    items = zip(*(each.transpose(0, 1).split(sizes, dim=1) for each in (query, key, value)), strict=True)
    found = [F.scaled_dot_product_attention(*(part[None] for part in item))[0] for item in items]
    return torch.cat(found, dim=1).transpose(0, 1)


def load(folder: Path, family: str, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    return encoders.load_encoder(
        ModelFiles("tiny", folder), MediaConfig(KINDS[family], 1), dtype, torch.device(device), dummy=True
    )


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_packed_items_attend_as_items_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, device: str
) -> None:
    write_checkpoint(tmp_path, family, text={**TEXT, **LANGUAGE[family]}, vision=SEEING[family])
    dtype = torch.bfloat16
    model = load(tmp_path, family, device, dtype)
    grid = torch.tensor([[1, 8, 12], [1, 4, 4], [2, 8, 6]], device=device)
    width = 3 * 2 * model.config.vision_config.patch_size**2
    pixels = torch.randn(int(grid.prod(1).sum()), width, device=device, dtype=dtype)
    visual = model.model.visual
    assert (visual.config._attn_implementation == encoders.PACKED) == (device == "cuda")
    found = []
    for kind in ("sdpa", encoders.PACKED):
        if device == "cpu":
            monkeypatch.setattr(encoders, "varlen_attn", one_by_one)
            transformers.AttentionInterface.register(encoders.PACKED, encoders.packed_attention)
        visual.config._attn_implementation = kind
        found.append(model.get_image_features(pixels, grid).pooler_output)
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
        assert float(theirs.float().std()) > 0.01


@pytest.mark.parametrize("bias", [False, True])
def test_patches_one_by_one_are_multiplied_and_others_convolved(bias: bool) -> None:
    size = (2, 4, 4)
    conv = torch.nn.Conv3d(3, 8, size, size, bias=bias)
    product = encoders.PatchProduct(3, 8, size, size, bias=bias)
    product.load_state_dict(conv.state_dict())
    for shape in (size, (2, 8, 12)):
        patches = torch.randn(5, 3, *shape)
        torch.testing.assert_close(product(patches), conv(patches))
