"""/v1/chat/completions: from request to inputs, and from pieces to messages and deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from bough.client.answer import Answer
from bough.client.handle import raise_if_refused
from bough.client.piece import Piece
from bough.core.errors import RequestError
from bough.server.chunks import PreparedChunk
from bough.server.messages import Message, render
from bough.server.openai.limits import check_request
from bough.server.openai.logprobs import TokenSpeller, chat_logprobs
from bough.server.openai.objects import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from bough.server.openai.reading import Identity, Shown, options_of, sampling_of
from bough.server.openai.schema import ChatRequest
from bough.server.openai.usage import (
    finish_word,
    make_usage,
    matched_stop,
    slowest_timings,
    usage_of,
    warnings_of,
    whole_piece,
)
from bough.server.responses import encode_json
from bough.server.sse import DONE, event
from bough.tokenizer.tokenizer import Tokenizer


def read_chat(request: ChatRequest, identity: Identity, context_length: int) -> dict[str, Any]:
    """What `InputReader.read` is to be given, but for the prompt."""
    check_request(request)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", field="top_logprobs")
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    return {
        **options_of(request, identity),
        # Without a limit an answer may use all that is left of the context; the scheduler knows how much that is.
        "sampling_params": sampling_of(
            request, max_new_tokens=context_length if limit is None else limit, samples=request.n or 1
        ),
        "return_logprob": bool(request.logprobs),
        "top_logprobs_num": request.top_logprobs or 0,
    }


def chat_prompt(request: ChatRequest, messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """The prompt's tokens: the messages through the model's template."""
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return render(
        tokenizer,
        messages,
        variables=variables,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
    )


@dataclass(frozen=True, slots=True)
class ChatForm:
    """What one call's answers look like."""

    identity: Identity
    shown: Shown
    speller: TokenSpeller

    def whole(self, answers: Sequence[Answer]) -> ChatCompletion:
        """The answer that is not streamed."""
        for answer in answers:
            raise_if_refused(answer)
        choices = [
            ChatChoice(
                index=answer.index,
                message=ChatMessage(content=answer.text),
                logprobs=self.logprobs(whole_piece(answer)),
                token_ids=answer.ids if self.shown.token_ids else UNSET,
                **self.ending(answer),
            )
            for answer in answers
        ]
        return ChatCompletion(
            id=self.identity.id,
            created=self.identity.created,
            model=self.identity.model,
            choices=choices,
            usage=usage_of(answers, self.shown.samples),
            timings=slowest_timings(answers).to_dict() if self.shown.timings else UNSET,
            warnings=warnings_of(answers),
        )

    def logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if self.shown.logprobs is None:
            return None
        columns, end = piece.answer.output_logprobs, piece.first + len(piece.ids)
        return ChatLogprobs(chat_logprobs(columns, piece.first, end, self.speller))

    def ending(self, answer: Answer) -> dict[str, Any]:
        """The fields that tell how an answer ended."""
        assert answer.finish is not None
        return {
            "finish_reason": finish_word(answer.finish),
            "matched_stop": matched_stop(answer.finish),
            "meta_info": answer.meta_info() if self.shown.meta_info else UNSET,
        }


class ChatWriter:
    """Writes one call's stream: for each answer a chunk with the role, its text, and a chunk that tells how it ended.

    The first two and the last two travel together, so the extra chunks cost no extra turn.
    """

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._answers: dict[int, Answer] = {}
        self._prepared: dict[int, PreparedChunk] = {}
        self._fast = form.shown.logprobs is None and not form.shown.usage_throughout

    def chunk(self, piece: Piece) -> bytes:
        """The events for a piece. Between its first and last, a plain stream fills in a prepared one."""
        prepared = self._prepared.get(piece.index)
        if prepared is not None and self._fast and piece.finish is None:
            return prepared.fill(piece.text, piece.ids)
        return b"".join(event(encode_json(chunk)) for chunk in self.full_chunks(piece))

    def full_chunks(self, piece: Piece) -> list[ChatChunk]:
        """The same through the schema."""
        answer = piece.answer
        if piece.finish is not None:
            raise_if_refused(answer)
        chunks = []
        if piece.index not in self._answers:
            self._begin(piece)
            chunks.append(self._chunk(piece, ChatDelta(role="assistant", content="")))
        if piece.text or piece.ids:
            shown = {
                "logprobs": self._form.logprobs(piece),
                "token_ids": piece.ids if self._form.shown.token_ids else UNSET,
            }
            chunks.append(self._chunk(piece, ChatDelta(content=piece.text), **shown))
        if piece.finish is not None:
            chunks.append(self._chunk(piece, ChatDelta(), **self._form.ending(answer)))
        return chunks

    def end(self) -> bytes:
        """After the last piece."""
        if not self._form.shown.usage_at_end:
            return DONE
        answers = [self._answers[i] for i in sorted(self._answers)]
        return event(encode_json(self._envelope([], usage_of(answers, self._form.shown.samples)))) + DONE

    def _begin(self, piece: Piece) -> None:
        self._answers[piece.index] = piece.answer
        shown = self._form.shown
        empty = ChatChunkChoice(
            index=piece.index, delta=ChatDelta(content=""), token_ids=[] if shown.token_ids else UNSET
        )
        self._prepared[piece.index] = PreparedChunk(
            event(encode_json(self._envelope([empty], self._no_usage()))), "content"
        )

    def _chunk(self, piece: Piece, delta: ChatDelta, **more: Any) -> ChatChunk:
        shown, answer = self._form.shown, piece.answer
        usage = self._no_usage()
        if shown.usage_throughout:
            done = piece.first + len(piece.ids)
            usage = make_usage(prompt=answer.prompt_tokens, cached=answer.cached_tokens, completion=done)
        last: dict[str, Any] = {}
        if "finish_reason" in more:
            last["timings"] = answer.timings.to_dict() if shown.timings else UNSET
            last["warnings"] = warnings_of([answer])
        return self._envelope([ChatChunkChoice(index=piece.index, delta=delta, **more)], usage, **last)

    def _no_usage(self) -> Any:
        """Where the usage comes at the end, the chunks before it say null."""
        return None if self._form.shown.usage_at_end else UNSET

    def _envelope(self, choices: list[ChatChunkChoice], usage: Any, **more: Any) -> ChatChunk:
        name = self._form.identity
        return ChatChunk(id=name.id, created=name.created, model=name.model, choices=choices, usage=usage, **more)
