"""`/start_profile` and `/stop_profile`: what the engine's main process spends its time on, as a trace file."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import RequestError
from bough.server.bodies import given_fields, read_body, settings_of
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from bough.server.errors import HttpError
from bough.server.native.control import outcome_of
from bough.server.native.schemas import Nothing, Outcome, ProfileBody
from bough.server.presence import while_connected

OPTIONS = ("output_dir", "start_step", "num_steps", "with_stack", "record_shapes")


def profile_routes(context: ServerContext) -> list[Endpoint]:
    return [
        Endpoint(
            path="/start_profile",
            methods=("GET", "POST"),
            handler=partial(start_profile, context),
            summary="Record a trace until /stop_profile, or for num_steps steps",
            access="admin",
            body=ProfileBody,
            answer=Outcome,
        ),
        Endpoint(
            path="/stop_profile",
            methods=("GET", "POST"),
            handler=partial(stop_profile, context),
            summary="End the recording and write its file",
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
