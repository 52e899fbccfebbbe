"""The `anthropic` SDK against a real server with the default model, as its users would call it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.serving import TINY, running

anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed (pip install bough[dev])")

NAME = "SmolLM2-135M-Instruct"
GREET: list[Any] = [{"role": "user", "content": "Say hello to Ada."}]
COLD = {"temperature": 0}  # the SDK's newer versions have no argument for it
GREEDY: dict[str, Any] = {"model": "any-name", "max_tokens": 24, "extra_body": COLD}


@pytest.fixture(scope="module")
def client(model_url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=model_url, api_key="none", max_retries=0) as made:
        yield made


def test_a_message_whole_and_streamed(client: Any) -> None:
    whole = client.messages.create(**GREEDY, messages=GREET)
    assert whole.model == NAME and whole.role == "assistant" and whole.type == "message"
    assert whole.content[0].text and whole.stop_reason in ("end_turn", "max_tokens")
    events = list(client.messages.create(**GREEDY, messages=GREET, stream=True))
    assert events[0].type == "message_start" and events[-1].type == "message_stop"
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == whole.content[0].text and len(deltas) > 1
    assert events[-2].delta.stop_reason == whole.stop_reason
    assert events[-2].usage.output_tokens == whole.usage.output_tokens


def test_the_sdks_own_stream_helper(client: Any) -> None:
    whole = client.messages.create(**GREEDY, messages=GREET)
    with client.messages.stream(**GREEDY, messages=GREET) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


def test_tokens_are_counted_before_and_after(client: Any) -> None:
    asked: dict[str, Any] = {"system": "Answer like a pirate.", "messages": GREET}
    count = client.messages.count_tokens(model="m", **asked).input_tokens
    first, second = (client.messages.create(**GREEDY, **asked).usage for _ in range(2))
    assert first.input_tokens + first.cache_read_input_tokens == count
    assert second.input_tokens + second.cache_read_input_tokens == count
    assert second.cache_read_input_tokens == count - 1 > first.cache_read_input_tokens


def test_systems_and_contents_as_blocks(client: Any) -> None:
    block: dict[str, Any] = {"type": "text", "cache_control": {"type": "ephemeral"}}
    plain = client.messages.create(**GREEDY, system="Be brief.", messages=GREET)
    turn: Any = {"role": "user", "content": [{**block, "text": GREET[0]["content"]}]}
    blocks = client.messages.create(**GREEDY, system=[{**block, "text": "Be brief."}], messages=[turn])
    assert blocks.content[0].text == plain.content[0].text


def test_stop_sequences(client: Any) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Count: 1, 2, 3, 4, 5"}], "max_tokens": 40}
    asked |= {"model": "m", "extra_body": COLD}
    text = client.messages.create(**asked).content[0].text
    stop = text[4:7]
    cut = client.messages.create(**asked, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]
    with client.messages.stream(**asked, stop_sequences=[stop]) as stream:
        assert "".join(stream.text_stream) == cut.content[0].text
        assert stream.get_final_message().stop_sequence == stop


def test_an_answer_goes_on_from_the_assistants_words(client: Any) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "It is"}]
    answer = client.messages.create(**GREEDY, messages=turns)
    assert answer.content[0].text.startswith(" ")
    again = client.messages.create(**GREEDY, messages=[*turns[:1], {"role": "user", "content": "Be quick."}])
    assert again.content[0].text != answer.content[0].text


def test_what_was_answered_can_be_sent_back(client: Any) -> None:
    first = client.messages.create(**GREEDY, messages=GREET)
    turns = [*GREET, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And to Bob."}]
    second = client.messages.create(**GREEDY, messages=turns)
    assert second.usage.cache_read_input_tokens > 20


def test_many_async_streams_at_once(model_url: str, client: Any) -> None:
    asked = [[{"role": "user", "content": f"What is {i} plus {i}?"}] for i in range(4)]
    alone = [client.messages.create(**GREEDY, messages=turns).content[0].text for turns in asked]

    async def one(made: Any, turns: Any) -> str:
        async with made.messages.stream(**GREEDY, messages=turns) as stream:
            return "".join([text async for text in stream.text_stream])

    async def go() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=model_url, api_key="none") as made:
            return list(await asyncio.gather(*(one(made, turns) for turns in asked)))

    assert asyncio.run(go()) == alone


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}, "thinking"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "takes no image"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "8192"),
    ],
)
def test_what_cannot_be_served_is_refused(client: Any, fields: dict[str, Any], named: str) -> None:
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match=named) as caught:
            client.messages.create(**{**GREEDY, "messages": GREET, **fields}, stream=stream)
        assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_keys(tiny_model: Path) -> None:
    def ask(url: str, key: str) -> None:
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as made:
            made.messages.create(**GREEDY, messages=GREET)

    with running(str(tiny_model), *TINY, "--api-key", "sesame", "--admin-api-key", "mountain") as server:
        for wrong in ("wrong", "mountain"):
            with pytest.raises(anthropic.AuthenticationError):
                ask(server.url, wrong)
        with pytest.raises(anthropic.BadRequestError, match="no tokenizer"):  # it was let in
            ask(server.url, "sesame")


def test_timings_come_on_request(client: Any) -> None:
    raw = client.messages.with_raw_response.create(**{**GREEDY, "extra_body": {"return_timings": True}}, messages=GREET)
    assert "prefill;dur=" in raw.headers["server-timing"]
    assert raw.parse().timings["time_to_first_token_s"] > 0
