"""The on-policy loop of examples/rl, as far as it goes without an engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

PATH = Path(__file__).parents[2] / "examples" / "rl" / "train.py"


@pytest.fixture(scope="module")
def train() -> Any:
    spec = importlib.util.spec_from_file_location("train", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reward_counts_letters(train: Any) -> None:
    assert (train.reward("A fish, a cat."), train.reward("12!"), train.reward("Ease")) == (1.0, 0.0, -3.0)


def test_the_trainers_logprobs_are_those_of_each_answer_alone(train: Any) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    rows = [([3, 4, 5], [6, 7]), ([8, 9], [10, 11, 12, 13])]
    outputs = [
        {"output_ids": answer, "meta_info": {"input_token_logprobs": [[None, token, None] for token in prompt]}}
        for prompt, answer in rows
    ]
    found, there = train.trainer_logprobs(model, outputs)
    assert there.sum(1).tolist() == [2, 4]
    for (prompt, answer), values in zip(rows, found, strict=True):
        scores = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        alone = [scores[len(prompt) + at - 1, token] for at, token in enumerate(answer)]
        torch.testing.assert_close(values[: len(answer)], torch.stack(alone))
