"""How byte-level BPE vocabularies cut text into words before merging, by the name that GGUF files give it.

A GGUF file holds vocabulary and merges but not the splitting rule: `tokenizer.ggml.pre` only names it, and another
rule gives ids that the model has never seen, without any error. So an unknown name is refused. The patterns are those
that the models' own `tokenizer.json` files carry; this table joins them to llama.cpp's names. Only "default" is
llama.cpp's own: what it falls back to for files from before there were names.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from bough.core.errors import ModelError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words whose capitals stand first, and words that are all capitals: GPT-4o's and Tekken's way of splitting camel case.
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAPITALISED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
ALL_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SYMBOLS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


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
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)
        return pre_tokenizers.Sequence([*steps, byte_level])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


GPT2 = SplitRule(gpt2=True)
SINGLE_DIGITS = SplitRule((r"\p{N}",), gpt2=True)
QWEN2_PATTERN = "|".join([CONTRACTIONS, WORD, r"\p{N}", SYMBOLS, SPACES])
LLAMA3_PATTERN = "|".join([CONTRACTIONS, WORD, r"\p{N}{1,3}", SYMBOLS, SPACES])
LLAMA3 = SplitRule((LLAMA3_PATTERN,), ignore_merges=True, adds_bos=True)
QWEN35_PATTERN = "|".join(
    [CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES]
)
TEKKEN_PATTERN = "|".join([CAPITALISED, ALL_CAPITALS, r"\p{N}", SYMBOLS_AND_SLASH, SPACES])
GPT4O_PATTERN = "|".join(
    [f"{CAPITALISED}{CONTRACTIONS}?", f"{ALL_CAPITALS}{CONTRACTIONS}?", r"\p{N}{1,3}", SYMBOLS_AND_SLASH, SPACES]
)
DEEPSEEK_V3_WORDS = "|".join(
    [
        rf"{ASCII_PUNCTUATION}[A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        SPACES,
    ]
)

SPLIT_RULES: dict[str, SplitRule] = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "mpt": GPT2,
    "olmo": GPT2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": SINGLE_DIGITS,
    "codeshell": SINGLE_DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "dbrx": SplitRule((LLAMA3_PATTERN,)),
    "qwen2": SplitRule((QWEN2_PATTERN,), nfc=True),
    "deepseek-r1-qwen": SplitRule((QWEN2_PATTERN,), nfc=True),
    "qwen35": SplitRule((QWEN35_PATTERN,), nfc=True),
    "stablelm2": SplitRule((QWEN2_PATTERN,)),
    "tekken": SplitRule((TEKKEN_PATTERN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": SplitRule((GPT4O_PATTERN,)),
    "deepseek-coder": SplitRule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": SplitRule((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3_WORDS)),
    "default": SplitRule((r"[\p{P}\$\+<=>\^~\|]+", r"\p{N}+", "[0-9][0-9][0-9]"), gpt2=True),
}


def find_split_rule(name: str) -> SplitRule:
    """The rule of that name; an unknown one is an error that lists the known ones."""
    rule = SPLIT_RULES.get(name)
    if rule is None:
        raise ModelError(
            f"The GGUF file's pre-tokenizer {name!r} is not known, and guessing would give wrong tokens; known are "
            f"{', '.join(sorted(SPLIT_RULES))}. Use a Hugging Face folder with a tokenizer.json instead."
        )
    return rule
