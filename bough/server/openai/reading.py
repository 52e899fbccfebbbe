"""From OpenAI's fields to the engine's: sampling parameters, options, and what the answer is to show.

`OPENAI_NAMES` are the fields that the engine knows by other names.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from bough.server.errors import set_field_names
from bough.server.grammars import grammar_names, grammar_of
from bough.server.openai.schema import EngineFields, SamplingFields, StreamOptions
from bough.server.resuming import Resume

OPENAI_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs_num": "top_logprobs",
    "input_ids": "prompt",
}
SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "custom_params",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What is the same in an answer and in all chunks of it."""

    id: str
    created: int
    model: str

    @classmethod
    def make(cls, prefix: str, rid: str | None, model: str, resume: Resume | None = None) -> Identity:
        """The client's own id where it gave one; the engine knows the request by the same. A resumed answer keeps what
        its first chunks said."""
        given = resume or Resume(output_ids=[])
        created = int(time.time()) if given.created is None else given.created
        return cls(given.id or rid or f"{prefix}{uuid.uuid4().hex}", created, model)


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows besides its text, as its request asked."""

    logprobs: int | None = None  # how many of the likeliest tokens beside the one taken; None: no logprobs
    token_ids: bool = False
    meta_info: bool = False
    timings: bool = False
    usage_at_end: bool = False  # of a stream
    usage_throughout: bool = False
    samples: int = 1  # answers per prompt

    @classmethod
    def of(
        cls, request: EngineFields, stream: StreamOptions | None, *, logprobs: int | None, samples: int = 1
    ) -> Shown:
        return cls(
            logprobs=logprobs,
            token_ids=bool(request.return_token_ids),
            meta_info=bool(request.return_meta_info),
            timings=bool(request.return_timings),
            usage_at_end=stream is not None and bool(stream.include_usage),
            usage_throughout=stream is not None and bool(stream.continuous_usage_stats),
            samples=samples,
        )


def sampling_of(request: SamplingFields, *, max_new_tokens: int, samples: int = 1) -> dict[str, Any]:
    """SGLang's sampling parameters; what was not given stays None and takes the model's default."""
    return {
        **{name: getattr(request, name) for name in SAME_NAMES},
        **grammar_of(request),
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": request.min_tokens,
        "sampling_seed": request.seed,
        "n": samples,
    }


def options_of(request: EngineFields, identity: Identity) -> dict[str, Any]:
    """The reader's options that all three APIs share."""
    return {
        "rid": identity.id,
        "priority": request.priority,
        "extra_key": request.extra_key,
        "cache_salt": request.cache_salt,
        "custom_logit_processor": request.custom_logit_processor,
    }


def use_openai_names(request: SamplingFields, **names: str) -> None:
    """Errors and warnings name OpenAI's fields from here on; `names` are particular to one API."""
    set_field_names({**OPENAI_NAMES, **grammar_names(request), **names})
