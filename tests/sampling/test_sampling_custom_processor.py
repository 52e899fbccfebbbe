"""Users' own logit processors: what they change, for whom, and what happens when they fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sampling_reference import make_setup

from bough.core.errors import RequestError
from bough.core.plan import LogprobSpec
from bough.sampling.custom_logit_processor import CustomLogitProcessor, load_processor
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState

VOCAB = 50


def only_token_text() -> str:
    class OnlyToken(CustomLogitProcessor):
        """A class that the engine could not import."""

        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            import math

            for line, params in zip(logits, custom_param_list, strict=True):
                line.fill_(-math.inf)
                line[params["token"]] = 0.0
            return logits

    return OnlyToken.to_str()


def failing_text(kind: str) -> str:
    class Failing(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            return logits[:, :3] if kind == "shape" else logits + {}["missing"]

    return Failing.to_str()


def run(setups: list[Any], logits: torch.Tensor) -> Any:
    state = SamplingState(len(setups), VOCAB, "cpu")
    state.setup(setups)
    return sample(state, logits, np.arange(len(setups), dtype=np.int32))


def processed(row: int, text: str, **params: Any) -> Any:
    from dataclasses import replace

    logprobs = params.pop("logprobs", None)
    return replace(make_setup(row, logprobs=logprobs, **params), processor=text)


def test_a_processor_decides_for_its_own_rows() -> None:
    text = only_token_text()
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    free = int(logits[1].argmax())
    kept = logits[2].clone()
    setups = [
        processed(0, text, custom_params={"token": 7}, temperature=0.0),
        make_setup(1, temperature=0.0),
        processed(2, text, custom_params={"token": 9}, logprobs=LogprobSpec()),
    ]
    sampled = run(setups, logits)
    assert sampled.tokens.tolist() == [7, free, 9] and not sampled.bad.any()
    assert torch.equal(logits[2], kept)  # logprobs are of the model's own distribution


@pytest.mark.parametrize("kind", ["error", "shape"])
def test_a_processor_that_fails_fails_its_own_request(kind: str) -> None:
    setups = [processed(0, failing_text(kind)), make_setup(1)]
    assert run(setups, torch.zeros(2, VOCAB)).bad.tolist() == [True, False]


def test_what_holds_no_processor_is_refused() -> None:
    for text in ("", "{}", '{"callable": "00"}', "not json"):
        with pytest.raises(RequestError) as caught:
            load_processor(text)
        assert caught.value.field == "custom_logit_processor"


def test_a_row_forgets_the_processor_of_its_last_request() -> None:
    state = SamplingState(1, VOCAB, "cpu")
    state.setup([processed(0, only_token_text(), custom_params={"token": 3})])
    assert not state.plain(np.array([0], dtype=np.int32))
    state.setup([make_setup(0)])
    assert state.plain(np.array([0], dtype=np.int32)) and not state.processors
