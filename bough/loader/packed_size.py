"""What a checkpoint's weights will take once they are packed: known from their types, before any is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bough.kernels.quant_linear.filling import format_for, of_tables
from bough.kernels.quant_linear.packed import packed_bytes
from bough.loader.source import WeightSource

TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class PackedSize:
    """Bytes of all tensors, and whether some of them are quantised."""

    nbytes: int
    quantised: bool


def packed_size(source: WeightSource, quantization: str) -> PackedSize:
    """Of all tensors that there are; matrices are packed, the rest becomes float32."""
    total, quantised = 0, False
    for name in source.names():
        shape = source.shape(name)
        if len(shape) != 2:
            total += 4 * math.prod(shape)
            continue
        how = of_tables(quantization) if name in TABLES else quantization
        form = format_for(how, source.stored_type(name), shape[1])
        total += packed_bytes(form, shape[0], shape[1])
        quantised |= not form.is_float
    return PackedSize(total, quantised)
