"""The `openai` SDK against a real server with the default model, as its users would call it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.system.serving import load_of, until

openai = pytest.importorskip("openai", reason="the openai SDK is not installed (pip install bough[dev])")

NAME = "SmolLM2-135M-Instruct"
FRANCE = "The capital of France is"
GREET: list[Any] = [{"role": "user", "content": "Say hello to Ada."}]
GREEDY: dict[str, Any] = {"model": "any-name", "temperature": 0}


@pytest.fixture(scope="module")
def client(model_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{model_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == NAME
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")


# Completions ----------------------------------------------------------------------------------------------------------


def test_a_completion_whole_and_streamed(client: Any) -> None:
    whole = client.completions.create(**GREEDY, prompt=FRANCE)
    assert whole.model == NAME and whole.choices[0].text.startswith(" Paris")
    assert whole.usage.prompt_tokens == 5 and whole.usage.completion_tokens == 16
    assert whole.choices[0].finish_reason == "length"
    options = {"include_usage": True}
    chunks = list(client.completions.create(**GREEDY, prompt=FRANCE, stream=True, stream_options=options))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 4


def test_completions_of_lists_and_token_ids_agree(client: Any, model_url: str) -> None:
    ids = httpx.post(f"{model_url}/tokenize", json={"prompt": FRANCE}).json()["tokens"]
    by_text = client.completions.create(**GREEDY, prompt=[FRANCE, "Two plus two is"], max_tokens=6)
    by_ids = client.completions.create(**GREEDY, prompt=[ids], max_tokens=6)
    alone = client.completions.create(**GREEDY, prompt=ids, max_tokens=6, echo=True)
    assert [choice.index for choice in by_text.choices] == [0, 1]
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert alone.choices[0].text == FRANCE + by_ids.choices[0].text


def test_echo_with_logprobs_scores_a_prompt(client: Any) -> None:
    scored = client.completions.create(**GREEDY, prompt=FRANCE, max_tokens=0, echo=True, logprobs=1)
    (choice,) = scored.choices
    assert choice.text == FRANCE == "".join(choice.logprobs.tokens)
    assert choice.logprobs.token_logprobs[0] is None and all(p < 0 for p in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset == [0, 3, 11, 14, 21]
    assert scored.usage.completion_tokens == 0


def test_stops_seeds_and_samples(client: Any) -> None:
    stopped = client.completions.create(**GREEDY, prompt=FRANCE, stop=["."], max_tokens=20).choices[0]
    assert stopped.text == " Paris" and stopped.finish_reason == "stop" and stopped.matched_stop == "."
    options: dict[str, Any] = {"model": "m", "prompt": FRANCE, "temperature": 1.5, "seed": 11, "max_tokens": 8}
    first, second = (client.completions.create(**options, n=3) for _ in range(2))
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert len({c.text for c in first.choices}) > 1
    best = client.completions.create(**options, best_of=3)
    assert best.choices[0].text in [c.text for c in first.choices]


def test_a_bias_bans_a_token(client: Any) -> None:
    plain = client.completions.create(**GREEDY, prompt=FRANCE, max_tokens=1, extra_body={"return_token_ids": True})
    (token,) = plain.choices[0].token_ids
    other = client.completions.create(**GREEDY, prompt=FRANCE, max_tokens=1, logit_bias={str(token): -100})
    assert other.choices[0].text != plain.choices[0].text


def test_bad_words_of_several_tokens(client: Any) -> None:
    plain = client.completions.create(**GREEDY, prompt=FRANCE, max_tokens=12)
    words = plain.choices[0].text.split()
    pairs = [f"{first} {second}" for first, second in itertools.pairwise(words)]
    other = client.completions.create(**GREEDY, prompt=FRANCE, max_tokens=24, extra_body={"bad_words": pairs})
    assert pairs and not any(pair in other.choices[0].text for pair in pairs)
    one = client.completions.create(**GREEDY, prompt=FRANCE, max_tokens=12, extra_body={"bad_words": pairs[1:]})
    assert one.choices[0].text.split()[:2] == words[:2]  # up to the first bad word nothing changes


def test_prompt_logprobs_are_those_of_an_echo(client: Any) -> None:
    asked = {"prompt": FRANCE, "max_tokens": 0, "echo": True, "logprobs": 2, "extra_body": {"prompt_logprobs": 2}}
    (choice,) = client.completions.create(**GREEDY, **asked).choices
    own = [None if entry is None else next(iter(entry.values())) for entry in choice.prompt_logprobs]
    assert [each and each["logprob"] for each in own] == choice.logprobs.token_logprobs
    assert [each and each["decoded_token"] for each in own][1:] == choice.logprobs.tokens[1:]
    best = [max(entry.values(), key=lambda each: each["logprob"]) for entry in choice.prompt_logprobs[1:]]
    assert all(each["rank"] == 1 for each in best)


def test_streamed_token_ids_are_those_of_the_whole(client: Any) -> None:
    body: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
    whole = client.completions.create(**GREEDY, prompt=FRANCE, extra_body=body)
    chunks = client.completions.create(**GREEDY, prompt=FRANCE, extra_body=body, stream=True)
    assert [token for c in chunks for token in c.choices[0].token_ids] == whole.choices[0].token_ids


# Chats ----------------------------------------------------------------------------------------------------------------


def test_a_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=GREET, max_completion_tokens=24)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.content
    chunks = list(client.chat.completions.create(**GREEDY, messages=GREET, max_completion_tokens=24, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_chat_without_a_limit_ends_by_itself(client: Any) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": "What is 2+2?"}])
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 1


def test_chat_logprobs_spell_the_answer(client: Any) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=GREET, max_tokens=8, logprobs=True, top_logprobs=3, n=2)
    for choice in answer.choices:
        content = choice.logprobs.content
        assert b"".join(bytes(token.bytes) for token in content).decode() == choice.message.content
        assert all(token.top_logprobs[0].logprob >= token.logprob for token in content)
        assert all(len(token.top_logprobs) == 3 for token in content)


def test_an_answer_can_be_continued(client: Any) -> None:
    whole = client.chat.completions.create(**GREEDY, messages=GREET, max_tokens=8, logprobs=True).choices[0]
    tokens = [token.token for token in whole.logprobs.content]
    turns = [*GREET, {"role": "assistant", "content": "".join(tokens[:3])}]
    rest = client.chat.completions.create(
        **GREEDY, messages=turns, max_tokens=5, extra_body={"continue_final_message": True}
    )
    assert rest.choices[0].message.content == "".join(tokens[3:])


def test_text_parts_and_odd_characters(client: Any) -> None:
    odd = "e\u0301 👩‍👩‍👧 שלום \0 ."
    parts = [{"type": "text", "text": "Repeat:"}, {"type": "text", "text": odd}]
    answer = client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": parts}], max_tokens=4)
    assert answer.usage.completion_tokens == 4
    echoed = client.completions.create(**GREEDY, prompt=odd, echo=True, max_tokens=0)
    assert echoed.choices[0].text == odd


def test_sglang_extras_come_back(client: Any) -> None:
    extras = {"return_meta_info": True, "return_timings": True, "rid": "my-own-id", "cache_salt": "s", "priority": 1}
    answer = client.chat.completions.create(**GREEDY, messages=GREET, max_tokens=4, extra_body=extras)
    assert answer.id == "my-own-id" and answer.choices[0].meta_info["id"] == "my-own-id"
    assert answer.timings["prefill_new_tokens"] == answer.usage.prompt_tokens
    raw = client.chat.completions.with_raw_response.create(
        **GREEDY, messages=GREET, max_tokens=4, extra_body={"return_timings": True}
    )
    assert "prefill;dur=" in raw.headers["server-timing"]


def test_many_async_streams_at_once(model_url: str, client: Any) -> None:
    prompts = [f"{i} and {i} make" for i in range(6)]
    alone = [client.completions.create(**GREEDY, prompt=p, max_tokens=8).choices[0].text for p in prompts]

    async def one(made: Any, prompt: str) -> str:
        stream = await made.completions.create(**GREEDY, prompt=prompt, max_tokens=8, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def go() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{model_url}/v1", api_key="none") as made:
            return list(await asyncio.gather(*(one(made, prompt) for prompt in prompts)))

    assert asyncio.run(go()) == alone


def test_leaving_a_stream_ends_its_request(client: Any, model_url: str) -> None:
    stream = client.completions.create(
        **GREEDY, prompt=FRANCE, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until(lambda: load_of(model_url)["num_running_reqs"] == 0, "the abandoned request is gone")


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"extra_body": {"regex": "(a"}}, "regex"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client: Any, fields: dict[str, Any], param: str | None) -> None:
    asked = {"model": "m", "messages": GREET, "max_tokens": 8, **fields}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**asked, stream=stream)
        assert caught.value.param == (param or "messages[0].content[0]")


def test_prompts_that_do_not_fit_are_refused_with_both_numbers(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"9000 tokens.*8192") as caught:
        client.completions.create(**GREEDY, prompt=[1] * 9000)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(**GREEDY, prompt=[10**6], stream=True)


# Responses ------------------------------------------------------------------------------------------------------------


def test_a_response_whole_streamed_and_fetched(client: Any) -> None:
    whole = client.responses.create(**GREEDY, input="Say hello to Ada.", max_output_tokens=24)
    assert whole.output_text == client.responses.retrieve(whole.id).output_text
    assert whole.usage.input_tokens > 0 and whole.status in ("completed", "incomplete")
    events = list(client.responses.create(**GREEDY, input="Say hello to Ada.", max_output_tokens=24, stream=True))
    assert events[0].type == "response.created"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert client.responses.retrieve(events[-1].response.id).output_text == whole.output_text


def test_the_sdks_own_stream_helper_follows_a_response(client: Any) -> None:
    with client.responses.stream(**GREEDY, input="Say hello to Ada.", max_output_tokens=12) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert deltas


def test_a_conversation_goes_on_with_what_was_said(client: Any) -> None:
    first = client.responses.create(
        **GREEDY, input="My name is Ada.", instructions="Answer in one sentence.", max_output_tokens=24
    )
    second = client.responses.create(
        **GREEDY, input="What is my name?", previous_response_id=first.id, max_output_tokens=24
    )
    turns: list[Any] = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    assert second.output_text == client.responses.create(**GREEDY, input=turns, max_output_tokens=24).output_text
    chat = client.chat.completions.create(**GREEDY, messages=turns, max_tokens=24)
    assert second.output_text == chat.choices[0].message.content


def test_a_response_in_the_background_can_be_cancelled(client: Any) -> None:
    body = {"ignore_eos": True}
    slow = client.responses.create(**GREEDY, input="Count.", background=True, max_output_tokens=4000, extra_body=body)
    assert slow.status == "queued"
    assert client.responses.cancel(slow.id).status == "cancelled"
    assert client.responses.retrieve(slow.id).status == "cancelled"


def test_responses_that_are_not_there(client: Any) -> None:
    gone = client.responses.create(**GREEDY, input="Hi.", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**GREEDY, input="Hi.", previous_response_id=gone.id)
