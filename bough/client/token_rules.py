"""vLLM's rules about tokens: `bad_words`, and `allowed_token_ids`. What concerns single tokens is a logit bias.

A bias comes before the penalties, and a repetition penalty divides what it made; so the two rules that raise and divide
logits are not given together.
"""

from collections.abc import Iterable, Sequence

import msgspec

from bough.core.errors import RequestError
from bough.core.sampling_params import INT32_MAX, MAX_BIAS, SamplingParams, require_few
from bough.tokenizer.tokenizer import Tokenizer

# Above the distance of any two logits, so that others get no probability; small enough to keep their fourth decimal.
ALLOWED_BIAS = 1000.0
MAX_BAD_WORDS, MAX_BAD_CHARS = 4096, 65_536  # of a request: with each token the scheduler looks which may be said now


def banned_words(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[set[int], tuple[tuple[int, ...], ...]]:
    """The tokens of the words, at the beginning of a text and behind a space: those that are one token; and of those
    that are several, the ones that could still be said."""
    if words and tokenizer is None:
        raise RequestError("bad_words are text, and this engine has no tokenizer.", field="bad_words")
    require_few(words, "bad_words", MAX_BAD_WORDS)
    if (chars := sum(map(len, words))) > MAX_BAD_CHARS:
        told = f"bad_words has {chars} characters; all its words together may have {MAX_BAD_CHARS}."
        raise RequestError(told, field="bad_words")
    for word in words:
        if not word.strip():
            raise RequestError(f"bad_words: {word!r} is no word; leave it out.", field="bad_words")
    written = [form for word in words for form in (word.lstrip(), f" {word.lstrip()}")]
    encoded = [] if tokenizer is None else tokenizer.encode_batch(written, add_special_tokens=False)
    forms = dict.fromkeys(map(tuple, encoded))
    single = {form[0] for form in forms if len(form) == 1}
    return single, tuple(form for form in forms if single.isdisjoint(form))


def with_rules(sampling: SamplingParams, banned: Iterable[int], allowed: Sequence[int] | None) -> SamplingParams:
    bias = dict(sampling.logit_bias)
    if allowed is not None:
        if not allowed or any(not 0 <= token <= INT32_MAX for token in allowed):
            raise RequestError("allowed_token_ids must be a list of at least one token id.", field="allowed_token_ids")
        if sampling.repetition_penalty != 1.0:
            text = "allowed_token_ids cannot be given together with a repetition_penalty; set that to 1."
            raise RequestError(text, field="allowed_token_ids")
        lift = ALLOWED_BIAS * max(1.0, sampling.temperature)
        for token in allowed:
            bias[token] = bias.get(token, 0.0) + lift
    bias |= dict.fromkeys(banned, -float(MAX_BIAS))
    return msgspec.structs.replace(sampling, logit_bias=bias)
