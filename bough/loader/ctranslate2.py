"""Models in CTranslate2's format, a folder with `model.bin`, as Transformers would have them: tensors and config.json.

Only Whisper's models are read, with numbers of 16 or 32 bits. Layout of the file, all numbers little-endian: version;
the name of what it is and its revision; then of each tensor its name, shape, type, size and bytes; then aliases. Texts
begin with their length and end with a zero. Torch-free.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bough.core.errors import ModelError
from bough.core.files import table_beside
from bough.models.fields import read_json

KIND, NEWEST = "WhisperSpec", 6
TYPES = ("<f4", "<i1", "<i2", "<i4", "<f2")
NAME = re.compile(r"^(\w+(?:/layer_\d+)?)/(?:(.*)/)?(\w+)$")  # where, which part, what of it
NAMES = table_beside(__file__, "ctranslate2.toml")
ENGLISH_VOCABULARY = 51_864  # more of them: a model of many languages, whose special tokens stand one further


def read_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """By Transformers' names. Mapped, so that what is not looked at is not read."""
    try:
        return dict(_tensors(path, np.memmap(path, dtype=np.uint8, mode="c")))
    except (struct.error, UnicodeDecodeError, ValueError, IndexError):
        raise ModelError(f"{path} is damaged or cut short, or no model of CTranslate2's; fetch it again.") from None


def _tensors(path: Path, data: npt.NDArray[np.uint8]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    at = 0

    def take(length: int) -> npt.NDArray[np.uint8]:
        nonlocal at
        at += length
        return data[at - length : at]

    def number(kind: str) -> int:
        return int(struct.unpack("<" + kind, take(struct.calcsize(kind)).tobytes())[0])

    def text() -> str:
        return take(number("H"))[:-1].tobytes().decode()

    version, kind, _, count = number("I"), text(), number("I"), number("I")
    if kind != KIND or version > NEWEST:
        raise ModelError(f"{path} holds {kind!r}, version {version}; of this format only Whisper is read.")
    for _ in range(count):
        name, shape = text(), tuple(number("I") for _ in range(number("B")))
        dtype, nbytes = number("B"), number("I")
        if dtype >= len(TYPES) or name.endswith("weight_scale"):
            raise ModelError(f"{path} has numbers of 8 bits or bfloat16; convert with --quantization float16.")
        tensor = take(nbytes).view(TYPES[dtype]).reshape(shape)
        place, module, own = NAME.findall(name)[0]
        modules = NAMES["modules"].get(module, module).split(" ")
        for found, rows in zip(modules, np.split(tensor, len(modules)) if shape else [tensor], strict=True):
            parts = "model", place.replace("/layer_", ".layers."), found, NAMES["kinds"].get(own, own)
            yield ".".join(filter(None, parts)), rows


def config_of(path: Path) -> Mapping[str, Any]:
    """What a config.json of Transformers' says of such a model."""
    tensors, beside = read_tensors(path), read_json(path.with_name("config.json"))
    vocabulary, width = tensors["model.decoder.embed_tokens.weight"].shape
    found: dict[str, Any] = {}
    for side, positions in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
        found |= {
            positions: len(tensors[f"model.{side}.embed_positions.weight"]),
            f"{side}_layers": sum(name.startswith(f"model.{side}.layers.") and "fc1.bias" in name for name in tensors),
            f"{side}_attention_heads": int(tensors[f"model.{side}.num_heads"]),
            f"{side}_ffn_dim": len(tensors[f"model.{side}.layers.0.fc1.weight"]),
        }
    further = vocabulary > ENGLISH_VOCABULARY
    return found | {
        "architectures": ["WhisperForConditionalGeneration"], "d_model": width, "vocab_size": vocabulary,
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1], "dtype": "float16",
        "decoder_start_token_id": 50_257 + further, "eos_token_id": 50_256 + further,
        "suppress_tokens": beside.get("suppress_ids"), "begin_suppress_tokens": beside.get("suppress_ids_begin"),
        "alignment_heads": beside.get("alignment_heads"),
    }  # fmt: skip
