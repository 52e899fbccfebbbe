"""The `ollama` package against a real server with the default model, as its users would call it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

ollama = pytest.importorskip("ollama", reason="the ollama package is not installed (pip install bough[dev])")

NAME = "SmolLM2-135M-Instruct"
GREET: list[Any] = [{"role": "user", "content": "Say hello to Ada."}]
GREEDY: dict[str, Any] = {"model": "any-name", "options": {"temperature": 0, "num_predict": 12}}


@pytest.fixture(scope="module")
def client(model_url: str) -> Any:
    return ollama.Client(host=model_url)


def test_a_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat(**GREEDY, messages=GREET)
    assert whole.model == NAME and whole.done and whole.done_reason in ("stop", "length")
    assert whole.message.role == "assistant" and whole.message.content
    assert whole.eval_count > 1 and whole.prompt_eval_count > 1
    assert 0 < whole.prompt_eval_duration < whole.total_duration and whole.eval_duration > 0
    parts = list(client.chat(**GREEDY, messages=GREET, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 2
    assert parts[-1].eval_count == whole.eval_count and parts[-1].done_reason == whole.done_reason


def test_a_prompt_whole_streamed_and_raw(client: Any) -> None:
    whole = client.generate(**GREEDY, prompt="Say hello to Ada.")
    assert whole.response == client.chat(**GREEDY, messages=GREET).message.content
    parts = list(client.generate(**GREEDY, prompt="Say hello to Ada.", stream=True))
    assert "".join(part.response for part in parts) == whole.response
    raw = client.generate(**GREEDY, prompt="The capital of France is", raw=True)
    assert raw.response.startswith(" Paris") and raw.prompt_eval_count == 5


def test_options(client: Any) -> None:
    options = {"temperature": 0, "num_predict": 20, "stop": ["."], "num_ctx": 2048}
    stopped = client.generate(model="m", prompt="The capital of France is", raw=True, options=options)
    assert stopped.response == " Paris" and stopped.done_reason == "stop"
    warm: dict[str, Any] = {"temperature": 1.5, "seed": 11, "num_predict": 12, "top_k": 40, "repeat_penalty": 1.1}
    first, second = (client.chat(model="m", messages=GREET, options=warm).message.content for _ in range(2))
    assert first == second


def test_the_model_and_its_loading(client: Any) -> None:
    (model,) = client.list().models
    assert model.model == NAME
    shown = client.show(NAME)
    assert shown.capabilities == ["completion"] and shown.details.family == "llama"
    assert shown.modelinfo["llama.context_length"] == 8192
    assert client.generate(model=NAME, keep_alive="5m").done_reason == "load"
    assert client.show("other").modelinfo == shown.modelinfo


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"format": {"type": "nothing"}}, "format"),
        ({"think": True}, "think"),
        ({"options": {"temperature": -3}}, "options.temperature"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "8192"),
    ],
)
def test_what_cannot_be_served_is_refused(client: Any, fields: dict[str, Any], named: str) -> None:
    asked = {**GREEDY, "messages": GREET, **fields}
    with pytest.raises(ollama.ResponseError, match=named) as caught:
        client.chat(**asked)
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match=named):
        list(client.chat(**asked, stream=True))


def test_many_async_streams_at_once(model_url: str, client: Any) -> None:
    asked = [[{"role": "user", "content": f"What is {i} plus {i}?"}] for i in range(3)]
    alone = [client.chat(**GREEDY, messages=turns).message.content for turns in asked]

    async def one(turns: Any) -> str:
        stream = await ollama.AsyncClient(host=model_url).chat(**GREEDY, messages=turns, stream=True)
        return "".join([part.message.content async for part in stream])

    async def go() -> list[str]:
        return list(await asyncio.gather(*map(one, asked)))

    assert asyncio.run(go()) == alone
