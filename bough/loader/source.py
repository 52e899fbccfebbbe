"""Where weights come from, behind one seam: tensors by their Hugging Face names, whole or in part.

`SafetensorsSource` reads checkpoints, `DummySource` makes weights up; `gguf_source` has the third. Files are
memory-mapped, so what is not asked for is not read. Which part goes where is the model's business (`WeightSlot`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from safetensors import SafetensorError, safe_open

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig

Index = tuple[slice, ...]
StoredRows = tuple[npt.NDArray[np.uint8], GGMLQuantizationType]  # [rows, bytes of a row], and what the bytes are
FLOAT_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
STORED_TYPES = {kind.name: kind for kind in FLOAT_TYPES.values()}  # by safetensors' names for them
# A multimodal checkpoint nests its language model; older and newer Transformers at different depths.
NESTED_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
DUMMY_SCALE = 0.02
# Prime, so that no two rows of a matrix begin at the same place in the repeated block and none are equal.
DUMMY_BLOCK = 524_309


class WeightSource(Protocol):
    """Tensors by their Hugging Face names, e.g. `model.layers.0.self_attn.q_proj.weight`."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def nbytes(self) -> int:
        """Size of all tensors as they are stored."""
        ...

    def stored_type(self, name: str) -> GGMLQuantizationType:
        """The type in which `read_stored` gives a matrix."""
        ...

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        """`tensor[index]`, dequantised, in memory of its own; slices must have step 1."""
        ...

    def read_stored(self, name: str, index: Index = ()) -> StoredRows:
        """The same part of a matrix as it is stored, where it can be packed so; else as floats."""
        ...


def float_rows(rows: torch.Tensor) -> StoredRows:
    """Rows of floats as the bytes that they are."""
    return rows.contiguous().view(torch.uint8).numpy(), FLOAT_TYPES[rows.dtype]


class SafetensorsSource:
    """The tensors of one or several safetensors files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._nbytes = sum(path.stat().st_size for path in paths)
        self._where: dict[str, tuple[Path, Any, str]] = {}  # name: file, open handle, name inside the file
        for path in paths:
            try:
                handle: Any = safe_open(str(path), framework="pt")
                stored = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again.") from None
            self._where |= {_plain_name(name): (path, handle, name) for name in stored}

    def names(self) -> Sequence[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def nbytes(self) -> int:
        return self._nbytes

    def stored_type(self, name: str) -> GGMLQuantizationType:
        return STORED_TYPES.get(str(self._slice(name).get_dtype()), GGMLQuantizationType.F32)

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        part: torch.Tensor = self._slice(name)[index]
        return part

    def read_stored(self, name: str, index: Index = ()) -> StoredRows:
        return float_rows(self.read(name, index))

    def _slice(self, name: str) -> Any:
        path, handle, stored = self._where[name]
        try:
            return handle.get_slice(stored)
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name!r} cannot be read ({error}); fetch the file again.") from None


class DummySource:
    """Random weights in the shape of a model: the same for the same name, whatever part is read. Norms are near one."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self._shapes = dict(_tensor_shapes(config))
        self._dtype = dtype
        # One block for all tensors, read from another place for each name: drawing billions of numbers takes minutes.
        block = torch.randn(DUMMY_BLOCK, generator=torch.Generator().manual_seed(0)) * DUMMY_SCALE
        self._block = block.to(dtype).to(device or torch.device("cpu"))
        self._norm_base = 0.0 if config.norm_plus_one else 1.0

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def nbytes(self) -> int:
        return sum(map(math.prod, self._shapes.values())) * self._dtype.itemsize

    def stored_type(self, name: str) -> GGMLQuantizationType:
        return FLOAT_TYPES[self._dtype]

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        first, *others = self._shapes[name]
        rows = range(first)[index[0]] if index else range(first)
        width = math.prod(others)
        values = self._stretch(name, rows.start * width, len(rows) * width).view(len(rows), *others)
        if "norm" in name:
            values = values + self._norm_base
        return values[(slice(None), *index[1:])]

    def read_stored(self, name: str, index: Index = ()) -> StoredRows:
        return float_rows(self.read(name, index))

    def _stretch(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements start .. start + count of an endless repetition of the block, begun elsewhere for each name."""
        turned = self._block.roll(-((start + zlib.crc32(name.encode())) % DUMMY_BLOCK))
        return turned.repeat(-(-count // DUMMY_BLOCK))[:count]


def _plain_name(name: str) -> str:
    for prefix, plain in NESTED_PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a checkpoint with this configuration."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for name, (rows, columns, biased) in linears.items():
        yield f"{name}.weight", (rows, columns)
        if biased:
            yield f"{name}.bias", (rows,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.architecture == "Gemma3ForCausalLM":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in norms:
        yield f"{name}.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
