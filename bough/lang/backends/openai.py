"""OpenAI's API and everything that speaks it (`base_url=`), LiteLLM with a hundred providers behind the same form, and
what to use for SGLang's back ends that are not built here."""

import dataclasses
import functools
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn

from bough.core.errors import RequestError, SettingsError
from bough.lang.backends.base import GenOutput, GenRequest, media_url, stops_of
from bough.lang.backends.chat_api import ChatApiBackend, load_sdk, meta_of, with_media
from bough.lang.chat import format_by_name
from bough.lang.choices import Scores
from bough.lang.primitives import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR

TEXT_MODELS = ("davinci-002", "babbage-002", "gpt-3.5-turbo-instruct")
REASONING_MODELS = re.compile(r"^(o\d|gpt-5)")  # they name the limit differently
FIELDS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "n", "top_k")  # sent under their own names
# What `dtype` says by a regex, which the API does not have, as the schema of a value.
VALUES: dict[Any, dict[str, str]] = {
    REGEX_INT: {"type": "integer"},
    REGEX_FLOAT: {"type": "number"},
    REGEX_BOOL: {"type": "boolean"},
    REGEX_STR: {"type": "string", "pattern": f"^{REGEX_STR[1:-1]}$"},
}
UNFINISHED = re.compile(r'\s*\{\s*"value"\s*:\s*(?:([-+.\d]+)|("(?:[^"\\]|\\[^u]|\\u[\da-fA-F]{4})*)("?))')
WRAPPER_TOKENS = 16  # for the JSON around a value, which the program's limit does not know of


class OpenAI(ChatApiBackend):
    """A model behind OpenAI's API. `client_args` (`base_url`, `api_key`, `timeout` …) go to the SDK's client. A chat
    model takes messages; any other continues text, in which roles are written as `chat_template` names it."""

    service = "OpenAI's API"
    known = frozenset({*FIELDS, "max_new_tokens", "stop", "json_schema"}) - {"top_k"}
    limit_name = "max_tokens"
    has_logprobs = True

    def __init__(
        self, model: str, is_chat_model: bool | None = None, chat_template: str | None = None, **client_args: Any
    ) -> None:
        super().__init__()
        sdk = load_sdk("openai", "openai")
        client = sdk.AsyncOpenAI(**client_args)
        self._refused = (sdk.APIStatusError,)
        self.model = model
        self.chat_only = model not in TEXT_MODELS if is_chat_model is None else is_chat_model
        self._complete = client.chat.completions.create if self.chat_only else client.completions.create
        if not self.chat_only:
            self.known -= {"json_schema"}
        elif REASONING_MODELS.match(model):
            self.limit_name = "max_completion_tokens"
        self.chat_format = format_by_name(chat_template or "default")

    async def generate(self, request: GenRequest) -> GenOutput:
        answer = await self._create(**self._arguments(request))
        texts = [(choice.message.content if self.chat_only else choice.text) or "" for choice in answer.choices]
        metas = [meta_of(answer.id, choice.finish_reason, usage_of(answer.usage)) for choice in answer.choices]
        for choice, meta in zip(answer.choices, metas, strict=True):
            _add_logprobs(choice, meta)
        for meta in metas[1:]:  # the usage is that of all choices
            meta.update(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        if request.sampling.get("regex") in VALUES:
            cut = [choice.finish_reason == "length" for choice in answer.choices]
            texts = [self._value(*each, request.sampling) for each in zip(texts, cut, strict=True)]
        return GenOutput(texts, metas)

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        if request.sampling.get("regex") in VALUES:  # it is read when its JSON is complete
            yield await self.generate(request)
            return
        arguments = {**self._arguments(request), "stream": True, "stream_options": {"include_usage": True}}
        text, reason, usage = "", None, None
        async for chunk in await self._create(**arguments):
            usage = getattr(chunk, "usage", None) or usage
            for choice in chunk.choices:
                text += (choice.delta.content if self.chat_only else choice.text) or ""
                reason = choice.finish_reason or reason
            yield GenOutput([text], [meta_of(chunk.id, reason, usage_of(usage))])

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        if self.chat_only:
            return await super().score(text, choices, unconditional=unconditional)
        if unconditional:
            told = f"{self.service} scores no text that stands alone, which unconditional_likelihood_normalized needs"
            raise RequestError(f"{told}; use token_length_normalized or greedy_token_selection.")
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

    def _arguments(self, request: GenRequest) -> dict[str, Any]:
        value = VALUES.get(request.sampling.get("regex")) if self.chat_only else None
        fields = self.asked(request if value is None else _wrapped(request, value))
        arguments = {name: fields[name] for name in FIELDS if name in fields}
        arguments |= {"model": self.model, self.limit_name: fields["max_new_tokens"]}
        if self.chat_only:
            messages = self.conversation(request)
            arguments["messages"] = [{**m, "content": with_media(m["content"], _media_block)} for m in messages]
        else:
            arguments["prompt"] = request.text
        if "stop" in fields:
            arguments["stop"] = stops_of(fields)
        if "json_schema" in fields:
            schema = {"name": "answer", "schema": json.loads(fields["json_schema"]), "strict": value is not None}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.has_logprobs and request.options.get("return_logprob"):
            top = request.options.get("top_logprobs_num") or 0
            arguments |= {"logprobs": True, "top_logprobs": top} if self.chat_only else {"logprobs": max(1, top)}
        return arguments

    def _value(self, answer: str, cut: bool, sampling: Mapping[str, Any]) -> str:
        """The value in the JSON as an engine writes it that is held to the regex, up to a stop."""
        try:
            value = json.loads(answer)["value"]
        except (ValueError, TypeError, KeyError):
            value = None
        if isinstance(value, float):
            value = f"{Decimal(str(value)):f}"  # without an exponent
        elif isinstance(value, str):
            value = f'"{value}"'
        begun = _begun(answer, sampling["regex"]) if cut and value is None else ""
        text = begun or str(value)
        if not begun and not re.fullmatch(sampling["regex"], text):
            raise RequestError(
                f"{self.service} answered {answer!r:.80}, which is no JSON object with a value of this form: "
                f"{VALUES[sampling['regex']]}; raise max_tokens if it is cut off, or use a model that keeps to schemas."
            )
        for stop in stops_of(sampling):
            text = text.partition(stop)[0]
        return text


class LiteLLM(OpenAI):
    """A model under LiteLLM's name for it, such as `openai/gpt-4o`. `args` (`api_base`, `api_key` …) go to each call;
    `base_url` is taken for `api_base`."""

    service = "LiteLLM"
    known = OpenAI.known | {"top_k"}
    has_logprobs = False

    def __init__(self, model: str, **args: Any) -> None:
        ChatApiBackend.__init__(self)
        sdk = load_sdk("litellm", "litellm")
        if "base_url" in args:
            args["api_base"] = args.pop("base_url")
        self.model = model
        self._complete = functools.partial(sdk.acompletion, **args)
        self._refused = (sdk.BadRequestError,)


def VertexAI(model_name: str = "MODEL", *args: Any, **kwargs: Any) -> NoReturn:  # SGLang's name
    text = "There is no back end of its own for Vertex AI"
    raise SettingsError(f"{text}; use LiteLLM('vertex_ai/{model_name}') (pip install 'bough[litellm]').")


def Crusoe(model_name: str = "MODEL", *args: Any, **kwargs: Any) -> NoReturn:  # SGLang's name
    text, other = "There is no back end of its own for Crusoe", f"OpenAI('{model_name}', base_url=…, api_key=…)"
    raise SettingsError(f"{text}; use {other} with the address of its API (pip install 'bough[openai]').")


def _wrapped(request: GenRequest, value: Mapping[str, str]) -> GenRequest:
    """Asks for an object with the value in it, as strict schemas must be. Its stops are for the value, not the JSON."""
    schema = {"type": "object", "properties": {"value": value}, "required": ["value"], "additionalProperties": False}
    sampling = {name: given for name, given in request.sampling.items() if name not in ("regex", "stop")}
    sampling |= {"json_schema": json.dumps(schema), "max_new_tokens": sampling["max_new_tokens"] + WRAPPER_TOKENS}
    return dataclasses.replace(request, sampling=sampling)


def _begun(answer: str, regex: str) -> str:
    """What a JSON that was cut off has of its value, as an engine's answer to the regex is cut off."""
    if (found := UNFINISHED.match(answer)) is None:
        return ""
    number, string, end = found.groups()
    part = re.match(regex.removesuffix('"') + '"?', number or '"' + json.loads(f'{string}"', strict=False) + end)
    return "" if part is None else part[0]


def _media_block(part: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI itself takes no video; servers that speak its protocol know it by this name."""
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": media_url(part["image"])}}
    return {"type": "video_url", "video_url": {"url": media_url(part["video"]), "num_frames": part["num_frames"]}}


def usage_of(usage: Any) -> tuple[int | None, int | None, int | None]:
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
