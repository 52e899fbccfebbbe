"""Management: empty the cache, abort requests, pause and continue, record a profile, release memory.

What reads a path or stops all service (`admin_only`) is never opened by a client's key.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.core.control import ProfileStart
from bough.core.errors import RequestError, SettingsError
from bough.core.files import table_beside
from bough.core.setting_checks import check_value
from bough.core.settings import LIVE_SETTINGS, all_fields
from bough.messages import requests as commands
from bough.messages.outputs import Reply
from bough.server.bodies import given_fields, refuse_unsupported
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint, Handler, Query, json_response
from bough.server.errors import HttpError, failure_of, native_shape
from bough.server.native import schemas
from bough.server.streaming import while_connected

RETRY_S = 0.1  # between two looks whether the engine has become idle
LONGEST_WAIT_S = 3600.0
SUMMARIES: dict[str, Any] = table_beside(__file__, "summaries.toml")
PROFILE_OPTIONS = ("output_dir", "with_stack", "record_shapes")
SETTING = f"Change settings while the engine runs: {', '.join(LIVE_SETTINGS)}"
STORAGE_SETTINGS = ("hicache_storage_backend", "hicache_storage_prefetch_policy", "hicache_write_policy")
SETTINGS = {f.name: f for _, f in all_fields()}


def control_routes(context: ServerContext) -> list[Endpoint]:
    client = context.client
    counts: dict[str, Any] = {"answer": schemas.ExpertCounts}
    get_or_post: dict[str, Any] = {"methods": ("GET", "POST")}
    memory: dict[str, Any] = {"body": schemas.MemoryBody, "access": "admin_only", **get_or_post}
    storage: dict[str, Any] = {"methods": ("GET",), "access": "admin", "answer": dict[str, str | None]}
    settings: dict[str, Any] = {"body": schemas.SettingsBody, "answer": schemas.SettingsOutcome}
    settings |= {"methods": ("POST", "PUT"), "access": "admin"}
    clear, detach = (partial(commands.ChangeStorage, action=action) for action in ("clear", "detach"))
    attaching: dict[str, Any] = {"body": schemas.StorageBody, "methods": ("PUT",), "access": "admin_only"}
    detaching: dict[str, Any] = {"methods": ("DELETE",), "access": "admin_only"}

    def record(action: Literal["start", "stop", "dump"]) -> Callable[[schemas.Nothing], Coroutine[Any, Any, Reply]]:
        return lambda _: client.record_experts(action)

    def close(body: schemas.NamedSession) -> Coroutine[Any, Any, Reply]:
        return client.change_session(body.session_id, open=False)

    def pause(body: schemas.PauseBody) -> Coroutine[Any, Any, Reply]:
        return client.call(lambda call: commands.Pause(call, body.mode or "abort"))

    timeout = Query("timeout", float, "seconds to wait until nothing runs")
    flush: dict[str, Any] = {"access": "admin", "answer": schemas.Outcome, "queries": (timeout,)}
    session: dict[str, Any] = {"access": "api", **get_or_post}
    return [
        described("/open_session", partial(open_session, context), body=schemas.SessionBody, answer=str, **session),
        command_route("/close_session", close, schemas.NamedSession, **session),
        described("/flush_cache", partial(flush_cache, context), body=schemas.Nothing, **flush, **get_or_post),
        described("/hicache/storage-backend", partial(storage_backend, context), **storage),
        command_route("/hicache/storage-backend", partial(attach_storage, context), **attaching),
        command_route("/hicache/storage-backend", lambda _: client.call(detach), **detaching),
        command_route("/hicache/storage-backend/clear", lambda _: client.call(clear)),
        command_route("/clear_hicache_storage_backend", lambda _: client.call(clear), **get_or_post),
        *adapter_routes(context),
        command_route("/abort_request", partial(abort_request, context), schemas.AbortBody),
        command_route("/pause_generation", pause, schemas.PauseBody),
        command_route("/continue_generation", lambda _: client.call(commands.Resume)),
        command_route("/start_profile", partial(start_profile, context), schemas.ProfileBody, **get_or_post),
        command_route("/stop_profile", lambda _: client.call(commands.StopProfile), **get_or_post),
        command_route("/start_expert_distribution_record", record("start"), **get_or_post),
        command_route("/stop_expert_distribution_record", record("stop"), **get_or_post),
        command_route("/dump_expert_distribution_record", record("dump"), **counts, **get_or_post),
        command_route("/freeze_gc", lambda _: freeze_gc(context), **get_or_post),
        command_route("/configure_logging", partial(configure_logging, context), schemas.LoggingBody, **get_or_post),
        Endpoint("/set_internal_state", partial(set_internal_state, context), SETTING, **settings),
        command_route("/release_memory_occupation", lambda body: client.release_memory(body.tags), **memory),
        command_route("/resume_memory_occupation", lambda body: client.resume_memory(body.tags), **memory),
    ]


def adapter_routes(context: ServerContext) -> list[Endpoint]:
    async def change(body: schemas.AdapterBody | schemas.NamedAdapter) -> Reply:
        given = (body.lora_path, bool(body.pinned)) if isinstance(body, schemas.AdapterBody) else ()
        return await context.client.call(lambda call: commands.ChangeAdapters(call, body.lora_name, *given))

    return [
        command_route(f"{root}/{verb}_lora_adapter", change, body, access="admin_only")
        for root in ("", "/v1")
        for verb, body in (("load", schemas.AdapterBody), ("unload", schemas.NamedAdapter))
    ]


def command_route(
    path: str,
    act: Callable[[Any], Coroutine[Any, Any, Reply]],
    body: type[msgspec.Struct] = schemas.Nothing,
    **more: Any,
) -> Endpoint:
    """A route whose body becomes a command to the engine."""

    async def handle(request: Request, given: Any) -> Response:
        reply = await while_connected(request, act(given))
        answer = more.get("answer")
        return outcome_of(reply) if answer is None else json_response(answer(**raise_if_refused(reply).data))

    return described(path, handle, **{"access": "admin", "body": body, "answer": schemas.Outcome, **more})


def described(path: str, handler: Handler, **more: Any) -> Endpoint:
    """With what the table says of it."""
    said = SUMMARIES[path]
    return Endpoint(path, handler, said if isinstance(said, str) else said[more["methods"][0]], **more)


def outcome_of(reply: Reply) -> Response:
    """The engine's reply to a command; a refusal becomes a 400."""
    return json_response(schemas.Outcome(True, raise_if_refused(reply).message))


def raise_if_refused(reply: Reply) -> Reply:
    if not reply.ok:
        raise RequestError(reply.message)
    return reply


async def flush_cache(context: ServerContext, request: Request, body: schemas.Nothing) -> Response:
    deadline = time.monotonic() + _timeout_of(request)

    async def flush() -> Reply:
        while True:
            reply = await context.client.call(commands.FlushCache)
            left = deadline - time.monotonic()
            if reply.ok or left <= 0:
                return reply
            await asyncio.sleep(min(left, RETRY_S))

    return outcome_of(await while_connected(request, flush()))


async def open_session(context: ServerContext, request: Request, body: schemas.SessionBody) -> Response:
    refuse_unsupported(body)
    opening = context.client.change_session(body.session_id, timeout_s=body.timeout)
    return json_response(raise_if_refused(await while_connected(request, opening)).message)


async def storage_backend(context: ServerContext, request: Request) -> Response:
    memory, (state, *_) = context.settings.memory, await context.states()
    return json_response({name: state.get(name, getattr(memory, name)) for name in STORAGE_SETTINGS})


async def attach_storage(context: ServerContext, body: schemas.StorageBody) -> Reply:
    given = {name.removesuffix("_json"): value for name, value in given_fields(body, body.__struct_fields__).items()}
    try:
        settings = {name: check_value(SETTINGS[name], value) for name, value in given.items()}
    except SettingsError as error:
        raise RequestError(str(error)) from None
    return await context.client.call(lambda call: commands.ChangeStorage(call, "attach", settings))


def _timeout_of(request: Request) -> float:
    given = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= LONGEST_WAIT_S:
        text = f"timeout must be a number of seconds between 0 and {LONGEST_WAIT_S:g}, got {given!r}."
        raise RequestError(text, field="timeout")
    return timeout_s


async def abort_request(context: ServerContext, body: schemas.AbortBody) -> Reply:
    if not body.rid and not body.abort_all:
        raise RequestError("Give the rid of a request, or abort_all: true.", field="rid")
    context.client.abort(body.rid or "", abort_all=bool(body.abort_all))
    return Reply(0, True, "Whatever runs under that name is ended.")


async def freeze_gc(context: ServerContext) -> Reply:
    reply = await context.client.call(lambda call: commands.ProcessCommand(call, freeze_gc=True))
    return Reply(reply.call, reply.ok, "Garbage collection frozen.")


async def configure_logging(context: ServerContext, body: schemas.LoggingBody) -> Reply:
    refuse_unsupported(body)
    given = given_fields(body, ("log_level", "log_requests", "log_requests_level"))
    reply = await context.client.call(lambda call: commands.ProcessCommand(call, **given))
    dumps = " Requests are not dumped." if body.dump_requests_folder else ""
    return Reply(reply.call, reply.ok, f"Logging is configured.{dumps}")


async def set_internal_state(context: ServerContext, request: Request, body: schemas.SettingsBody) -> Response:
    try:
        values = {name: _live_value(name, value) for name, value in body.server_args.items()}
    except SettingsError as error:
        failure = failure_of(RequestError(str(error), field="server_args"))
        return json_response({"updated": False, **native_shape(failure)}, failure.status)
    reply = await while_connected(request, context.client.call(lambda call: commands.ChangeSettings(call, values)))
    return json_response(schemas.SettingsOutcome(reply.ok))


def _live_value(name: str, value: Any) -> Any:
    if name not in LIVE_SETTINGS:
        raise SettingsError(f"{name} cannot change while the engine runs; these can: {', '.join(LIVE_SETTINGS)}.")
    return check_value(SETTINGS[name], value)


async def start_profile(context: ServerContext, body: schemas.ProfileBody) -> Reply:
    for name in ("profile_by_stage", "profile_stages", "profile_prefix", "merge_profiles"):
        if getattr(body, name):
            raise RequestError(f"{name} is not supported by this engine; leave it out.", field=name)
    settings = context.settings.server
    if body.output_dir is not None and settings.api_key is not None and settings.admin_api_key is None:
        message = "output_dir is refused to clients; leave it out, or start the server with --admin-api-key."
        raise HttpError(403, message, "PermissionDeniedError")  # a path of the client's choice is a file written there
    profile = ProfileStart(**given_fields(body, PROFILE_OPTIONS), activities=tuple(body.activities or ()))
    start_step, num_steps = int(body.start_step or 0), int(body.num_steps or 0) or None
    return await context.client.call(lambda call: commands.StartProfile(call, start_step, num_steps, profile))
