"""OpenAI's API, and everything that speaks it (`base_url=`), as a back end: chat models and, for text, completions."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bough.core.errors import RequestError
from bough.lang.backends.base import GenOutput, GenRequest, Scores
from bough.lang.backends.chat_api import ChatApiBackend, image_parts, load_sdk, meta_of, stops_of
from bough.lang.chat import ChatFormat
from bough.lang.named_templates import format_by_name

TEXT_MODELS = ("davinci-002", "babbage-002", "gpt-3.5-turbo-instruct")
REASONING_MODELS = re.compile(r"^(o\d|gpt-5)")  # they name the limit differently
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "n": "n",
}


class OpenAI(ChatApiBackend):
    """A model behind OpenAI's API. `client_args` (`base_url`, `api_key`, `timeout` …) go to the SDK's client. A chat
    model takes messages; any other continues text, in which roles are written as `chat_template` names it."""

    service = "OpenAI's API"
    known = frozenset({*FIELDS, "max_new_tokens", "stop", "json_schema"})

    def __init__(
        self, model: str, is_chat_model: bool | None = None, chat_template: str | None = None, **client_args: Any
    ) -> None:
        super().__init__()
        sdk = load_sdk("openai", "openai")
        self._client = sdk.AsyncOpenAI(**client_args)
        self._refused = (sdk.APIStatusError,)
        self.model = model
        self.chat_only = model not in TEXT_MODELS if is_chat_model is None else is_chat_model
        if not self.chat_only:
            self.known -= {"json_schema"}
        self._format = format_by_name(chat_template or "default")

    @property
    def chat_format(self) -> ChatFormat:
        return self._format

    async def generate(self, request: GenRequest) -> GenOutput:
        arguments = self._arguments(request)
        answer = await self._create(**arguments)
        texts = [(choice.message.content if self.chat_only else choice.text) or "" for choice in answer.choices]
        metas = [meta_of(answer.id, choice.finish_reason, usage_of(answer.usage)) for choice in answer.choices]
        for choice, meta in zip(answer.choices, metas, strict=True):
            _add_logprobs(choice, meta)
        for meta in metas[1:]:  # the usage is that of all choices
            meta.update(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        return GenOutput(texts, metas)

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        arguments = {**self._arguments(request), "stream": True, "stream_options": {"include_usage": True}}
        text, reason, usage = "", None, None
        async for chunk in await self._create(**arguments):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += (choice.delta.content if self.chat_only else choice.text) or ""
                reason = choice.finish_reason or reason
            yield GenOutput([text], [meta_of(chunk.id, reason, usage_of(usage))])

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        if self.chat_only:
            return await super().score(text, choices, unconditional=unconditional)
        if unconditional:
            raise RequestError(
                f"{self.service} scores no text that stands alone, which unconditional_likelihood_normalized needs; "
                "use token_length_normalized or greedy_token_selection."
            )
        answer = await self._create(
            model=self.model,
            prompt=[text + choice for choice in choices],
            max_tokens=0,
            echo=True,
            logprobs=1,
            temperature=0.0,
        )
        columns = [choice.logprobs for choice in sorted(answer.choices, key=lambda choice: choice.index)]
        # The token over the border belongs to the choices; where it begins, all choices begin.
        border = min(_border(column, len(text)) for column in columns)
        tokens = [
            [
                (logprob, None, token)
                for logprob, token, start in _tokens(column)
                if start >= border and logprob is not None
            ]
            for column in columns
        ]
        if not all(tokens):
            raise RequestError("select() scores its choices after some text; add text to the state before it.")
        return Scores(tokens, None, [meta_of(answer.id, "stop", usage_of(answer.usage))])

    # ------------------------------------------------------------------------------------------------------------------

    async def _create(self, **arguments: Any) -> Any:
        service = self._client.chat.completions if self.chat_only else self._client.completions
        try:
            return await service.create(**arguments)
        except self._refused as error:
            raise RequestError(f"{self.service}: {error}", status_code=error.status_code) from error

    def _arguments(self, request: GenRequest) -> dict[str, Any]:
        fields = self.asked(request)
        arguments = {name: fields[field] for field, name in FIELDS.items() if field in fields}
        arguments["model"] = self.model
        if self.chat_only:
            arguments["messages"] = [{**m, "content": image_parts(m["content"])} for m in self.conversation(request)]
        else:
            arguments["prompt"] = request.text
        longer_name = self.chat_only and REASONING_MODELS.match(self.model)
        arguments["max_completion_tokens" if longer_name else "max_tokens"] = fields["max_new_tokens"]
        if "stop" in fields:
            arguments["stop"] = stops_of(fields)
        if "json_schema" in fields:
            arguments["response_format"] = response_format(fields["json_schema"])
        if request.options.get("return_logprob"):
            top = request.options.get("top_logprobs_num") or 0
            arguments |= {"logprobs": True, "top_logprobs": top} if self.chat_only else {"logprobs": max(1, top)}
        return arguments


def response_format(schema: str) -> dict[str, Any]:
    """A schema in the API's form."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(schema)}}


def usage_of(usage: Any) -> tuple[int | None, int | None, int | None]:
    """(prompt, cached, completion) tokens."""
    if usage is None:
        return (0, 0, 0)
    details = getattr(usage, "prompt_tokens_details", None)
    return (usage.prompt_tokens, getattr(details, "cached_tokens", 0), usage.completion_tokens)


def _add_logprobs(choice: Any, meta: dict[str, Any]) -> None:
    given = getattr(choice, "logprobs", None)
    if given is None:
        return
    if getattr(given, "content", None) is not None:
        meta["output_token_logprobs"] = [(entry.logprob, None, entry.token) for entry in given.content]
    elif getattr(given, "tokens", None):
        pairs = zip(given.token_logprobs, given.tokens, strict=True)
        meta["output_token_logprobs"] = [(logprob, None, token) for logprob, token in pairs]


def _tokens(column: Any) -> list[tuple[float | None, str, int]]:
    return list(zip(column.token_logprobs, column.tokens, column.text_offset, strict=True))


def _border(column: Any, length: int) -> int:
    """Where the first token begins that reaches past the text."""
    return next(start for _, token, start in _tokens(column) if start + len(token) > length)
