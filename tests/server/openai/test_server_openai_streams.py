"""Any chunking of a stream, joined, equals the whole answer; prepared chunks equal those of the schema."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bough.client.inputs import Inputs
from bough.client.outputs import Piece, RequestOutput
from bough.core.finish import FinishLength
from bough.messages.outputs import Delta
from bough.server.endpoint import encode_json
from bough.server.openai.chat import ChatWriter, read_chat
from bough.server.openai.completions import CompletionWriter, read_completion
from bough.server.openai.requests import ChatRequest, CompletionRequest, Identity, ResponsesRequest
from bough.server.openai.responses import ResponseWriter, read_response_request
from bough.server.openai.writing import TokenSpeller
from bough.server.streaming import DONE, json_event
from tests.fakes.scripted_engine import ScriptedEngine, deltas_of, fresh_answer
from tests.server.stream_scripts import SCRIPTS, Script

ENGINE = ScriptedEngine(lambda request: None)
SPELLER = TokenSpeller(ENGINE.tokenizer)
ME = Identity('id"text":""é', 1_700_000_000, 'a "text":"" model')  # what would mislead a careless search

# What SDKs expect of a delta without thinking or calls.
NOTHING_SPLIT = {"reasoning_content": None, "tool_calls": None}


def read(fields: dict[str, Any], **more: Any) -> Inputs:
    """What the reader makes of a request. Its `model` and `overlong` are the context's to read."""
    left_out = ("model", "overlong")
    return ENGINE.reader.read(**{name: value for name, value in fields.items() if name not in left_out}, **more)


def pieces_of(answers: Sequence[RequestOutput], scripts: Sequence[Script], turns: Sequence[int]) -> Iterator[Piece]:
    """Pieces as they come when the answers take turns."""
    waiting: list[list[Delta]] = [
        deltas_of(ENGINE.tokenizer, answer.handle, answer.prompt, script.ids, script.cuts, script.finish)
        for answer, script in zip(answers, scripts, strict=True)
    ]
    step = 0
    while any(waiting):
        open_ones = [i for i, deltas in enumerate(waiting) if deltas]
        who = open_ones[(turns[step % len(turns)] if turns else 0) % len(open_ones)]
        step += 1
        answers[who].add(waiting[who].pop(0))
        yield answers[who].take()


def parsed(stream: bytes) -> list[Any]:
    assert stream.endswith(b"\n\n")
    lines = [line for block in stream.decode().split("\n\n")[:-1] for line in block.split("\n")]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def plain(value: Any) -> Any:
    return json.loads(encode_json(value))


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def joined_logprobs(parts: list[Any]) -> Any:
    """Columns or contents, one behind the other."""
    if all(part is None for part in parts):
        return None
    names = parts[0].keys()
    return {
        name: None if parts[0][name] is None else [entry for part in parts if part for entry in part[name]]
        for name in names
    }


@given(
    scripts=st.lists(SCRIPTS, min_size=1, max_size=3),
    turns=st.lists(st.integers(0, 2), max_size=8),
    logprobs=st.none() | st.integers(0, 2),
    echo=st.booleans(),
    extras=st.booleans(),
    options=st.sampled_from([None, {"include_usage": True}, {"continuous_usage_stats": True}]),
)
def test_completion_streams(
    scripts: list[Script], turns: list[int], logprobs: int | None, echo: bool, extras: bool, options: Any
) -> None:
    fields = {"prompt": "né", "n": len(scripts), "logprobs": logprobs, "echo": echo, "return_token_ids": extras}
    request = msgspec.convert({**fields, "return_meta_info": extras, "stream_options": options}, CompletionRequest)
    inputs = read(read_completion(request, ME))
    answers = [fresh_answer(ENGINE.tokenizer, prompt, i) for i, prompt in enumerate(inputs.prompts)]
    echoes = ["né"] if echo else []
    writer, slow, whole_writer = (CompletionWriter(request, ME, SPELLER, echoes) for _ in range(3))
    stream = b""
    for piece in pieces_of(answers, scripts, turns):
        chunk = writer.chunk(piece)
        assert chunk == b"".join(map(json_event, slow.full_chunks(piece)))
        stream += chunk
    chunks, end = parsed(stream), writer.end()
    assert end.endswith(DONE)
    whole = plain(whole_writer.whole(answers))
    assert all(chunk["id"] == whole["id"] and chunk["model"] == whole["model"] for chunk in chunks)
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert joined_logprobs([c["logprobs"] for c in own]) == choice["logprobs"]
        if extras:
            assert flat(c["token_ids"] for c in own) == choice["token_ids"]
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        for name in ("finish_reason", "matched_stop", "meta_info"):
            assert own[-1].get(name) == choice.get(name)
    if options == {"include_usage": True}:
        assert all(chunk["usage"] is None for chunk in chunks)
        assert parsed(end)[0]["usage"] == whole["usage"] and parsed(end)[0]["choices"] == []
    else:
        assert end == DONE


@given(
    scripts=st.lists(SCRIPTS, min_size=1, max_size=3),
    turns=st.lists(st.integers(0, 2), max_size=8),
    top=st.none() | st.integers(0, 2),
    extras=st.booleans(),
    options=st.sampled_from([None, {"include_usage": True}, {"continuous_usage_stats": True}]),
)
def test_chat_streams(scripts: list[Script], turns: list[int], top: int | None, extras: bool, options: Any) -> None:
    logprobs = {} if top is None else {"logprobs": True, "top_logprobs": top}
    fields = {"n": len(scripts), **logprobs, "return_token_ids": extras, "return_meta_info": extras}
    request = msgspec.convert({**fields, "stream_options": options}, ChatRequest)
    inputs = read(read_chat(request, ME, 512), input_ids=[1, 2])
    answers = [fresh_answer(ENGINE.tokenizer, prompt, i) for i, prompt in enumerate(inputs.prompts)]
    writer, slow, whole_writer = (ChatWriter(request, ME, SPELLER) for _ in range(3))
    stream = b""
    for piece in pieces_of(answers, scripts, turns):
        chunk = writer.chunk(piece)
        assert chunk == b"".join(json_event(full) for full in slow.full_chunks(piece))
        stream += chunk
    chunks, end = parsed(stream), writer.end()
    whole = plain(whole_writer.whole(answers))
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": "", **NOTHING_SPLIT}
        assert all(c["delta"] | NOTHING_SPLIT == c["delta"] for c in own) and own[-1]["delta"] == NOTHING_SPLIT
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        shown = [c["logprobs"]["content"] for c in own if c["logprobs"] is not None]
        assert flat(shown) == ([] if choice["logprobs"] is None else choice["logprobs"]["content"])
        if extras:
            assert flat(c.get("token_ids", []) for c in own) == choice["token_ids"]
        for name in ("finish_reason", "matched_stop", "meta_info"):
            assert own[-1].get(name) == choice.get(name)
    if options == {"include_usage": True}:
        assert parsed(end)[0]["usage"] == whole["usage"]


@given(script=SCRIPTS, top=st.none() | st.integers(1, 2))
def test_response_streams(script: Script, top: int | None) -> None:
    request = msgspec.convert({"input": "x", "top_logprobs": top, "return_token_ids": True}, ResponsesRequest)
    inputs = read(read_response_request(request, ME, 512), input_ids=[1, 2])
    answer = fresh_answer(ENGINE.tokenizer, inputs.prompts[0])
    writer, whole_writer = (ResponseWriter(request, ME, inputs, SPELLER, stored=True) for _ in range(2))
    stream = b"".join(map(writer.chunk, pieces_of([answer], [script], [])))
    whole = whole_writer.whole([answer])
    events = parsed(stream + writer.end())
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"] for e in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    fields = ["type", "item_id", "output_index", "content_index", "delta", "logprobs", "sequence_number"]
    assert all(list(e) == fields and e["item_id"] == plain(whole)["output"][0]["id"] for e in deltas)
    part = plain(whole)["output"][0]["content"][0]
    assert "".join(e["delta"] for e in deltas) == part["text"] == events[-4]["text"] == events[-3]["part"]["text"]
    assert flat(e["logprobs"] for e in deltas) == (part["logprobs"] or [])
    assert events[-1]["response"] == plain(whole)
    length = isinstance(script.finish, FinishLength)
    assert kinds[-1] == ("response.incomplete" if length else "response.completed")
