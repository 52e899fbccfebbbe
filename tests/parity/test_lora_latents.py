"""Adapters of latent attention, also of the matrix that makes its keys and values: the same tokens as PEFT's, with
others and none in one batch, in chunks and with cached prefixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from bough.messages.requests import LogprobRequest
from bough.native.library import instruction_sets, load_library
from tests.parity.engines import LocalEngine
from tests.parity.test_deepseek import SIZES, SPARSE, draw, glm_dsa, v2_lite, v3, v32
from tests.parity.test_lora_families import continued

peft: Any = pytest.importorskip("peft", reason="PEFT is not installed")
# Whether long chunks are computed in the expanded form depends on the sizes; here those of 25 tokens are.
PROMPTS = [draw(60, 1), [*draw(60, 1)[:45], *draw(8, 6)], draw(5, 7)]
QUERY, REST = ("q_proj",), ("kv_a_proj_with_mqa", "o_proj")
LIBRARY = load_library()
SETS = [] if LIBRARY is None else instruction_sets(LIBRARY)
FLAGS = {"dtype": "float32", "max_total_tokens": 4096, "enable_lora": True, "quantization": "none"}


class Trained(NamedTuple):
    base: Path
    adapters: dict[str, Path]
    expected: dict[str, list[list[int]]]  # by name, the outputs for PROMPTS; of the model itself under ""


def train(folder: Path, make: Callable[[], transformers.PreTrainedModel]) -> Trained:
    torch.manual_seed(0)
    theirs = make().eval().float()
    theirs.save_pretrained(folder / "base")
    query = QUERY if theirs.config.q_lora_rank is None else ("q_a_proj", "q_b_proj")
    kinds: dict[str, dict[str, Any]] = {
        "all": {"target_modules": "all-linear"},
        "made": {"target_modules": ["kv_b_proj"], "r": 3, "rank_pattern": {r"layers\.1\..*": 20}},
        "query": {"target_modules": [*query]},
        "rest": {"target_modules": [*REST], "r": 16, "use_rslora": True},
        "attention": {"target_modules": [*query, *REST, "kv_b_proj"], "r": 1},
        "last": {"target_modules": ["kv_b_proj"], "layers_to_transform": [2], "r": 17},
    }
    adapters, expected = {}, {"": [continued(theirs, tokens) for tokens in PROMPTS]}
    for seed, (name, kind) in enumerate(kinds.items()):
        config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **kind})
        adapted = peft.get_peft_model(theirs, config)
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in (each for part, each in adapted.named_parameters() if "lora_" in part):
                weight.normal_(0, 0.3)
        adapters[name] = folder / name
        adapted.save_pretrained(adapters[name])
        expected[name] = [continued(adapted, tokens) for tokens in PROMPTS]
        theirs = adapted.unload()
    assert len({str(outputs) for outputs in expected.values()}) == len(expected), "all must differ"
    return Trained(folder / "base", adapters, expected)


def engine_for(trained: Trained, **flags: object) -> LocalEngine:
    engine = LocalEngine(trained.base, new=len(trained.expected[""][0]), **{**FLAGS, **flags})
    assert engine.adapters is not None
    for name, path in trained.adapters.items():
        engine.adapters.load(name, str(path))
    return engine


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("latents"), v3)


def check_together(engine: LocalEngine, trained: Trained) -> None:
    """All adapters and none in one batch, twice: the second time prefixes are cached."""
    asked = [(name, turn) for turn in range(len(PROMPTS)) for name in trained.expected]
    for _ in range(2):
        got = engine.ask(*(PROMPTS[turn] for _, turn in asked), adapters=[name for name, _ in asked])
        assert [output for output, _ in got] == [trained.expected[name][turn] for name, turn in asked]
    assert min(cached for _, cached in got) >= len(PROMPTS[2]) - 1


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_alone(trained: Trained, backend: str) -> None:
    """A prefix in the cache is read by requests of its adapter alone."""
    if backend == "native" and LIBRARY is None:
        pytest.skip("the CPU kernels are not compiled")
    engine = engine_for(trained, attention_backend=backend, chunked_prefill_size=32)
    for name, expected in trained.expected.items():
        got = [engine.ask(prompt, adapters=[name])[0] for prompt in PROMPTS]
        assert [output for output, _ in got] == expected
        assert got[0][1] == 0 and got[1][1] >= 44


@pytest.mark.parametrize(
    "flags",
    [
        {"attention_backend": "torch", "max_loras_per_batch": 6, "chunked_prefill_size": 64},
        {"attention_backend": "torch", "max_loras_per_batch": 2},
        {"attention_backend": "torch", "max_loras_per_batch": 6, "page_size": 4, "enable_mixed_chunk": True},
        *(
            {"attention_backend": "native", "max_loras_per_batch": 6, "cpu_instruction_set": name, "cpu_threads": 3}
            for name in SETS
        ),
        *({"attention_backend": "native", "max_loras_per_batch": most} for most in ((1, 3) if SETS else ())),
    ],
    ids=str,
)
def test_all_adapters_and_none_in_one_batch(trained: Trained, flags: dict[str, object]) -> None:
    check_together(engine_for(trained, **flags), trained)


@pytest.mark.parametrize("backend", ["native", "torch"] if SETS else ["torch"])
def test_all_tokens_of_a_prompt_have_the_adapter(trained: Trained, backend: str) -> None:
    """Of the last layer, too, where all rows are computed for prompt logprobs."""
    engine = engine_for(trained, attention_backend=backend)
    got = engine.ask(*[PROMPTS[0]] * 3, adapters=["made", "", "last"], logprobs=LogprobRequest(start=0))
    assert [output for output, _ in got] == [trained.expected[name][0] for name in ("made", "", "last")]


@pytest.mark.slow
@pytest.mark.parametrize("make", [v2_lite, v32, glm_dsa])
def test_other_models(tmp_path: Path, make: Callable[[], transformers.PreTrainedModel]) -> None:
    """Without a matrix between hidden states and queries, and where layers choose tokens."""
    assert SIZES["num_hidden_layers"] == 3 and SPARSE["index_topk"] < len(PROMPTS[0])
    trained = train(tmp_path, make)
    check_together(engine_for(trained, max_loras_per_batch=6), trained)


@pytest.mark.skipif(LIBRARY is None, reason="the CPU kernels are not compiled")
def test_rows_have_the_same_bits_in_any_company(trained: Trained) -> None:
    """Those without an adapter have the bits of an engine without any."""
    engine = engine_for(trained, max_loras_per_batch=6, cpu_threads=3)
    plain = LocalEngine(trained.base, new=1, **{**FLAGS, "enable_lora": False, "cpu_threads": 3})

    def logprobs(of: LocalEngine, *names: str) -> list[bytes]:
        first, spec = of._handles, LogprobRequest(start=0)
        of.ask(*[PROMPTS[0]] * len(names), adapters=names, logprobs=spec)
        runs = [of.out.started[first + number].input_logprobs for number in range(len(names))]
        return [run.logprobs for run in runs if run is not None]

    names = ["", *trained.adapters]
    alone = logprobs(plain, "") + [logprobs(engine, name)[0] for name in trained.adapters]
    assert logprobs(engine, *reversed(names))[::-1] == alone and len(set(alone)) == len(names)
