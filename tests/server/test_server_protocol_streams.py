"""Streams of Anthropic and Ollama: any chunking, joined, equals the whole; each event is that of the schema."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bough.client.outputs import Piece, RequestOutput
from bough.core.finish import FinishLength
from bough.server.anthropic.writing import MessageWriter
from bough.server.endpoint import encode_json
from bough.server.errors import Failure
from bough.server.ollama.writing import KEEP_ALIVE, LineWriter, line, message_of
from bough.server.streaming import named_event
from tests.fakes.scripted_engine import ScriptedEngine, deltas_of, fresh_answer
from tests.server.stream_scripts import SCRIPTS, Script

ENGINE = ScriptedEngine(lambda request: None)
NAME = 'a "text":"" "content":"" "response":"" model é'  # what would mislead a careless search


def new_answer() -> RequestOutput:
    (prompt,) = ENGINE.reader.read(input_ids=[1, 2]).prompts
    return fresh_answer(ENGINE.tokenizer, prompt)


def pieces_of(answer: RequestOutput, script: Script) -> Iterator[Piece]:
    for delta in deltas_of(ENGINE.tokenizer, answer.handle, answer.prompt, script.ids, script.cuts, script.finish):
        answer.add(delta)
        yield answer.take()


def plain(value: Any) -> Any:
    return json.loads(encode_json(value))


@settings(deadline=None)
@given(script=SCRIPTS, timed=st.booleans())
def test_anthropic_streams(script: Script, timed: bool) -> None:
    answer, stream = new_answer(), b""
    writer, whole_writer = (MessageWriter("msg_1", NAME, timed) for _ in range(2))
    for piece in pieces_of(answer, script):
        chunk = writer.chunk(piece)
        if piece.text:
            delta = {"type": "text_delta", "text": piece.text}
            assert named_event({"type": "content_block_delta", "index": 0, "delta": delta}) in chunk
        stream += chunk
    stream += writer.end()
    events = [json.loads(block.split("\ndata: ")[1]) for block in stream.decode().split("\n\n")[:-1]]
    kinds = [event["type"] for event in events]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    rebuilt = {
        **events[0]["message"],
        **events[-2]["delta"],
        "content": [{"type": "text", "text": "".join(deltas)}],
        "usage": events[-2]["usage"],
    }
    if timed:
        rebuilt["timings"] = events[-2]["timings"]
    assert rebuilt == plain(whole_writer.whole([answer]))


@settings(deadline=None)
@given(script=SCRIPTS, chat=st.booleans(), timed=st.booleans())
def test_ollama_streams(script: Script, chat: bool, timed: bool) -> None:
    answer, stream = new_answer(), b""
    writer, whole_writer = (LineWriter(NAME, chat=chat, timed=timed, clock=lambda: 0.0) for _ in range(2))
    for piece in pieces_of(answer, script):
        chunk = writer.chunk(piece)
        if piece.text:
            assert chunk.startswith(line(whole_writer.show(message_of(piece.text), done=False)))
        stream += chunk
    stream += writer.end()
    lines = [json.loads(each) for each in stream.decode().split("\n")[:-1]]
    assert [each["done"] for each in lines] == [False] * (len(lines) - 1) + [True]
    whole = plain(whole_writer.whole([answer]))
    if chat:
        text = "".join(each["message"]["content"] for each in lines)
        assert {**lines[-1], "message": {"role": "assistant", "content": text}} == whole
    else:
        assert {**lines[-1], "response": "".join(each["response"] for each in lines)} == whole


def test_each_line_of_ollama_tells_when_it_was_made() -> None:
    clock = itertools.count()
    answer = new_answer()
    writer = LineWriter(NAME, chat=True, timed=False, clock=lambda: float(next(clock)))
    stream = b"".join(map(writer.chunk, pieces_of(answer, Script([104, 105], [1], FinishLength(2)))))
    made = [json.loads(each)["created_at"] for each in stream.splitlines()]
    assert made == [f"1970-01-01T00:00:0{second}.000000Z" for second in range(3)]


def test_streams_that_break_end_with_an_error_of_their_protocol() -> None:
    failure = Failure(503, "The engine has ended.", "EngineDeadError")
    name, data = MessageWriter("msg_1", NAME, False).failure(failure).decode().strip().split("\n")
    assert name == "event: error"
    error = {"type": "overloaded_error", "message": "The engine has ended."}
    assert json.loads(data.removeprefix("data: ")) == {"type": "error", "error": error}
    assert json.loads(LineWriter(NAME, chat=True, timed=False).failure(failure)) == {"error": "The engine has ended."}


def test_what_keeps_a_stream_of_lines_alive_is_part_of_the_next_line() -> None:
    stream = KEEP_ALIVE + KEEP_ALIVE + line({"done": False}) + KEEP_ALIVE + line({"done": True})
    assert [json.loads(each)["done"] for each in stream.splitlines()] == [False, True]
