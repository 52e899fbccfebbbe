"""Tokenizers built from GGUF metadata.

SmolLM2's ids below are facts of its vocabulary that other implementations of it give too. `transformers`' own GGUF
conversion agrees on all text but numerals beyond ASCII ("½", "١٢"): it ignores `tokenizer.ggml.pre`, so digits are not
split one by one, and those merge with what stands before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from bough.core.errors import ModelError
from bough.tokenizer.gguf_tokenizer import SPLIT_RULES, build_backend, find_split_rule
from bough.tokenizer.load import load_tokenizer
from bough.tokenizer.tokenizer import Tokenizer

shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# SmolLM2's vocabulary lacks the bytes of some control characters and of the lead of U+40000 and on: it drops those.
IN_VOCABULARY = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_categories=["Cc"]) | st.sampled_from(
    "\n\t\r"
)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("<|im_start|>", [1]),
        ("<|im_end|>\n", [2, 198]),
        ("", []),
    ],
)
def test_smollm2_gives_the_known_ids(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_knows_its_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == (2,)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.chat_template is not None
    assert smollm2.decode([1, 19556, 2]) == "Hello"


@shared
@given(text=st.text(alphabet=IN_VOCABULARY, max_size=80))
def test_smollm2_gives_every_text_back(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("rule", SPLIT_RULES.values(), ids=SPLIT_RULES)
@shared
@given(text=st.text(max_size=60))
def test_splitting_loses_nothing(rule: Any, text: str) -> None:
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole = "".join(word for word, _ in alphabet.pre_tokenize_str(text))
    assert "".join(word for word, _ in rule.pre_tokenizer().pre_tokenize_str(text)) == whole


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "we'll see 1234", ["we", "'ll", "Ġsee", "Ġ1234"]),
        ("smollm", "see 12", ["see", "Ġ", "1", "2"]),
        ("llama-bpe", "WE'LL 1234 a", ["WE", "'LL", "Ġ", "123", "4", "Ġa"]),
        ("qwen2", "x 12\n\ny", ["x", "Ġ", "1", "2", "ĊĊ", "y"]),
        ("tekken", "camelCase HTTPServer/x", ["camel", "Case", "ĠHTTPServer", "/x"]),
        ("kimi-k2", "It's x/\n", ["It's", "Ġx", "/Ċ"]),
        ("kimi-k2", "ab中文 中cD12345", ["ab", "ä¸Ńæĸĩ", "Ġ", "ä¸Ń", "c", "D", "123", "45"]),
        ("gpt-4o", "It's 1234", ["It's", "Ġ", "123", "4"]),
        ("deepseek-v3", "1234.com, x", ["123", "4", ".com", ",", "Ġx"]),
        ("hunyuan-dense", "1234.com", ["123", "4", ".com"]),
        ("glm4", "WE'LL 1234", ["WE", "'LL", "Ġ", "123", "4"]),
        ("seed-coder", "x 12;\n\ny", ["x", "Ġ", "1", "2", ";", "ĊĊ", "y"]),
        ("exaone-moe", "ab cd 12/\n", ["abĠcd", "Ġ", "1", "2", "/Ċ"]),
        ("deepseek-coder", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("default", "a, 1234", ["a", ",", "Ġ", "123", "4"]),
    ],
)
def test_each_rule_cuts_as_its_models_do(name: str, text: str, words: list[str]) -> None:
    assert [word for word, _ in find_split_rule(name).pre_tokenizer().pre_tokenize_str(text)] == words


def test_an_unknown_pre_tokenizer_is_refused_by_name(smollm2_metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"'martian'.*llama-bpe.*smollm"):
        build_backend({**smollm2_metadata, "tokenizer.ggml.pre": "martian"})


def test_an_unknown_kind_of_vocabulary_is_refused(smollm2_metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="'rwkv' vocabulary"):
        build_backend({**smollm2_metadata, "tokenizer.ggml.model": "rwkv"})


def test_a_file_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.ggml\.tokens"):
        build_backend({"tokenizer.ggml.model": "gpt2"})


def test_bos_and_eos_are_added_where_the_file_asks(smollm2_metadata: dict[str, Any]) -> None:
    asked = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_tokenizer(Path("x.gguf"), metadata={**smollm2_metadata, **asked})
    assert tokenizer.encode("Hello") == [1, 19556, 2]
    assert tokenizer.encode("Hello", add_special_tokens=False) == [19556]


def test_every_end_token_counts(smollm2_metadata: dict[str, Any]) -> None:
    more = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    assert load_tokenizer(Path("x.gguf"), metadata={**smollm2_metadata, **more}).eos_ids == (2, 0)


def spelt(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.backend.id_to_token(token) for token in tokenizer.encode(text)]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(spm: Tokenizer) -> None:
    assert spelt(spm, "the") == ["<s>", "▁the"]  # "▁t" + "he", the best scores
    assert spelt(spm, "hello the") == ["<s>", "▁he", "ll", "o", "▁the"]  # "▁hello" cannot be reached: no half of it is
    assert spelt(spm, "é😀") == ["<s>", "▁", "é", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert spelt(spm, "a<tool>t") == ["<s>", "▁", "<0x61>", "<tool>", "▁t"]


def test_sentencepiece_without_space_prefix(spm_metadata: dict[str, Any]) -> None:
    bare = load_tokenizer(Path("x"), metadata={**spm_metadata, "tokenizer.ggml.add_space_prefix": False})
    assert spelt(bare, "the the") == ["<s>", "t", "he", "▁the"]
    assert bare.decode(bare.encode(" the")) == " the"


@shared
@given(text=st.text(alphabet=st.sampled_from("thelowrdé日 😀x\n"), max_size=40))
def test_sentencepiece_gives_every_text_back(spm: Tokenizer, text: str) -> None:
    assert spm.decode(spm.encode(text)) == text


def test_gemma_4_states_its_merges(spm_metadata: dict[str, Any]) -> None:
    """Its scores are those of no merges: what is made of what, and in which order, is said."""
    stated = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": ["▁ t", "l l", "h e"]}
    scores = [0.0] * len(spm_metadata["tokenizer.ggml.tokens"])
    metadata = {**spm_metadata, **stated, "tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": False}
    tokenizer = load_tokenizer(Path("x"), metadata=metadata)
    assert spelt(tokenizer, "the hell the") == ["<s>", "t", "he", "▁", "he", "ll", "▁t", "he"]
