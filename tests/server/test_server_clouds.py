"""Routes of managed clouds: SageMaker and Vertex AI."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.server.native_engine import NativeEngine, open_server


def serve(scenario: Callable[[httpx.AsyncClient], Awaitable[None]], **settings: object) -> None:
    async def go() -> None:
        async with open_server(NativeEngine(lambda _: [97, 98]), **settings) as http:
            await scenario(http)

    asyncio.run(go())


def test_sagemaker_calls_are_chat_completions() -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        assert (await http.get("/ping")).status_code == 200
        reply = await http.post("/invocations", json={"messages": [{"role": "user", "content": "hi"}]})
        assert reply.json()["choices"][0]["message"]["content"] == "ab"

    serve(scenario)


def test_vertex_instances_become_predictions() -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        body = {"instances": [{"text": "x"}, {"text": "y"}], "parameters": {"sampling_params": {"max_new_tokens": 2}}}
        predictions = (await http.post("/vertex_generate", json=body)).json()["predictions"]
        assert [each["text"] for each in predictions] == ["ab", "ab"]
        one = await http.post("/vertex_generate", json={"instances": [{"input_ids": [1, 2]}]})
        assert len(one.json()["predictions"]) == 1
        assert (await http.post("/vertex_generate", json={"instances": []})).json() == {"predictions": []}
        for wrong in ([{"text": "x"}, {"input_ids": [1]}], [{}], [{"image_data": "y"}], [{"text": "x", "top_p": 1}]):
            assert (await http.post("/vertex_generate", json={"instances": wrong})).status_code == 400
        odd = {"instances": [{"text": "x", "image_data": None}], "parameters": {"max_new_tokens": 2}}
        (said,) = (await http.post("/vertex_generate", json=odd)).json()["predictions"]
        (warning,) = said["meta_info"]["warnings"]
        assert warning.startswith("Unknown field 'max_new_tokens' has no effect.")

    serve(scenario)


def test_vertex_names_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")

    async def scenario(http: httpx.AsyncClient) -> None:
        assert (await http.post("/predict", json={"instances": [{"text": "x"}]})).status_code == 200

    serve(scenario)


@pytest.mark.parametrize(
    ("style", "running"), [("sglang", "sglang:num_running_reqs"), ("vllm", "vllm:num_requests_running")]
)
def test_metrics_in_the_names_of_another_engine(style: str, running: str) -> None:
    async def scenario(http: httpx.AsyncClient) -> None:
        page = (await http.get("/metrics")).text
        assert f"\n{running}{{" in page and "bough:" not in page
        if style == "vllm":
            assert "vllm:kv_cache_usage_perc{" in page and "vllm:prefix_cache_hits_total{" in page
            assert "vllm:request_success_total{" in page

    serve(scenario, metrics_names=style)


def test_http_requests_in_progress_are_counted() -> None:
    async def go() -> None:
        async with open_server(NativeEngine(lambda _: None)) as http:
            running = asyncio.create_task(http.post("/generate", json={"text": "x"}))
            await asyncio.sleep(0.05)
            assert re.search(r"^bough:http_requests_active{.*} 1.0$", (await http.get("/metrics")).text, re.MULTILINE)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert re.search(r"^bough:http_requests_active{.*} 0.0$", (await http.get("/metrics")).text, re.MULTILINE)

    asyncio.run(go())
