"""Why a request ended. Exactly one of these reaches every caller; the JSON form is SGLang's `finish_reason`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from bough.core.errors import RequestError


class FinishStop(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="stop"):
    """A stop token (its id), a stop string, or what a stop regex (the pattern) describes was generated."""

    kind: ClassVar[Literal["stop"]] = "stop"
    matched: int | str | None
    matched_text: str | None = None  # what a stop regex has matched


class FinishLength(msgspec.Struct, frozen=True, tag_field="type", tag="length"):
    """The limit on new tokens, or the end of the context, was reached."""

    kind: ClassVar[Literal["length"]] = "length"
    length: int


class FinishAbort(msgspec.Struct, frozen=True, tag_field="type", tag="abort"):
    """The request was refused, cancelled or failed. `status_code` is what an HTTP edge answers with."""

    kind: ClassVar[Literal["abort"]] = "abort"
    message: str
    status_code: int = 400
    err_type: str = "BadRequestError"
    field: str | None = None  # the input that must change, where one is to blame
    code: str | None = None  # OpenAI's word for it, where clients look for that

    @classmethod
    def because(cls, error: RequestError) -> FinishAbort:
        return cls(error.message, error.status_code, error.err_type, error.field, error.code)

    def to_error(self) -> RequestError:
        return RequestError(
            self.message, field=self.field, status_code=self.status_code, err_type=self.err_type, code=self.code
        )


FinishReason = FinishStop | FinishLength | FinishAbort


def finish_to_dict(reason: FinishReason) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(reason)
    for name in ("field", "code"):  # SGLang's objects have none; a lone request's error has both
        built.pop(name, None)
    return built
