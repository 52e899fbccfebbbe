"""An engine as a back end, which speaks SGLang's native API: that of a server, Bough's or any other, to which it owns
the connections, or one in this process. Requests of one turn of the loop reach this one together, as one batch."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bough.core.errors import EngineDeadError, RequestError
from bough.lang.backends.base import GenOutput, GenRequest, NativeBackend, body_of, output_of
from bough.lang.chat import ChatFormat, NoChat, TemplateFormat, format_by_name, format_by_path
from bough.lang.loop import wait_for
from bough.tokenizer.chat_template import ChatTemplate

if TYPE_CHECKING:
    import httpx

    from bough.launch.engine import Engine

CONNECT_TIMEOUT_S = 10.0  # an answer may take as long as it takes; see `timeout_s` of `run`
INTRODUCTION_S = 60.0  # for the first answer, before there is any program


class RuntimeEndpoint(NativeBackend):
    """The server at `base_url`. `verify` is False, or a file with certificates, for HTTPS with one's own; the chat
    template is the server's, unless one is named."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        super().__init__()
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self.verify = verify
        named = None if chat_template_name is None else format_by_name(chat_template_name)
        self.model_info: dict[str, Any] = wait_for(self._introduction())
        self.chat_format = named or _format_of(self.model_info)

    def get_model_name(self) -> str:
        return str(self.model_info["model_path"])

    async def ask(self, body: dict[str, Any]) -> Any:
        return await self._call("/generate", body)

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        import httpx

        body = {**body_of(request), "stream": True}
        try:
            async with self._client.stream("POST", "/generate", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _refusal(response)
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise RequestError(event["error"]["message"])
                        yield output_of(event)
        except httpx.TransportError as error:
            raise self._dead(error) from error

    async def encode(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = (await self._call("/tokenize", {"prompt": texts}))["tokens"]
        return ids

    async def async_flush_cache(self) -> bool:
        try:
            await self._call("/flush_cache")
        except RequestError:
            return False
        return True

    async def async_server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self._call("/get_server_info", method="GET")
        return info

    # ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """Made on the background loop, to which it belongs."""
        import httpx

        return httpx.AsyncClient(
            base_url=self.base_url,
            headers={} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"},
            verify=True if self.verify is None else self.verify,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def _introduction(self) -> dict[str, Any]:
        try:
            info: dict[str, Any] = await asyncio.wait_for(self._call("/get_model_info", method="GET"), INTRODUCTION_S)
        except TimeoutError:
            text = f"The server at {self.base_url} did not say within {INTRODUCTION_S:g} s what it is"
            raise EngineDeadError(f"{text}; is it a server of Bough's or SGLang's, and has it started?") from None
        return info

    async def _call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        import httpx

        try:
            response = await self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            raise self._dead(error) from error
        if response.status_code != 200:
            raise _refusal(response)
        return json.loads(response.content)

    def _dead(self, error: Exception) -> EngineDeadError:
        return EngineDeadError(
            f"The server at {self.base_url} cannot be reached, or has ended: {type(error).__name__} {error}".rstrip()
        )


def _refusal(response: httpx.Response) -> RequestError:
    try:
        message = json.loads(response.content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"The server answered {response.status_code}: {response.text[:200]}"
    return RequestError(message, status_code=response.status_code)


def _format_of(info: dict[str, Any]) -> ChatFormat:
    """The template that the server tells of; others are known by the model's name."""
    if "chat_template" not in info:
        return format_by_path(str(info.get("model_path", "")))
    template = info["chat_template"]
    if template is None:
        return NoChat()
    own = ChatTemplate(template["sources"], template["variables"], template.get("placeholders"))
    return TemplateFormat(own, template["first_token"])


class EngineBackend(NativeBackend):
    """Talks to an `Engine`, which it does not keep alive."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine_ref = weakref.ref(engine)
        tokenizer = engine.tokenizer
        if tokenizer is not None and tokenizer.chat_template is not None:
            self.chat_format = TemplateFormat(tokenizer.chat_template, tokenizer.first_token_text)

    @property
    def _engine(self) -> Engine:
        engine = self._engine_ref()
        if engine is None:
            raise EngineDeadError("The engine of this back end is gone.")
        return engine

    async def ask(self, body: dict[str, Any]) -> Any:
        return await self._engine.async_generate(body.pop("text", None), **body)

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        async for piece in await self.ask({**body_of(request), "stream": True}):
            yield output_of(piece)

    async def encode(self, texts: list[str]) -> list[list[int]]:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("This engine has no tokenizer (--skip-tokenizer-init), so select() cannot score texts.")
        return tokenizer.encode_batch(texts)

    async def async_flush_cache(self) -> bool:
        return await asyncio.to_thread(self._engine.flush_cache)

    async def async_server_info(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._engine.get_server_info)
