"""Images, video and sound in the requests of each protocol: which prompt and which sources come of them."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest

from bough.client.inputs import InputReader, Inputs
from bough.core.errors import RequestError
from bough.core.media import MediaSource
from bough.server.app import App
from bough.server.protocols import all_endpoints
from bough.tokenizer.chat_template import ChatTemplate
from tests.fakes.scripted_engine import ScriptedEngine
from tests.server.protocol_desk import HELLO, Desk

KINDS = frozenset({"image", "video", "audio"})
PNG = b"\x89PNG..."
DATA = base64.b64encode(PNG).decode()
URL, DATA_URL = "https://example.org/cat.png", f"data:image/png;base64,{DATA}"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<' + p.type + '>' }}{% endfor %}{% endif %}|{% endfor %}"
)


class NotingReader(InputReader):
    """Notes the sources, and leaves them out: the engine of these tests knows nothing of media."""

    sources: tuple[MediaSource, ...] = ()

    def read(self, **given: Any) -> Inputs:
        inputs = super().read(**given)
        self.sources = inputs.prompts[0].sources
        return dataclasses.replace(
            inputs, prompts=tuple(msgspec.structs.replace(p, sources=()) for p in inputs.prompts)
        )


def served(
    use: Callable[[Desk, NotingReader], Awaitable[None]], kinds: frozenset[Any] = KINDS, template: str = TEMPLATE
) -> None:
    async def go() -> None:
        engine = ScriptedEngine(lambda request: HELLO)
        engine.tokenizer.chat_template = ChatTemplate(template, placeholders={"image": "[IMG]"})
        engine.client.media_kinds = kinds
        reader = engine.reader = NotingReader(engine.tokenizer, {}, random_seed=7)
        context = engine.context()
        app = App(all_endpoints(context), context.settings.server)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as http:
            await use(Desk(http, engine), reader)

    asyncio.run(go())


def says(role: str, *parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": list(parts)}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_instances_of_vertex_may_have_an_image() -> None:
    async def use(desk: Desk, reader: NotingReader) -> None:
        both = [{"text": "a<image>", "image_data": URL}, {"text": "b"}]
        await desk.post("/vertex_generate", instances=both)
        assert reader.sources == (MediaSource("image", URL),)
        await desk.post("/vertex_generate", instances=[both[1], both[0]])
        assert reader.sources == ()

    served(use)


IMAGE = {"type": "image_url", "image_url": {"url": URL}}
FROM_BASE64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
FROM_URL = {"type": "image", "source": {"type": "url", "url": URL}}
REQUESTS: list[tuple[str, dict[str, Any], str, list[MediaSource]]] = [
    (
        "/v1/chat/completions",
        {"messages": says("user", text("a"), {**IMAGE, "image_url": {"url": DATA_URL, "detail": "low"}}, text("b"))},
        "user:a<image>b|",
        [MediaSource("image", DATA_URL, "low")],
    ),
    (
        "/v1/chat/completions",
        {
            "messages": says(
                "user",
                {"type": "video_url", "video_url": {"url": URL, "num_frames": 4}},
                {"type": "audio_url", "audio_url": {"url": URL}},
                {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
                {"type": "image_url", "image_url": URL},
            )
        },
        "user:<video><audio><audio><image>|",
        [
            MediaSource("video", URL, None, 4),
            MediaSource("audio", URL),
            MediaSource("audio", PNG),
            MediaSource("image", URL),
        ],
    ),
    (
        "/v1/responses",
        {"input": says("user", {"type": "input_image", "image_url": URL, "detail": "high"}, text("b"))},
        "user:<image>b|",
        [MediaSource("image", URL, "high")],
    ),
    (
        "/v1/messages",
        {"max_tokens": 4, "messages": says("user", FROM_BASE64, text("b"), FROM_URL) + says("user", text("c"))},
        "user:<image>b<image>c|",
        [MediaSource("image", PNG), MediaSource("image", URL)],
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": says("assistant", {"type": "tool_use", "id": "t", "name": "look", "input": {}})
            + says("user", {"type": "tool_result", "tool_use_id": "t", "content": [text("x"), FROM_BASE64]}),
        },
        "assistant:|tool:x<image>|",
        [MediaSource("image", PNG)],
    ),
    (
        "/api/chat",
        {"stream": False, "messages": [{"role": "user", "content": "b", "images": [DATA, DATA]}]},
        "user:<image><image>b|",
        [MediaSource("image", PNG)] * 2,
    ),
    (
        "/api/generate",
        {"stream": False, "prompt": "b", "images": [DATA], "system": "s"},
        "system:s|user:<image>b|",
        [MediaSource("image", PNG)],
    ),
    (
        "/api/generate",
        {"stream": False, "prompt": "<image>b", "images": [DATA], "raw": True},
        "<image>b",
        [MediaSource("image", PNG)],
    ),
]


@pytest.mark.parametrize(("path", "body", "prompt", "sources"), REQUESTS)
def test_prompts_have_placeholders_and_sources_in_order(
    path: str, body: dict[str, Any], prompt: str, sources: list[MediaSource]
) -> None:
    async def use(desk: Desk, reader: NotingReader) -> None:
        await desk.post(path, **body)
        assert desk.prompt == prompt and list(reader.sources) == sources

    served(use)


def test_a_template_of_texts_gets_the_models_placeholder() -> None:
    async def use(desk: Desk, reader: NotingReader) -> None:
        await desk.post("/v1/chat/completions", messages=says("user", text("a"), IMAGE, text("b")))
        assert desk.prompt == "[IMG]\na\nb" and reader.sources == (MediaSource("image", URL),)

    served(use, template="{{ messages[0].content }}")


def test_a_response_that_is_continued_keeps_its_images() -> None:
    async def use(desk: Desk, reader: NotingReader) -> None:
        image = {"type": "input_image", "image_url": URL}
        first = await desk.post("/v1/responses", input=says("user", image))
        await desk.post("/v1/responses", input="and?", previous_response_id=first["id"])
        assert desk.prompt == "user:<image>|assistant:hello|user:and?|"
        assert reader.sources == (MediaSource("image", URL),)

    served(use)


def test_tokens_of_images_are_counted_without_the_engine() -> None:
    async def use(desk: Desk, reader: NotingReader) -> None:
        count = await desk.post("/v1/messages/count_tokens", messages=says("user", FROM_URL, text("b")))
        assert count == {"input_tokens": len("user:<image>b|")} and reader.sources == (MediaSource("image", URL),)
        assert not desk.engine.requests

    served(use)


NO_IMAGES = "content[0]: this model takes no image; send text only."


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": says("user", IMAGE)}, f"messages[0].{NO_IMAGES}"),
        ("/v1/responses", {"input": says("user", {"type": "input_image", "image_url": URL})}, f"input[0].{NO_IMAGES}"),
        ("/v1/messages", {"max_tokens": 1, "messages": says("user", FROM_URL)}, f"messages[0].{NO_IMAGES}"),
        ("/api/chat", REQUESTS[5][1], "messages[0].images[0]: this model takes no image"),
        ("/api/generate", REQUESTS[6][1], "images[0]: this model takes no image"),
        ("/api/generate", REQUESTS[7][1], "images[0]: this model takes no image"),
    ],
)
def test_a_model_of_texts_refuses_the_part_by_name(path: str, body: dict[str, Any], message: str) -> None:
    async def use(desk: Desk, reader: NotingReader) -> None:
        answer = await desk.post(path, 400, **body)
        error = answer["error"]
        assert message in (error if isinstance(error, str) else error["message"])
        if path in ("/v1/chat/completions", "/v1/responses"):
            assert error["type"] == "invalid_request_error" and error["param"] == message.partition(":")[0]
        elif path == "/v1/messages":
            assert answer["type"] == "error" and error["type"] == "invalid_request_error"
        assert desk.engine.requests == []

    served(use, kinds=frozenset())


def chat(*parts: dict[str, Any], role: str = "user") -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": says(role, *parts)}


def message(*parts: dict[str, Any], role: str = "user") -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 1, "messages": says(role, *parts)}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (chat({"type": "image_url"}), "messages[0].content[0].image_url must have a url"),
        (chat({"type": "image_url", "image_url": {"url": ""}}), "must have a url"),
        (chat({"type": "image_url", "image_url": {"url": URL, "detail": "best"}}), "detail must be low, high or auto"),
        (chat({"type": "video_url", "video_url": {"url": URL, "num_frames": 0}}), "num_frames must be"),
        (chat({"type": "input_audio", "input_audio": {"data": "?"}}), "content[0].input_audio.data must be a file's"),
        (chat({"type": "file", "file": {"file_id": "f"}}), "parts of type 'file' are not supported"),
        (chat(IMAGE, role="assistant"), "parts of type 'image_url' are not supported"),
        (("/v1/responses", {"input": says("user", {"type": "input_file", "file_id": "f"})}), "'input_file' are not"),
        (("/v1/responses", {"input": says("user", {"type": "input_image", "file_id": "f"})}), "keeps no files"),
        (message({"type": "document", "source": {}}), "documents are not read by this server; send their text"),
        (message({"type": "image", "source": {"type": "file", "file_id": "f"}}), 'must be of type "base64"'),
        (message({"type": "image", "source": {"type": "base64", "data": "?"}}), "source.data must be a file's bytes"),
        (message(FROM_URL, role="assistant"), "parts of type 'image' are not supported"),
        (
            ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["?"]}]}),
            "messages[0].images[0] must",
        ),
        (("/api/chat", {"messages": [{"role": "user", "content": "x", "images": 3}]}), "must be a list of images"),
        (("/api/generate", {"prompt": "x", "images": [""]}), "images[0] must be a file's bytes in base64"),
    ],
)
def test_what_is_wrong_with_a_part_is_said(request_: tuple[str, dict[str, Any]], words: str) -> None:
    async def use(desk: Desk, reader: NotingReader) -> None:
        path, body = request_
        assert words in json.dumps(await desk.post(path, 400, **body)).replace('\\"', '"')

    served(use)


@pytest.mark.parametrize(("count", "param"), [(1, "messages[0].content[0]"), (2, "messages")])
def test_what_preparing_finds_is_said_of_the_part(count: int, param: str) -> None:
    """The engine calls images image_data."""

    async def use(desk: Desk, reader: NotingReader) -> None:
        def fail(**given: Any) -> Inputs:
            raise RequestError("image_data is not an image.", field="image_data")

        reader.read = fail  # type: ignore[method-assign]
        answer = await desk.post("/v1/chat/completions", 400, messages=says("user", *[IMAGE] * count))
        assert answer["error"]["param"] == param and answer["error"]["message"] == f"{param} is not an image."

    served(use)


def test_openais_client() -> None:
    async def use(desk: Desk, reader: NotingReader) -> None:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=desk.http, max_retries=0)
        question: Any = says("user", text("Who is this?"), {"type": "image_url", "image_url": {"url": DATA_URL}})
        answer = await client.chat.completions.create(model="tiny", messages=question)
        assert answer.choices[0].message.content == "hello" and answer.usage is not None
        assert answer.usage.prompt_tokens == len("user:Who is this?<image>|")
        assert reader.sources == (MediaSource("image", DATA_URL),)
        bad: Any = says("user", {"type": "image_url", "image_url": {}})
        with pytest.raises(openai.BadRequestError, match="must have a url"):
            await client.chat.completions.create(model="tiny", messages=bad)

    served(use)
