"""What a request may not ask for: values out of OpenAI's ranges, and features that this engine does not have.

Both are tables. A feature that gets built loses its row in `HARMLESS` and is read where prompts and parameters are
made; nothing else has to change. Ranges that SGLang's sampling parameters share are checked there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bough.core.errors import RequestError
from bough.core.sampling_params import INT32_MAX

MAX_STOPS = 128
MAX_CHOICES = 1024

# name, lowest, highest
RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("n", 1, MAX_CHOICES),
    ("best_of", 1, MAX_CHOICES),
    ("top_logprobs", 0, 20),
    ("max_tokens", 0, INT32_MAX),
    ("max_completion_tokens", 0, INT32_MAX),
    ("max_output_tokens", 1, INT32_MAX),
    ("min_tokens", 0, INT32_MAX),
)
MAX_COMPLETION_LOGPROBS = 5  # `logprobs` is a number in the completions API and a yes or no in the chat API

# Fields without their feature, and the values, besides empty ones, that ask for nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "response_format": ({"type": "text"},),
    "tools": (),
    "tool_choice": ("auto", "none"),
    "functions": (),
    "function_call": ("auto", "none"),
    "suffix": (),
    "lora_path": (),
    "session_id": (),
    "session_params": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "return_hidden_states": (),
    "return_cached_tokens_details": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (None,),  # here even an empty object asks for a search
    "moderation": (),
    "prompt": (),
    "conversation": (),
    "context_management": (),
    "truncation": ("disabled",),
}


def check_request(request: msgspec.Struct) -> None:
    """Raises a `RequestError` that names the first field which cannot be served."""
    given = {name: value for name in request.__struct_fields__ if (value := getattr(request, name)) is not None}
    for name, low, high in RANGES:
        value = given.get(name)
        if value is not None and not low <= value <= high:
            raise RequestError(f"{name} must be between {low} and {high}, got {value}.", field=name)
    logprobs = given.get("logprobs")
    if not isinstance(logprobs, bool | None) and not 0 <= logprobs <= MAX_COMPLETION_LOGPROBS:
        raise RequestError(
            f"logprobs must be between 0 and {MAX_COMPLETION_LOGPROBS}, got {logprobs}.", field="logprobs"
        )
    for name in ("stop", "stop_regex", "stop_token_ids"):
        value = given.get(name)
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise RequestError(f"{name} has {len(value)} entries; at most {MAX_STOPS} are taken.", field=name)
    for name in given.keys() & HARMLESS.keys():
        if not _harmless(name, given[name]):
            raise RequestError(f"{name} is not supported by this server; leave it out.", field=name)


def _harmless(name: str, value: Any) -> bool:
    if name == "prompt" and not isinstance(value, dict):  # a completion's prompt, not a stored template of prompts
        return True
    empty = not value and None not in HARMLESS[name]
    return empty or value in HARMLESS[name]
