"""Streams that go through parsers: any chunking, joined, is the whole message; prepared chunks equal the schema's."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.finish import FinishLength, FinishStop
from bough.parsers import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from bough.server.openai.chat import ChatWriter, read_chat
from bough.server.openai.requests import ChatRequest
from bough.server.streaming import json_event
from tests.fakes.scripted_engine import fresh_answer
from tests.server.openai.test_server_openai_streams import ENGINE, ME, SPELLER, flat, parsed, pieces_of, plain, read
from tests.server.stream_scripts import Script
from tests.server.tool_desk import CALL, MALFORMED, SCHEMA

FORM = AnswerFormat(
    reasoning=REASONING_FORMATS["qwen3"], tool_format=TOOL_FORMATS["hermes"], tools={"get_weather": SCHEMA}
)
PARTS = st.sampled_from(["<think>", "Hm é.", "</think>", "Well", " \n", CALL, MALFORMED, CALL[:40], "<tool_"])
SCRIPTS = st.builds(
    Script,
    st.lists(PARTS, max_size=5).map(lambda parts: list("".join(parts).encode())),
    st.lists(st.integers(1, 200), max_size=40),
    st.sampled_from([FinishStop(257), FinishLength(12)]),
)


def without_ids(chunk: bytes) -> bytes:
    """Ids of calls are drawn by lot."""
    return re.sub(rb'"call_\w+"', b'"call"', chunk)


@settings(deadline=None, max_examples=40)
@given(
    scripts=st.lists(SCRIPTS, min_size=1, max_size=2), turns=st.lists(st.integers(0, 1), max_size=6), ids=st.booleans()
)
def test_parsed_chat_streams(scripts: list[Script], turns: list[int], ids: bool) -> None:
    request = msgspec.convert({"n": len(scripts), "return_token_ids": ids}, ChatRequest)
    inputs = read(read_chat(request, ME, 512), input_ids=[1, 2])
    answers = [fresh_answer(ENGINE.tokenizer, prompt, i) for i, prompt in enumerate(inputs.prompts)]
    writer, slow, whole_writer = (ChatWriter(request, ME, SPELLER, FORM) for _ in range(3))
    stream = b""
    for piece in pieces_of(answers, scripts, turns):
        chunk = writer.chunk(piece)
        full = b"".join(json_event(each) for each in slow.full_chunks(piece))
        assert without_ids(chunk) == without_ids(full)
        stream += chunk
    chunks = parsed(stream)
    for choice in plain(whole_writer.whole(answers))["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        deltas: list[dict[str, Any]] = [c["delta"] for c in own]
        message = choice["message"]
        assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
        assert "".join(delta["reasoning_content"] or "" for delta in deltas) == (message["reasoning_content"] or "")
        pieces = flat(delta["tool_calls"] or [] for delta in deltas)
        shown = ["".join(p["function"]["arguments"] for p in pieces if p["index"] == i) for i in range(len(pieces))]
        whole = [call["function"]["arguments"] for call in message["tool_calls"] or ()]
        assert [arguments for arguments in shown if arguments] == whole
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        if ids:
            assert flat(c.get("token_ids", []) for c in own) == choice["token_ids"]
