"""The server with the default model: what it says, and the ways to reach it."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.certificates import make_certificate
from tests.system.serving import PATIENCE_S, TINY, Server, load_of, running, until

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture
def http(model_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=model_url, timeout=PATIENCE_S) as client:
        yield client


def test_the_call_to_paste_works_as_it_stands(model_server: Server) -> None:
    assert "SmolLM2-135M-Instruct" in model_server.welcome
    command = model_server.welcome.split("Try:\n")[1]
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    done = subprocess.run(command, shell=True, capture_output=True, check=True)
    assert "Paris" in json.loads(done.stdout)["text"]


def test_a_stream_ends_in_the_whole_answer(http: httpx.Client) -> None:
    body: dict[str, Any] = {"text": PROMPT, "sampling_params": GREEDY}
    whole = http.post("/generate", json=body).json()
    with http.stream("POST", "/generate", json=body | {"stream": True}) as response:
        lines = [line[6:] for line in response.iter_lines() if line]
    outputs = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and outputs[-1]["text"] == whole["text"]
    assert all(later["text"].startswith(sooner["text"]) for sooner, later in itertools.pairwise(outputs))
    assert outputs[-1]["meta_info"]["cached_tokens"] > 0


def test_a_text_of_millions_of_tokens_is_refused_before_it_is_tokenised_whole(http: httpx.Client) -> None:
    refused = http.post("/generate", json={"text": "a " * (4 << 20)})
    assert refused.status_code == 400
    assert (
        "more than 262144 tokens is longer than the model's context length of 8192 tokens"
        in refused.json()["error"]["message"]
    )


def test_what_a_selecting_program_needs(http: httpx.Client) -> None:
    """The steps of SGLang's `select`: fill the cache, then score each choice behind the prompt."""
    filled = http.post("/generate", json={"text": PROMPT, "sampling_params": {"max_new_tokens": 0}}).json()
    start = filled["meta_info"]["prompt_tokens"] - 2
    body = {
        "text": [PROMPT + " Paris", PROMPT + " Oslo"],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": max(start, 0),
    }
    paris, oslo = (
        sum(entry[0] for entry in output["meta_info"]["input_token_logprobs"] if entry[0] is not None)
        for output in http.post("/generate", json=body).json()
    )
    assert paris > oslo


def test_text_of_every_kind_survives_or_is_refused(http: httpx.Client) -> None:
    for text in ("👩‍👩‍👧 ok", "e\u0301\u0323", "שלום עולם", "a\0b", "\ufeff\u202e"):
        tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["text"] == text
        assert http.post("/generate", json={"text": text, "sampling_params": GREEDY}).status_code == 200
    lone = http.post("/generate", content=b'{"text": "\\ud83d alone"}')
    assert lone.status_code == 400


def test_too_long_a_prompt_is_told_both_numbers(http: httpx.Client) -> None:
    for stream in (False, True):
        reply = http.post("/generate", json={"input_ids": [5] * 9000, "stream": stream})
        message = reply.json()["error"]["message"]
        assert reply.status_code == 400 and "9000" in message and "8192" in message


def test_health_and_load(http: httpx.Client, model_url: str) -> None:
    assert http.get("/health_generate").status_code == 200
    until(lambda: http.get("/server_info").json()["internal_states"][0]["num_running_reqs"] == 0, "an idle server")
    assert load_of(model_url)["max_total_num_tokens"] == 20000


@pytest.mark.slow
def test_a_unix_socket(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with running(str(tiny_model), *TINY, "--uds", str(path)):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://bough") as client:
            assert client.get("/health").status_code == 200


@pytest.mark.slow
def test_ipv6_and_tls(tiny_model: Path, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    flags = ("--host", "::1", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    with running(str(tiny_model), *TINY, *flags) as server:
        assert server.url.startswith("https://[::1]:")
        assert httpx.get(f"{server.url}/health", verify=False).status_code == 200
    cert.write_text("no certificate")
    with running(str(tiny_model), *TINY, *flags, ready=False) as server:
        assert server.wait() == 2 and "cannot be used" in server.log() and server.log().count("\n") == 1
