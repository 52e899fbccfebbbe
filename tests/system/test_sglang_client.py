"""SGLang's own frontend language against a real server with the default model."""

from __future__ import annotations

from tests.system.foreign import require, what_it_saw


def test_programs_of_sglang_run_unchanged(model_url: str) -> None:
    require("sglang")
    seen = what_it_saw("sglang_calls", model_url)
    assert seen["context_length"] == 8192 and seen["model"]
    assert seen["whole"].startswith(" Paris")
    assert "".join(seen["pieces"]) == seen["whole"] and len(seen["pieces"]) > 1
    assert seen["stopped"] == " Paris"
    assert seen["chosen"] == " Paris"
    assert seen["batch"][0] == seen["whole"] and seen["batch"][1]
    assert len(seen["forks"]) == 2 and all(seen["forks"]) and seen["chat"]
    assert seen["logprobs"] == 2 and seen["top_logprobs"] == [2, 2]
