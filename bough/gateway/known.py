"""The few things that the gateway reads in an answer: its id, and how much of the prompt the worker found cached."""

from __future__ import annotations

from typing import Any

import msgspec

from bough.gateway.excerpt import LARGE


class Known(msgspec.Struct):
    """Of a whole answer or of one event; everything else in it is skipped."""

    id: Any = None
    created: Any = None
    usage: Any = None
    meta_info: Any = None
    message: Any = None  # Anthropic's first event
    response: Any = None  # the events of /v1/responses
    error: Any = None

    @property
    def name(self) -> str | None:
        """The answer's id, wherever its protocol puts it."""
        candidates = (self.id, *(_get(place, "id") for place in (self.message, self.response, self.meta_info)))
        return next((name for name in candidates if isinstance(name, str)), None)

    def prompt_tokens(self) -> tuple[int, int] | None:
        """(tokens of the prompt, those found in the cache), if the worker tells both."""
        for usage in (self.usage, self.meta_info, _get(self.message, "usage")):
            if not isinstance(usage, dict):
                continue
            if "input_tokens" in usage and "cache_read_input_tokens" in usage:
                cached = _count(usage["cache_read_input_tokens"])
                return _count(usage["input_tokens"]) + cached, cached
            cached = _get(usage.get("prompt_tokens_details"), "cached_tokens", usage.get("cached_tokens"))
            if isinstance(cached, int) and usage.get("prompt_tokens"):
                return _count(usage["prompt_tokens"]), cached
        return None


_DECODER = msgspec.json.Decoder(Known)


def read_known(body: bytes) -> Known | None:
    """None where the body is no JSON object, nor a list of such (a native batch). A large one is believed and not read:
    that would hold up everybody else."""
    if len(body) > LARGE:
        begins, ends = body[:64].lstrip().startswith((b"{", b"[")), body[-64:].rstrip().endswith((b"}", b"]"))
        return Known() if begins and ends else None
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError:
        return _read_list(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _read_list(body: bytes) -> Known | None:
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return Known() if isinstance(content, list) else None


def _get(place: Any, name: str, otherwise: Any = None) -> Any:
    return place.get(name, otherwise) if isinstance(place, dict) else otherwise


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
