"""Adapters in a whole engine: loaded at the start, later and on first use; in the language, over HTTP and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import bough
from bough.core.errors import RequestError
from tests.fakes.adapters import merge, write_adapter
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.scripted_engine import BYTE_OF_CHAR
from tests.parity.engines import LocalEngine
from tests.system.serving import running

PROMPT = [5, 6, 7, 8, 9]
TEXT = "Bough has"
VOICE: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
FIXED: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "max_total_tokens": 512}
GREEDY = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.slow
def test_an_engine_with_adapters(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", 1)
    first, second = (write_adapter(tmp_path / f"a{seed}", base, seed) for seed in (2, 3))
    fixed = {"skip_tokenizer_init": True, "max_total_tokens": 512, "context_length": 128}
    with bough.Engine(base, enable_lora=True, lora_paths=[f"one={first}"], **fixed) as engine:
        ask = asking(engine)
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
        with pytest.raises(RequestError, match=r"cannot be read: Expected `str`, got `int` - at `\$.name`"):
            engine.load_lora_adapter(3, second)  # type: ignore[arg-type]


def asking(engine: bough.Engine) -> Callable[..., list[list[int]]]:
    def ask(*names: str | None) -> list[list[int]]:
        given = {"input_ids": [PROMPT] * len(names), "sampling_params": GREEDY, "lora_path": list(names)}
        return [output["output_ids"] for output in engine.generate(**given)]

    return ask


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose tokens are bytes, and with adapters for it."""
    folder = tmp_path_factory.mktemp("spelled")
    base = write_checkpoint(folder / "base", 1, vocab_size=256, eos_token_id=None)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(base / "tokenizer.json"))
    (folder / "adapters").mkdir()
    for seed, name in enumerate(("one", "two"), 2):
        merge(base, write_adapter(folder / "adapters" / name, base, seed), folder / name)
    return folder


@bough.function
def two_voices(s: Any) -> None:
    s += TEXT + bough.gen("plain", **VOICE) + bough.gen("one", lora_path="one", **VOICE)


@pytest.mark.slow
def test_ranks_load_on_first_use_and_give_the_tokens_of_merged_weights(spelled: Path) -> None:
    names = ("base", "one", "two")
    expected = [
        LocalEngine(spelled / name, new=6, attention_backend="torch", **FIXED).ask(PROMPT)[0][0] for name in names
    ]
    assert len({*map(tuple, expected)}) == 3
    lora = {"enable_lora": True, "lora_resolver": spelled / "adapters", "max_loras_per_batch": 1}
    with bough.Engine(spelled / "base", tp_size=2, **lora, **FIXED) as engine:
        assert asking(engine)(None, "one", "two", "one") == [*expected, expected[1]]
        assert set(engine.get_server_info()["internal_states"][0]["loaded_adapters"]) == {"one", "two"}
        with pytest.raises(RequestError, match=r"no adapter '\.\./one'"):
            engine.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path="../one")
        state = two_voices.run(backend=engine)
        after = engine.generate(TEXT + state["plain"], sampling_params=GREEDY, lora_path="one")
        assert state["one"] == after["text"] != engine.generate(TEXT + state["plain"], sampling_params=GREEDY)["text"]


@pytest.mark.slow
def test_a_server_finds_adapters_by_their_names(spelled: Path) -> None:
    flags = [word for name, value in FIXED.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with (
        running(str(spelled / "base"), *flags, "--enable-lora", "--lora-resolver", str(spelled / "adapters")) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def ask(model: str) -> httpx.Response:
            return http.post("/v1/completions", json={"model": model, "prompt": PROMPT, "temperature": 0})

        answers = [ask(model).json()["choices"][0]["text"] for model in ("base", "one", "base:one", "two")]
        assert answers[1] == answers[2] and len(set(answers)) == 3
        models = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        assert models.keys() == {"base", "one", "two"} and models["one"]["parent"] == "base"
        for wrong in ("three", "../one", "base:three"):
            assert ask(wrong).status_code == 404 and "inside --lora-resolver" in ask(wrong).text
            assert ask(wrong).json()["error"]["param"] == "model"
        scored = {"model": "three", "query": PROMPT, "items": [[1]], "label_token_ids": [1]}
        assert http.post("/v1/score", json=scored).json()["error"]["param"] == "model"
        mine = {"lora_name": "base", "lora_path": str(spelled / "adapters" / "one")}
        assert "means the model itself" in http.post("/load_lora_adapter", json=mine).json()["message"]
