"""Management: empty the cache, abort requests, pause and continue, record a profile, update weights, release memory."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import RequestError
from bough.messages.outputs import Reply
from bough.server.bodies import given_fields, read_body, settings_of
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint, Query, json_response
from bough.server.errors import HttpError, failure_of, native_shape
from bough.server.native.schemas import (
    AbortBody,
    MemoryBody,
    Nothing,
    Outcome,
    PauseBody,
    ProfileBody,
    UpdateWeightsBody,
    WeightsOutcome,
)
from bough.server.streaming import while_connected

RETRY_S = 0.1  # between two looks whether the engine has become idle
LONGEST_WAIT_S = 3600.0


def control_routes(context: ServerContext) -> list[Endpoint]:
    return [
        Endpoint(
            "/flush_cache",
            partial(flush_cache, context),
            "Forget all cached prefixes; 400 if requests still run after `timeout` seconds",
            methods=("GET", "POST"),
            access="admin",
            answer=Outcome,
            queries=(Query("timeout", float, "seconds to wait until nothing runs"),),
        ),
        Endpoint(
            "/abort_request",
            partial(abort_request, context),
            "End a request, or all",
            access="admin",
            body=AbortBody,
            answer=Outcome,
        ),
        Endpoint(
            "/pause_generation",
            partial(pause_generation, context),
            "Stop computing until /continue_generation; requests that arrive in the meantime wait",
            access="admin",
            body=PauseBody,
            answer=Outcome,
        ),
        Endpoint(
            "/continue_generation",
            partial(continue_generation, context),
            "Go on after /pause_generation",
            access="admin",
            body=Nothing,
            answer=Outcome,
        ),
    ]


def outcome_of(reply: Reply) -> Response:
    """The engine's reply to a command; a refusal becomes a 400."""
    if not reply.ok:
        raise RequestError(reply.message)
    return json_response(Outcome(True, reply.message))


async def flush_cache(context: ServerContext, request: Request) -> Response:
    deadline = time.monotonic() + _timeout_of(request)
    await read_body(request, Nothing)

    async def flush() -> Reply:
        while True:
            reply = await context.client.flush_cache()
            left = deadline - time.monotonic()
            if reply.ok or left <= 0:
                return reply
            await asyncio.sleep(min(left, RETRY_S))

    return outcome_of(await while_connected(request, flush()))


def _timeout_of(request: Request) -> float:
    given = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= LONGEST_WAIT_S:
        raise RequestError(
            f"timeout must be a number of seconds between 0 and {LONGEST_WAIT_S:g}, got {given!r}.", field="timeout"
        )
    return timeout_s


async def abort_request(context: ServerContext, request: Request) -> Response:
    body = await read_body(request, AbortBody)
    if not body.rid and not body.abort_all:
        raise RequestError("Give the rid of a request, or abort_all: true.", field="rid")
    context.client.abort(body.rid or "", abort_all=bool(body.abort_all))
    return json_response(Outcome(True, "Whatever runs under that name is ended."))


async def pause_generation(context: ServerContext, request: Request) -> Response:
    body = await read_body(request, PauseBody)
    return outcome_of(await while_connected(request, context.client.pause(body.mode or "abort")))


async def continue_generation(context: ServerContext, request: Request) -> Response:
    await read_body(request, Nothing)
    return outcome_of(await while_connected(request, context.client.resume()))


OPTIONS = ("output_dir", "start_step", "num_steps", "with_stack", "record_shapes")


def profile_routes(context: ServerContext) -> list[Endpoint]:
    return [
        Endpoint(
            "/start_profile",
            partial(start_profile, context),
            "Record a trace until /stop_profile, or for num_steps steps",
            methods=("GET", "POST"),
            access="admin",
            body=ProfileBody,
            answer=Outcome,
        ),
        Endpoint(
            "/stop_profile",
            partial(stop_profile, context),
            "End the recording and write its file",
            methods=("GET", "POST"),
            access="admin",
            body=Nothing,
            answer=Outcome,
        ),
    ]


async def start_profile(context: ServerContext, request: Request) -> Response:
    body = await read_body(request, ProfileBody)
    for name in ("profile_by_stage", "merge_profiles"):
        if getattr(body, name):
            raise RequestError(f"{name} is not supported by this engine; leave it out.", field=name)
    settings = settings_of(request)
    if body.output_dir is not None and settings.api_key is not None and settings.admin_api_key is None:
        message = "output_dir is refused to clients; leave it out, or start the server with --admin-api-key."
        raise HttpError(403, message, "PermissionDeniedError")  # a path of the client's choice is a file written there
    options = given_fields(body, OPTIONS)
    starting = context.client.start_profile(**options, activities=tuple(body.activities or ()))
    return outcome_of(await while_connected(request, starting))


async def stop_profile(context: ServerContext, request: Request) -> Response:
    await read_body(request, Nothing)
    return outcome_of(await while_connected(request, context.client.stop_profile()))


def memory_routes(context: ServerContext) -> list[Endpoint]:
    """Never opened by a client's key: a path is a file that is read, and a released engine serves nobody."""
    memory: dict[str, Any] = {"access": "admin_only", "body": MemoryBody, "answer": Outcome}
    return [
        Endpoint(
            "/update_weights_from_disk",
            partial(update_weights, context),
            "Read another checkpoint of the same model in the place of its weights",
            access="admin_only",
            body=UpdateWeightsBody,
            answer=WeightsOutcome,
        ),
        Endpoint(
            "/release_memory_occupation",
            partial(release_memory, context),
            "Give back the memory of weights and cache; 400 while requests run",
            **memory,
        ),
        Endpoint(
            "/resume_memory_occupation",
            partial(resume_memory, context),
            "Take the memory again; weights are read from their files",
            **memory,
        ),
    ]


async def update_weights(context: ServerContext, request: Request) -> Response:
    body = await read_body(request, UpdateWeightsBody)
    updating = context.client.update_weights(
        body.model_path,
        body.load_format,
        flush_cache=body.flush_cache is not False,
        abort_all_requests=bool(body.abort_all_requests),
        weight_version=body.weight_version,
    )
    reply = await while_connected(request, updating)
    outcome = msgspec.structs.asdict(WeightsOutcome(reply.ok, reply.message, reply.data["num_paused_requests"]))
    if reply.ok:
        return json_response(outcome)
    failure = failure_of(RequestError(reply.message))
    return json_response({**outcome, **native_shape(failure)}, failure.status)


async def release_memory(context: ServerContext, request: Request) -> Response:
    body = await read_body(request, MemoryBody)
    return outcome_of(await while_connected(request, context.client.release_memory(body.tags)))


async def resume_memory(context: ServerContext, request: Request) -> Response:
    body = await read_body(request, MemoryBody)
    return outcome_of(await while_connected(request, context.client.resume_memory(body.tags)))
