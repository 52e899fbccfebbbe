"""What OpenAI's requests may not ask for: the features that this engine does not have, and values out of range."""

from __future__ import annotations

import msgspec

from bough.server.limits import Harmless, check_ranges, check_stops, refuse_unbuilt
from bough.server.openai.schema import ResponsesRequest

UNBUILT: Harmless = {
    "functions": (),
    "function_call": ("auto", "none"),
    "suffix": (),
    "lora_path": (),
    "session_id": (),
    "session_params": (),
    "return_hidden_states": (),
    "return_cached_tokens_details": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (None,),
    "moderation": (),
    "conversation": (),
    "context_management": (),
    "truncation": ("disabled",),
}
UNBUILT_IN_RESPONSES: Harmless = {
    **UNBUILT,
    "prompt": (),  # a stored template of prompts; elsewhere the prompt itself
    "input_ids": (),
    "n": (1, None),
    "resume": (),
}


def check_request(request: msgspec.Struct) -> None:
    """Raises a `RequestError` that names the first field which cannot be served."""
    check_ranges(request)
    for name in ("stop", "stop_regex", "stop_token_ids"):
        check_stops(getattr(request, name), name)
    refuse_unbuilt(request, UNBUILT_IN_RESPONSES if isinstance(request, ResponsesRequest) else UNBUILT)
