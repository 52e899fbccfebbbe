"""`/generate`: SGLang's native generation. Streams are cumulative: each event shows the whole output so far."""

import dataclasses
import os
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.client.handle import raise_if_refused
from bough.client.inputs import READ_FIELDS, Inputs, ThinkingMarks
from bough.client.outputs import Piece, RequestOutput
from bough.core.errors import RequestError
from bough.server.bodies import decode_body, given_fields, name_unknown_fields, refuse_unsupported
from bough.server.context import ServerContext
from bough.server.endpoint import EVENTS, Endpoint, encode_json, json_response
from bough.server.errors import Failure, native_shape, set_field_names
from bough.server.native.schemas import GenerateBody, GenerateOutput, Predictions, VertexBody
from bough.server.parsing import plan_answers, unknown_thinking
from bough.server.streaming import DONE, Writer, json_event, read_resumption, respond

GENERATE = "Continue one prompt or many, given as text or token ids"
VERTEX = "/generate in the form of Vertex AI, which names the route in AIP_PREDICT_ROUTE"
LIGHT = 1 << 13  # logprobs that are written in a few milliseconds
TEXT_NAMES = {"prompt": "text", "input_ids": "text"}  # for a client that sent text
# What may stand beside the sampling parameters, too, in vLLM's words.
SAMPLING_NAMES = {
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
}
OPTIONS = tuple(name for name in GenerateBody.__struct_fields__ if name in READ_FIELDS)


def generate_routes(context: ServerContext) -> list[Endpoint]:
    outputs: dict[str, Any] = {"answer": GenerateOutput | list[GenerateOutput], "event": GenerateOutput}
    given: dict[str, Any] = {"methods": ("POST", "PUT"), "body": GenerateBody, "other_types": (EVENTS,)}
    named, predict = os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate"), partial(vertex_generate, context)
    return [
        Endpoint("/generate", partial(generate, context), GENERATE, **given, **outputs),
        Endpoint(named, predict, VERTEX, body=VertexBody, answer=Predictions),
    ]


async def vertex_generate(context: ServerContext, request: Request, body: VertexBody) -> Response:
    if not body.instances:
        return json_response({"predictions": []})
    if (body.parameters or {}).get("stream"):
        raise RequestError("Vertex AI's predictions are whole; leave stream out.", field="parameters")
    kind = "input_ids" if "input_ids" in body.instances[0] else "text"
    named = [{name for name, value in instance.items() if value is not None} for instance in body.instances]
    if any(names - {"image_data"} != {kind} for names in named):
        raise RequestError(f"Each instance must have {kind}, may have image_data, and nothing else.", field="instances")
    columns = {name: [each.get(name) for each in body.instances] for name in set[str]().union(*named)}
    raw = encode_json({**(body.parameters or {}), **columns})
    batch = decode_body(raw, GenerateBody)
    name_unknown_fields(request, raw, GenerateBody)
    response = await generate(context, request, batch)
    return json_response({"predictions": msgspec.Raw(bytes(response.body))})


async def generate(context: ServerContext, request: Request, body: GenerateBody) -> Response:
    refuse_unsupported(body)
    if sum(given is not None for given in (body.text, body.input_ids, body.input_embeds)) != 1:
        instead = "" if body.input_embeds is None else ", or input_embeds instead of both"
        raise RequestError(f"Give exactly one of text and input_ids{instead}.", field="text")
    set_field_names(TEXT_NAMES if body.input_ids is None else {})
    inputs = await read_inputs(context, body)
    inputs = dataclasses.replace(inputs, watched=not body.no_logs, metered=body.log_metrics is not False)
    writer = OutputWriter(batched=inputs.batched, timed=body.return_timings)
    return await respond(context.client, request, inputs, writer, stream=body.stream)


async def read_inputs(context: ServerContext, body: GenerateBody) -> Inputs:
    options = given_fields(body, OPTIONS) | read_resumption(body.resume, body.stream)
    if sampling := {ours: given for name, ours in SAMPLING_NAMES.items() if (given := getattr(body, name)) is not None}:
        options["sampling_params"] = _with_defaults(body.sampling_params, sampling)
    if body.resume is not None and body.resume.id is not None:
        options["rid"] = body.resume.id
    return await context.read_inputs(prompt=body.text, thinking=_marks(context, body), **options)


def _with_defaults(given: Any, defaults: dict[str, Any]) -> Any:
    if isinstance(given, list):
        return [_with_defaults(each, defaults) for each in given]
    return defaults | {name: value for name, value in (given or {}).items() if value is not None}


def _marks(context: ServerContext, body: GenerateBody) -> ThinkingMarks | None:
    """The marks of thinking, for requests with a budget or with a grammar after it. The prompts of one call are taken
    to be alike."""
    if body.max_thinking_tokens is None and not body.require_reasoning:
        return None
    plan = plan_answers(context.settings)
    if plan.thinking is None:
        raise unknown_thinking("require_reasoning" if body.max_thinking_tokens is None else "max_thinking_tokens")
    texts = [body.text] if isinstance(body.text, str) else body.text or [""]
    given = body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params]
    return plan.marks((given[0] if given else None) or {}, texts[0] if texts else "", budget=body.max_thinking_tokens)


class OutputWriter(Writer):
    """In a stream the outputs of a batch say which prompt they belong to.

    Every event shows the whole output again. Where that is much, because of logprobs, there are fewer events: each
    comes when there is a tenth more to show, so that a stream costs as much as its last event several times over.
    """

    opening_events = 0
    shows_refusals = True

    def __init__(self, *, batched: bool, timed: bool | None) -> None:
        self._batched = batched
        self.timed = timed
        self._shown: dict[int, int] = {}  # by answer, the logprobs in its last event

    def whole(self, answers: list[RequestOutput]) -> Any:
        if all(answer.refusal is not None for answer in answers):
            raise_if_refused(answers[0])
        outputs = [self._output(answer) for answer in answers]
        return outputs if self._batched else outputs[0]

    def chunk(self, piece: Piece) -> bytes:
        logprobs = piece.answer.logprob_entries
        if piece.finish is None and LIGHT < logprobs < 1.1 * self._shown.get(piece.index, 0):
            return b""
        self._shown[piece.index] = logprobs
        output = self._output(piece.answer)
        if self._batched:
            output["index"] = piece.index
        return json_event(output)

    def end(self) -> bytes:
        return DONE

    def failure(self, failure: Failure) -> bytes:
        return json_event(native_shape(failure)) + DONE

    def _output(self, answer: RequestOutput) -> dict[str, Any]:
        output = answer.to_dict()
        if self.timed:
            output["meta_info"]["timings"] = answer.timings
        return output
