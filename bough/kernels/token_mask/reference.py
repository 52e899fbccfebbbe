"""Masks in plain torch: bytes of a mask are looked up as eight numbers to add, 0 or -inf, which is far cheaper on a CPU
than filling by a mask of booleans."""

from __future__ import annotations

import torch

_BITS = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).bool()  # [byte, bit], lowest bit first
BIAS_OF_BYTE = torch.zeros(256, 8).masked_fill_(_BITS.logical_not(), -torch.inf)


def forbid_tokens_(logits: torch.Tensor, words: torch.Tensor, places: torch.Tensor) -> None:
    """Sets what line i of `words` [m, ceil(vocabulary / 32)] int32 does not allow to -inf, in row `places[i]` of the
    logits [n, vocabulary]. Bit t % 32 of word t // 32 allows token t; `places` [m] int64 are distinct."""
    vocab_size = logits.shape[1]
    biases = BIAS_OF_BYTE.to(logits.device, logits.dtype)
    for line, place in zip(words.contiguous().view(torch.uint8), places.tolist(), strict=True):
        logits[place].add_(biases.index_select(0, line.int()).view(-1)[:vocab_size])
