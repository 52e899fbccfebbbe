"""The routes of completions and chats: reads requests, runs them on the engine's client, answers whole or streamed."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from bough.client.answer import Answer
from bough.client.inputs import Inputs
from bough.server.bodies import read_lenient_body
from bough.server.context import ServerContext, aside
from bough.server.endpoint import EVENTS, Endpoint
from bough.server.errors import Failure, openai_shape
from bough.server.messages import Rendered, read_messages, text_size
from bough.server.openai.chat import ChatForm, ChatWriter, chat_prompt, read_chat
from bough.server.openai.completions import CompletionForm, CompletionWriter, read_completion, samples_of
from bough.server.openai.logprobs import TokenSpeller
from bough.server.openai.objects import ChatCompletion, Completion
from bough.server.openai.reading import Identity, Shown, use_openai_names
from bough.server.openai.schema import ChatRequest, CompletionRequest
from bough.server.openai.tools import chat_tools
from bough.server.parsing import AnswerPlan, plan_answers
from bough.server.presence import while_connected
from bough.server.responses import json_response
from bough.server.resuming import resumable
from bough.server.sse import DONE, json_event
from bough.server.streaming import Writer, stream_answers
from bough.server.timing import timing_headers


def generation_routes(context: ServerContext) -> list[Endpoint]:
    api = OpenAI(context)
    return [
        Endpoint(
            path="/v1/completions",
            handler=api.completions,
            summary="Continue one prompt or several",
            body=CompletionRequest,
            answer=Completion,
            other_types=(EVENTS,),
            shape=openai_shape,
            tag="openai",
        ),
        Endpoint(
            path="/v1/chat/completions",
            handler=api.chat,
            summary="Answer a conversation",
            body=ChatRequest,
            answer=ChatCompletion,
            other_types=(EVENTS,),
            shape=openai_shape,
            tag="openai",
        ),
    ]


class OpenAI:
    """The handlers of completions and chats."""

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
            return self._stream(inputs, resumable(request, inputs, CompletionWriter(form)), shown)
        answers = await while_connected(request, self._context.client.answers(inputs))
        return json_response(form.whole(answers), headers=_timing_header(shown, answers))

    async def chat(self, request: Request) -> Response:
        body = await read_lenient_body(request, ChatRequest)
        identity = Identity.make("chatcmpl-", body.rid, self._context.model.name, body.resume)
        use_openai_names(body, input_ids="input_ids" if body.input_ids is not None else "messages")
        given = read_chat(body, identity, self._context.model.context_length)
        plan = plan_answers(
            self._context.settings,
            chat_tools(body),
            self._context.tokenizer,
            separate=body.separate_reasoning is not False,
            stream_reasoning=body.stream_reasoning is not False,
        )
        prompt, continued = await self._chat_prompt(body, plan)
        given["sampling_params"] = sampling = plan.sampling(given["sampling_params"])
        given["thinking"] = plan.marks(sampling, prompt.text, continued, body.max_thinking_tokens)
        inputs = await self._context.read_inputs(input_ids=prompt.ids, **given)
        wanted = (body.top_logprobs or 0) if body.logprobs else None
        shown = Shown.of(body, body.stream_options, logprobs=wanted, samples=body.n or 1)
        form = ChatForm(identity, shown, self._speller, plan.answers(prompt.text, continued))
        if body.stream:
            writer = resumable(request, inputs, ChatWriter(form), opening_events=1)
            return self._stream(inputs, writer, shown)
        answers = await while_connected(request, self._context.client.answers(inputs))
        return json_response(form.whole(answers), headers=_timing_header(shown, answers))

    async def _chat_prompt(self, body: ChatRequest, plan: AnswerPlan) -> tuple[Rendered, str]:
        """The prompt, and the assistant's words that the answer goes on with."""
        if body.input_ids is not None:
            return Rendered(body.input_ids, ""), ""
        tokenizer = self._context.require_tokenizer("messages")
        messages = read_messages(body.messages)
        prompt = await aside(text_size(messages), lambda: chat_prompt(body, messages, tokenizer, plan.tools))
        return prompt, messages[-1]["content"] if body.continue_final_message else ""

    def _echoes(self, body: CompletionRequest, inputs: Inputs) -> list[str]:
        """The text of each prompt, if it is to be shown again."""
        if not body.echo:
            return []
        if isinstance(body.prompt, str):
            return [body.prompt]
        if isinstance(body.prompt[0], str):
            return [str(text) for text in body.prompt]
        tokenizer = self._context.require_tokenizer("echo")
        skip = body.skip_special_tokens is not False
        return [tokenizer.decode(prompt.ids.tolist(), skip) for prompt in inputs.prompts[:: samples_of(body)]]

    def _stream(self, inputs: Inputs, writer: Writer, shown: Shown) -> Response:
        return stream_answers(self._context.client, inputs, writer, broken_stream, timed=shown.timings)


def broken_stream(failure: Failure) -> bytes:
    """The last events of a stream that cannot go on."""
    return json_event(openai_shape(failure)) + DONE


def _timing_header(shown: Shown, answers: list[Answer]) -> Mapping[str, str]:
    return timing_headers(answers) if shown.timings and answers else {}
