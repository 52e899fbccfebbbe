"""Encoders whose items are packed attend as Transformers' own attention does, one item or window after the other."""

from __future__ import annotations

import sys
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
    sizes = [size for size in begins.diff().tolist() if size]
    assert max(sizes) <= longest
    rest = len(query) - sum(sizes)  # of no item
    items = zip(*(each.transpose(0, 1).split([*sizes, rest], dim=1) for each in (query, key, value)), strict=True)
    found = [F.scaled_dot_product_attention(*(part[None] for part in item))[0] for item in items]
    return torch.cat(found, dim=1).transpose(0, 1)


def load(folder: Path, family: str, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    return encoders.load_encoder(
        ModelFiles("tiny", folder), MediaConfig(KINDS[family], 1), dtype, torch.device(device), dummy=True
    )


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_few_kernels_compute_what_many_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, device: str
) -> None:
    vision = {**SEEING[family], **({"intermediate_size": 42} if family == "qwen2_5_vl" else {})}
    write_checkpoint(tmp_path, family, text={**TEXT, **LANGUAGE[family]}, vision=vision)
    modeling = sys.modules[getattr(transformers, KINDS[family]).__module__]
    monkeypatch.setattr(modeling, encoders.ROTATION, getattr(modeling, encoders.ROTATION))
    launch_less, dtype = encoders.launch_less, torch.bfloat16
    monkeypatch.setattr(encoders, "launch_less", lambda visual: None)
    model = load(tmp_path, family, device, dtype)
    grid = torch.tensor([[1, 8, 6], [1, 4, 4], [2, 4, 4]], device=device)
    width = 3 * 2 * model.config.vision_config.patch_size**2
    pixels = torch.randn(int(grid.prod(1).sum()), width, device=device, dtype=dtype)
    expected = model.get_image_features(pixels, grid).pooler_output
    if device == "cpu":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_by_one)  # imported late: it is slow
    launch_less(model.model.visual)
    for theirs, ours in zip(expected, model.get_image_features(pixels, grid).pooler_output, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
        assert float(theirs.float().std()) > 0.01


def test_a_rotation_in_place_is_transformers_one() -> None:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision as theirs

    qkv = torch.randn(7, 3, 4, 16, dtype=torch.bfloat16)
    angles = torch.randn(7, 8).repeat(1, 2)
    q, k, v = qkv.clone().permute(1, 0, 2, 3).unbind(0)
    expected = theirs(q, k, angles.cos(), angles.sin())
    found = encoders.rotate(lambda *_: pytest.fail("this layout is rotated in place"), q, k, angles.cos(), angles.sin())
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-2, rtol=1e-2)
    assert found[0].data_ptr() == q.data_ptr() and torch.equal(v, qkv[:, 2])
    apart = encoders.rotate(theirs, q.contiguous(), k, angles.cos(), angles.sin())
    torch.testing.assert_close(apart[0], theirs(q, k, angles.cos(), angles.sin())[0])


@pytest.mark.parametrize("bias", [False, True])
def test_patches_one_by_one_are_multiplied_and_others_convolved(bias: bool) -> None:
    size = (2, 4, 4)
    conv = torch.nn.Conv3d(3, 8, size, size, bias=bias)
    product = encoders.PatchProduct(3, 8, size, size, bias=bias)
    product.load_state_dict(conv.state_dict())
    for shape in (size, (2, 8, 12)):
        patches = torch.randn(5, 3, *shape)
        torch.testing.assert_close(product(patches), conv(patches))
