"""Prompts of multilingual models, by the numbers that OpenAI's vocabularies have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from bough.core.errors import RequestError
from bough.core.speech import SpeechConfig
from bough.speech.transcriber import Task, Transcriber


class Names:
    """A tokenizer whose languages are called by their tokens."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<|{token}|>" for token in ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def transcriber(start: int, timestamps: int) -> Transcriber:
    speech = SpeechConfig({"max_source_positions": 1500}, start, start - 1, timestamps)
    return Transcriber(cast(Any, None), cast(Any, None), cast(Any, Names()), speech)


def test_a_multilingual_model_is_told_language_and_task() -> None:
    model = transcriber(50_258, 50_364)
    assert len(model._languages()) == 99  # from <|en|>, 50259, on
    assert model._prompt(Task(language="50261")) == [50_258, 50_261, 50_359]
    assert model._prompt(Task(language="50261", translate=True)) == [50_258, 50_261, 50_358]
    assert model._prompt(Task(language="50259", stream=True)) == [50_258, 50_259, 50_359, 50_363]
    with pytest.raises(RequestError, match="'klingon' is not known; known are 50259,"):
        model._prompt(Task(language="klingon"))


def test_the_third_large_model_has_one_language_more() -> None:
    model = transcriber(50_258, 50_365)
    assert len(model._languages()) == 100
    assert model._prompt(Task(language="50358")) == [50_258, 50_358, 50_360]


def test_an_english_model_is_told_the_end_of_a_long_prompt() -> None:
    prompt = transcriber(50_257, 50_363)._prompt(Task(prompt="x" * 500))
    assert prompt[0] == 50_360 and prompt[-1] == 50_257 and len(prompt) == 225
