"""Incremental decoding: any chunking gives the text of decoding at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from bough.tokenizer.incremental import IncrementalDecoder, WindowDecoder
from bough.tokenizer.tokenizer import Tokenizer

shared = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
# SmolLM2's vocabulary lacks the bytes of some control characters and of the lead of U+40000 and on: it drops those.
IN_VOCABULARY = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_categories=["Cc"]) | st.sampled_from(
    "\n\t\r"
)
HARD_TEXTS = [
    "😀👨‍👩‍👧‍👦🇩🇪",
    "e\u0301 A\u030a",
    "مرحبا بالعالم",
    "你好，世界",
    "naïve café",
    "नमस्ते",
    "a<|im_end|>b",
    "\ufffd",
    "𝒳",
]


def chunked(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)), label="cuts"))
    return [ids[a:b] for a, b in pairwise([0, *cuts, len(ids)])]


def stream(decoder: IncrementalDecoder | WindowDecoder, chunks: list[list[int]]) -> str:
    parts = [decoder.push(chunk) for chunk in chunks]
    return "".join(parts) + decoder.flush()


def smollm2_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Random ids (special, partial characters and outside the vocabulary included) between pieces of real text."""
    texts = st.one_of(st.sampled_from(HARD_TEXTS), st.text(max_size=12)).map(tokenizer.encode)
    lone_bytes = st.integers(17, 17 + 255).map(lambda token: [token])  # SmolLM2's byte tokens stand near the front
    noise = st.lists(st.integers(0, 49_200), max_size=4)
    return [token for part in data.draw(st.lists(texts | noise | lone_bytes, max_size=8)) for token in part]


@shared
@given(data=st.data(), skip=st.booleans(), prompt=st.sampled_from([[], [1], [19556, 905]]))
def test_byte_level_text_is_what_the_library_decodes(
    smollm2: Tokenizer, data: st.DataObject, skip: bool, prompt: list[int]
) -> None:
    ids = smollm2_ids(data, smollm2)
    expected = smollm2.backend.decode(ids, skip_special_tokens=skip)
    assert stream(smollm2.decoder(prompt, skip), chunked(data, ids)) == expected
    assert smollm2.decode(ids, skip) == expected


@shared
@given(text=st.text(alphabet=IN_VOCABULARY, max_size=40))
def test_no_push_shows_half_a_character(smollm2: Tokenizer, text: str) -> None:
    decoder = smollm2.decoder([], skip_special_tokens=False)
    shown = ""
    for token in smollm2.encode(text):
        shown += decoder.push([token])
        assert text.startswith(shown)
    assert shown == text  # nothing is held longer than needed either


@shared
@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_text_is_what_follows_the_prompt(spm: Tokenizer, data: st.DataObject, skip: bool) -> None:
    token = st.integers(0, spm.vocab_size + 2)
    prompt = spm.encode(data.draw(st.sampled_from(["", "the", " ", "é"]), label="prompt"))
    ids = data.draw(st.lists(token, max_size=25), label="ids")
    expected = spm.decode(prompt + ids, skip)[len(spm.decode(prompt, skip)) :]
    assert stream(spm.decoder(prompt, skip), chunked(data, ids)) == expected


@shared
@given(text=st.text(max_size=40), skip=st.booleans())
def test_sentencepiece_decodes_valid_text_as_the_library_does(spm: Tokenizer, text: str, skip: bool) -> None:
    ids = spm.encode(text)
    assert spm.decode(ids, skip) == spm.backend.decode(ids, skip_special_tokens=skip)


def test_a_continuation_keeps_its_space_and_a_beginning_does_not(spm: Tokenizer) -> None:
    the = spm.encode("the", add_special_tokens=False)
    assert spm.decoder(spm.encode("hello"), True).push(the) == " the"
    assert spm.decoder([1], True).push(the) == "the"
    assert spm.decoder([1], False).push(the) == " the"  # behind a visible "<s>"


def test_valid_characters_survive_a_stray_byte(spm: Tokenizer) -> None:
    stray = [*spm.encode("x😀", add_special_tokens=False)[1:], 3 + 0xFF, 3 + ord("y")]
    assert spm.decode(stray) == "x😀\ufffdy"


def test_special_tokens_inside_a_character_do_not_break_it(smollm2: Tokenizer) -> None:
    first, *rest = smollm2.encode("😀")
    decoder = smollm2.decoder([], skip_special_tokens=True)
    assert [decoder.push([first]), decoder.push([2]), decoder.push(rest), decoder.flush()] == ["", "", "😀", ""]


def word_tokenizer(decoder: tokenizers.decoders.Decoder, words: list[str]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.decoder = decoder
    backend.add_special_tokens([words[1]])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    "tokenizer",
    [
        word_tokenizer(decoders.Metaspace(), ["▁un", "<s>", "▁a", "b", "▁c▁", "é"]),
        word_tokenizer(decoders.WordPiece(), ["un", "[CLS]", "a", "##b", ".", "'s"]),
        word_tokenizer(decoders.BPEDecoder(), ["un", "<s>", "a</w>", "b", "c</w>", "d"]),
    ],
    ids=["metaspace", "wordpiece", "bpe"],
)
@shared
@given(data=st.data(), skip=st.booleans())
def test_other_decoders_go_through_a_window(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, 7), max_size=30), label="ids")
    prompt = data.draw(st.lists(st.integers(0, 5), max_size=12), label="prompt")
    decode = tokenizer.backend.decode
    expected = decode(prompt + ids, skip_special_tokens=skip)[len(decode(prompt, skip_special_tokens=skip)) :]
    assert stream(tokenizer.decoder(prompt, skip), chunked(data, ids)) == expected


def test_the_window_waits_for_a_character_but_not_for_ever() -> None:
    bytes_of_emoji = [f"<0x{byte:02X}>" for byte in "😀".encode()]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate([*bytes_of_emoji, "a"])}, "a"))
    backend.decoder = decoders.ByteFallback()  # without Fuse: not one of the two known families
    tokenizer = Tokenizer(backend)
    decoder = tokenizer.decoder([4], True)
    assert [decoder.push([i]) for i in range(4)] == ["", "", "", "😀"]
    assert decoder.push([4]) == "a"
    assert "".join(decoder.push([0]) for _ in range(8)) == "\ufffd" * 8
    decoder.push([0])
    assert decoder.flush() == "\ufffd"
