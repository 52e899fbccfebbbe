"""/v1/completions: the handler, from request to inputs, and from pieces to choices."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.client.inputs import Inputs
from bough.client.outputs import LogprobColumns, Piece, RequestOutput
from bough.core.errors import RequestError
from bough.server.context import ServerContext
from bough.server.openai import requests, writing
from bough.server.openai.objects import Completion, CompletionChoice, CompletionLogprobs
from bough.server.openai.requests import CompletionRequest, Identity
from bough.server.streaming import PreparedChunk, read_resumption, respond

DEFAULT_MAX_TOKENS = 16


def read_completion(request: CompletionRequest, identity: Identity) -> dict[str, Any]:
    requests.check_request(request)
    samples, kept = samples_of(request), request.n or 1
    if samples < kept:
        raise RequestError(f"best_of ({samples}) must not be smaller than n ({kept}).", field="best_of")
    if request.stream and samples > kept:
        raise RequestError("best_of chooses among finished answers, so it cannot be streamed.", field="best_of")
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    echoed = request.echo and request.resume is None  # a resumed stream has shown it
    return {
        **text_or_ids(request.prompt, "prompt"),
        **requests.options_of(request, identity),
        "sampling_params": requests.sampling_of(request, max_new_tokens=max_tokens, samples=samples),
        "overlong": "none" if request.max_tokens is None else "refused",
        **requests.logprobs_of(
            request, request.logprobs, of_output=samples > kept, of_prompt=bool(echoed) and request.logprobs is not None
        ),
        **read_resumption(request.resume, request.stream),
    }


def samples_of(request: CompletionRequest) -> int:
    """Answers that are made for each prompt; `n` of them are shown."""
    return request.best_of or request.n or 1


def text_or_ids(given: str | list[Any], field: str) -> Mapping[str, Any]:
    """One text, many, one list of token ids, or many."""
    if isinstance(given, str):
        return {"prompt": given}
    kinds = {type(entry) for entry in given}
    if not kinds:
        raise RequestError(f"{field} is an empty list; give at least one {field} or token.", field=field)
    if len(kinds) > 1:
        allowed = "a string, a list of strings, a list of token ids or a list of such lists, not a mixture"
        raise RequestError(f"{field} must be {allowed}.", field=field)
    return {"prompt": given} if kinds == {str} else {"input_ids": given}


class CompletionWriter(writing.AnswerWriter):
    """Remembers how far each answer has come."""

    whole_type = chunk_type = Completion

    def __init__(
        self, request: CompletionRequest, identity: Identity, speller: writing.TokenSpeller, echoes: Sequence[str] = ()
    ) -> None:
        """`echoes` are the prompts' texts, if they are to stand before their answers."""
        super().__init__(request, identity, speller, logprobs=request.logprobs, samples=samples_of(request))
        self._kept = request.n or 1  # of the samples of each prompt
        self._echoes = echoes
        self._prepared: dict[int, PreparedChunk] = {}
        self._offsets: dict[int, writing.TextOffsets] = {}

    def _choices(self, answers: list[RequestOutput]) -> list[CompletionChoice]:
        chosen = [self._choice(writing.whole_piece(answer)) for answer in self._best(answers)]
        return [msgspec.structs.replace(choice, index=i) for i, choice in enumerate(chosen)]

    def _best(self, answers: list[RequestOutput]) -> list[RequestOutput]:
        """Of each prompt's samples the likeliest ones, best first; all of them in their order if all are shown."""
        samples = self._samples
        if samples == self._kept:
            return answers
        groups = [answers[i : i + samples] for i in range(0, len(answers), samples)]
        ranked = [sorted(group, key=writing.likelihood, reverse=True) for group in groups]
        return [best for group in ranked for best in group[: self._kept]]

    def _quick(self, piece: Piece) -> bytes:
        return self._prepared[piece.index].fill(piece.text, piece.ids)

    def full_chunks(self, piece: Piece) -> list[Completion]:
        choice = self._choice(piece)
        if piece.index not in self._answers:
            self._answers[piece.index] = piece.answer
            empty = CompletionChoice(index=piece.index, text="", token_ids=self._shown_ids([]))
            self._prepared[piece.index] = self._prepare(empty, "text")
        return [self._chunk(piece, choice, last=piece.finish is not None)]

    def _choice(self, piece: Piece) -> CompletionChoice:
        echo = ""
        if self._echoes and piece.index not in self._answers and not piece.answer.resumed:
            echo = self._echoes[piece.index // self._samples]
        return CompletionChoice(
            index=piece.index,
            text=echo + piece.text,
            logprobs=None if self._top is None else self._logprobs(piece),
            prompt_logprobs=self._prompt_logprobs(piece.answer),
            token_ids=self._shown_ids(piece.ids),
            **({} if piece.finish is None else self._ending(piece.answer)),
        )

    def _logprobs(self, piece: Piece) -> CompletionLogprobs:
        answer, begins = piece.answer, piece.index not in self._offsets
        if begins:
            skip = answer.prompt.sampling.skip_special_tokens
            self._offsets[piece.index] = writing.TextOffsets(self._speller, skip)
        offsets = self._offsets[piece.index]

        if begins and answer.resumed:
            past = answer.prompt.ids[: answer.prompt_tokens].tolist() if self._echoes else []
            offsets.of(past + answer.ids[: piece.first])
        given = answer.input_logprobs if begins and self._echoes and not answer.resumed else LogprobColumns()
        shown = given.followed_by(answer.output_logprobs, *piece.logprob_span)
        return writing.completion_logprobs(shown, top=self._top, speller=self._speller, offsets=offsets)


async def complete(context: ServerContext, request: Request, body: CompletionRequest) -> Response:
    identity = Identity.make("cmpl-", body.rid, context.shown_name(body.model), body.resume)
    requests.use_openai_names(body, top_logprobs_num="logprobs")
    inputs = await context.read_inputs(**read_completion(body, identity))
    writer = CompletionWriter(body, identity, writing.TokenSpeller(context.tokenizer), _echoes(context, body, inputs))
    return await respond(context.client, request, inputs, writer, stream=body.stream)


def _echoes(context: ServerContext, body: CompletionRequest, inputs: Inputs) -> list[str]:
    if not body.echo:
        return []
    if isinstance(body.prompt, str):
        return [body.prompt]
    if isinstance(body.prompt[0], str):
        return [str(text) for text in body.prompt]
    tokenizer = context.require_tokenizer("echo")
    skip = body.skip_special_tokens is not False
    return [tokenizer.decode(prompt.ids.tolist(), skip) for prompt in inputs.prompts[:: samples_of(body)]]
