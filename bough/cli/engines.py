"""The few steps that `generate` and `chat` share."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bough.core.errors import ModelError, SettingsError

if TYPE_CHECKING:
    from bough.launch.engine import Engine
    from bough.tokenizer.tokenizer import Tokenizer

Output = dict[str, Any]
Message = dict[str, Any]

# Standard error is the same terminal on which the text appears: only what the user must know goes there.
DEFAULTS = {"log_level": "warning"}


@contextlib.contextmanager
def running(settings: dict[str, Any]) -> Iterator[Engine]:
    """An engine for as long as the block lasts. One that could not show text is refused before it is started."""
    if settings.get("skip_tokenizer_init"):
        raise SettingsError("This command shows text, so --skip-tokenizer-init cannot be used with it.")
    from bough.launch.engine import Engine

    with Engine(**DEFAULTS | settings) as engine:
        yield engine


def chat_tokenizer(engine: Engine) -> Tokenizer:
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        advice = "give one with --chat-template (a Jinja file or text), or use `bough generate` for plain completion"
        raise ModelError(f"{engine.served_model_name} has no chat template; {advice}.")
    return tokenizer


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def stream_pieces(engine: Engine, **inputs: Any) -> Generator[tuple[str, Output], None, None]:
    """(new text, whole output so far) as tokens come; closing it aborts the request."""
    shown = 0
    with contextlib.closing(engine.generate(**inputs, stream=True)) as outputs:
        for output in outputs:
            yield output["text"][shown:], output
            shown = len(output["text"])


def abort_reason(output: Output) -> str | None:
    """Why the engine gave up on a request after it had begun; None for an ordinary end."""
    finish = output["meta_info"]["finish_reason"] or {}
    return str(finish["message"]) if finish.get("type") == "abort" else None
