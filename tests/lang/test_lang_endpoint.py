"""A server as a back end: what is sent, and what its errors become."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bough as sgl
from bough.core.errors import EngineDeadError, SettingsError
from bough.lang.backends import endpoint
from bough.launch import owned_server

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
INFO: dict[str, Any] = {
    "model_path": "tiny",
    "chat_template": {"sources": {"default": CHATML}, "variables": {}, "first_token": ""},
}


def output(text: str, **meta: Any) -> dict[str, Any]:
    shown = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 1, **meta}
    return {"text": text, "output_ids": [1], "meta_info": shown}


def entries(ids: list[int]) -> list[list[Any]]:
    return [[None if i == 0 else -float(token), token, chr(token)] for i, token in enumerate(ids)]


class NativeServer:
    """SGLang's native API with a scripted `generate`; a reply of None breaks the connection off."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info
        self.asked: list[tuple[str, Any, str | None]] = []
        self.url = ""

    def generate(self, body: dict[str, Any]) -> Any:
        if "input_ids" in body:  # the score of a token is minus its number
            pairs = zip(body["input_ids"], body["logprob_start_len"], strict=True)
            return [output("", input_token_logprobs=entries(ids[start:])) for ids, start in pairs]
        return output(f"<{body['text'][-1]}>")


@contextmanager
def native(info: dict[str, Any] = INFO) -> Iterator[NativeServer]:
    server = NativeServer(info)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(self.path, None)

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"] or 0))
            self._answer(self.path, json.loads(raw or b"null"))

        def _answer(self, path: str, body: Any) -> None:
            server.asked.append((path, body, self.headers["Authorization"]))
            if path == "/tokenize":
                self._send(200, {"tokens": [[ord(c) for c in text] for text in body["prompt"]]})
            elif path == "/flush_cache":
                self._send(400, {"error": {"message": "busy"}})
            elif path == "/generate" and body.get("stream"):
                events = [output(text) for text in ("a", "ab", "abc")]
                raw = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
                self._send(200, raw)
            elif path == "/generate":
                reply = server.generate(body)
                if reply is None:
                    self.close_connection = True
                else:
                    self._send(*(reply if isinstance(reply, tuple) else (200, reply)))
            else:
                self._send(200, server.info)

        def _send(self, status: int, body: Any) -> None:
            raw = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args: Any) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


@sgl.function
def chat(s: Any) -> None:
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("a", max_tokens=3, return_logprob=True, lora_path="sql"))
    s += sgl.select("b", choices=["xx", "ay"])


def test_programs_run_over_http_with_the_servers_own_template() -> None:
    with native() as server:
        backend = sgl.RuntimeEndpoint(f"{server.url}/", api_key="secret")
        state = chat.run(backend=backend)
        assert state["a"] == "<>>" and state.text() == "<user>Hi</><assistant><>></>ay"
        assert backend.token_usage == state.get_usage() and backend.token_usage.requests > 1
        path, body, key = server.asked[1]
        assert path == "/generate" and body["text"] == "<user>Hi</><assistant>" and key == "Bearer secret"
        assert body["sampling_params"]["max_new_tokens"] == 3 and body["return_logprob"] is True
        assert body["lora_path"] == "sql"
        assert state.get_meta_info("b")["input_token_logprobs"][1] == [(-97.0, 97, "a"), (-121.0, 121, "y")]
        streamed = chat.run(backend=backend, stream=True)
        assert "".join(streamed.text_iter("a")) == "abc"
        streamed.sync()  # its choice is scored behind that, and is not to be the last request below
        assert backend.get_model_name() == "tiny" and sgl.flush_cache(backend) is False
        assert sgl.get_server_info(backend)["model_path"] == "tiny"
        chat.cache(backend)
        assert server.asked[-1][1] == {"text": "<user>Hi</><assistant>", "sampling_params": {"max_new_tokens": 0}}


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "INTRODUCTION_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(EngineDeadError, match=r"did not say within 0.05 s"),
    ):
        sgl.RuntimeEndpoint(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_users_of_a_back_end_wait_for_it() -> None:
    with native() as server:
        backend = sgl.RuntimeEndpoint(server.url)
        assert backend.flush_cache() is False and backend.get_server_info()["model_path"] == "tiny"
        backend.cache_prefix("Once")
        assert server.asked[-1][:2] == ("/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 0}})


def test_a_runtime_can_be_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    with native() as server:
        monkeypatch.setattr(owned_server, "OwnedServer", lambda settings: SimpleNamespace(url=server.url, close=int))
        with sgl.Runtime() as runtime:
            answer = json.loads(runtime.generate("Once", {"max_new_tokens": 2}, return_logprob=True))
            assert answer["text"] == "<e>" and server.asked[-1][1]["return_logprob"] is True
            assert server.asked[-1][1]["sampling_params"] == {"max_new_tokens": 2}
            runtime.cache_prefix("Once")
            assert server.asked[-1][1] == {"text": "Once", "sampling_params": {"max_new_tokens": 0}}
            assert runtime.flush_cache() is False

            async def follow() -> tuple[str, Any]:
                pieces = [piece async for piece in runtime.async_generate("Once", {"max_new_tokens": 2})]
                return "".join(pieces), await runtime.get_server_info()

            assert asyncio.run(follow()) == ("abc", INFO)
            (streamed,) = [body for path, body, _ in server.asked if path == "/generate" and body.get("stream")]
            assert streamed["text"] == "Once" and streamed["sampling_params"]["max_new_tokens"] == 2


def test_pictures_travel_as_their_bytes(tmp_path: Path) -> None:
    png = b"\x89PNG..."
    (tmp_path / "cat.png").write_bytes(png)
    (tmp_path / "film.mp4").write_bytes(b"....ftyp....")
    written = base64.b64encode(png).decode()

    @sgl.function
    def look(s: Any) -> None:
        s += sgl.image(png) + sgl.image(str(tmp_path / "cat.png")) + sgl.image(written)
        s += sgl.image("https://example.org/a.png") + sgl.video(str(tmp_path / "film.mp4"), 4) + sgl.gen("x")

    with native() as server:
        assert look.run(backend=sgl.RuntimeEndpoint(server.url)).text().startswith("<image>" * 4)
        body = server.asked[-1][1]
    assert body["image_data"] == [f"data:image/png;base64,{written}"] * 3 + ["https://example.org/a.png"]
    film = base64.b64encode(b"....ftyp....").decode()
    assert body["video_data"] == [{"url": f"data:video/mp4;base64,{film}", "num_frames": 4}]


def test_choices_are_not_scored_after_a_picture() -> None:
    @sgl.function
    def choose(s: Any) -> None:
        s += sgl.image(b"\x89PNG...") + sgl.select("x", choices=["cat", "dog"])

    with native() as server, pytest.raises(sgl.ProgramError, match=r"use gen\(\) with a regex"):
        choose.run(backend=sgl.RuntimeEndpoint(server.url))


def test_other_servers_templates_are_known_by_name() -> None:
    with native({"model_path": "x/Llama-3-8B-Instruct"}) as server:
        text = chat.run(backend=sgl.RuntimeEndpoint(server.url)).text()
        assert text.startswith("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>")
        named = sgl.RuntimeEndpoint(server.url, chat_template_name="chatml")
        assert "<|im_start|>user\nHi<|im_end|>" in chat.run(backend=named).text()
        with pytest.raises(SettingsError, match="Unknown chat template"):
            sgl.RuntimeEndpoint(server.url, chat_template_name="nonsense")


def test_a_model_without_a_template_takes_no_roles() -> None:
    with (
        native({"model_path": "gpt2", "chat_template": None}) as server,
        pytest.raises(sgl.ProgramError, match="has no chat template"),
    ):
        chat.run(backend=sgl.RuntimeEndpoint(server.url))


def test_refusals_and_deaths_surface_in_run() -> None:
    with native() as server:
        backend = sgl.RuntimeEndpoint(server.url)
        server.generate = lambda body: (400, {"error": {"message": "too long by 3"}})  # type: ignore[method-assign]
        with pytest.raises(sgl.ProgramError, match="too long by 3"):
            chat.run(backend=backend)
        server.generate = lambda body: (502, "<html>")  # type: ignore[method-assign]
        with pytest.raises(sgl.ProgramError, match="answered 502: <html>"):
            chat.run(backend=backend)
        server.generate = lambda body: None  # type: ignore[method-assign]
        with pytest.raises(sgl.ProgramError, match="cannot be reached, or has ended"):
            chat.run(backend=backend)
        aborted = output("", finish_reason={"type": "abort", "message": "stopped by hand"})
        server.generate = lambda body: aborted  # type: ignore[method-assign]
        with pytest.raises(sgl.ProgramError, match="stopped by hand"):
            chat.run(backend=backend)
    with pytest.raises(EngineDeadError, match="cannot be reached"):
        sgl.RuntimeEndpoint(server.url)
