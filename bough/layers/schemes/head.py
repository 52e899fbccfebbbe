"""The head of a model whose layers have 4 bits."""

from collections.abc import Iterator

import torch

from bough.kernels.quantize_rows.reference import SMALLEST_AMAX, QuantizedRows
from bough.kernels.registry import fp8_ops_for
from bough.kernels.scaled_linear.reference import FEW_ROWS
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot

LARGEST = 127
BAND = 16384  # vectors that are widened at once: more would only take memory


class Int8Head:
    """A vocabulary's vectors as 8-bit integers with a scale for each: half of what the logits of a few rows read.

    Integers, since 8-bit floats cost SmolLM2 1.8 % of its perplexity here, and these 0.05 %. Scales have the bits of a
    bfloat16, so that vectors can be widened in one step.
    """

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self._dtype, device = placement.dtype, placement.device
        values = torch.empty(vocab_size, hidden_size, dtype=torch.int8, device=device)
        self._weight = QuantizedRows(values, torch.empty(vocab_size, 1, dtype=torch.float32, device=device))
        self._few_rows = fp8_ops_for(device).weight_linear

    def embed(self, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self._widened(token_ids) * scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) <= FEW_ROWS:
            return self._few_rows(hidden, self._weight, None)
        out = hidden.new_empty(len(hidden), len(self._weight.values))
        for first in range(0, out.shape[1], BAND):
            band = slice(first, first + BAND)
            torch.mm(hidden, self._widened(band).t(), out=out[:, band])
        return out

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self._weight.values, store=self._store, held=tuple(self._weight))

    def _store(self, first: int, band: torch.Tensor) -> None:
        amax = band.float().abs().amax(dim=1, keepdim=True).clamp_(min=SMALLEST_AMAX)
        scales = (amax * ((1 + 2**-7) / LARGEST)).bfloat16().float()  # rounded, yet never too small
        values, rows = (band.float() / scales).round_(), slice(first, first + len(band))
        self._weight.values[rows] = values.to(torch.int8)
        self._weight.scales[rows] = scales

    def _widened(self, which: slice | torch.Tensor) -> torch.Tensor:
        return self._weight.values[which] * self._weight.scales[which].to(self._dtype)
