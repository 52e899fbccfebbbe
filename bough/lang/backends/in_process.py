"""The engine in this process as a back end. Requests of one turn of the loop reach it together, as one batch."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bough.core.errors import EngineDeadError, RequestError
from bough.lang.backends.base import Backend, GenOutput, GenRequest, media_url
from bough.lang.chat import ChatFormat, NoChat, TemplateFormat
from bough.lang.choices import Scores, plan_scoring

if TYPE_CHECKING:
    from bough.launch.engine import Engine


class EngineBackend(Backend):
    """Talks to an `Engine`, which it does not keep alive."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine_ref = weakref.ref(engine)

    @property
    def _engine(self) -> Engine:
        engine = self._engine_ref()
        if engine is None:
            raise EngineDeadError("The engine of this back end is gone.")
        return engine

    @cached_property
    def chat_format(self) -> ChatFormat:
        tokenizer = self._engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            return NoChat()
        return TemplateFormat(tokenizer.chat_template, tokenizer.first_token_text)

    async def generate(self, request: GenRequest) -> GenOutput:
        return output_of(await self._engine.async_generate(request.text, dict(request.sampling), **options_of(request)))

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        pieces = await self._engine.async_generate(
            request.text, dict(request.sampling), stream=True, **options_of(request)
        )
        async for piece in pieces:
            yield output_of(piece)

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("This engine has no tokenizer (--skip-tokenizer-init), so select() cannot score texts.")
        text_ids, *full_ids = tokenizer.encode_batch([text, *(text + choice for choice in choices)])
        plan = plan_scoring(text_ids, full_ids, unconditional=unconditional)
        return plan.read(output_of(await self._engine.async_generate(**plan.request)).metas)

    async def async_cache_prefix(self, text: str) -> None:
        await self._engine.async_generate(text, {"max_new_tokens": 0})

    async def async_flush_cache(self) -> bool:
        return await asyncio.to_thread(self._engine.flush_cache)

    async def async_server_info(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._engine.get_server_info)


def output_of(answer: Any) -> GenOutput:
    """An engine's output, or the list of them that n > 1 gives."""
    outputs = answer if isinstance(answer, list) else [answer]
    for output in outputs:
        reason = output["meta_info"]["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise RequestError(reason.get("message") or "The request was aborted.")
    return GenOutput([output["text"] for output in outputs], [output["meta_info"] for output in outputs])


def options_of(request: GenRequest) -> dict[str, Any]:
    options = dict(request.options)
    if request.images:
        options["image_data"] = [media_url(source) for source in request.images]
    if request.videos:
        options["video_data"] = [{"url": media_url(path), "num_frames": frames} for path, frames in request.videos]
    return options
