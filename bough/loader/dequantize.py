"""Turns the blocks of a GGUF tensor into numbers, as the `gguf` package does. CPUs multiply most formats as they are:
this is for GPUs and for formats without a product."""

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from bough.core.errors import ModelError

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def dequantize(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> torch.Tensor:
    """Rows of bytes [rows, bytes] to rows of numbers [rows, values]: float32, or the file's own plain type."""
    if kind in PLAIN:
        return torch.from_numpy(raw.copy()).view(PLAIN[kind])
    try:
        return torch.from_numpy(quants.dequantize(raw, kind))
    except NotImplementedError:
        text = f"Weights of GGUF type {kind.name} cannot be read; use a file of another quantisation."
        raise ModelError(text) from None
