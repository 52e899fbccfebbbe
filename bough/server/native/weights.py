"""Weights that change while the server runs: from disk, sent as tensors or by a trainer's group, or shared in memory.

All of it is the operator's (`admin_only`): it reads paths, or changes what all clients get.
"""

import base64
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bough.core import control
from bough.core.errors import RequestError
from bough.core.files import shared_file
from bough.messages.outputs import Reply
from bough.server.bodies import decode_body, read_bytes
from bough.server.context import ServerContext
from bough.server.endpoint import BINARY, Endpoint, json_response
from bough.server.errors import HttpError, failure_of, native_shape
from bough.server.native import schemas
from bough.server.native.control import command_route, described, raise_if_refused
from bough.server.streaming import while_connected

T = TypeVar("T")
OPTIONS = ("flush_cache", "abort_all_requests", "weight_version")
SAFE = "send safetensors (safetensors.torch.save, bough.rl.json_body)"
BY = "Use /update_weights_from_ipc, /update_weights_from_distributed or /update_weights_from_disk"
OTHER_WAYS = f"{BY}, send fewer tensors at a time, or raise it."
TENSORS = (("application/json", schemas.TensorBody), ("application/octet-stream", BINARY))


def weight_routes(context: ServerContext) -> list[Endpoint]:
    updating: dict[str, Any] = {"access": "admin_only", "answer": schemas.WeightsOutcome}
    reading: dict[str, Any] = {"access": "admin_only", "methods": ("GET", "POST"), "body": schemas.ReadWeightBody}
    naming: dict[str, Any] = {"access": "admin_only", "answer": dict[str, Any]}

    def update(kind: str, body: Any, command: Callable[[Any], control.WeightsCommand]) -> Endpoint:
        async def handle(request: Request, given: Any) -> Response:
            return await update_weights(context, request, command(given), given)

        return described(f"/update_weights_from_{kind}", handle, body=body, **updating)

    def group(verb: str, body: Any, command: type[control.TrainerCommand]) -> Endpoint:
        async def act(given: Any) -> Reply:
            return await context.client.change_trainers(read_as(command, given))

        return command_route(f"/{verb}_weights_update_group", act, body, access="admin_only")

    async def name_version(body: schemas.VersionBody) -> Reply:
        options: dict[str, Any] = {"flush_cache": False, "abort_all_requests": body.abort_all_requests}
        reply = await context.client.update_weights(control.SetVersion(), weight_version=body.new_version, **options)
        message = f"The weights are version {body.new_version}."
        return Reply(0, reply.ok, reply.message, {"success": True, "message": message, "new_version": body.new_version})

    def in_files(body: schemas.IpcBody) -> control.TakeTensors:
        if not body.files or body.zmq_handles is not None:
            text = "Give the paths of files (bough.rl.shared_tensors makes one, also of CUDA tensors), no zmq_handles."
            raise RequestError(text, field="files")
        return control.TakeTensors(tuple(body.files))

    return [
        update("disk", schemas.DiskBody, lambda b: control.SwapWeights(b.model_path, b.load_format)),
        update("ipc", schemas.IpcBody, in_files),
        update("distributed", schemas.DistributedBody, partial(read_as, control.ReceiveTensors)),
        group("init", control.GroupPlace, control.JoinTrainer),
        group("destroy", schemas.NamedGroup, control.LeaveTrainer),
        described("/update_weights_from_tensor", partial(update_from_tensor, context), own_bodies=TENSORS, **updating),
        described("/get_weights_by_name", partial(read_weight, context), answer=list[Any], **reading),
        command_route("/update_weight_version", name_version, schemas.VersionBody, **naming),
    ]


def read_as(command: type[T], body: msgspec.Struct) -> T:
    """The command that has those fields of a body that it knows."""
    return msgspec.convert(body, command, from_attributes=True)


async def update_weights(
    context: ServerContext, request: Request, command: control.WeightsCommand, body: schemas.UpdateBody
) -> Response:
    options = {name: getattr(body, name) for name in OPTIONS}
    reply = await while_connected(request, context.client.update_weights(command, **options))
    outcome = {"success": reply.ok, "message": reply.message, "num_paused_requests": reply.data["num_paused_requests"]}
    if reply.ok:
        return json_response(outcome)
    failure = failure_of(RequestError(reply.message))
    return json_response({**outcome, **native_shape(failure)}, failure.status)


async def update_from_tensor(context: ServerContext, request: Request) -> Response:
    try:
        raw = await read_bytes(request)
    except HttpError as error:
        failure = error.failure
        raise HttpError(failure.status, f"{failure.message} {OTHER_WAYS}", failure.type, failure.headers) from None
    if request.headers.get("content-type", "").partition(";")[0] in ("", "application/json"):
        body = decode_body(raw, schemas.TensorBody)
        given = body.serialized_named_tensors
        parts = [_decoded(part) for part in ([given] if isinstance(given, str) else given)]
    else:
        fields = {**request.query_params, "serialized_named_tensors": ""}
        body, parts = msgspec.convert(fields, schemas.TensorBody, strict=False), [raw]
    if any(part[8:9] != b"{" for part in parts):  # behind its length, the header
        raise RequestError(f"Not safetensors. Pickled tensors can run code and are never read; {SAFE}.")
    if body.load_format not in (None, "safetensors"):
        raise RequestError(f"load_format must be 'safetensors' or left out; {SAFE}.", field="load_format")
    with contextlib.ExitStack() as files:
        paths = []
        for part in parts:
            paths.append(files.enter_context(shared_file(len(part))))
            Path(paths[-1]).write_bytes(part)
        return await update_weights(context, request, control.TakeTensors(tuple(paths)), body)


def _decoded(part: str) -> bytes:
    try:
        return base64.b64decode(part, validate=True)
    except ValueError:
        text = f"serialized_named_tensors must be base64; {SAFE}."
        raise RequestError(text, field="serialized_named_tensors") from None


async def read_weight(context: ServerContext, request: Request, body: schemas.ReadWeightBody) -> Response:
    asking = context.client.read_weight(control.ReadWeight(body.name, body.truncate_size))
    return Response(raise_if_refused(await while_connected(request, asking)).message, media_type="application/json")
