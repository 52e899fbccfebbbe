"""What "near the float64 reference" means in all tests of kernels.

The distance by norm, over everything, sees a kernel that is a little wrong everywhere; but among 100,000 numbers it
does not see one that is altogether wrong. So each number is bounded too, by the scale of its row (its last dimension),
because sums of large terms may leave small results, which no kernel can know to more digits than the terms had.
"""

from __future__ import annotations

import torch

PER_ELEMENT = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}  # of the largest number of the row


def assert_near(actual: torch.Tensor, expected: torch.Tensor, by_norm: float | None = None, times: float = 1.0) -> None:
    """By norm, and each element by itself. `by_norm`: for a kernel that is to be nearer than each of its elements is;
    `times`: farther, for what is rounded again and again on the way."""
    assert actual.shape == expected.shape
    bound = times * PER_ELEMENT[actual.dtype]
    wide = expected.double()
    error = (actual.double() - wide).abs()
    distance = float(error.norm() / wide.norm())
    assert distance < (bound if by_norm is None else by_norm), f"{distance:.1e} away by norm"
    scale = wide.abs().amax(dim=-1, keepdim=True)
    over = (error - bound * scale).flatten()
    worst = int(over.argmax())
    found, meant, most = (float(t.expand_as(wide).flatten()[worst]) for t in (actual, wide, scale))
    told = f"element {worst} of {len(over)} is {found} instead of {meant}, in a row up to {most}"
    assert over[worst] <= 0, told
