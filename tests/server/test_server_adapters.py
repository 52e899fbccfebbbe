"""Adapters over HTTP: how requests choose one, the list of models, and who may load them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from bough.messages.requests import ChangeAdapters
from tests.server.native_engine import NativeEngine, open_server

HELLO = [*b"hello"]
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def served(use: Callable[[httpx.AsyncClient, NativeEngine], Awaitable[None]], **settings: Any) -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: HELLO)
        engine.state["loaded_adapters"] = {"sql": "/adapters/sql"}
        async with open_server(engine, **settings) as http:
            await use(http, engine)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("path", "body", "adapter"),
    [
        ("/generate", {"text": "a", "lora_path": "sql"}, "sql"),
        ("/generate", {"text": "a", "model": "sql"}, ""),
        ("/v1/completions", {"prompt": "a", "model": "sql"}, "sql"),
        ("/v1/completions", {"prompt": "a", "model": "tiny:sql"}, "sql"),
        ("/v1/completions", {"prompt": "a", "model": "tiny"}, ""),
        ("/v1/completions", {"prompt": "a", "model": "default"}, ""),
        ("/v1/completions", {"prompt": "a", "model": "default:sql"}, "sql"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1], "model": "sql"}, "sql"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1], "model": "default"}, ""),
        ("/v1/completions", {"prompt": "a"}, ""),
        ("/v1/completions", {"prompt": "a", "model": "tiny", "lora_path": "sql"}, "sql"),
        ("/v1/chat/completions", {**CHAT, "model": "tiny:sql"}, "sql"),
        ("/v1/responses", {"input": "a", "model": "sql"}, "sql"),
    ],
)
def test_requests_choose_an_adapter(path: str, body: dict[str, Any], adapter: str) -> None:
    async def use(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        reply = await http.post(path, json=body)
        assert reply.status_code == 200 and engine.requests[-1].adapter == adapter
        named = body["model"] if adapter and body.get("model", "tiny") != "tiny" else "tiny"
        assert reply.json().get("model", named) == named, "an answer names what was asked for"

    served(use, enable_lora=True)


def test_each_prompt_of_a_batch_may_have_another() -> None:
    async def use(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        await http.post("/generate", json={"text": ["a", "b", "c"], "lora_path": ["sql", None, "law"]})
        assert [request.adapter for request in engine.requests] == ["sql", "", "law"]

    served(use, enable_lora=True)


def test_without_adapters_any_model_name_is_the_model() -> None:
    async def use(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        await http.post("/v1/completions", json={"prompt": "a", "model": "tiny:latest"})
        assert engine.requests[-1].adapter == ""
        assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["tiny"]

    served(use)


def test_models_show_adapters_with_their_parent() -> None:
    async def use(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        model, adapter = (await http.get("/v1/models")).json()["data"]
        assert (model["id"], model["parent"]) == ("tiny", None)
        assert (adapter["id"], adapter["root"], adapter["parent"]) == ("sql", "/adapters/sql", "tiny")
        for name in ("sql", "tiny:sql", "default:sql"):
            assert (await http.get(f"/v1/models/{name}")).json() == adapter
        for name in ("law", "tiny:law"):
            assert (await http.get(f"/v1/models/{name}")).status_code == 404

    served(use, enable_lora=True)


@pytest.mark.parametrize("root", ["", "/v1"])
def test_loading_and_unloading(root: str) -> None:
    async def use(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        body = {"lora_name": "law", "lora_path": "/adapters/law", "pinned": True}
        reply = await http.post(f"{root}/load_lora_adapter", json=body)
        assert reply.status_code == 200 and reply.json()["success"]
        await http.post(f"{root}/unload_lora_adapter", json={"lora_name": "law"})
        load, unload = engine.commands
        assert load == ChangeAdapters(load.call, "law", "/adapters/law", True)
        assert unload == ChangeAdapters(unload.call, "law")
        for path, wrong in (("load", {"lora_name": "law"}), ("unload", {}), ("load", {**body, "lora_rank": 4})):
            assert (await http.post(f"{root}/{path}_lora_adapter", json=wrong)).status_code == 400

    served(use, enable_lora=True)


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_a_clients_key_opens_neither(path: str) -> None:
    async def use(http: httpx.AsyncClient, engine: NativeEngine) -> None:
        headers = {"authorization": "Bearer client"}
        body = {"lora_name": "law"} | ({"lora_path": "/etc"} if "unload" not in path else {})
        assert (await http.post(path, json=body, headers=headers)).status_code == 403
        assert not engine.commands

    served(use, enable_lora=True, api_key="client")
