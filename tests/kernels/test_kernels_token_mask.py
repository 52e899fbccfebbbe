"""Masks over logits: exactly what a bit forbids becomes impossible, in exactly the rows that are meant."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bough.kernels.logits import reference
from bough.kernels.logits import triton as fast


@pytest.mark.parametrize("kernel", [reference.forbid_tokens_, fast.forbid_tokens_])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [97, 4096, 5000])
def test_a_mask_forbids_what_it_says(  # type: ignore[no-untyped-def]
    device: torch.device, kernel, dtype: torch.dtype, vocab_size: int
) -> None:
    rng = np.random.default_rng(vocab_size)
    words = rng.integers(-(2**31), 2**31, size=(3, -(-vocab_size // 32)), dtype=np.int32)
    words[1] = -1
    logits = torch.from_numpy(rng.normal(size=(5, vocab_size))).to(dtype).to(device)
    before = logits.clone()
    places = [4, 0, 2]
    kernel(logits, torch.from_numpy(words).to(device), torch.tensor(places, device=device))
    allowed = np.ones((5, vocab_size), dtype=np.bool_)
    allowed[places] = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    expected = before.masked_fill(torch.from_numpy(~allowed).to(device), -torch.inf)
    assert torch.equal(logits, expected)


def test_no_masks_are_no_work(device: torch.device) -> None:
    logits = torch.ones(2, 40, device=device)
    for kernel in (reference.forbid_tokens_, fast.forbid_tokens_):
        none = torch.zeros((0, 2), dtype=torch.int32, device=device)
        kernel(logits, none, torch.zeros(0, dtype=torch.int64, device=device))
    assert (logits == 1).all()
