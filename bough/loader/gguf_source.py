"""Weights from a GGUF file, given back in the names and the row order of the Hugging Face checkpoint it was made from.

Only the rows asked for are dequantised. llama.cpp interleaves the two halves of each query and key head of the `llama`
architecture, because it rotates neighbours; that order is undone here. Gemma's norms keep the one that llama.cpp added
to them: `ModelConfig.norm_plus_one` is false for a GGUF.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from gguf.constants import GGMLQuantizationType

from bough.core.model_config import ModelConfig
from bough.kernels.quant_linear.packed import NATURAL
from bough.loader.dequantize import dequantize
from bough.loader.gguf_config import ARCHITECTURES, hugging_face_name
from bough.loader.gguf_file import GgufFile
from bough.loader.source import Index, StoredRows, float_rows

log = logging.getLogger(__name__)


class GgufSource:
    """The tensors of one open GGUF file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        kind = str(file.metadata.get("general.architecture"))
        architecture = ARCHITECTURES.get(kind, config.architecture)
        named = ((hugging_face_name(info.name, architecture), info) for info in file.tensors.values())
        self._file = file
        self._tensors = {name: info for name, info in named if name is not None}
        self._told: set[GGMLQuantizationType] = set()
        # Heads whose rows are interleaved, by the module that holds them.
        self._interleaved = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if kind == "llama" else {}

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._tensors.values())

    def stored_type(self, name: str) -> GGMLQuantizationType:
        kind = self._tensors[name].kind
        return kind if kind in NATURAL else GGMLQuantizationType.F32

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        info = self._tensors[name]
        raw = self._file.raw(info)
        order = self._row_order(name)
        if len(info.shape) == 1:
            values = dequantize(raw, info.kind).view(-1)
            return (values if order is None else values[order])[index]
        rows = index[0] if index else slice(None)
        part = raw[rows] if order is None else raw[order[rows].numpy()]
        return dequantize(part, info.kind).view(-1, *info.shape[1:])[(slice(None), *index[1:])]

    def read_stored(self, name: str, index: Index = ()) -> StoredRows:
        info = self._tensors[name]
        columns = range(info.shape[1])[index[1]] if len(index) > 1 else range(info.shape[1])
        if info.kind not in NATURAL or len(columns) < info.shape[1]:
            self._tell_dequantised(info.kind)
            return float_rows(self.read(name, index))
        rows, order = index[0] if index else slice(None), self._row_order(name)
        raw = self._file.raw(info)
        return raw[rows] if order is None else raw[order[rows].numpy()], info.kind

    def _tell_dequantised(self, kind: GGMLQuantizationType) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.info("weights of GGUF type %s have no native kernel; they are dequantised to float32", kind.name)

    def _row_order(self, name: str) -> torch.Tensor | None:
        """Which stored row is each row of the checkpoint; None: they are the same."""
        heads = self._interleaved.get(name.split(".")[-2])
        if heads is None:
            return None
        return torch.arange(self.shape(name)[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)
