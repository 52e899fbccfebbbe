"""Models in CTranslate2's format, a folder with `model.bin`: its tensors, and its shape as a config.json would say it.

Only Whisper's models are read, with numbers of 16 or 32 bits. Layout of the file, all numbers little-endian: version;
the name of what it is and its revision; then of each tensor its name, shape, type, size and bytes; then aliases. Texts
begin with their length and end with a zero. Torch-free.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bough.core.errors import ModelError
from bough.models.fields import read_json

KIND, NEWEST = "WhisperSpec", 6
TYPES = ("<f4", "<i1", "<i2", "<i4", "<f2")
LAYER = re.compile(r"/layer_(\d+)/")
RENAMED = {"/": ".", "norm.gamma": "norm.weight", "norm.beta": "norm.bias"}
ENGLISH_VOCABULARY = 51_864  # more of them: a model of many languages, whose special tokens stand one further
Tensors = dict[str, npt.NDArray[Any]]


def read_tensors(path: Path) -> Tensors:
    """Mapped, so that what is not looked at is not read. Parts of names are separated by dots, such as
    `decoder.layers.0.ffn.linear_0.weight`."""
    try:
        return _Reader(path).tensors()
    except (struct.error, UnicodeDecodeError, ValueError, IndexError):
        raise ModelError(f"{path} is damaged or cut short, or no model of CTranslate2's; fetch it again.") from None


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._data = np.memmap(path, dtype=np.uint8, mode="c")

    def tensors(self) -> Tensors:
        version, kind = self._number("I"), self._text()
        if kind != KIND or version > NEWEST:
            raise ModelError(f"{self._path} holds {kind!r}, version {version}; of this format only Whisper is read.")
        self._number("I")
        return dict(self._tensor() for _ in range(self._number("I")))

    def _number(self, kind: str) -> int:
        (value,) = struct.unpack_from("<" + kind, self._data.data, self._at)
        self._at += struct.calcsize("<" + kind)
        return int(value)

    def _text(self) -> str:
        length = self._number("H")
        self._at += length
        return self._data[self._at - length : self._at - 1].tobytes().decode()

    def _tensor(self) -> tuple[str, npt.NDArray[Any]]:
        name = LAYER.sub(r"/layers/\1/", self._text())
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        shape = tuple(self._number("I") for _ in range(self._number("B")))
        kind, nbytes = self._number("B"), self._number("I")
        if kind >= len(TYPES) or name.endswith("weight_scale"):
            raise ModelError(f"{self._path} has numbers of 8 bits or bfloat16; convert with --quantization float16.")
        self._at += nbytes
        return name, self._data[self._at - nbytes : self._at].view(TYPES[kind]).reshape(shape)


def config_of(path: Path) -> Mapping[str, Any]:
    """What a config.json of Transformers' says of such a model."""
    tensors, beside = read_tensors(path), read_json(path.with_name("config.json"))
    sides = ("encoder", "decoder")
    layers = {side: {name.split(".")[2] for name in tensors if name.startswith(f"{side}.layers.")} for side in sides}
    vocabulary, width = tensors["decoder.embeddings.weight"].shape
    further = vocabulary > ENGLISH_VOCABULARY
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": width,
        "vocab_size": vocabulary,
        "num_mel_bins": tensors["encoder.conv1.weight"].shape[1],
        "max_source_positions": len(tensors["encoder.position_encodings.encodings"]),
        "max_target_positions": len(tensors["decoder.position_encodings.encodings"]),
        **{f"{side}_layers": len(layers[side]) for side in sides},
        **{f"{side}_attention_heads": int(tensors[f"{side}.num_heads"]) for side in sides},
        **{f"{side}_ffn_dim": len(tensors[f"{side}.layers.0.ffn.linear_0.weight"]) for side in sides},
        "decoder_start_token_id": 50_257 + further,
        "eos_token_id": 50_256 + further,
        "suppress_tokens": beside.get("suppress_ids"),
        "begin_suppress_tokens": beside.get("suppress_ids_begin"),
        "dtype": "float16",
    }
