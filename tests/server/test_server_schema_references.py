"""Schemas with references that lead out of them, on every route that takes a schema: nobody fetches anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bough.constrained.interface import GrammarSpec, Ticket
from bough.constrained.prepare import prepare
from bough.core.errors import RequestError
from bough.core.settings import SchedulerSettings
from bough.launch.grammars import GrammarDesk
from bough.scheduler.ports import Grammars
from bough.server.app import App
from bough.server.protocols import all_endpoints
from tests.fakes.bait import laid_out
from tests.fakes.scripted_engine import IM_END, byte_level_tokenizer
from tests.fakes.whole_engine import VOCAB, WholeEngine

ASK = [{"role": "user", "content": "a"}]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


class InProcess:
    """Prepares grammars in this process, where what it opens is seen; answers with what it would warn of."""

    def request(self, spec: GrammarSpec) -> Ticket:
        raise RequestError("; ".join(prepare(spec, "llguidance").warnings))

    def spell(self, last: int | None, forced: bytes, *, whole: bool = False) -> Sequence[int]:
        raise AssertionError("no grammar was compiled")


def calls(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    """Every place of every protocol where a client may put a schema."""
    chat = {"model": "m", "messages": ASK}
    inner = {"name": "x", "schema": schema}
    tag = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}]}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"p": schema}}}
    must = {"tool_choice": "required"}
    forced = {"tools": [{"type": "function", "function": function}], **must}
    formats = [
        {"type": "json_schema", "json_schema": {**inner, "strict": True}},
        {"type": "json_schema", "json_schema": inner},
        {"type": "json_object", "schema": schema},
        {**tag, "triggers": ["<f"]},
    ]
    return [
        ("/generate", {"text": "a", "sampling_params": {"json_schema": schema}}),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": json.dumps(schema)}}),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": schema, "grammar_strict": False}}),
        *((CHAT, {**chat, "response_format": form}) for form in formats),
        (CHAT, {**chat, "guided_json": schema}),
        (CHAT, {**chat, "structured_outputs": {"json": schema}}),
        (CHAT, {**chat, **forced}),
        ("/v1/completions", {"model": "m", "prompt": "a", "guided_json": schema}),
        ("/v1/responses", {"model": "m", "input": "a", "text": {"format": {"type": "json_schema", **inner}}}),
        (MESSAGES, {**chat, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        (
            MESSAGES,
            {
                **chat,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": function["parameters"]}],
                "tool_choice": {"type": "any"},
            },
        ),
        ("/api/chat", {"model": "m", "messages": ASK, "format": schema}),
        ("/api/generate", {"model": "m", "prompt": "a", "format": schema}),
        ("/v1/responses", {"model": "m", "input": "a", "tools": [{"type": "function", **function}], **must}),
        ("/v1/completions", {"model": "m", "prompt": "a", "response_format": formats[0]}),
        ("/generate", {"text": "a", "sampling_params": {"structural_tag": {**tag, "triggers": ["<f"]}}}),
    ]


def answers(grammars: Grammars, asked: Sequence[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
    async def go() -> list[httpx.Response]:
        context = WholeEngine(grammars=grammars).context(tool_call_parser="hermes")
        app = App(all_endpoints(context), context.settings.server)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bough") as client:
            return [await client.post(path, json=body) for path, body in asked]

    return asyncio.run(go())


def test_no_route_fetches_what_a_schema_names(tmp_path: Path) -> None:
    with laid_out(tmp_path) as bait:
        for schema in bait.schemas().values():
            for answer in answers(InProcess(), calls(schema)):
                assert answer.status_code == 400, answer.text
                assert "of the schema" in answer.text or "in the schema" in answer.text or "Ref cannot" in answer.text
        assert bait.fetched == [] and bait.touched == []


def test_nor_does_the_process_that_compiles(tmp_path: Path) -> None:
    desk = GrammarDesk(byte_level_tokenizer, (IM_END,), VOCAB, SchedulerSettings())
    with contextlib.closing(desk), laid_out(tmp_path) as bait:
        asked = [("/generate", {"text": "a", "sampling_params": {"json_schema": s}}) for s in bait.schemas().values()]
        assert {answer.status_code for answer in answers(desk, asked)} == {400}
        assert bait.fetched == []
