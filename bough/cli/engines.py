"""What the commands ask of an engine, and the few steps that `generate` and `chat` share.

The engine itself is the offline one of `bough.launch`; commands get it from a factory, which tests replace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

from bough.core.errors import ModelError, SettingsError

Output = dict[str, Any]
Message = dict[str, str]

# Standard error is the same terminal on which the text appears: only what the user must know goes there.
DEFAULTS = {"log_level": "warning"}


class TextEngine(Protocol):
    """The part of `bough.Engine` that commands use."""

    @property
    def tokenizer(self) -> Any: ...  # of `bough.tokenizer`, or None

    @property
    def served_model_name(self) -> str: ...

    def generate(
        self,
        prompt: str | None = None,
        sampling_params: dict[str, Any] | None = None,
        input_ids: list[int] | None = None,
        *,
        stream: bool = False,
    ) -> Any: ...

    def shutdown(self) -> None: ...


MakeEngine = Callable[[dict[str, Any]], TextEngine]


def start_engine(settings: dict[str, Any]) -> TextEngine:
    from bough.launch.engine import Engine

    return Engine(**settings)


@contextlib.contextmanager
def running(make_engine: MakeEngine, settings: dict[str, Any]) -> Iterator[TextEngine]:
    """An engine for as long as the block lasts. One that could not show text is refused before it is started."""
    if settings.get("skip_tokenizer_init"):
        raise SettingsError("This command shows text, so --skip-tokenizer-init cannot be used with it.")
    engine = make_engine(DEFAULTS | settings)
    try:
        yield engine
    finally:
        engine.shutdown()


def chat_tokenizer(engine: TextEngine) -> Any:
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ModelError(
            f"{engine.served_model_name} has no chat template; give one with --chat-template (a Jinja file or text), "
            "or use `bough generate` for plain completion."
        )
    return tokenizer


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    ids: list[int] = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    return ids


def stream_pieces(engine: TextEngine, **inputs: Any) -> Generator[tuple[str, Output], None, None]:
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
