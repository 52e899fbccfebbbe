"""What answers of chats and completions have in common, whole and streamed: their envelope, usage, end and logprobs.

Logprobs have two forms: columns for completions, one object per token for chats and responses. Tokens are often parts
of characters. Their text then shows U+FFFD, as OpenAI's does, and `bytes` has the truth; offsets into the text count
the characters that were complete before a token.
"""

import codecs
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from bough.client.outputs import Entry, LogprobColumns, Piece, RequestOutput
from bough.core.finish import FinishStop
from bough.server.errors import Failure, openai_shape
from bough.server.openai import objects
from bough.server.openai.requests import EngineFields, Identity
from bough.server.streaming import DONE, PreparedChunk, Writer, json_event, slowest_timings, warnings_of
from bough.tokenizer.tokenizer import Tokenizer

VERY_UNLIKELY = -9999.0  # OpenAI's number for a logprob that is not finite


def usage_of(answers: Sequence[RequestOutput], samples: int = 1, reasoning: int = 0) -> objects.Usage:
    """The cost of a whole call: `samples` answers for each prompt, in the order of the prompts. Samples share their
    prompt, so it counts once; what the first of them found in the cache is what the call found there."""
    firsts = answers[::samples]
    return make_usage(
        prompt=sum(answer.prompt_tokens for answer in firsts),
        cached=sum(answer.cached_tokens for answer in firsts),
        completion=sum(len(answer.ids) for answer in answers),
        reasoning=reasoning,
    )


def make_usage(*, prompt: int, cached: int, completion: int, reasoning: int = 0) -> objects.Usage:
    reasoning = min(reasoning, completion)
    return objects.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        reasoning_tokens=reasoning,
        prompt_tokens_details=objects.PromptTokensDetails(cached),
        completion_tokens_details=objects.CompletionTokensDetails(reasoning),
    )


def whole_piece(answer: RequestOutput) -> Piece:
    """A finished answer as if it had come in one piece."""
    return Piece(answer, answer.text, answer.ids, 0, answer.finish)


class TokenSpeller:
    """Spells tokens; without a tokenizer they are shown as their numbers."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def count(self, text: str) -> int:
        """How many tokens a part of an answer has, as the model would have written it."""
        return 0 if self._tokenizer is None or not text else len(self._tokenizer.encode(text, False))

    def spelling(self, token: int, hide_special: bool = False) -> bytes | None:
        """What the token adds to the answer's text."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token, hide_special)


class TextOffsets:
    """Where each next token of one answer begins in its text."""

    def __init__(self, speller: TokenSpeller, skip_special_tokens: bool) -> None:
        self._speller = speller
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def of(self, tokens: Iterable[int]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            shown = self._speller.spelling(token, self._skip_special_tokens)
            self._length += len(self._decoder.decode(shown or b""))
        return offsets


def completion_logprobs(
    columns: LogprobColumns, *, top: int | None, speller: TokenSpeller, offsets: TextOffsets
) -> objects.CompletionLogprobs:
    """The form of completions."""
    entries = columns.tokens
    return objects.CompletionLogprobs(
        tokens=[speller.text(token) for _, token, _ in entries],
        token_logprobs=[logprob for logprob, _, _ in entries],
        top_logprobs=_top_columns(entries, columns.top, speller, top) if top else None,
        text_offset=offsets.of(token for _, token, _ in entries),
    )


def chat_logprobs(
    columns: LogprobColumns, start: int, end: int, speller: TokenSpeller, count: int | None = None
) -> list[objects.TokenLogprob]:
    """The form of chats and responses, for the tokens from `start` to `end`; `count` of the likeliest, or all known."""
    tops = columns.top[start:end]
    return [
        objects.TokenLogprob(
            speller.text(token),
            _finite(logprob),
            _byte_values(speller, token),
            [
                objects.TopLogprob(speller.text(t), _finite(p), _byte_values(speller, t))
                for p, t, _ in (top or [])[:count]
            ],
        )
        for (logprob, token, _), top in zip(columns.tokens[start:end], tops, strict=True)
    ]


def prompt_logprobs(columns: LogprobColumns, count: int, speller: TokenSpeller) -> objects.PromptLogprobs:
    """vLLM's form, of a whole prompt: each token itself, then `count` of the likeliest in its place."""
    shown: objects.PromptLogprobs = [None]
    for (logprob, token, _), top in zip(columns.tokens[1:], columns.top[1:], strict=True):
        likeliest = {
            t: objects.PromptLogprob(_finite(p), i + 1, speller.text(t)) for i, (p, t, _) in enumerate(top or ())
        }
        own = likeliest.get(token) or objects.PromptLogprob(_finite(logprob), None, speller.text(token))
        first = dict(list(likeliest.items())[:count])
        shown.append({str(t): entry for t, entry in ({token: own} | first).items()})
    return shown


def likelihood(answer: RequestOutput) -> float:
    """How likely an answer is, per token: what `best_of` chooses by."""
    values = [_finite(logprob) for logprob, _, _ in answer.output_logprobs.tokens[: len(answer.ids)]]
    return sum(values) / len(values) if values else 0.0


def _top_columns(
    entries: Sequence[Entry], tops: Sequence[list[Entry] | None], speller: TokenSpeller, count: int
) -> list[dict[str, float] | None]:
    """By text; of two tokens that look alike the likelier counts. The token that was taken is always among them."""
    columns: list[dict[str, float] | None] = []
    for (logprob, token, _), top in zip(entries, tops, strict=True):
        if top is None:
            columns.append(None)
            continue
        by_text: dict[str, float] = {}
        for other_logprob, other, _ in (*top[:count], (logprob, token, None)):
            by_text.setdefault(speller.text(other), _finite(other_logprob))
        columns.append(by_text)
    return columns


def _finite(logprob: float | None) -> float:
    return VERY_UNLIKELY if logprob is None else logprob


def _byte_values(speller: TokenSpeller, token: int) -> list[int] | None:
    spelt = speller.spelling(token)
    return None if spelt is None else list(spelt)


class AnswerWriter(Writer):
    """Between the first and the last piece of an answer, text fills in a prepared chunk (`_quick`)."""

    whole_type: ClassVar[type[msgspec.Struct]]
    chunk_type: ClassVar[type[msgspec.Struct]]
    opening_events = 0

    def __init__(
        self, request: EngineFields, identity: Identity, speller: TokenSpeller, *, logprobs: int | None, samples: int
    ) -> None:
        """`logprobs`: how many of the likeliest tokens are shown beside the one taken; None: there are no logprobs.
        `samples` are the answers per prompt."""
        options = request.stream_options
        self.timed = request.return_timings
        self._request = request
        self._identity = identity
        self._speller = speller
        self._top = logprobs
        self._samples = samples
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_throughout = options is not None and bool(options.continuous_usage_stats)
        self._fast = logprobs is None and not self._usage_throughout
        self._no_usage = None if self._usage_at_end else UNSET  # where it comes at the end, earlier chunks say null
        self._answers: dict[int, RequestOutput] = {}

    def whole(self, answers: list[RequestOutput]) -> Any:
        choices = self._choices(answers)
        return self._make(
            self.whole_type,
            choices,
            usage=usage_of(answers, self._samples, self._reasoning_tokens(choices)),
            **self._more(answers),
            timings=slowest_timings(answers) if self.timed else UNSET,
            warnings=warnings_of(answers),
            sglext=self._extras(answers),
        )

    @abstractmethod
    def _choices(self, answers: list[RequestOutput]) -> list[Any]:
        """The choices of the whole answer."""

    def chunk(self, piece: Piece) -> bytes:
        if self._fast and piece.finish is None and piece.index in self._answers:
            return self._quick(piece)
        return b"".join(map(json_event, self.full_chunks(piece)))

    @abstractmethod
    def _quick(self, piece: Piece) -> bytes:
        """The chunks of a piece that is neither the first nor the last one of its answer."""

    @abstractmethod
    def full_chunks(self, piece: Piece) -> list[Any]:
        """The chunks of any piece."""

    def _more(self, answers: list[RequestOutput]) -> dict[str, Any]:
        """What else stands beside the choices."""
        return {}

    def _prompt_logprobs(self, answer: RequestOutput) -> objects.PromptLogprobs | UnsetType:
        count = self._request.prompt_logprobs
        return UNSET if count is None else prompt_logprobs(answer.input_logprobs, count, self._speller)

    def end(self) -> bytes:
        answers = [self._answers[i] for i in sorted(self._answers)]
        events = b""
        if (extras := self._extras(answers)) is not UNSET:
            events += json_event(self._make(self.chunk_type, [], usage=self._no_usage, sglext=extras))
        if self._usage_at_end:
            usage = usage_of(answers, self._samples, self._reasoning_tokens())
            events += json_event(self._make(self.chunk_type, [], usage=usage))
        return events + DONE

    def _extras(self, answers: list[RequestOutput]) -> dict[str, Any] | UnsetType:
        """SGLang's: where the first prompt's cached tokens were found, for those who asked."""
        asked = answers and self._request.return_cached_tokens_details
        return {"cached_tokens_details": answers[0].cached_details} if asked else UNSET

    def failure(self, failure: Failure) -> bytes:
        return json_event(openai_shape(failure)) + DONE

    def _reasoning_tokens(self, choices: Sequence[Any] = ()) -> int:
        """Of the whole answer's choices, or of the stream."""
        return 0

    def _make(self, kind: type[msgspec.Struct], choices: Sequence[msgspec.Struct], **more: Any) -> Any:
        me = self._identity
        return kind(id=me.id, created=me.created, model=me.model, choices=choices, **more)

    def _chunk(self, piece: Piece, choice: msgspec.Struct, *, last: bool) -> Any:
        answer = piece.answer
        more: dict[str, Any] = {"usage": self._no_usage}
        if self._usage_throughout:
            done = piece.first + len(piece.ids)
            more["usage"] = make_usage(prompt=answer.prompt_tokens, cached=answer.cached_tokens, completion=done)
        if last:
            more["timings"] = answer.timings if self.timed else UNSET
            more["warnings"] = warnings_of([answer])
        return self._make(self.chunk_type, [choice], **more)

    def _prepare(self, choice: msgspec.Struct, text_field: str) -> PreparedChunk:
        """`choice` has an empty text and, if they are shown, empty token ids."""
        return PreparedChunk(json_event(self._make(self.chunk_type, [choice], usage=self._no_usage)), text_field)

    def _shown_ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._request.return_token_ids else UNSET

    def _ending(self, answer: RequestOutput, *, called: bool = False) -> dict[str, Any]:
        finish = answer.finish
        assert finish is not None
        return {
            "finish_reason": "tool_calls" if called and finish.kind == "stop" else finish.kind,
            "matched_stop": finish.matched if isinstance(finish, FinishStop) else None,
            "meta_info": answer.meta_info() if self._request.return_meta_info else UNSET,
            "sgl_ext": {"routed_experts": answer.routed_experts} if self._request.return_routed_experts else UNSET,
            "hidden_states": (answer.hidden_states[1:] or [[]])[-1] if self._request.return_hidden_states else UNSET,
        }
