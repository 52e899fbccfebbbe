"""An engine that answers from a script, for commands that would start a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self
from unittest import mock

from bough.cli.main import main


class WordTokenizer:
    """A word is a token; a conversation is rendered as `<role>text` and ends with `<assistant>`."""

    chat_template = "a word for each role"

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /) -> str:
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages) + " <assistant>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[Any]:
        return text.split()


class FakeEngine:
    """Gives the scripted answers in turn; an exception in an answer's words is raised at that point."""

    served_model_name = "fake"

    def __init__(self, *answers: Sequence[str | BaseException], finish: dict[str, Any] | None = None) -> None:
        self.tokenizer: WordTokenizer | None = WordTokenizer()
        self.settings: dict[str, Any] | None = None
        self.calls: list[dict[str, Any]] = []
        self.streams_closed = 0
        self.closed = False
        self._answers = iter(answers)
        self._finish = finish or {"type": "stop", "matched": 2}

    def make(self, settings: dict[str, Any]) -> FakeEngine:
        """What commands get in the place of an engine (`run_with`)."""
        self.settings = settings
        return self

    def generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        stream: bool = False,
        **more: Any,
    ) -> Any:
        self.calls.append(
            {"prompt": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream, **more}
        )
        if stream:
            return self._stream(next(self._answers))
        count = (sampling_params or {}).get("n", 1)
        outputs = [list(self._stream(next(self._answers)))[-1] for _ in range(count)]
        return outputs if count > 1 else outputs[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def _stream(self, words: Sequence[str | BaseException]) -> Iterator[dict[str, Any]]:
        ids = self.calls[-1]["input_ids"] or [0]
        text = ""
        try:
            for number, word in enumerate(words, start=1):
                if isinstance(word, BaseException):
                    raise word
                text += word
                meta = {
                    "finish_reason": self._finish if number == len(words) else None,
                    "prompt_tokens": len(ids),
                    "completion_tokens": number,
                    "cached_tokens": len(ids) // 2,
                }
                yield {"text": text, "output_ids": list(range(number)), "meta_info": meta}
        finally:
            self.streams_closed += 1


def run_with(make: Callable[[dict[str, Any]], Any], argv: Sequence[str]) -> int:
    """The exit code of a command line whose engine is made of its settings by `make`."""
    with mock.patch("bough.launch.engine.Engine", lambda **settings: make(settings)):
        return main(argv)
