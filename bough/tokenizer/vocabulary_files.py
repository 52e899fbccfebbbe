"""Tokenizers from the files that hold a vocabulary alone: SentencePiece's `tokenizer.model`, tiktoken's ranks (Kimi's
`tiktoken.model`) and Mistral's `tekken.json`.

Each reader takes `tokenizer_config.json` as well and gives it back with what the file says where that is silent. A
damaged file raises whatever it may; the caller names the file.
"""

import json
import struct
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from bough.core.errors import ModelError
from bough.tokenizer import gguf_tokenizer
from bough.tokenizer.gguf_tokenizer import CONTROL, NORMAL, SplitRule
from bough.tokenizer.incremental import BYTE_OF_CHAR

Config = dict[str, Any]
Read = tuple[tokenizers.Tokenizer, Config]

UNKNOWN = 2
MOST_TOKENS = 1 << 22
UNIGRAM, BPE = 1, 2
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
# What a tekken.json that lists no special tokens means (versions up to v7), by id.
TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def read_model(file: Path, config: Config, rule: SplitRule) -> Read:
    """A `.model` file of either kind: SentencePiece's begins with the key of a piece, tiktoken's with base64."""
    data = file.read_bytes()
    return _sentencepiece(file, data, config) if data[:1] == b"\n" else _tiktoken(data, config, rule)


# ---- SentencePiece


def _sentencepiece(file: Path, data: bytes, config: Config) -> Read:
    """The file is a protobuf message, of which a few fields matter. Its types of pieces have the numbers of GGUF's."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(data):
        match field:
            case 1:
                piece = dict(_fields(value))
                score = struct.unpack("<f", piece.get(2, bytes(4)))[0]
                pieces.append((piece.get(1, b"").decode(), score, piece.get(3, NORMAL)))
            case 2:
                trainer = dict(_fields(value))
            case 3:
                normalizer = dict(_fields(value))
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE) or trainer.get(24, False):
        raise ModelError(f"{file} is neither a BPE nor a Unigram model with spaces before words; add a tokenizer.json.")
    tokens, scores, types = map(list, zip(*pieces, strict=True))
    backend = gguf_tokenizer.build_backend(
        {
            "tokenizer.ggml.model": "t5" if kind == UNIGRAM else "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.unknown_token_id": types.index(UNKNOWN) if UNKNOWN in types else None,
            "tokenizer.ggml.precompiled_charsmap": normalizer.get(2, b""),
            "tokenizer.ggml.add_space_prefix": normalizer.get(3, True),
            "tokenizer.ggml.remove_extra_whitespaces": normalizer.get(4, True),
        }
    )
    named = {"bos_token": trainer.get(41, 1), "eos_token": trainer.get(42, 2)}  # a huge number means: none
    special = {name: tokens[i] for name, i in named.items() if i < len(tokens) and types[i] == CONTROL}
    return backend, {"add_bos_token": kind == BPE, **special, **config}


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of the fields of a protobuf message: whole numbers as such, everything else as bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        match key & 7:
            case 0:
                value, at = _varint(message, at)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(message, at)
            case 5:
                size = 4
            case wire_type:
                raise ValueError(f"wire type {wire_type} at byte {at}")
        if at + size > len(message):
            raise ValueError("it ends too early")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number without end before byte {at}")


# ---- tiktoken and Tekken: bytes with ranks


def _tiktoken(data: bytes, config: Config, rule: SplitRule) -> Read:
    """A line for each token: its bytes in base64, and its rank, which is its id. Only the configuration names the
    special tokens."""
    lines = [line.split() for line in data.splitlines() if line]
    ranks = {b64decode(token, validate=True): int(rank) for token, rank in lines}
    named = {entry["content"]: int(i) for i, entry in config.get("added_tokens_decoder", {}).items()}
    shown = {e["content"] for e in config.get("added_tokens_decoder", {}).values() if not e.get("special", False)}
    return _ranked_backend(ranks, 0, named, shown, rule), {"add_bos_token": rule.adds_bos, **config}


def read_tekken(file: Path, config: Config) -> Read:
    """Special tokens have the first ids; the ranks follow, as many as the vocabulary has room for."""
    content = json.loads(file.read_text(encoding="utf-8"))
    settings, listed = content["config"], content.get("special_tokens")
    if listed is None:
        listed = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(TEKKEN_SPECIAL)]
    first: int = settings["default_num_special_tokens"]
    if not 0 <= first <= settings["default_vocab_size"] <= MOST_TOKENS:
        raise ValueError(f"{first} special tokens of {settings['default_vocab_size']}")
    special = {f"<SPECIAL_{i}>": i for i in range(len(listed), first)}
    special |= {entry["token_str"]: entry["rank"] for entry in listed}
    shown = {entry["token_str"] for entry in listed if not entry["is_control"]}
    entries = content["vocab"][: settings["default_vocab_size"] - first]
    ranks = {b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    backend = _ranked_backend(ranks, first, special, shown, SplitRule((settings["pattern"],), ignore_merges=True))
    return backend, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config}


def _ranked_backend(
    ranks: Mapping[bytes, int], first: int, special: Mapping[str, int], shown: Collection[str], rule: SplitRule
) -> tokenizers.Tokenizer:
    """Byte-level BPE in which the token of the lowest rank is made first; ids are the ranks from `first` on. `special`
    tokens have their ids, those that are `shown` are part of the text."""
    spelt = {token.decode("latin-1").translate(CHAR_OF_BYTE): rank for token, rank in ranks.items()}
    merges = gguf_tokenizer.find_merges(sorted(spelt, key=spelt.__getitem__))
    vocabulary = {**{token: first + rank for token, rank in spelt.items()}, **special}
    backend = gguf_tokenizer.byte_level_backend(vocabulary, merges, rule)
    backend.add_tokens([AddedToken(token, normalized=False) for token in special if token in shown])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special if token not in shown])
    return backend
