"""What answers of chats and completions have in common, whole and streamed: their envelope, usage and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from bough.client.outputs import Piece, RequestOutput
from bough.core.finish import FinishAbort, FinishLength, FinishReason, FinishStop
from bough.server.errors import Failure, in_client_names, openai_shape
from bough.server.openai.logprobs import TokenSpeller
from bough.server.openai.objects import CompletionTokensDetails, FinishWord, PromptTokensDetails, Usage
from bough.server.openai.requests import Identity, Shown
from bough.server.streaming import DONE, PreparedChunk, json_event


def usage_of(answers: Sequence[RequestOutput], samples: int = 1, reasoning: int = 0) -> Usage:
    """The cost of a whole call: `samples` answers for each prompt, in the order of the prompts. Samples share their
    prompt, so it counts once; what the first of them found in the cache is what the call found there."""
    firsts = answers[::samples]
    return make_usage(
        prompt=sum(answer.prompt_tokens for answer in firsts),
        cached=sum(answer.cached_tokens for answer in firsts),
        completion=sum(len(answer.ids) for answer in answers),
        reasoning=reasoning,
    )


def make_usage(*, prompt: int, cached: int, completion: int, reasoning: int = 0) -> Usage:
    reasoning = min(reasoning, completion)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        reasoning_tokens=reasoning,
        prompt_tokens_details=PromptTokensDetails(cached),
        completion_tokens_details=CompletionTokensDetails(reasoning),
    )


def finish_word(finish: FinishReason, *, called: bool = False) -> FinishWord:
    match finish:
        case FinishStop():
            return "tool_calls" if called else "stop"
        case FinishLength():
            return "length"
        case FinishAbort():
            return "abort"


def warnings_of(answers: Sequence[RequestOutput]) -> list[str] | UnsetType:
    """Which parts of their grammars are not enforced; unset where all are."""
    texts = dict.fromkeys(in_client_names(text) for answer in answers for text in answer.warnings)
    return list(texts) or UNSET


def broken_stream(failure: Failure) -> bytes:
    return json_event(openai_shape(failure)) + DONE


def whole_piece(answer: RequestOutput) -> Piece:
    """A finished answer as if it had come in one piece."""
    return Piece(answer, answer.text, answer.ids, 0, answer.finish)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    chunk_type: ClassVar[type[msgspec.Struct]]

    identity: Identity
    shown: Shown
    speller: TokenSpeller

    def chunk(self, choices: Sequence[msgspec.Struct], **more: Any) -> Any:
        me = self.identity
        return self.chunk_type(id=me.id, created=me.created, model=me.model, choices=choices, **more)

    def ending(self, answer: RequestOutput, *, called: bool = False) -> dict[str, Any]:
        finish = answer.finish
        assert finish is not None
        return {
            "finish_reason": finish_word(finish, called=called),
            "matched_stop": finish.matched if isinstance(finish, FinishStop) else None,
            "meta_info": answer.meta_info() if self.shown.meta_info else UNSET,
        }


class ChunkWriter:
    """Writes one call's stream. Between the first and the last piece of an answer, text fills in a prepared chunk."""

    def __init__(self, form: AnswerForm) -> None:
        shown = form.shown
        self._shown = shown
        self._answers: dict[int, RequestOutput] = {}
        self._fast = shown.logprobs is None and not shown.usage_throughout
        self._no_usage = None if shown.usage_at_end else UNSET  # where it comes at the end, earlier chunks say null
        self._make_chunk = form.chunk

    def end(self) -> bytes:
        if not self._shown.usage_at_end:
            return DONE
        answers = [self._answers[i] for i in sorted(self._answers)]
        usage = usage_of(answers, self._shown.samples, self._reasoning_tokens())
        return json_event(self._make_chunk([], usage=usage)) + DONE

    def _reasoning_tokens(self) -> int:
        return 0

    def _chunk(self, piece: Piece, choice: msgspec.Struct, *, last: bool) -> Any:
        shown, answer = self._shown, piece.answer
        more: dict[str, Any] = {"usage": self._no_usage}
        if shown.usage_throughout:
            done = piece.first + len(piece.ids)
            more["usage"] = make_usage(prompt=answer.prompt_tokens, cached=answer.cached_tokens, completion=done)
        if last:
            more["timings"] = answer.timings.to_dict() if shown.timings else UNSET
            more["warnings"] = warnings_of([answer])
        return self._make_chunk([choice], **more)

    def _prepare(self, choice: msgspec.Struct, text_field: str) -> PreparedChunk:
        """`choice` has an empty text and, if they are shown, empty token ids."""
        return PreparedChunk(json_event(self._make_chunk([choice], usage=self._no_usage)), text_field)
