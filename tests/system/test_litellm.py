"""`litellm` against a real server with the default model. Importing it takes about as long as a model's load."""

from __future__ import annotations

import pytest

from tests.system.foreign import require, what_it_saw


@pytest.mark.slow
def test_litellm_gets_the_same_answers_whole_and_streamed(model_url: str) -> None:
    require("litellm")
    seen = what_it_saw("litellm_calls", model_url)
    assert seen["chat"] and seen["finish"] in ("stop", "length")
    assert seen["chat"] == seen["streamed"] == seen["async_streamed"] and seen["pieces"] > 2
    assert seen["streamed_usage"][-1] == seen["usage"]
    assert seen["text"].startswith(" Paris") and seen["text"] == seen["text_streamed"]
    assert "temperature" in seen["refused"]
