"""LiteLLM as a back end: a hundred providers' chat APIs behind one call in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from bough.core.errors import RequestError
from bough.lang.backends.base import GenOutput, GenRequest
from bough.lang.backends.chat_api import ChatApiBackend, image_parts, load_sdk, meta_of, stops_of
from bough.lang.backends.openai import FIELDS, response_format, usage_of


class LiteLLM(ChatApiBackend):
    """A model under LiteLLM's name for it, such as `openai/gpt-4o`. `args` (`api_base`, `api_key` …) go to each call;
    `base_url` is taken for `api_base`."""

    service = "LiteLLM"
    known = frozenset({*FIELDS, "top_k", "max_new_tokens", "stop", "json_schema"})

    def __init__(self, model: str, **args: Any) -> None:
        super().__init__()
        self._sdk = load_sdk("litellm", "litellm")
        self.model = model
        if "base_url" in args:
            args["api_base"] = args.pop("base_url")
        self._args = args

    async def generate(self, request: GenRequest) -> GenOutput:
        answer = await self._create(**self._arguments(request))
        texts = [choice.message.content or "" for choice in answer.choices]
        metas = [meta_of(answer.id, choice.finish_reason, usage_of(answer.usage)) for choice in answer.choices]
        for meta in metas[1:]:  # the usage is that of all choices
            meta.update(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        return GenOutput(texts, metas)

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        text, reason, usage = "", None, None
        arguments = {**self._arguments(request), "stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await self._create(**arguments):
            usage = getattr(chunk, "usage", None) or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
            yield GenOutput([text], [meta_of(chunk.id, reason, usage_of(usage))])

    async def _create(self, **arguments: Any) -> Any:
        try:
            return await self._sdk.acompletion(**arguments)
        except self._sdk.BadRequestError as error:
            raise RequestError(f"{self.service}: {error}", status_code=400) from error

    def _arguments(self, request: GenRequest) -> dict[str, Any]:
        fields = self.asked(request)
        arguments = {name: fields[field] for field, name in FIELDS.items() if field in fields}
        if "top_k" in fields:
            arguments["top_k"] = fields["top_k"]
        if "stop" in fields:
            arguments["stop"] = stops_of(fields)
        if "json_schema" in fields:
            arguments["response_format"] = response_format(fields["json_schema"])
        messages = [{**m, "content": image_parts(m["content"])} for m in self.conversation(request)]
        return {
            **self._args,
            **arguments,
            "model": self.model,
            "max_tokens": fields["max_new_tokens"],
            "messages": messages,
        }
