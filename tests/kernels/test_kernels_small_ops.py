"""Rotation, gated activations and cache writes against their definitions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bough.kernels.activation.reference import gated_mul
from bough.kernels.norm_rope_store.reference import apply_rope, store_kv


def test_rope_turns_each_pair_by_its_angle() -> None:
    torch.manual_seed(0)
    x, angle = torch.randn(5, 3, 8), torch.randn(5, 1, 4)
    cos, signed_sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(apply_rope(x, cos, signed_sin), expected)
    half = apply_rope(x.bfloat16(), cos, signed_sin)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=3e-2, rtol=3e-2)


def test_gates_are_the_first_half() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    torch.testing.assert_close(gated_mul(x, "silu"), F.silu(x[:, :3]) * x[:, 3:])
    torch.testing.assert_close(gated_mul(x, "gelu_tanh"), F.gelu(x[:, :3], approximate="tanh") * x[:, 3:])


def test_store_kv_writes_only_its_slots() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 1, 4)
    k_cache, v_cache = torch.zeros(2, 5, 1, 4)
    store_kv(k, v, k_cache, v_cache, torch.tensor([3, 1]))
    assert torch.equal(k_cache[[3, 1]], k)
    assert torch.equal(v_cache[[3, 1]], v)
    assert not k_cache[[0, 2, 4]].any()
    assert not v_cache[[0, 2, 4]].any()
