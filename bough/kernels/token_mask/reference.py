"""Masks in plain torch."""

from __future__ import annotations

import torch

BITS_OF_BYTE = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).bool()  # [byte, bit], lowest bit first


def forbid_tokens_(logits: torch.Tensor, words: torch.Tensor, places: torch.Tensor) -> None:
    """Sets what line i of `words` [m, ceil(vocabulary / 32)] int32 does not allow to -inf, in row `places[i]` of the
    logits [n, vocabulary]. Bit t % 32 of word t // 32 allows token t; `places` [m] int64 are distinct."""
    vocab_size = logits.shape[1]
    bits = BITS_OF_BYTE.to(logits.device)[words.contiguous().view(torch.uint8).int()]  # [m, bytes, 8]
    allowed = bits.flatten(1)[:, :vocab_size]
    for line, place in zip(allowed, places.tolist(), strict=True):
        logits[place].masked_fill_(line.logical_not(), -torch.inf)
