"""Sessions over HTTP, down to the scheduler: what the routes answer, and what each protocol goes on behind."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx

from tests.fakes.whole_engine import WholeEngine
from tests.server.native_engine import NativeEngine, open_server

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


async def said(http: httpx.AsyncClient, text: str, **fields: Any) -> dict[str, Any]:
    sent = {"text": text, "sampling_params": {**GREEDY, **fields.pop("sampling", {})}, **fields}
    reply = await http.post("/generate", json=sent)
    assert reply.status_code == 200, reply.text
    output: dict[str, Any] = reply.json()
    return output


def test_a_session_saves_its_clients_from_sending_all_again() -> None:
    async def go() -> None:
        engine = WholeEngine()
        async with open_server(cast(NativeEngine, engine)) as http:
            session = (await http.post("/open_session", json={"capacity_of_str_len": 1000})).json()
            assert isinstance(session, str) and session
            assert (await http.get("/open_session")).json() != session
            first = await said(http, "Once upon", session_params={"id": session})
            rid = first["meta_info"]["id"]
            second = await said(http, " a time", session_params={"id": session, "rid": rid})
            ids = [*engine.tokenizer.encode("Once upon"), *first["output_ids"], *engine.tokenizer.encode(" a time")]
            whole = (await http.post("/generate", json={"input_ids": ids, "sampling_params": GREEDY})).json()
            assert second["output_ids"] == whole["output_ids"]
            assert second["meta_info"]["prompt_tokens"] == len(ids) == whole["meta_info"]["prompt_tokens"]
            completion = {"prompt": " a time", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            params = {"session_params": {"id": session, "rid": rid}}
            answer = (await http.post("/v1/completions", json={**completion, **params})).json()
            assert answer["choices"][0]["text"] == second["text"] and answer["usage"]["prompt_tokens"] == len(ids)
            assert (await http.post("/close_session", json={"session_id": session})).status_code == 200
            gone = await http.post("/generate", json={"text": "x", "session_params": {"id": session}})
            assert gone.status_code == 400 and "not open" in gone.json()["error"]["message"]

    asyncio.run(go())


def test_what_a_stop_string_cuts_off_is_not_gone_on_behind() -> None:
    async def go() -> None:
        engine = WholeEngine(turns=3)  # so that the scheduler is ahead of the text
        async with open_server(cast(NativeEngine, engine)) as http:
            plain = await said(http, "abc", sampling={"max_new_tokens": 12})
            text = engine.tokenizer.decode(plain["output_ids"][:4])
            await http.post("/open_session", json={"session_id": "s"})
            params: dict[str, Any] = {"session_params": {"id": "s"}, "rid": "one"}
            first = await said(http, "abc", sampling={"max_new_tokens": 12, "stop": [text[-2:]]}, **params)
            assert first["meta_info"]["finish_reason"]["type"] == "stop" and len(first["output_ids"]) < 12
            second = await said(http, "d", session_params={"id": "s", "rid": "one"})
            assert second["meta_info"]["prompt_tokens"] == 3 + len(first["output_ids"]) + 1

    asyncio.run(go())


def test_what_cannot_be_is_refused_by_name() -> None:
    async def go() -> None:
        async with open_server(cast(NativeEngine, WholeEngine())) as http:
            assert (await http.post("/open_session", json={"session_id": "s"})).json() == "s"
            again = await http.post("/open_session", json={"session_id": "s"})
            assert again.status_code == 400 and "open already" in again.json()["error"]["message"]
            for body in ({"streaming": True}, {"timeout": 0}, {"capacity": 1}):
                assert (await http.post("/open_session", json=body)).status_code == 400
            missing = await http.post("/close_session", json={"session_id": "t"})
            assert missing.status_code == 400 and "not open" in missing.json()["error"]["message"]
            for params in ({"id": "s", "rid": "x"}, {"rid": "x"}, {"id": "s", "place": 1}):
                refused = await http.post("/generate", json={"text": "x", "session_params": params})
                assert refused.status_code == 400, params
            scored = {"return_logprob": True, "logprob_start_len": 0, "session_params": {"id": "s", "rid": "x"}}
            refused = await http.post("/generate", json={"text": "x", **scored})
            assert refused.json()["error"]["param"] == "logprob_start_len"

    asyncio.run(go())
