"""Why a request ended. Exactly one of these reaches every caller; the JSON form is SGLang's `finish_reason`."""

from __future__ import annotations

from typing import Any

import msgspec


class FinishStop(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    """A stop token (its id), a stop string or a stop regex (the text that matched) was generated."""

    matched: int | str | None = None


class FinishLength(msgspec.Struct, frozen=True, tag_field="type", tag="length"):
    """The limit on new tokens, or the end of the context, was reached."""

    length: int


class FinishAbort(msgspec.Struct, frozen=True, tag_field="type", tag="abort"):
    """The request was refused, cancelled or failed. `status_code` is what an HTTP edge answers with."""

    message: str
    status_code: int = 400
    err_type: str = "BadRequestError"


FinishReason = FinishStop | FinishLength | FinishAbort


def finish_to_dict(reason: FinishReason) -> dict[str, Any]:
    """The reason as the JSON object that clients see."""
    built: dict[str, Any] = msgspec.to_builtins(reason)
    return built
