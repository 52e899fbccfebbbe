"""Every example on the default model, in this process and over HTTP, with the same text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import bough as sgl
from tests.fakes.examples import NAMES, load_example
from tests.system.serving import running

SETTINGS = {"dtype": "float32", "quantization": "none", "max_total_tokens": 20_000, "random_seed": 7}
EXPECTED = {  # words that the default model's answer must hold, where it can be relied upon
    "few_shot_qa": "Paris",
    "json_extraction": '"name": "Ada Lovelace"',
    "multi_turn_chat": "The capital of France is Paris.",
    "react_calculator": "Observation: 45",
    "batch_evaluation": "3. Rating: ",
}

QUICK = ("batch_evaluation", "few_shot_qa", "multi_turn_chat", "streaming")  # choices, branches, roles, a stream


@pytest.fixture(scope="module")
def seeded() -> Iterator[sgl.Engine]:
    with sgl.Engine(**SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def endpoint() -> Iterator[sgl.RuntimeEndpoint]:
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with running(*flags) as server:
        yield sgl.RuntimeEndpoint(server.url)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_an_example_writes_the_same_in_process_and_over_http(
    name: str, seeded: sgl.Engine, endpoint: sgl.RuntimeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load_example(name)
    texts = []
    for backend in (seeded, endpoint):
        monkeypatch.setattr(sgl.global_config, "default_backend", backend)
        texts.append(example.main())
    assert texts[0] == texts[1] and EXPECTED.get(name, "") in texts[0]


def test_a_time_out_reaches_the_server(endpoint: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def endless(s: Any) -> None:
        s += "Once upon a time" + sgl.gen("rest", max_tokens=4000, ignore_eos=True)

    with pytest.raises(sgl.ProgramError, match=r"took longer than 0.5 s"):
        endless.run(backend=endpoint, timeout_s=0.5)
    while sgl.get_server_info(endpoint)["internal_states"][0]["num_running_reqs"]:  # ends only if the request does
        threading.Event().wait(0.02)


def test_what_the_engine_refuses_is_told_over_http_too(endpoint: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def look(s: Any) -> None:
        s += sgl.user(sgl.image(b"...") + "What is it?") + sgl.assistant(sgl.gen("x", max_tokens=2))

    with pytest.raises(sgl.ProgramError, match=r"in look: RequestError: image_data is not supported by this engine"):
        look.run(backend=endpoint)


def test_there_are_the_examples_that_are_promised() -> None:
    assert {"multi_turn_chat_with_reasoning", "batch_evaluation"} < set(NAMES) and len(NAMES) == 11
