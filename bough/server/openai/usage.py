"""What requests cost and how they ended, in OpenAI's terms; the same for a whole answer and for a stream."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from bough.client.outputs import Piece, RequestOutput
from bough.core.finish import FinishAbort, FinishLength, FinishReason, FinishStop
from bough.server.errors import Failure, in_client_names, openai_shape
from bough.server.openai.objects import CompletionTokensDetails, FinishWord, PromptTokensDetails, Usage
from bough.server.streaming import DONE, json_event


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
    """`called`: the answer has calls."""
    match finish:
        case FinishStop():
            return "tool_calls" if called else "stop"
        case FinishLength():
            return "length"
        case FinishAbort():
            return "abort"


def matched_stop(finish: FinishReason) -> int | str | None:
    """The stop token or string at which the answer ended."""
    return finish.matched if isinstance(finish, FinishStop) else None


def warnings_of(answers: Sequence[RequestOutput]) -> list[str] | UnsetType:
    """Which parts of their grammars are not enforced; unset where all are."""
    texts = dict.fromkeys(in_client_names(text) for answer in answers for text in answer.warnings)
    return list(texts) or UNSET


def broken_stream(failure: Failure) -> bytes:
    """The last events of a stream that cannot go on."""
    return json_event(openai_shape(failure)) + DONE


def whole_piece(answer: RequestOutput) -> Piece:
    """A finished answer as if it had come in one piece."""
    return Piece(answer, answer.text, answer.ids, 0, answer.finish)
