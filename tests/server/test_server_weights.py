"""The routes through which weights change: their JSON, what they refuse, and what reaches the engine."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load, save

from bough.core.control import JoinTrainer, LeaveTrainer, ReadWeight, ReceiveTensors, SetVersion, TakeTensors
from bough.messages.requests import Control
from bough.rl import json_body
from bough.server.native.weights import weight_routes
from tests.server.native_engine import NativeEngine, open_server

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
PATH = "/update_weights_from_tensor"


class Reading(NativeEngine):
    """Looks into the files of each command, as the executor does before it answers."""

    def __init__(self) -> None:
        super().__init__(lambda message: None)
        self.taken: list[dict[str, torch.Tensor]] = []

    def _reply(self, message: Any) -> None:
        if isinstance(message, Control) and isinstance(message.command, TakeTensors):
            self.taken += [load(Path(path).read_bytes()) for path in message.command.files]
        super()._reply(message)


def served(go: Callable[[Reading, httpx.AsyncClient], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        engine = Reading()
        async with open_server(engine, **settings) as http:
            await go(engine, http)

    asyncio.run(run())


def test_tensors_arrive_as_json_or_as_bytes() -> None:
    async def go(engine: Reading, http: httpx.AsyncClient) -> None:
        done = {"success": True, "message": "done", "num_paused_requests": 0}
        sent = json_body(TENSORS, weight_version="7", load_format=None, flush_cache=False, abort_all_requests=True)
        assert (await http.post(PATH, json=sent)).json() == done
        half = [base64.b64encode(save({name: tensor})).decode() for name, tensor in TENSORS.items()]
        assert (await http.post(PATH, json={"serialized_named_tensors": half})).json() == done
        raw = {"content": save(TENSORS), "headers": {"content-type": "application/octet-stream"}}
        assert (await http.post(PATH, params={"flush_cache": "false", "weight_version": "8"}, **raw)).json() == done
        first, second, third = (message for message in engine.commands if isinstance(message, Control))
        assert (first.flush_cache, first.abort_all, first.wait, first.facts) == (
            False,
            True,
            True,
            {"weight_version": "7"},
        )
        assert (second.flush_cache, second.abort_all, second.facts) == (True, False, {})
        assert (third.flush_cache, third.facts) == (False, {"weight_version": "8"})
        whole, *halves, bytes_alone = engine.taken
        assert [set(part) for part in halves] == [{"a"}, {"b"}]
        for found in (whole, bytes_alone):
            assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
        assert not any(Path(path).exists() for path in (*first.command.files, *third.command.files))
        engine.busy = 1
        refused = await http.post(PATH, json=sent)
        assert refused.status_code == 400 and refused.json()["success"] is False
        assert refused.json()["message"] == refused.json()["error"]["message"] == "busy"

    served(go)


def archived() -> bytes:
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [pickle.dumps([("a", [1.0])]), pickle.dumps([("a", [1.0])], protocol=0), archived()],
    ids=["pickle", "oldest pickle", "torch.save"],
)
def test_pickles_are_refused_with_what_to_send(content: bytes) -> None:
    async def go(engine: Reading, http: httpx.AsyncClient) -> None:
        as_json = await http.post(PATH, json={"serialized_named_tensors": [base64.b64encode(content).decode()]})
        as_bytes = await http.post(PATH, content=content, headers={"content-type": "application/octet-stream"})
        sglangs = {"serialized_named_tensors": [base64.b64encode(content).decode()], "load_format": "flattened_bucket"}
        for refused in (as_json, as_bytes, await http.post(PATH, json=sglangs)):
            message = refused.json()["error"]["message"]
            assert refused.status_code == 400 and "Pickled" in message and "send safetensors" in message
        assert not engine.commands

    served(go)


def test_other_bodies_are_refused() -> None:
    async def go(engine: Reading, http: httpx.AsyncClient) -> None:
        for wrong in ({}, {"serialized_named_tensors": "?"}, {**json_body(TENSORS), "load_format": "flattened_bucket"}):
            refused = await http.post(PATH, json=wrong)
            assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "load_format" and "send safetensors" in refused.text
        assert (await http.post(PATH, json=json_body({}, load_format="safetensors"))).status_code == 200
        raw = {"content": save(TENSORS), "headers": {"content-type": "application/octet-stream"}}
        assert (await http.post(PATH, params={"flush": "false"}, **raw)).status_code == 400
        large = await http.post(PATH, json={"serialized_named_tensors": "A" * (1 << 20)})
        message = large.json()["error"]["message"]
        assert large.status_code == 413 and "--max-body-mb" in message
        assert all(f"/update_weights_from_{way}" in message for way in ("ipc", "distributed", "disk"))
        assert len(engine.commands) == 1

    served(go, max_body_mb=1)


def test_files_of_shared_memory_are_named(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(save(TENSORS))

    async def go(engine: Reading, http: httpx.AsyncClient) -> None:
        reply = await http.post("/update_weights_from_ipc", json={"files": [str(tmp_path / "one")]})
        assert reply.status_code == 200 and set(engine.taken[0]) == {"a", "b"}
        for wrong in ({}, {"files": []}, {"zmq_handles": {"gpu": "ipc://x"}}):
            refused = await http.post("/update_weights_from_ipc", json=wrong)
            assert refused.status_code == 400 and "bough.rl.shared_tensors" in refused.json()["error"]["message"]

    served(go)


def test_a_trainers_group_is_joined_heard_and_left() -> None:
    place = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
    sent = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
    join, hear, leave = (
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/destroy_weights_update_group",
    )

    async def go(engine: Reading, http: httpx.AsyncClient) -> None:
        assert (await http.post(join, json={**place, "backend": "gloo"})).json() == {"success": True, "message": "done"}
        await http.post(join, json={**place, "group_name": "other"})
        options = {"flush_cache": False, "abort_all_requests": True, "weight_version": "3", "load_format": None}
        reply = await http.post(hear, json={**sent, **options})
        assert reply.json() == {"success": True, "message": "done", "num_paused_requests": 0}
        assert (await http.post(leave, json={"group_name": "other"})).status_code == 200
        joined, other, heard, left = (message for message in engine.commands if isinstance(message, Control))
        assert joined.command == JoinTrainer(**place, group_name="weight_update_group", backend="gloo")
        assert other.command == JoinTrainer(**place, group_name="other") and left.command == LeaveTrainer("other")
        assert joined.wait and left.wait and not joined.flush_cache  # the cache of the old weights is still theirs
        assert heard.command == ReceiveTensors(("a", "b"), ("bfloat16", "float32"), ((2, 3), ()))
        assert (heard.flush_cache, heard.abort_all, heard.facts) == (False, True, {"weight_version": "3"})
        for path, wrong in (
            (join, {**place, "rank_offset": 0}),
            (join, {**place, "master_port": 0}),
            (join, {**place, "backend": "mpi"}),
            (join, {"master_address": "10.0.0.1"}),
            (hear, {**sent, "shapes": [[-1], []]}),
            (hear, {**sent, "load_format": "flattened_bucket"}),
            (hear, {"names": ["a"]}),
            (leave, {"group": "other"}),
        ):
            assert (await http.post(path, json=wrong)).status_code == 400, wrong
        engine.busy = 1
        refused = await http.post(hear, json=sent)
        assert refused.status_code == 400 and refused.json()["message"] == refused.json()["error"]["message"] == "busy"

    served(go)


def test_weights_are_shown_and_named() -> None:
    async def go(engine: Reading, http: httpx.AsyncClient) -> None:
        body = {"name": "model.norm.weight"}
        assert (await http.post("/get_weights_by_name", json=body)).json() == [[0.5]]
        await http.request("GET", "/get_weights_by_name", json={**body, "truncate_size": 3})
        reply = await http.post("/update_weight_version", json={"new_version": "9", "abort_all_requests": True})
        assert reply.json()["success"] is True and reply.json()["new_version"] == "9"
        shown, again, named = (message for message in engine.commands if isinstance(message, Control))
        assert (shown.command, again.command) == (ReadWeight(**body), ReadWeight(**body, truncate_size=3))
        assert named.command == SetVersion() and named.facts == {"weight_version": "9"}
        assert named.abort_all and not named.flush_cache
        engine.busy = 1
        assert (await http.post("/get_weights_by_name", json=body)).status_code == 400
        assert (await http.post("/get_weights_by_name", json={**body, "truncate_size": -1})).status_code == 400

    served(go)


def test_all_of_it_is_the_operators() -> None:
    endpoints = weight_routes(NativeEngine(lambda _: None).context())
    assert len(endpoints) > 4 and {endpoint.access for endpoint in endpoints} == {"admin_only"}
