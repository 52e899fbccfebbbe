"""Whether the server is well, and what it serves."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.client.answer import WEIGHT_VERSION
from bough.client.inputs import Inputs
from bough.core.errors import RequestError
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from bough.server.errors import HttpError
from bough.server.native.schemas import Status
from bough.server.responses import json_response
from bough.tokenizer.tokenizer import Tokenizer
from bough.version import __version__

HEALTH_TIMEOUT_S = 20.0
LOOK_S = 0.5  # how often one looks whether others' tokens have come


def info_routes(context: ServerContext) -> list[Endpoint]:
    get: dict[str, Any] = {"methods": ("GET",)}
    open_get: dict[str, Any] = {"methods": ("GET",), "access": "open"}
    well = partial(health, context)
    info = partial(model_info, context)
    server = partial(server_info, context)
    return [
        Endpoint(
            path="/health",
            handler=well,
            summary="200 while the engine answers; 503 while it loads, drains or is stuck",
            answer=Status,
            **open_get,
        ),
        Endpoint(
            path="/health_generate",
            handler=partial(health_generate, context),
            summary="Generate one token, to see that the whole way works",
            answer=Status,
            **get,
        ),
        Endpoint(path="/model_info", handler=info, summary="What is served", answer=dict[str, Any], **get),
        Endpoint(path="/get_model_info", handler=info, summary="Same as /model_info", answer=dict[str, Any], **get),
        Endpoint(
            path="/server_info", handler=server, summary="Settings, limits and load", answer=dict[str, Any], **get
        ),
        Endpoint(path="/get_server_info", handler=server, summary="Same as /server_info", answer=dict[str, Any], **get),
        Endpoint(path="/ping", handler=well, summary="Same as /health, for SageMaker", answer=Status, **open_get),
        Endpoint(path="/", handler=here, summary="That there is a server", answer=Status, **open_get),
    ]


async def health(context: ServerContext, request: Request) -> Response:
    if context.watchdog is not None and context.watchdog.stuck:
        raise HttpError(503, context.watchdog.complaint, "EngineStuckError")
    return json_response(Status("ok"))


async def here(request: Request) -> Response:
    return json_response(Status("ok"))


async def health_generate(context: ServerContext, request: Request) -> Response:
    """Any output counts, that of others too: on a busy server the one token may have to wait for its turn."""
    inputs = context.reader.read(
        input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0}, rid=f"HEALTH_CHECK_{uuid.uuid4().hex}"
    )
    inputs = dataclasses.replace(inputs, watched=False)
    began = time.monotonic()
    task = asyncio.ensure_future(_answered(context, inputs))
    try:
        while time.monotonic() - began < HEALTH_TIMEOUT_S:
            await asyncio.wait({task}, timeout=LOOK_S)
            if task.done():
                task.result()
                return json_response(Status("ok"))
            if context.client.heard_at > began:
                return json_response(Status("ok"))
    except RequestError as error:
        raise HttpError(503, f"The engine refuses to generate: {error.message}", "EngineStuckError") from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    raise HttpError(503, f"The engine made no token within {HEALTH_TIMEOUT_S:g} s.", "EngineStuckError")


async def _answered(context: ServerContext, inputs: Inputs) -> None:
    """Comes back with the token. A full queue has no place for it, and is no illness: then others' tokens must tell."""
    try:
        await context.client.answers(inputs)
    except RequestError as error:
        if error.status_code != 429:
            raise
        await asyncio.Event().wait()


def describe_model(context: ServerContext) -> dict[str, Any]:
    model = context.model
    return {
        "model_path": model.path,
        "tokenizer_path": model.tokenizer_path,
        "served_model_name": model.name,
        "is_generation": True,
        "weight_version": WEIGHT_VERSION,
        "architecture": model.architecture,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "has_chat_template": context.tokenizer is not None and context.tokenizer.has_chat_template,
        "chat_template": describe_template(context.tokenizer),
        "preferred_sampling_params": None,
    }


def describe_template(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """All that a client needs to render conversations as the server would."""
    template = None if tokenizer is None else tokenizer.chat_template
    if tokenizer is None or template is None:
        return None
    return {
        "sources": template.sources,
        "variables": template.variables,
        "first_token": tokenizer.first_token_text,
    }


async def model_info(context: ServerContext, request: Request) -> Response:
    return json_response(describe_model(context))


async def server_info(context: ServerContext, request: Request) -> Response:
    state = await context.state()
    return json_response(
        {
            **context.settings.to_shown(),
            "tp_size": 1,
            "dp_size": 1,
            **context.model.limits,
            **describe_model(context),
            "version": __version__,
            "started": context.model.created,
            "internal_states": [] if state is None else [state],
        }
    )
