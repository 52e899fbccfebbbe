"""The engine in this process as a back end. Requests of one turn of the loop reach it together, as one batch."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from bough.core.errors import EngineDeadError, RequestError
from bough.lang.backends.base import GenOutput, GenRequest, NativeBackend, body_of, output_of
from bough.lang.chat import TemplateFormat

if TYPE_CHECKING:
    from bough.launch.engine import Engine


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
