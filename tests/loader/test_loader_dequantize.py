from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES

from bough.core.errors import ModelError
from bough.loader.source import dequantize

# Where the float16 scales of a block stand; random bytes there could be infinite, and would tell nothing.
SCALES = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}


def random_blocks(kind: Kind, rows: int, blocks: int) -> np.ndarray:
    _, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    raw = generator.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for at in SCALES[kind]:
        raw[:, at : at + 2] = generator.normal(size=(rows * blocks, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, blocks * size)


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_rows_of_a_mapped_file_become_numbers(kind: Kind) -> None:
    raw = random_blocks(kind, rows=7, blocks=9)
    raw.flags.writeable = False  # as a file's mapping is
    found = dequantize(raw, kind)
    assert found.shape == (7, 9 * GGML_QUANT_SIZES[kind][0]) and found.dtype == torch.float32
    assert torch.equal(found[2:4], dequantize(raw[2:4], kind)), "a band has the numbers that it has in the whole"
    assert torch.isfinite(found).all() and len(found.unique()) > 100


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_numbers_are_nearly_those_that_were_quantised(kind: Kind) -> None:
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    found = dequantize(gguf.quants.quantize(values, kind), kind)
    step = np.abs(values).max() * 2 / (2 ** int(kind.name[1]) - 1)
    assert np.abs(found.numpy() - values).max() < step


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_plain_formats_keep_their_type(kind: Kind) -> None:
    values = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    raw = np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8)
    found = dequantize(raw, kind)
    assert found.dtype == {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
    assert torch.equal(found.float(), torch.from_numpy(gguf.quants.dequantize(raw, kind).copy()))


def test_what_the_package_cannot_read_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="GGUF type Q8_K cannot be read"):
        dequantize(np.zeros((1, 292), np.uint8), Kind.Q8_K)
