"""Damaged model files: whatever is wrong in one, reading it gives a model, or a `ModelError` that names the file.

The damage is done to every class of byte by itself: those that say what a file is, lengths and counts, kinds of values,
offsets, names, and the values; and to the whole by cuts."""

from __future__ import annotations

import json
import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from bough.core.errors import BoughError, ModelError
from bough.loader.config import read_config
from bough.loader.gguf_config import read_gguf_config
from bough.loader.gguf_file import GgufArray, GgufFile
from bough.loader.locate import locate
from bough.loader.source import SafetensorsSource
from bough.tokenizer.incremental import BYTE_OF_CHAR
from bough.tokenizer.load import load_tokenizer
from tests.conftest import TINY_LLAMA

COUNTS = [pytest.param(200, marks=pytest.mark.slow), pytest.param(3000, marks=pytest.mark.long)]
NUMBERS = [0, 1, 2, 3, 8, 12, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
MOST_BYTES = 64 << 20  # that reading a file of a few KB may hold


def changes(content: bytes, places: range, width: int, count: int) -> Iterator[bytes]:
    """Numbers of that width at these places, single bits, and noise."""
    draw = random.Random(len(content) + places.start)
    for turn in range(count):
        damaged = bytearray(content)
        at = draw.choice(places)
        match turn % 3:
            case 0:
                damaged[at : at + width] = struct.pack("<Q", draw.choice(NUMBERS))[:width]
            case 1:
                damaged[at] ^= 1 << draw.randrange(8)
            case _:
                damaged[at : at + width] = draw.randbytes(width)
        yield bytes(damaged)


def read_or_named(path: Path, read: Callable[[], Any]) -> bool:
    """Whether it was read. Anything but a `ModelError` fails, and so does memory that the file cannot need."""
    tracemalloc.start()
    try:
        read()
        return True
    except ModelError as error:
        assert path.stem in str(error) or str(path.parent) in str(error), f"it does not name the file: {error}"
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES, f"{peak} bytes were held at once"


# GGUF ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 32)):
        writer.add_uint32(f"llama.{name}", value)
    for name, value in (("feed_forward_length", 48), ("attention.head_count", 4), ("attention.head_count_kv", 2)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    words = [chr(0x100 + index) for index in range(63)]
    words.append(words[0] + words[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges([f"{words[0]} {words[1]}"])
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_gguf(path: Path) -> None:
    file = GgufFile.open(path)
    for value in file.metadata.values():
        if isinstance(value, GgufArray):
            value.values()
    for info in file.tensors.values():
        file.raw(info)
    read_gguf_config(path)
    found = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    metadata = {key: value.values() if isinstance(value, GgufArray) else value for key, value in found.items()}
    load_tokenizer(path, metadata=metadata)


def gguf_classes(content: bytes) -> dict[str, tuple[range, int]]:
    """Where each class of bytes lies, and how wide its numbers are."""
    first, tensor = content.index(b"llama.block_count"), content.index(b"token_embd.weight")
    tokens = content.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    return {
        "what it is": (range(8), 4),
        "counts": (range(8, 24, 8), 8),
        "length of a name": (range(first - 8, first - 7), 8),
        "name": (range(first, first + 16), 1),
        "kind of a value": (range(first + 17, first + 18), 4),
        "value": (range(first + 21, first + 22), 4),
        "array": (range(tokens, tokens + 16, 4), 8),
        "length of a word": (range(tokens + 16, tokens + 17), 8),
        "word": (range(tokens + 24, tokens + 60), 1),
        "tensor": (range(tensor - 8, tensor + 17), 8),
        "dimensions": (range(tensor + 17, tensor + 38), 4),
        "kind of a tensor": (range(tensor + 37, tensor + 38), 4),
        "offset": (range(tensor + 41, tensor + 42), 8),
    }


@pytest.mark.parametrize("count", COUNTS)
def test_gguf(gguf_file: Path, count: int) -> None:
    content = gguf_file.read_bytes()
    read_gguf(gguf_file)
    refused = 0
    for places, width in gguf_classes(content).values():
        for damaged in changes(content, places, width, count // 4):
            gguf_file.write_bytes(damaged)
            refused += not read_or_named(gguf_file, lambda: read_gguf(gguf_file))
    for end in range(0, len(content), max(1, len(content) * 4 // count)):
        gguf_file.write_bytes(content[:end])
        assert not read_or_named(gguf_file, lambda: read_gguf(gguf_file)), f"cut at {end} and still read"
    assert refused


# Safetensors --------------------------------------------------------------------------------------------------------


def headers(good: dict[str, Any]) -> Iterator[Any]:
    """Every field of the header with something odd in it."""
    odd: list[Any] = [None, -1, 2**63, 2**64, 1.5, "x", "", [], [[]], {}, [0], [0, 0], [8, 0], [0, 2**62], True]
    for name in good:
        for field in ("dtype", "shape", "data_offsets"):
            for value in odd:
                yield {**good, name: {**good[name], field: value}}
            yield {**good, name: {key: value for key, value in good[name].items() if key != field}}
        for value in odd:
            yield {**good, name: value}
    yield from ({**good, "__metadata__": value} for value in odd)
    yield from odd


@pytest.mark.parametrize("count", COUNTS)
def test_safetensors(tmp_path: Path, count: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, path)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]

    def read() -> None:
        source = SafetensorsSource([path])
        for name in source.names():
            source.read(name)

    def cases() -> Iterator[bytes]:
        for places, width in ((range(1), 8), (range(8, 8 + length), 1), (range(8, 8 + length), 8)):
            yield from changes(content, places, width, count)
        for changed in headers({name: value for name, value in header.items() if name != "__metadata__"}):
            text = json.dumps(changed).encode()
            yield struct.pack("<Q", len(text)) + text + data
        for depth in (100, 100_000):
            text = b'{"a":' + b"[" * depth
            yield struct.pack("<Q", len(text)) + text + data
        for end in range(0, len(content), max(1, len(content) // count)):
            yield content[:end]

    read()
    results = []
    for damaged in cases():
        path.write_bytes(damaged)
        results.append(read_or_named(path, read))
    assert results.count(False) > len(results) // 2


# Tokenizers and configurations, which are JSON ----------------------------------------------------------------------

ODD: Any = [None, True, -1, 10**9, 2**70, 1e308, "", "\x00", "{{", "a" * 10_000, [], {}, [None], {"": None}, [[[]]]]


def odd_places(draw: random.Random, value: Any) -> Any:
    """The same with something odd at one place, however deep."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: odd_places(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        return [*value[:place], odd_places(draw, value[place]), *value[place + 1 :]]
    return draw.choice(ODD)


def json_cases(good: Any, count: int) -> Iterator[bytes]:
    draw = random.Random(count)
    text = json.dumps(good).encode()
    yield from (b"", b"\xff\xfe", b"null", b"[]", b'"x"', b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000)
    for turn in range(count):
        if turn % 3:
            yield json.dumps(odd_places(draw, good)).encode()
        else:
            yield next(changes(text[draw.randrange(9) :], range(len(text) - 9), 1, 1))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_tokenizer_files(tmp_path: Path, name: str, count: int) -> None:
    good = tmp_path / "good"
    good.mkdir()
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(BYTE_OF_CHAR)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(good / "tokenizer.json"))
    (good / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0].content }}"})
    )
    (good / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<s>", "eos_token": {"content": "</s>"}}))
    load_tokenizer(good)
    for number, damaged in enumerate(json_cases(json.loads((good / name).read_text()), count)):
        folder = tmp_path / f"{number}"
        shutil.copytree(good, folder)
        (folder / name).write_bytes(damaged)

        def read(folder: Path = folder) -> None:
            tokenizer = load_tokenizer(folder)
            tokenizer.decode(tokenizer.encode("The é of 12."))

        read_or_named(folder / name, read)
        shutil.rmtree(folder)


@pytest.mark.parametrize("count", COUNTS)
def test_configurations(tmp_path: Path, count: int) -> None:
    for damaged in json_cases({**TINY_LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, count * 3):
        (tmp_path / "config.json").write_bytes(damaged)
        try:
            read_config(locate(str(tmp_path)), {})
        except BoughError as error:
            assert "config.json" in str(error) or str(tmp_path) in str(error), error
