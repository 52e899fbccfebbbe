"""Every implementation of the embedding against indexing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.embedding.reference import embedding as reference
from bough.kernels.embedding.triton import embedding as triton_embedding


@pytest.mark.parametrize("embed", [reference, triton_embedding], ids=["reference", "triton"])
# The interpreter cuts bfloat16 off where a GPU rounds it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale", [1.0, 3.375])
@pytest.mark.parametrize("size", [20, 1100])
def test_gathers_and_scales_rows(
    embed: Callable[..., torch.Tensor], dtype: torch.dtype, scale: float, size: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, size, device=device).to(dtype)
    kept = weight.clone()
    ids = torch.tensor([3, 0, 6, 3], device=device)
    out = embed(ids, weight, scale)
    assert torch.equal(out, (kept[ids].float() * scale).to(dtype))
    assert torch.equal(weight, kept)
