"""A stream that breaks anywhere and is resumed on another engine is, joined, the stream that never broke."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.server import anthropic, ollama, openai
from bough.server.app import App
from bough.server.native.generate import generate_routes
from tests.fakes.whole_engine import WholeEngine

MESSAGES = [{"role": "user", "content": "né"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "né"},
    "/v1/completions": {"prompt": "né", "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"messages": MESSAGES, "stream_options": {"include_usage": True}},
    "/v1/messages": {"messages": MESSAGES},
}
MARKED = {"X-Bough-Resume": "1"}


@dataclass
class Group:
    """Events that travel together, with what was announced of them."""

    events: list[Any] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    seed: int | None = None
    missing: int = 0  # events that belong to it and have not come


def groups_of(stream: str) -> list[Group]:
    """As a gateway reads them."""
    groups: list[Group] = []
    assert stream.endswith("\n\n")
    for block in stream.split("\n\n")[:-1]:
        if not groups or not groups[-1].missing:
            groups.append(Group(missing=1))
        group = groups[-1]
        group.missing -= 1
        for line in block.split("\n"):
            name, _, value = line.removeprefix(": ").partition(" ")
            if line.startswith("data: "):
                group.events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
            elif name == "ids":
                group.ids += map(int, value.split(","))
            elif name == "seed":
                group.seed = int(value)
            elif name == "events":
                group.missing += int(value) - 1
            else:
                assert line.startswith("event: ")
    assert not groups[-1].missing
    return groups


def stream(engine: WholeEngine, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> list[Group]:
    return groups_of(post(engine, path, {**body, "stream": True}, headers or MARKED).text)


def client_of(engine: WholeEngine) -> httpx.AsyncClient:
    context = engine.context()
    endpoints = [*generate_routes(context), *openai.routes(context), *anthropic.routes(context)]
    app = App([*endpoints, *ollama.routes(context)], context.settings.server)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bough")


def post(
    engine: WholeEngine, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, status: int = 200
) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(engine) as http:
            return await http.post(path, json=body, headers=headers)

    answer = asyncio.run(go())
    assert answer.status_code == status, answer.text
    return answer


def resume_body(path: str, body: dict[str, Any], head: list[Group]) -> dict[str, Any]:
    """What a gateway asks another worker for."""
    first = head[0].events[0]
    resume: dict[str, Any] = {"output_ids": [i for group in head for i in group.ids], "seed": head[0].seed}
    if path == "/generate":
        resume["id"] = first["meta_info"]["id"]
    elif path == "/v1/messages":
        resume["id"] = first["message"]["id"]
    else:
        resume |= {"id": first["id"], "created": first["created"]}
    return {**body, "resume": resume}


def told(path: str, groups: list[Group]) -> dict[str, Any]:
    """All that a stream tells, whatever its chunks."""
    events = [event for group in groups for event in group.events]
    ids = [i for group in groups for i in group.ids]
    if path == "/v1/messages":
        assert events.pop()["type"] == "message_stop"
        last, stop = events.pop(), events.pop()
        texts = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
        kinds = [e["type"] for e in events if e["type"] != "content_block_delta"]
        usage = last["usage"]["output_tokens"], sum(v for k, v in last["usage"].items() if "input" in k)
        return {
            "text": "".join(texts),
            "ids": ids,
            "finish": last["delta"],
            "usage": usage,
            "kinds": [*kinds, stop["type"]],
            "id": [e["message"]["id"] for e in events if "message" in e],
        }
    assert events.pop() == "[DONE]"
    if path == "/generate":
        meta = events[-1]["meta_info"]
        texts = [e["text"] for e in events]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        return {"text": texts[-1], "ids": ids, "finish": meta["finish_reason"], "usage": usage_of(meta)} | {
            "id": {e["meta_info"]["id"] for e in events},
            "output_ids": events[-1]["output_ids"],
        }
    usage = events.pop()
    choices = [e["choices"][0] for e in events]
    deltas = [c.get("delta", c) for c in choices]
    return {
        "text": "".join(d.get("text") or d.get("content") or "" for d in deltas),
        "roles": [d["role"] for d in deltas if "role" in d],
        "ids": ids,
        "finish": [(c["finish_reason"], c["matched_stop"]) for c in choices if c["finish_reason"]],
        "usage": usage_of(usage["usage"]),
        "id": {(e["id"], e["created"]) for e in [*events, usage]},
        "logprobs": [entry for c in choices if c["logprobs"] for entry in logprob_entries(c["logprobs"])],
    }


def usage_of(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


def logprob_entries(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = ("tokens", "token_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in columns), strict=True))


def sampling_body(path: str, max_tokens: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """The same wishes in each protocol's words."""
    if path == "/generate":
        names = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
        given = {names.get(name, name): value for name, value in sampling.items()}
        return ROUTES[path] | {"sampling_params": {"max_new_tokens": max_tokens, **given}}
    if path == "/v1/messages":
        known = {name: value for name, value in sampling.items() if name == "temperature"}
        return ROUTES[path] | {"max_tokens": max_tokens, "stop_sequences": sampling.get("stop"), **known}
    return ROUTES[path] | {"max_tokens": max_tokens, **sampling}


SAMPLINGS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1.0])},
    optional={
        "seed": st.just(11),
        "frequency_penalty": st.just(0.5),
        "stop": st.sampled_from([["aa"], ["b a", "bb b"], ["é"], ["\ufffd"]]),
        "stop_regex": st.just(["a+ b"]),
        "no_stop_trim": st.just(True),
        "ignore_eos": st.just(True),
        "min_tokens": st.just(5),
    },
)
ENGINES = st.fixed_dictionaries(
    {},
    optional={
        "turns": st.integers(1, 4),
        "stream_interval": st.integers(1, 5),
        "page_size": st.sampled_from([1, 4]),
        "chunk_tokens": st.sampled_from([4, 64]),
        "disable_overlap_schedule": st.just(True),
    },
)


@pytest.mark.parametrize("path", ROUTES)
@settings(deadline=None, max_examples=15)
@given(sampling=SAMPLINGS, max_tokens=st.integers(5, 24), first=ENGINES, second=ENGINES)
def test_head_and_resumed_tail_are_the_undisturbed_stream(
    path: str, sampling: dict[str, Any], max_tokens: int, first: dict[str, Any], second: dict[str, Any]
) -> None:
    body = sampling_body(path, max_tokens, sampling)
    whole = stream(WholeEngine(**first), path, body)
    for cut in range(1, len(whole)):
        head = whole[:cut]
        tail = stream(WholeEngine(**second), path, resume_body(path, body, head))
        assert told(path, head + tail) == told(path, whole), cut


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_and_their_places_go_on(path: str, echo: bool) -> None:
    chat = path == "/v1/chat/completions"
    extras = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2, "echo": echo}
    body = sampling_body(path, 12, {"ignore_eos": True, "seed": 3}) | extras
    whole = stream(WholeEngine(), path, body)
    assert len(told(path, whole)["logprobs"]) == 12 + (3 if echo and not chat else 0)
    for cut in range(1, len(whole)):
        tail = stream(WholeEngine(), path, resume_body(path, body, whole[:cut]))
        assert told(path, whole[:cut] + tail) == told(path, whole)


def test_native_logprobs_are_those_of_what_follows() -> None:
    body = sampling_body("/generate", 6, {"ignore_eos": True}) | {"return_logprob": True, "logprob_start_len": 0}
    whole = stream(WholeEngine(seed=1), "/generate", body)
    tail = stream(WholeEngine(), "/generate", resume_body("/generate", body, whole[:4]))
    meta, undisturbed = tail[-1].events[0]["meta_info"], whole[-1].events[0]["meta_info"]
    assert meta["output_token_logprobs"] == undisturbed["output_token_logprobs"][4:]
    assert meta["output_token_logprobs_length"] == 2
    assert meta["input_token_logprobs"] == undisturbed["input_token_logprobs"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "sampling",
    [{"stop": ["a"]}, {"stop": ["\ufffd"], "ignore_eos": True}, {"ignore_eos": True}, {}, {"no_stop_trim": True}],
)
def test_an_answer_that_was_complete_only_ends(path: str, sampling: dict[str, Any]) -> None:
    body = sampling_body(path, 30, {"seed": 5, **sampling})
    whole = stream(WholeEngine(seed=5), path, body)
    (end,) = stream(WholeEngine(), path, resume_body(path, body, whole))
    assert end.ids == []
    full = told(path, whole)
    rest = told(path, [*whole[:-1], end]) if path == "/generate" else told(path, [end])
    assert (rest["finish"], rest["usage"]) == (full["finish"], full["usage"])
    assert rest["text"] == (full["text"] if path == "/generate" else "")


def test_nothing_is_computed_for_an_answer_that_its_tokens_ended() -> None:
    engine = WholeEngine()
    body = sampling_body("/generate", 4, {"stop_token_ids": [99]})
    for ids, finish in (([98, 99], {"type": "stop", "matched": 99}), ([98] * 4, {"type": "length", "length": 4})):
        (end,) = stream(engine, "/generate", {**body, "resume": {"output_ids": ids}})
        assert end.events[0]["meta_info"]["finish_reason"] == finish
    assert not engine.executor.plans


def test_a_resumed_stream_can_break_again() -> None:
    path = "/v1/chat/completions"
    body = sampling_body(path, 20, {"ignore_eos": True, "stop": ["bbbb"]})
    whole = stream(WholeEngine(seed=9), path, body)
    again = stream(WholeEngine(), path, resume_body(path, body, whole[:3]))
    tail = stream(WholeEngine(), path, resume_body(path, body, whole[:3] + again[:5]))
    assert told(path, whole[:3] + again[:5] + tail) == told(path, whole)


def test_the_engine_goes_on_as_after_a_retraction() -> None:
    engine = WholeEngine()
    body = sampling_body("/generate", 9, {"frequency_penalty": 1.0, "ignore_eos": True})
    stream(engine, "/generate", {**body, "resume": {"output_ids": [97, 98, 97], "seed": 77}})
    (setup,) = engine.executor.setups
    assert (setup.generated, setup.seed, setup.prompt_len) == (3, 77, 3)
    assert setup.history is not None and setup.history.tolist()[3:] == [97, 98, 97]


def test_cached_tokens_are_those_of_the_prompt() -> None:
    engine = WholeEngine(seed=2)
    body = sampling_body("/v1/messages", 20, {"temperature": 0})
    whole = stream(engine, "/v1/messages", body)
    tail = stream(engine, "/v1/messages", resume_body("/v1/messages", body, whole[:2]))
    usage = tail[-1].events[-2]["usage"]
    assert usage["input_tokens"] == 0 < usage["cache_read_input_tokens"]


def test_only_streams_that_ask_for_it_and_have_one_answer_are_announced() -> None:
    body = sampling_body("/generate", 3, {})
    assert all(not g.ids and g.seed is None for g in stream(WholeEngine(), "/generate", body, {"X-Bough-Resume": "0"}))
    several = sampling_body("/generate", 3, {"n": 2})
    assert all(not group.ids for group in stream(WholeEngine(), "/generate", several))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stream": False}, "set stream to true"),
        ({"resume": {}}, "output_ids"),
        ({"resume": {"output_ids": [1], "ids": 3}}, "ids"),
        ({"resume": {"output_ids": ["x"]}}, "resume.output_ids"),
        ({"resume": {"output_ids": [[1], [2]]}}, "of one answer"),
        ({"resume": {"output_ids": [258]}}, "resume.output_ids: token id 258 is outside the vocabulary"),
        ({"resume": {"output_ids": [-1]}}, "resume.output_ids: token id -1"),
        ({"resume": {"output_ids": [2**40]}}, "outside the vocabulary"),
        ({"resume": {"output_ids": [257, 97]}}, "goes on behind token 257"),
        ({"resume": {"output_ids": [1], "seed": 2**63}}, "resume.seed"),
        ({"resume": {"output_ids": [1], "created": "now"}}, "resume.created"),
        ({"n": 2}, "leave n at 1"),
        ({"prompt": ["a", "b"]}, "one prompt"),
    ],
)
def test_what_cannot_be_resumed_is_refused_with_a_reason(more: dict[str, Any], words: str) -> None:
    body = {"prompt": "a", "stream": True, "resume": {"output_ids": [97]}, **more}
    answer = post(WholeEngine(), "/v1/completions", body, status=400)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x"}),
        ("/api/chat", {"messages": MESSAGES}),
        ("/api/generate", {"prompt": "x"}),
    ],
)
def test_routes_that_cannot_resume_say_so(path: str, body: dict[str, Any]) -> None:
    """Beginning again in silence would show the client its beginning twice."""
    answer = post(WholeEngine(), path, {**body, "resume": {"output_ids": [97]}}, status=400)
    assert "resume is not supported" in answer.text


def test_an_id_that_is_still_in_use_is_no_obstacle() -> None:
    """The worker may not have noticed yet that the stream broke."""

    async def go() -> None:
        engine = WholeEngine()
        first = engine.reader.read(prompt="a", rid="same", sampling_params={"max_new_tokens": 50, "ignore_eos": True})
        pieces = engine.client.pieces(first, stream=True)
        await anext(pieces)
        body = sampling_body("/generate", 4, {"ignore_eos": True}) | {"resume": {"output_ids": [97], "id": "same"}}
        async with client_of(engine) as http:
            answer = await http.post("/generate", json={**body, "stream": True})
        assert answer.status_code == 200 and len(groups_of(answer.text)) > 1
        await pieces.aclose()

    asyncio.run(go())
