"""Tokenizers from vocabularies alone, compared with the libraries that the files are made for: `sentencepiece`,
`tiktoken`, and `mistral_common` where it is installed."""

from __future__ import annotations

import json
import random
import struct
import unicodedata
from base64 import b64encode
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from bough.core.errors import ModelError, RequestError
from bough.tokenizer import vocabulary_files
from bough.tokenizer.gguf_tokenizer import find_split_rule
from bough.tokenizer.incremental import BYTE_OF_CHAR
from bough.tokenizer.load import load_tokenizer
from bough.tokenizer.tokenizer import Tokenizer

(KIMI_PATTERN,), (LLAMA3_PATTERN,), (TEKKEN_PATTERN,) = (
    find_split_rule(name).patterns for name in ("kimi-k2", "llama3", "tekken")
)
CORPUS = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
# But "▁", which means a space, and marks on letters: where a vocabulary replaces a letter, `tokenizers` drops its mark.
ANYWHERE = [
    code
    for code in (*range(1, 0x2581), *range(0x2582, 0xD800), *range(0x1F300, 0x1F700))
    if not unicodedata.category(chr(code)).startswith("M")
]
ALPHABETS = ["ab", "ab ", "=-_ ", "aA1 'sLL", "日本語中文 a", "éàüß \n\t", "😀\u200d❤️ x", "()[]{}<>/\\\n ", "0x<>A"]


def texts(count: int) -> Iterator[str]:
    """Repetitive ones, prose, and characters from anywhere."""
    rng = random.Random(7)
    for _ in range(count):
        yield "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 40)))
        start = rng.randrange(len(CORPUS))
        yield CORPUS[start : start + rng.randint(1, 200)]
        yield "".join(map(chr, rng.choices(ANYWHERE, k=20)))


def assert_the_same(tokenizer: Tokenizer, encode: Callable[[str], list[int]], *, any_order: bool = False) -> None:
    for text in texts(300):
        ids, truth = tokenizer.encode(text, add_special_tokens=False), encode(text)
        assert ids == truth or (any_order and sorted(ids) == sorted(truth)), repr(text)


def assert_text_comes_back(tokenizer: Tokenizer) -> None:
    """Whole, and token by token."""
    for text in texts(100):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        decoder = tokenizer.decoder((), skip_special_tokens=True)
        assert "".join(decoder.push([token]) for token in ids) + decoder.flush() == text


# ---- SentencePiece


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protobuf message."""
    match value:
        case int():
            return varint(number << 3) + varint(value)
        case float():
            return varint(number << 3 | 5) + struct.pack("<f", value)
        case bytes():
            return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    return bytes([value & 0x7F | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([value])


@pytest.fixture
def model(tmp_path: Path, spm_metadata: dict[str, Any]) -> Path:
    """The pieces of `spm` as a BPE model that takes texts as they are."""
    keys = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
    pieces = b"".join(
        field(1, field(1, token.encode()) + field(2, score) + field(3, kind))
        for token, score, kind in zip(*(spm_metadata[key] for key in keys), strict=True)
    )
    trainer = field(3, 2) + field(16, 0.5) + field(35, 1) + field(43, 2**64 - 1)
    (tmp_path / "tokenizer.model").write_bytes(pieces + field(2, trainer) + field(3, field(4, 0)))
    return tmp_path


def test_a_model_gives_the_ids_of_the_same_pieces_in_a_gguf(model: Path, spm: Tokenizer) -> None:
    tokenizer = load_tokenizer(model)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, (2,), {1, 2})
    for text in texts(100):
        assert tokenizer.encode(text) == spm.encode(text)
    assert_text_comes_back(tokenizer)


def test_the_configuration_beside_a_model_counts(model: Path) -> None:
    config: dict[str, Any] = {"add_bos_token": False, "eos_token": "<end>"}
    first_free = load_tokenizer(model).vocab_size
    (model / "special_tokens_map.json").write_text('{"bos_token": "</s>", "eos_token": "</s>"}')
    config["added_tokens_decoder"] = {str(first_free): {"content": "<end>", "special": True}}
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ bos_token }}x"}))
    tokenizer = load_tokenizer(model)
    assert tokenizer.encode("the<end>") == [261, first_free]
    assert tokenizer.eos_ids == (first_free,)
    assert tokenizer.apply_chat_template([]) == "</s>x"


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"\n\x05\x0f" + data[3:], lambda data: data + b"\x80", lambda data: b"x y z"],
    ids=["cut", "wire type", "number", "no ranks"],
)
def test_a_damaged_model_is_named(model: Path, damage: Callable[[bytes], bytes]) -> None:
    file = model / "tokenizer.model"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"tokenizer\.model is damaged or of an unknown form"):
        load_tokenizer(model)


def test_numbers_and_tokens_have_an_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a number without end"):
        list(vocabulary_files._fields(b"\xff" * 1000))
    write_tiktoken(tmp_path, {b"a": 0, b"a" * 5000: 1})
    with pytest.raises(ModelError, match="more than 4096 characters"):
        load_tokenizer(tmp_path)


def test_a_model_of_words_is_refused(model: Path) -> None:
    file = model / "tokenizer.model"
    file.write_bytes(file.read_bytes() + field(2, field(3, 3)))
    with pytest.raises(ModelError, match=r"neither a BPE nor a Unigram"):
        load_tokenizer(model)


PLAIN = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        {**PLAIN, "add_dummy_prefix": False},
        {**PLAIN, "add_dummy_prefix": False, "user_defined_symbols": ["\n\n", "<table>"]},
        {"byte_fallback": True},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "character_coverage": 0.99},
    ],
    ids=["llama", "no prefix", "gemma", "compatible characters and fewer spaces", "unknown characters"],
)
def test_a_trained_model_gives_its_own_ids(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "corpus.txt").write_text(CORPUS)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "tokenizer"), model_type=kind,
        vocab_size=1000, minloglevel=2, hard_vocab_limit=False, **options,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path)
    truth = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    # In "────────", ─── + ───── and ───── + ─── are equally likely, and rounding decides.
    assert_the_same(tokenizer, truth.encode, any_order=kind == "unigram")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert (tokenizer.encode("a")[0] == 1) == (kind == "bpe")
    if "remove_extra_whitespaces" in options and "byte_fallback" in options:
        assert_text_comes_back(tokenizer)


# ---- tiktoken and Tekken


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A byte-level vocabulary of the corpus; its first ranks are the bytes, which Mistral's library demands."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learner.train_from_iterator([CORPUS], trainer)
    best_first = sorted(learner.get_vocab().items(), key=lambda entry: entry[1])
    learnt = [bytes(BYTE_OF_CHAR[char] for char in token) for token, _ in best_first if len(token) > 1]
    return {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *learnt])}


def slow_encode(ranks: dict[bytes, int], pattern: str, text: str) -> list[int]:
    """What a vocabulary of ranks means: in each word, the two neighbours that make the token of the lowest rank are
    joined, the first two of several, until no two make a token."""
    regex = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    ids = []
    for word, _ in regex.pre_tokenize_str(text):
        data = word.encode()
        parts = [data] if data in ranks else [data[i : i + 1] for i in range(len(data))]
        while joins := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            _, i = min(joins)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def write_tiktoken(folder: Path, ranks: dict[bytes, int], name: str = "tiktoken.model", **config: Any) -> None:
    lines = [b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_tekken(folder: Path, ranks: dict[bytes, int], special: Any, **config: Any) -> None:
    vocab = [{"rank": i, "token_bytes": b64encode(token).decode(), "token_str": None} for token, i in ranks.items()]
    settings = {"pattern": TEKKEN_PATTERN, "default_vocab_size": len(ranks) + 90, "default_num_special_tokens": 100}
    content = {"config": settings | config, "vocab": vocab, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(content))


KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
}


def kimi_tokens(ranks: dict[bytes, int]) -> dict[str, Any]:
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 11: "<|tool_call_begin|>"}
    return {str(len(ranks) + i): {"content": name, "special": i < 10} for i, name in names.items()}


RANKED = pytest.mark.parametrize(
    ("name", "config", "pattern"),
    [
        ("tiktoken.model", KIMI, KIMI_PATTERN),
        ("tiktoken.model", {}, LLAMA3_PATTERN),
        ("tokenizer.model", {}, LLAMA3_PATTERN),
    ],
    ids=["kimi", "llama 3", "llama 3, its own name"],
)


@RANKED
def test_ranks_say_what_is_merged_first(
    tmp_path: Path, ranks: dict[bytes, int], name: str, config: dict[str, Any], pattern: str
) -> None:
    write_tiktoken(tmp_path, ranks, name, **config)
    tokenizer = load_tokenizer(tmp_path)
    for text in texts(30):
        assert tokenizer.encode(text, add_special_tokens=False) == slow_encode(ranks, pattern, text)
    assert_text_comes_back(tokenizer)


@RANKED
def test_ranks_give_the_ids_of_tiktoken(
    tmp_path: Path, ranks: dict[bytes, int], name: str, config: dict[str, Any], pattern: str
) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    write_tiktoken(tmp_path, ranks, name, **config)
    truth = tiktoken.Encoding("ranks", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert_the_same(load_tokenizer(tmp_path), truth.encode_ordinary)


def test_kimi_has_its_special_tokens_where_its_configuration_says(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    write_tiktoken(tmp_path, ranks, **KIMI, added_tokens_decoder=kimi_tokens(ranks))
    tokenizer = load_tokenizer(tmp_path)
    n = len(ranks)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (n, (n + 1,), n + 12)
    ids = tokenizer.encode("[BOS]a<|tool_call_begin|>b<|im_end|>")
    assert ids == [n, ranks[b"a"], n + 11, ranks[b"b"], n + 2]
    assert tokenizer.decode(ids) == "a<|tool_call_begin|>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[BOS]a<|tool_call_begin|>b<|im_end|>"
    assert tokenizer.decode([n + 5]) == ""


def test_the_model_type_tells_kimi_too(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    write_tiktoken(tmp_path, ranks, auto_map=KIMI["auto_map"])
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    han_and_latin = "中文abc"
    assert load_tokenizer(tmp_path).encode(han_and_latin) == slow_encode(ranks, KIMI_PATTERN, han_and_latin)


def test_ranks_with_other_code_beside_them_are_not_guessed(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    write_tiktoken(tmp_path, ranks, auto_map={"AutoTokenizer": ["own.Own", None]})
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_tokenizer(tmp_path)


def test_tekken_puts_special_tokens_first(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    special = [("<unk>", True), ("<s>", True), ("</s>", True), ("[THINK]", False)]
    write_tekken(tmp_path, ranks, [{"rank": i, "token_str": s, "is_control": c} for i, (s, c) in enumerate(special)])
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), len(ranks) + 90)
    assert tokenizer.encode("a[THINK]<SPECIAL_99></s>") == [1, 100 + ranks[b"a"], 3, 99, 2]
    assert tokenizer.decode([1, 100 + ranks[b"a"], 3, 99, 2]) == "a[THINK]"
    left_out = {token: rank for token, rank in ranks.items() if rank < len(ranks) - 10}
    for text in texts(30):
        ids = [100 + token for token in slow_encode(left_out, TEKKEN_PATTERN, text)]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert_text_comes_back(tokenizer)


def test_tekken_without_a_list_of_special_tokens_has_the_first_ones(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    write_tekken(tmp_path, ranks, None)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("[INST]a[/INST][TOOL_CALLS]")[1:] == [3, 100 + ranks[b"a"], 4, 9]
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]")
    assert load_tokenizer(tmp_path).apply_chat_template([]) == "<s>[INST]"


def test_without_a_template_tekken_needs_mistrals_library(
    tmp_path: Path, ranks: dict[bytes, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tekken(tmp_path, ranks, None)
    monkeypatch.setattr("bough.tokenizer.load.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"--chat-template .*bough\[mistral\]"):
        load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}])


SAID = {"role": "user", "content": "What is <b>é</b>?"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def test_mistrals_library_writes_prompts_where_no_template_is(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    requests = pytest.importorskip("mistral_common.protocol.instruct.request")
    write_tekken(tmp_path, ranks, None, version="v3")
    tokenizer = load_tokenizer(tmp_path)
    library = mistral.MistralTokenizer.from_file(tmp_path / "tekken.json")
    answered = [SAID, {"role": "assistant", "content": "A"}]
    for messages, tools, goes_on in [
        ([{"role": "system", "content": "Be brief."}, SAID], None, False),
        ([*answered, SAID], TOOLS, False),
        (answered, None, True),
    ]:
        options = {"tools": tools, "continue_final_message": goes_on}
        request = requests.ChatCompletionRequest.from_openai(messages, **options)
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=not goes_on, **options)
        assert prompt.startswith("<s>")
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert ids == library.encode_chat_completion(request).tokens
    for wrong in ([], [{"role": "user"}], [{"role": "nobody", "content": "x"}], answered):
        with pytest.raises(RequestError, match="mistral-common refused the messages"):
            tokenizer.apply_chat_template(wrong)
    with pytest.raises(RequestError, match="no place for image"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])


BAD_PATTERN = (
    '{"config": {"pattern": "(", "default_vocab_size": 30, "default_num_special_tokens": 30}, "vocab": [],'
    ' "special_tokens": []}'
)


ENDLESS = BAD_PATTERN.replace("30", str(10**9)).replace('"("', '"."')


@pytest.mark.parametrize("content", ["{", "[]", '{"config": {}}', '{"config": 1}', BAD_PATTERN, ENDLESS])
def test_a_damaged_tekken_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(ModelError, match=r"tekken\.json is damaged or of an unknown form"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_mistrals_own_vocabularies_give_its_ids(tmp_path: Path, name: str) -> None:
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    file = Path(tekken.__file__).parents[2] / "data" / name
    (tmp_path / "tekken.json").symlink_to(file)
    truth = tekken.Tekkenizer.from_file(file)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == truth.n_words
    assert tokenizer.special_ids == truth.special_ids
    assert_the_same(tokenizer, lambda text: truth.encode(text, bos=False, eos=False))
    assert_text_comes_back(tokenizer)


def test_a_template_of_tokens_that_names_an_unknown_one_is_the_files_fault(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    content = json.loads(backend.to_str())
    content["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="has a value that cannot be used"):
        load_tokenizer(tmp_path)
