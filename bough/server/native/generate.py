"""`/generate`: SGLang's native generation. Streams are cumulative: each event shows the whole output so far. And the
model's tokenizer and parsers for clients that have none: /tokenize, /detokenize, /parse_function_call and
/separate_reasoning.
"""

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
from bough.parsers import AnswerFormat, reasoning_format, tool_format
from bough.server.bodies import decode_body, given_fields, name_unknown_fields, refuse_unsupported
from bough.server.context import MAX_REQUESTS_PER_CALL, ServerContext, offload
from bough.server.endpoint import EVENTS, Endpoint, encode_json, json_response
from bough.server.errors import Failure, native_shape, set_field_names, shape_of
from bough.server.messages import read_messages
from bough.server.native import schemas
from bough.server.native.schemas import GenerateBody, GenerateOutput, Predictions, VertexBody
from bough.server.openai.requests import choose_tools
from bough.server.parsing import any_of, plan_answers, read_functions, unknown_thinking
from bough.server.streaming import DONE, Writer, json_event, read_resumption, respond
from bough.tokenizer.tokenizer import Tokenizer

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


MAX_TOKENS = 1 << 20  # to detokenize in one request, which takes about a second


def text_routes(context: ServerContext) -> list[Endpoint]:
    parse, separate = partial(parse_function_call, context), partial(separate_reasoning, context)
    reading: dict[str, Any] = {"body": schemas.TokenizeBody, "answer": schemas.TokenizeOutput}
    writing: dict[str, Any] = {"body": schemas.DetokenizeBody, "answer": schemas.DetokenizeOutput}
    calling: dict[str, Any] = {"body": schemas.ParseCallBody, "answer": schemas.ParsedCalls}
    thinking: dict[str, Any] = {"body": schemas.SeparateBody, "answer": schemas.Separated}
    made: list[Endpoint] = []
    for prefix in ("", "/v1"):
        shape = shape_of(f"{prefix}/tokenize")
        made += [
            Endpoint(f"{prefix}/tokenize", partial(tokenize, context), "Text to token ids", shape=shape, **reading),
            Endpoint(f"{prefix}/detokenize", partial(detokenize, context), "Token ids to text", shape=shape, **writing),
        ]
    return [
        *made,
        Endpoint("/parse_function_call", parse, "Find the calls in a model's text", **calling),
        Endpoint("/separate_reasoning", separate, "Tell the thinking in a model's text from the answer", **thinking),
    ]


async def tokenize(context: ServerContext, request: Request, body: schemas.TokenizeBody) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either prompt or messages to tokenize.", field="prompt")
    if body.prompt is not None and body.tools:
        raise RequestError("tools are a part of conversations; give messages instead of prompt.", field="tools")
    tokenizer = context.require_tokenizer("prompt")
    set_field_names({"input_ids": "messages" if body.prompt is None else "prompt"})
    lists = await (_tokenize_messages(body, context) if body.prompt is None else _tokenize(body, tokenizer))
    length = context.model.context_length
    if isinstance(body.prompt, list):
        return json_response({"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": length})
    return json_response({"tokens": lists[0], "count": len(lists[0]), "max_model_len": length})


async def _tokenize(body: schemas.TokenizeBody, tokenizer: Tokenizer) -> list[list[int]]:
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
    if len(texts) > MAX_REQUESTS_PER_CALL:
        raise RequestError(f"prompt has {len(texts)} texts; at most {MAX_REQUESTS_PER_CALL} are taken.", field="prompt")
    special = body.add_special_tokens is not False
    return await offload(sum(map(len, texts)), lambda: list(tokenizer.encode_each(texts, special, keep="all")))


async def _tokenize_messages(body: schemas.TokenizeBody, context: ServerContext) -> list[list[int]]:
    """The prompt that /v1/chat/completions makes of the same messages."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    options: dict[str, Any] = {"variables": effort | (body.chat_template_kwargs or {}), "keep": "all"}
    options |= given_fields(body, ("add_generation_prompt", "continue_final_message"))
    messages = await offload(0, lambda: read_messages(body.messages))
    tools = choose_tools(read_functions(body.tools), body.tool_choice).shown
    return [(await context.render(messages, tools=tools, **options)).ids]


async def detokenize(context: ServerContext, request: Request, body: schemas.DetokenizeBody) -> Response:
    tokenizer = context.require_tokenizer("tokens")
    many = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: list[Any] = body.tokens if many else [body.tokens]
    count = sum(len(ids) if isinstance(ids, list) else 1 for ids in lists)
    if count > MAX_TOKENS:
        raise RequestError(f"tokens has {count} ids; at most {MAX_TOKENS} are taken.", field="tokens")
    for ids in lists:
        if not isinstance(ids, list) or any(not isinstance(token, int) for token in ids):
            raise RequestError("tokens must be a list of token ids, or a list of such lists.", field="tokens")
        wrong = next((token for token in ids if not 0 <= token < context.model.vocab_size), None)
        if wrong is not None:
            last = context.model.vocab_size - 1
            raise RequestError(f"tokens: {wrong} is outside the vocabulary (0 to {last}).", field="tokens")
    skip = body.skip_special_tokens is not False
    texts = await offload(sum(map(len, lists)), lambda: [tokenizer.decode(ids, skip) for ids in lists])
    return json_response({"text": texts if many else texts[0]})


async def parse_function_call(context: ServerContext, request: Request, body: schemas.ParseCallBody) -> Response:
    name = _chosen(body.tool_call_parser, context.settings.model.tool_call_parser, "tool_call_parser")
    tools = any_of(read_functions(body.tools)).schemas
    form = AnswerFormat(tool_format=tool_format(name, "tool_call_parser"), tools=tools)
    parsed = await offload(len(body.text), lambda: form.parse(body.text))
    places = {tool: i for i, tool in enumerate(tools)}
    calls = [schemas.ParsedCall(places[call.name], call.name, call.arguments) for call in parsed.calls]
    return json_response(schemas.ParsedCalls(parsed.text, calls))


async def separate_reasoning(context: ServerContext, request: Request, body: schemas.SeparateBody) -> Response:
    """There is no prompt to look at, so the format alone says whether the text begins with thinking. An answer after
    thinking is trimmed, which a stream can do only at its beginning."""
    name = _chosen(body.reasoning_parser, context.settings.model.reasoning_parser, "reasoning_parser")
    kind = reasoning_format(name, "reasoning_parser")
    form = AnswerFormat(reasoning=kind, thinking=kind.forced)
    parsed = await offload(len(body.text), lambda: form.parse(body.text))
    return json_response(schemas.Separated(parsed.reasoning, parsed.text.strip() if parsed.reasoning else parsed.text))


def _chosen(given: str | None, own: str | None, field: str) -> str:
    name = given or own
    if name is None:
        raise RequestError(f"Give a {field}; this server was started without one.", field=field)
    return name
