"""Weights packed and multiplied by the compiled library outside of a tape, with the signatures of the reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from bough.kernels.quant_linear.packed import Format, PackedWeight, aligned_bytes, linear_library, structs_of
from bough.native.tape import ThreadPool


def pack(
    rows: npt.NDArray[np.uint8],  # [n, bytes of a row], as the file holds them
    source: GGMLQuantizationType,
    k: int,
    form: Format,
) -> PackedWeight:
    """Puts rows into tiles. Floats can be packed as F32, Q8 and Q4_MIN, every type in its natural format and as F32."""
    library, n = linear_library(), len(rows)
    size = library.bough_weight_bytes(form, n, k)
    blob = aligned_bytes(size)
    stored = np.ascontiguousarray(rows)
    if not size or library.bough_weight_pack(form, source, n, k, stored.ctypes.data, blob.ctypes.data, 0, n):
        raise ValueError(f"{source.name} rows of {k} inputs cannot be packed as {form.name}.")
    return PackedWeight(form, n, k, blob)


def quant_linear(
    x: torch.Tensor,  # [tokens, in] float32
    parts: Sequence[PackedWeight],  # whose outputs stand side by side
    bias: torch.Tensor | None = None,  # [out]
    *,
    out: torch.Tensor | None = None,  # [tokens, out]
    prompt: bool = False,  # the tokens are of a prompt
    pool: ThreadPool | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, written to `out` if given."""
    library, pool = linear_library(), pool or _one_thread()
    structs = structs_of(parts)
    if out is None:
        out = torch.empty(len(x), sum(part.n for part in parts))
    scratch = aligned_bytes(library.bough_linear_scratch(structs, len(parts), len(x), pool.threads))
    library.bough_linear_alone(
        pool.handle,
        structs,
        len(parts),
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        None if bias is None else bias.data_ptr(),
        len(x),
        prompt,
        scratch.ctypes.data,
    )
    return out


def dequantize_row(weight: PackedWeight, row: int) -> torch.Tensor:
    """The values of one row. [k] float32"""
    values = torch.empty(weight.k)
    linear_library().bough_weight_row(structs_of([weight]), row, values.data_ptr())
    return values


@functools.cache
def _one_thread() -> ThreadPool:
    return ThreadPool(linear_library(), 1)
