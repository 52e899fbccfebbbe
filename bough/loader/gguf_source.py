"""Weights from a GGUF file, as it has them. Only the rows asked for are dequantised."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from gguf.constants import GGMLQuantizationType

from bough.kernels.quant_linear.packed import NATURAL
from bough.loader.dequantize import dequantize
from bough.loader.gguf_file import GgufFile
from bough.loader.source import Index, StoredRows, float_rows

log = logging.getLogger(__name__)


class GgufSource:
    """The tensors of one open GGUF file, by llama.cpp's names."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._told: set[GGMLQuantizationType] = set()

    def names(self) -> Sequence[str]:
        return list(self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[name].shape

    def stored_type(self, name: str) -> GGMLQuantizationType:
        kind = self._file.tensors[name].kind
        return kind if kind in NATURAL else GGMLQuantizationType.F32

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        info = self._file.tensors[name]
        raw = self._file.raw(info)
        if len(info.shape) == 1:
            return dequantize(raw, info.kind).view(-1)[index]
        rows, *others = index or (slice(None),)
        return dequantize(raw[rows], info.kind).view(-1, *info.shape[1:])[(slice(None), *others)]

    def read_stored(self, name: str, index: Index = ()) -> StoredRows:
        info = self._file.tensors[name]
        columns = range(info.shape[1])[index[1]] if len(index) > 1 else range(info.shape[1])
        if info.kind not in NATURAL or len(columns) < info.shape[1]:
            self._tell_dequantised(info.kind)
            return float_rows(self.read(name, index))
        return self._file.raw(info)[index[0] if index else slice(None)], info.kind

    def _tell_dequantised(self, kind: GGMLQuantizationType) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.info("weights of GGUF type %s have no native kernel; they are dequantised to float32", kind.name)
