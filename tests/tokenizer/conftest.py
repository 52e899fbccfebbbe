"""The default model's tokenizer, from its real GGUF file, and a small SentencePiece-like one with every byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bough.loader import catalogue
from bough.loader.gguf_file import GgufArray, GgufFile
from bough.tokenizer.load import load_tokenizer
from bough.tokenizer.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@pytest.fixture(scope="session")
def smollm2_metadata() -> dict[str, Any]:
    file = GgufFile.open(catalogue.pull(catalogue.DEFAULT, progress=False))
    return {
        key: value.values() if isinstance(value, GgufArray) else value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.")
    }


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(Path("smollm2.gguf"), metadata=smollm2_metadata)


@pytest.fixture(scope="session")
def spm_metadata() -> dict[str, Any]:
    """Llama 2's layout: control tokens, all bytes, then pieces with falling scores."""
    pieces = ["▁t", "he", "▁the", "ll", "▁he", "▁hello", "▁", *"thelowrdé日"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<tool>", "<0xZZ>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED, NORMAL]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0, -1e6]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def spm(spm_metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(Path("spm.gguf"), metadata=spm_metadata)
