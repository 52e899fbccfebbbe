"""Anthropic's API as a back end."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from bough.core.errors import RequestError
from bough.lang.backends.base import GenOutput, GenRequest, image_data, stops_of
from bough.lang.backends.chat_api import ChatApiBackend, load_sdk, meta_of, with_media


class Anthropic(ChatApiBackend):
    """A model behind Anthropic's API. `client_args` (`base_url`, `api_key` …) go to the SDK's client."""

    service = "Anthropic's API"
    known = frozenset({"temperature", "top_p", "top_k", "max_new_tokens", "stop", "n"})

    def __init__(self, model: str, **client_args: Any) -> None:
        super().__init__()
        sdk = load_sdk("anthropic", "anthropic")
        self._complete = sdk.AsyncAnthropic(**client_args).messages.create
        self._refused = (sdk.APIStatusError,)
        self.model = model

    async def generate(self, request: GenRequest) -> GenOutput:
        arguments = self._arguments(request)
        # The API gives one answer to a call.
        answers = await asyncio.gather(*(self._create(**arguments) for _ in range(request.sampling.get("n", 1))))
        texts = ["".join(block.text for block in answer.content if block.type == "text") for answer in answers]
        return GenOutput(texts, [meta_of(a.id, a.stop_reason, _usage_of(a.usage)) for a in answers])

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        text, identity, reason, prompt, cached, written = "", None, None, 0, 0, 0
        async for event in await self._create(**self._arguments(request), stream=True):
            if event.type == "message_start":
                identity = event.message.id
                prompt, cached, written = _usage_of(event.message.usage)
            elif event.type == "content_block_delta" and event.delta.type == "text_delta":
                text += event.delta.text
            elif event.type == "message_delta":
                reason, written = event.delta.stop_reason, event.usage.output_tokens
            else:
                continue
            yield GenOutput([text], [meta_of(identity, reason, (prompt, cached, written))])

    def _arguments(self, request: GenRequest) -> dict[str, Any]:
        fields = self.asked(request)
        messages = self.conversation(request)
        # The API takes these, but newer SDKs have no arguments for them.
        chosen = {name: fields[name] for name in ("temperature", "top_p", "top_k") if name in fields}
        arguments: dict[str, Any] = {"extra_body": chosen} if chosen else {}
        system = [message["content"] for message in messages if message["role"] == "system"]
        if system:
            arguments["system"] = "\n\n".join(system)
        if "stop" in fields:
            arguments["stop_sequences"] = stops_of(fields)
        shown = [m for m in messages if m["role"] != "system"]
        return {
            **arguments,
            "model": self.model,
            "max_tokens": fields["max_new_tokens"],
            "messages": [{"role": m["role"], "content": with_media(m["content"], _image_block)} for m in shown],
        }


def _image_block(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        raise RequestError("Anthropic's API takes no video().")
    source = part["image"]
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return {"type": "image", "source": {"type": "url", "url": source}}
    media_type, data = image_data(source)
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def _usage_of(usage: Any) -> tuple[int, int, int]:
    """(prompt, cached, completion) tokens; the API does not count cached ones as input."""
    cached = getattr(usage, "cache_read_input_tokens", 0) or 0
    return (usage.input_tokens + cached, cached, usage.output_tokens)
