"""/v1/completions: the handler, from request to inputs, and from pieces to choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from bough.client.handle import raise_if_refused
from bough.client.inputs import Inputs
from bough.client.outputs import Piece, RequestOutput
from bough.core.errors import RequestError
from bough.server.bodies import read_lenient_body
from bough.server.context import ServerContext
from bough.server.openai.logprobs import TextOffsets, TokenSpeller, completion_logprobs, joined, mean_logprob
from bough.server.openai.objects import Completion, CompletionChoice, CompletionLogprobs
from bough.server.openai.requests import (
    CompletionRequest,
    Identity,
    Shown,
    check_request,
    options_of,
    sampling_of,
    use_openai_names,
)
from bough.server.openai.writing import AnswerForm, ChunkWriter, broken_stream, usage_of, warnings_of, whole_piece
from bough.server.streaming import (
    PreparedChunk,
    json_event,
    read_resumption,
    resumable,
    slowest_timings,
    stream_answers,
    whole_response,
)

DEFAULT_MAX_TOKENS = 16


def read_completion(request: CompletionRequest, identity: Identity) -> dict[str, Any]:
    check_request(request)
    samples, kept = samples_of(request), request.n or 1
    if samples < kept:
        raise RequestError(f"best_of ({samples}) must not be smaller than n ({kept}).", field="best_of")
    if request.stream and samples > kept:
        raise RequestError("best_of chooses among finished answers, so it cannot be streamed.", field="best_of")
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    choosing = samples > kept
    shows_prompt = request.echo and request.resume is None  # a resumed stream has shown it
    return {
        **_prompts(request.prompt),
        **options_of(request, identity),
        "sampling_params": sampling_of(request, max_new_tokens=max_tokens, samples=samples),
        "return_logprob": request.logprobs is not None or choosing,
        "logprob_start_len": 0 if shows_prompt and request.logprobs is not None else -1,
        "top_logprobs_num": request.logprobs or 0,
        **read_resumption(request.resume, request.stream),
    }


def samples_of(request: CompletionRequest) -> int:
    """Answers that are made for each prompt; `n` of them are shown."""
    return request.best_of or request.n or 1


def _prompts(given: str | list[Any]) -> Mapping[str, Any]:
    """One text, many, one list of token ids, or many."""
    if isinstance(given, str):
        return {"prompt": given}
    kinds = {type(entry) for entry in given}
    if not kinds:
        raise RequestError("prompt is an empty list; give at least one prompt or token.", field="prompt")
    if len(kinds) > 1:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, not a mixture.",
            field="prompt",
        )
    return {"prompt": given} if kinds == {str} else {"input_ids": given}


@dataclass(frozen=True, slots=True)
class CompletionForm(AnswerForm):
    chunk_type = Completion

    kept: int  # of `shown.samples` answers per prompt
    echoes: Sequence[str] = ()  # the prompts' texts, if they are to stand before their answers

    def whole(self, answers: Sequence[RequestOutput]) -> Completion:
        for answer in answers:
            raise_if_refused(answer)
        chosen = self._best(answers)
        choices = [
            msgspec.structs.replace(CompletionWriter(self).choice(whole_piece(answer)), index=i)
            for i, answer in enumerate(chosen)
        ]
        timings = slowest_timings(answers).to_dict() if self.shown.timings else UNSET
        usage = usage_of(answers, self.shown.samples)
        whole: Completion = self.chunk(choices, usage=usage, timings=timings, warnings=warnings_of(chosen))
        return whole

    def _best(self, answers: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Of each prompt's samples the likeliest ones, best first; all of them in their order if all are shown."""
        samples = self.shown.samples
        if samples == self.kept:
            return list(answers)

        def likelihood(answer: RequestOutput) -> float:
            return mean_logprob(answer.output_logprobs, len(answer.ids))

        groups = [answers[i : i + samples] for i in range(0, len(answers), samples)]
        return [best for group in groups for best in sorted(group, key=likelihood, reverse=True)[: self.kept]]


class CompletionWriter(ChunkWriter):
    """Writes one call's stream; remembers how far each answer has come."""

    def __init__(self, form: CompletionForm) -> None:
        super().__init__(form)
        self._form = form
        self._prepared: dict[int, PreparedChunk] = {}
        self._offsets: dict[int, TextOffsets] = {}

    def chunk(self, piece: Piece) -> bytes:
        prepared = self._prepared.get(piece.index)
        if prepared is not None and self._fast and piece.finish is None:
            return prepared.fill(piece.text, piece.ids)
        return json_event(self.full_chunk(piece))

    def full_chunk(self, piece: Piece) -> Completion:
        if piece.finish is not None:
            raise_if_refused(piece.answer)
        choice = self.choice(piece)
        if piece.index not in self._answers:
            self._answers[piece.index] = piece.answer
            empty = CompletionChoice(index=piece.index, text="", token_ids=[] if self._shown.token_ids else UNSET)
            self._prepared[piece.index] = self._prepare(empty, "text")
        chunk: Completion = self._chunk(piece, choice, last=piece.finish is not None)
        return chunk

    def choice(self, piece: Piece) -> CompletionChoice:
        shown, echo = self._shown, ""
        if self._form.echoes and piece.index not in self._answers and not piece.answer.resumed:
            echo = self._form.echoes[piece.index // shown.samples]
        return CompletionChoice(
            index=piece.index,
            text=echo + piece.text,
            logprobs=None if shown.logprobs is None else self._logprobs(piece),
            token_ids=piece.ids if shown.token_ids else UNSET,
            **({} if piece.finish is None else self._form.ending(piece.answer)),
        )

    def _logprobs(self, piece: Piece) -> CompletionLogprobs:
        form, answer = self._form, piece.answer
        top = bool(form.shown.logprobs)
        offsets = self._offsets.get(piece.index)
        begins = offsets is None
        if offsets is None:
            skip = answer.prompt.sampling.skip_special_tokens
            offsets = self._offsets[piece.index] = TextOffsets(form.speller, skip)
        given = None
        if begins and answer.resumed:
            shown = answer.prompt.ids[: answer.prompt_tokens].tolist() if form.echoes else []
            offsets.of(shown + answer.ids[: piece.first])
        elif begins and form.echoes:
            columns = answer.input_logprobs
            given = completion_logprobs(columns, 0, len(columns.tokens), top=top, speller=form.speller, offsets=offsets)
        output = completion_logprobs(
            answer.output_logprobs,
            *piece.logprob_span,
            top=top,
            speller=form.speller,
            offsets=offsets,
        )
        return output if given is None else joined(given, output)


class Completions:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._speller = TokenSpeller(context.tokenizer)

    async def completions(self, request: Request) -> Response:
        body = await read_lenient_body(request, CompletionRequest)
        identity = Identity.make("cmpl-", body.rid, self._context.model.name, body.resume)
        use_openai_names(body, top_logprobs_num="logprobs")
        inputs = await self._context.read_inputs(**read_completion(body, identity))
        shown = Shown.of(body, body.stream_options, logprobs=body.logprobs, samples=samples_of(body))
        form = CompletionForm(identity, shown, self._speller, body.n or 1, self._echoes(body, inputs))
        if body.stream:
            writer = resumable(request, inputs, CompletionWriter(form))
            return stream_answers(self._context.client, inputs, writer, broken_stream, timed=shown.timings)
        return await whole_response(self._context.client, request, inputs, form.whole, timed=shown.timings)

    def _echoes(self, body: CompletionRequest, inputs: Inputs) -> list[str]:
        if not body.echo:
            return []
        if isinstance(body.prompt, str):
            return [body.prompt]
        if isinstance(body.prompt[0], str):
            return [str(text) for text in body.prompt]
        tokenizer = self._context.require_tokenizer("echo")
        skip = body.skip_special_tokens is not False
        return [tokenizer.decode(prompt.ids.tolist(), skip) for prompt in inputs.prompts[:: samples_of(body)]]
