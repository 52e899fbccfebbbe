"""vLLM's rules about single tokens, as a logit bias: `bad_words`, and `allowed_token_ids`.

A bias comes before the penalties, and a repetition penalty divides what it made; so the two rules that raise and divide
logits are not given together.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bough.core.errors import RequestError
from bough.core.sampling_params import INT32_MAX, MAX_BIAS, SamplingParams
from bough.tokenizer.tokenizer import Tokenizer

# Above the distance of any two logits, so that others get no probability; small enough to keep their fourth decimal.
ALLOWED_BIAS = 1000.0


def banned_tokens(words: Sequence[str], tokenizer: Tokenizer | None) -> list[int]:
    """The tokens that the words are, at the beginning of a text and behind a space."""
    if words and tokenizer is None:
        raise RequestError("bad_words are text, and this engine has no tokenizer.", field="bad_words")
    banned: list[int] = []
    for word in words:
        assert tokenizer is not None
        alone, inside = tokenizer.encode_batch([word.lstrip(), f" {word.lstrip()}"], add_special_tokens=False)
        if len(alone) != 1 or not word.strip():
            raise RequestError(
                f"bad_words: {word!r} is not one token of this model, and only single tokens can be banned.",
                field="bad_words",
            )
        banned += [*alone, *(inside if len(inside) == 1 else ())]
    return banned


def with_rules(sampling: SamplingParams, banned: Sequence[int], allowed: Sequence[int] | None) -> SamplingParams:
    bias = dict(sampling.logit_bias)
    if allowed is not None:
        if not allowed or any(not 0 <= token <= INT32_MAX for token in allowed):
            raise RequestError("allowed_token_ids must be a list of at least one token id.", field="allowed_token_ids")
        if sampling.repetition_penalty != 1.0:
            raise RequestError(
                "allowed_token_ids cannot be given together with a repetition_penalty; set that to 1.",
                field="allowed_token_ids",
            )
        lift = ALLOWED_BIAS * max(1.0, sampling.temperature)
        for token in allowed:
            bias[token] = bias.get(token, 0.0) + lift
    bias |= dict.fromkeys(banned, -float(MAX_BIAS))
    return msgspec.structs.replace(sampling, logit_bias=bias)
