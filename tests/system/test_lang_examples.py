"""Every example on the default model, in this process and over HTTP, with the same text."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(scope="module")
def seeded() -> Iterator[sgl.Engine]:
    with sgl.Engine(**SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def endpoint() -> Iterator[sgl.RuntimeEndpoint]:
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with running(*flags) as server:
        yield sgl.RuntimeEndpoint(server.url)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_writes_the_same_in_process_and_over_http(
    name: str, seeded: sgl.Engine, endpoint: sgl.RuntimeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load_example(name)
    texts = []
    for backend in (seeded, endpoint):
        monkeypatch.setattr(sgl.global_config, "default_backend", backend)
        texts.append(example.main())
    assert texts[0] == texts[1] and EXPECTED.get(name, "") in texts[0]


def test_there_are_the_examples_that_are_promised() -> None:
    assert {"multi_turn_chat_with_reasoning", "batch_evaluation"} < set(NAMES) and len(NAMES) == 11
