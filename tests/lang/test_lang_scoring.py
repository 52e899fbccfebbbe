"""Choices: which tokens are scored, and how the methods decide."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.core.errors import RequestError
from bough.lang.backends.base import NativeBackend
from bough.lang.choices import (
    Scores,
    greedy_token_selection,
    normalized,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

WORDS = ["is", " ", " yes", " no", "yes", "no", "!", " yes!"]


def tokenize(text: str) -> list[int]:
    """Greedy: the longest known word at each place."""
    ids = []
    while text:
        word = max((word for word in WORDS if text.startswith(word)), key=len)
        ids.append(WORDS.index(word))
        text = text[len(word) :]
    return ids


def spell(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


class Asked(NativeBackend):
    """Keeps what it was asked, and answers with what it was given, or that all tokens are impossible."""

    chat_format = stream = None

    def __init__(self, entries: Sequence[Any] | None = None, reason: Any = None) -> None:
        super().__init__()
        self._entries, self._reason = entries, reason

    async def encode(self, texts: list[str]) -> list[list[int]]:
        return list(map(tokenize, texts))

    async def ask(self, body: dict[str, Any]) -> Any:
        self.prompts, self.starts = body["input_ids"], body["logprob_start_len"]
        found = self._entries or [[(None, token, "") for token in prompt] for prompt in self.prompts]
        reasons = [self._reason if i == 1 else {"type": "length"} for i in range(len(found))]
        return [
            {"text": "", "meta_info": {"finish_reason": reason, "input_token_logprobs": entry}}
            for entry, reason in zip(found, reasons, strict=True)
        ]


def score(backend: Asked, text: str, choices: list[str], *, unconditional: bool = True) -> Scores:
    return asyncio.run(backend.score(text, choices, unconditional=unconditional))


def test_the_border_is_healed() -> None:
    asked = Asked()
    score(asked, "is ", ["yes", "!"])
    assert asked.starts == [0, 0, 0, 0]  # both are scored after "is", though only one joins the space to its word
    assert [spell(prompt) for prompt in asked.prompts] == ["is yes", "is !", " yes", " !"]


@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=4), st.lists(st.sampled_from(WORDS), min_size=1, max_size=4)
)
def test_what_is_scored_is_the_same_text_after_the_same_tokens(words: list[str], choices: list[str]) -> None:
    text, asked = "is" + "".join(words), Asked()
    score(asked, text, choices)
    first, count = asked.starts[0], len(choices)
    heads = {tuple(prompt[: start + 1]) for prompt, start in zip(asked.prompts, asked.starts, strict=True)}
    contexts = {tuple(prompt[: first + 1]) for prompt in asked.prompts[:count]}
    assert len(contexts) == 1 and heads
    for choice, prompt, alone in zip(choices, asked.prompts[:count], asked.prompts[count:], strict=True):
        assert spell(prompt) == text + choice and prompt[first + 1 :] == alone and alone
        assert text.startswith(spell(prompt[: first + 1]))


def test_there_must_be_something_to_score_after() -> None:
    with pytest.raises(RequestError, match="after some text"):
        score(Asked(), "", ["yes", "no"], unconditional=False)


def test_answers_are_sorted_and_refusals_raised() -> None:
    entries = [
        [(None, 0, "is"), (-1.0, 2, " yes")],
        [(None, 0, "is"), (None, 3, " no")],
        [(None, 2, "")],
        [(None, 3, "")],
    ]
    scores = score(Asked(entries, {"type": "length"}), "is", [" yes", " no"])
    assert scores.tokens == [[(-1.0, 2, " yes")], [(-math.inf, 3, " no")]] and scores.alone == entries[2:]
    with pytest.raises(RequestError, match="too long"):
        score(Asked(entries, {"type": "abort", "message": "too long"}), "is", [" yes", " no"])


def decide(method: Any, rows: list[list[float]], alone: list[list[float | None]] | None = None) -> str:
    tokens = [[(logprob, 0, "") for logprob in row] for row in rows]
    bare = None if alone is None else [[(logprob, 0, "") for logprob in row] for row in alone]
    decision = method(
        choices=[str(i) for i in range(len(rows))],
        normalized_prompt_logprobs=[normalized(row) for row in tokens],
        input_token_logprobs=tokens,
        output_token_logprobs=[[] for _ in rows],
        unconditional_token_logprobs=bare,
    )
    return str(decision.decision)


def test_methods_differ_where_they_should() -> None:
    rows = [[-1.0, -0.1, -0.1], [-0.9, -3.0], [-2.0]]
    assert decide(token_length_normalized, rows) == "0"  # the best mean
    assert decide(greedy_token_selection, rows) == "1"  # the best first token
    assert decide(greedy_token_selection, [[-1.0, -2.0], [-1.0], [-1.0, -3.0]]) == "1"  # ended: represented by its mean
    alone: list[list[float | None]] = [[None, -0.1, -0.1], [None, -9.0], [None]]
    assert decide(unconditional_likelihood_normalized, rows, alone) == "1"  # what the text makes likelier
    with pytest.raises(ValueError, match="unconditional_token_logprobs"):
        decide(unconditional_likelihood_normalized, rows)
