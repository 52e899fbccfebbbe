"""Adapters in a whole engine, loaded at the start and later."""

from __future__ import annotations

from pathlib import Path

import pytest

import bough
from bough.core.errors import RequestError
from tests.fakes.adapters import write_adapter
from tests.fakes.checkpoints import write_checkpoint

PROMPT = [5, 6, 7, 8, 9]
GREEDY = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.slow
def test_an_engine_with_adapters(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", 1)
    first, second = (write_adapter(tmp_path / f"a{seed}", base, seed) for seed in (2, 3))
    fixed = {"skip_tokenizer_init": True, "max_total_tokens": 512, "context_length": 128}
    with bough.Engine(base, enable_lora=True, lora_paths=[f"one={first}"], **fixed) as engine:

        def ask(*names: str | None) -> list[list[int]]:
            given = {"input_ids": [PROMPT] * len(names), "sampling_params": GREEDY, "lora_path": list(names)}
            return [output["output_ids"] for output in engine.generate(**given)]

        plain, one = ask(None, "one")
        assert plain != one
        engine.load_lora_adapter("two", second)
        assert ask("two", None, "one")[1:] == [plain, one] and ask("two")[0] not in (plain, one)
        assert set(engine.get_server_info()["internal_states"][0]["loaded_adapters"]) == {"one", "two"}
        engine.unload_lora_adapter("two")
        with pytest.raises(RequestError, match="no adapter 'two'"):
            engine.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path="two")
        with pytest.raises(RequestError, match="is no adapter"):
            engine.load_lora_adapter("three", tmp_path)
