"""`--log-requests`: a line when a request comes and one when it has ended.

Lines show what a request is made of, never how it was let in: headers and keys are not known here. Texts and ids are
the callers', so they are quoted: none of them can end a line and begin another.
"""

from __future__ import annotations

import logging

import msgspec

from bough.client.outputs import RequestOutput
from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SAMPLING, TEXT_BEGINNINGS, WHOLE_TEXTS = 1, 2, 3  # what each level adds to the sizes and times of level 0
SHOWN = 2048  # characters, or token ids, of a text that is not shown whole


class RequestLog:
    def __init__(self, level: int, tokenizer: Tokenizer | None) -> None:
        self._level = level
        self._tokenizer = tokenizer

    def arrived(self, answer: RequestOutput) -> None:
        prompt = answer.prompt
        parts = [f"{len(prompt.ids)} prompt tokens"]
        if self._level >= SAMPLING:
            parts.append(f"sampling {msgspec.to_builtins(prompt.sampling)}")  # what is not at its default
        if self._level >= TEXT_BEGINNINGS:
            parts.append(f"prompt {self._prompt_text(answer)}")
        log.info("request %r came: %s", prompt.rid, ", ".join(parts))

    def ended(self, answer: RequestOutput) -> None:
        timings = answer.timings
        times = {
            "queue": timings.queue_s,
            "prefill": timings.prefill_s,
            "first token": timings.first_token_s,
            "total": timings.total_s,
        }
        parts = [
            f"{timings.prompt_tokens} prompt tokens ({timings.cached_tokens} cached)",
            f"{timings.output_tokens} output tokens",
            *(f"{name} {seconds * 1000:.1f} ms" for name, seconds in times.items()),
        ]
        if self._level >= TEXT_BEGINNINGS:
            parts.append(f"output {self._output_text(answer)}")
        log.info("request %r ended (%s): %s", answer.prompt.rid, finish_word(answer), ", ".join(parts))

    def _prompt_text(self, answer: RequestOutput) -> str:
        ids = answer.prompt.ids if self._level >= WHOLE_TEXTS else answer.prompt.ids[:SHOWN]
        if self._tokenizer is None:
            return str(ids.tolist())
        return self._quoted(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def _output_text(self, answer: RequestOutput) -> str:
        if self._tokenizer is None:
            return str(answer.ids if self._level >= WHOLE_TEXTS else answer.ids[:SHOWN])
        return self._quoted(answer.text)

    def _quoted(self, text: str) -> str:
        return repr(text if self._level >= WHOLE_TEXTS else text[:SHOWN])


def finish_word(answer: RequestOutput) -> str:
    """How a request ended, in a word or two; what stopped it is part of its text."""
    match answer.finish:
        case None:
            return "left by its client" if answer.error is None else "the engine has ended"
        case FinishStop():
            return "stop"
        case FinishLength():
            return "length"
        case FinishAbort():
            return f"{answer.finish.err_type} {answer.finish.status_code}"
