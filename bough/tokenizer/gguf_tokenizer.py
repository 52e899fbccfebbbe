"""A tokenizer built from the metadata of a GGUF file, which holds the vocabulary but no tokenizer program.

Three kinds are served: `gpt2` (byte-level BPE with merges), `llama` and `t5` (SentencePiece with scores: BPE and
Unigram). The file only names the rule that splits text into words (`tokenizer.ggml.pre`, here `split_rules.toml`); an
unknown name is refused, because a wrong rule gives wrong ids.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from bough.core.errors import ModelError
from bough.core.files import table_beside
from bough.tokenizer.incremental import SPACE_MARK


@dataclass(frozen=True, slots=True)
class SplitRule:
    """`patterns` cut one after the other; `gpt2` then applies GPT-2's own pattern, which the library has built in."""

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    nfc: bool = False  # the model's tokenizer composes characters first
    ignore_merges: bool = False  # a word that is in the vocabulary as it stands is taken as it stands
    adds_bos: bool = False  # when the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])


def _split_rules() -> Iterator[tuple[str, SplitRule]]:
    for rule in table_beside(__file__, "split_rules.toml")["rule"]:
        names, patterns = rule.pop("names"), tuple(rule.pop("patterns", ()))
        for name in names:
            own = {flag: value if isinstance(value, bool) else name in value for flag, value in rule.items()}
            yield name, SplitRule(patterns, **own)


SPLIT_RULES = dict(_split_rules())
MOST_CHARACTERS = 4096  # of a token that is cut in two wherever it can be


def find_split_rule(name: str) -> SplitRule:
    rule = SPLIT_RULES.get(name)
    if rule is None:
        raise ModelError(
            f"The GGUF file's pre-tokenizer {name!r} is not known, and guessing would give wrong tokens; known are "
            f"{', '.join(sorted(SPLIT_RULES))}. Use a Hugging Face folder with a tokenizer.json instead."
        )
    return rule


Metadata = Mapping[str, Any]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # the numbers of `tokenizer.ggml.token_type` that matter here


def build_backend(metadata: Metadata) -> tokenizers.Tokenizer:
    """The complete tokenizer: model, splitting, added tokens, and the BOS or EOS that it puts around a text."""
    kind = _required(metadata, "tokenizer.ggml.model")
    tokens: Sequence[str] = _required(metadata, "tokenizer.ggml.tokens")
    match kind:
        case "gpt2":
            rule = find_split_rule(metadata.get("tokenizer.ggml.pre", "default"))
            merges = _merges(_required(metadata, "tokenizer.ggml.merges"))
            backend = byte_level_backend({token: i for i, token in enumerate(tokens)}, merges, rule)
            adds_bos = rule.adds_bos
        case "llama" | "t5" | "gemma4":
            backend, adds_bos = _sentencepiece(metadata, tokens, unigram=kind == "t5"), kind != "t5"
        case _:
            raise ModelError(
                f"The GGUF file has a {kind!r} vocabulary; gpt2, llama, t5 and gemma4 are served. "
                "Use a Hugging Face folder with a tokenizer.json instead."
            )
    _add_tokens(backend, metadata, tokens)
    before = _marker(metadata, tokens, "bos", adds_bos)
    after = _marker(metadata, tokens, "eos", False)
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[token for token, _ in before] + ["$A"] + [token for token, _ in after],
            special_tokens=before + after,
        )
    return backend


def special_token_ids(metadata: Metadata) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    given = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {f"{name}_token": int(token) for name, token in given.items() if token is not None}


def end_ids(metadata: Metadata) -> tuple[int, ...]:
    given = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(int(token) for token in given if token is not None))


def chat_templates(metadata: Metadata) -> dict[str, str]:
    templates = {"default": metadata.get("tokenizer.chat_template")}
    for name in metadata.get("tokenizer.chat_templates", ()):
        templates[name] = metadata.get(f"tokenizer.chat_template.{name}")
    return {name: source for name, source in templates.items() if source}


def _merges(given: Sequence[str]) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in given)]


def byte_level_backend(
    vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], rule: SplitRule
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], *, unigram: bool) -> tokenizers.Tokenizer:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    scores = _required(metadata, "tokenizer.ggml.scores")
    types = _required(metadata, "tokenizer.ggml.token_type")
    if unigram:
        # The library finds every piece in text, SentencePiece only normal ones: the others cost more than any spelling.
        least = min(scores) - 1000.0
        pieces = [(t, s if kind == NORMAL else least) for t, s, kind in zip(tokens, scores, types, strict=True)]
        backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=True))
    else:
        best_first = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
        stated = _merges(metadata.get("tokenizer.ggml.merges", ()))  # by Gemma 4, whose scores mean nothing
        backend = tokenizers.Tokenizer(
            models.BPE(
                {token: i for i, token in enumerate(tokens)},
                stated or find_merges([tokens[i] for i in best_first if types[i] == NORMAL]),
                unk_token=None if unknown is None else tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
    steps: list[normalizers.Normalizer] = []
    text_steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if charsmap := bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", ())):
        steps.append(normalizers.Precompiled(charsmap))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.append(normalizers.Prepend(SPACE_MARK))
        text_steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    backend.decoder = decoders.Sequence(text_steps)
    return backend


def find_merges(best_first: Sequence[str]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, in the order in which SentencePiece and tiktoken merge: these know no
    merges, only which token is better."""
    mergeable = set(best_first)
    if max(map(len, mergeable), default=0) > MOST_CHARACTERS:
        raise ValueError(f"a token has more than {MOST_CHARACTERS} characters")
    return [
        (left, right)
        for token in best_first
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in mergeable and (right := token[cut:]) in mergeable
    ]


def _add_tokens(backend: tokenizers.Tokenizer, metadata: Metadata, tokens: Sequence[str]) -> None:
    """Control tokens become special, user-defined ones are recognised in text and shown in it."""
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])


def _marker(metadata: Metadata, tokens: Sequence[str], name: str, default: bool) -> list[tuple[str, int]]:
    token = metadata.get(f"tokenizer.ggml.{name}_token_id")
    wanted = metadata.get(f"tokenizer.ggml.add_{name}_token", default)
    return [(tokens[token], int(token))] if wanted and token is not None else []


def _required(metadata: Metadata, key: str) -> Any:
    value = metadata.get(key)
    if value is None:
        raise ModelError(f"The GGUF file has no {key}, so text cannot be tokenized; use a complete file.")
    return value
