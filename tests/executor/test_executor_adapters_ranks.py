"""Adapters on several ranks: each has its share of their matrices, and the tokens are those of merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.core.control import LoadAdapter
from bough.core.errors import ModelError
from bough.core.plan import Executor
from bough.core.settings import LoraSettings
from bough.executor.adapters import AdapterStore
from bough.layers.adapters import Adapter
from bough.scheduler.adapters import Adapters
from tests.executor.test_executor_ranks import NEW, alone, with_ranks
from tests.fakes.adapters import EMBEDDING, EXPERTS, HEAD, LINEAR, merge, write_adapter
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import MODELS, VOCAB
from tests.fakes.scheduler_bench import Bench

PROMPTS = [[5, 6, 7], [*range(20, 60)], [90, VOCAB - 1], [11] * 17]
ENDS = (EMBEDDING, HEAD, *LINEAR)
LATENT = tuple(f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))


def tokens_of(executor: Executor, resolver: Path | None = None, *names: str) -> list[list[int]]:
    """What each prompt gives with each adapter, all at once."""
    lora = None if resolver is None else LoraSettings(lora_resolver=str(resolver), max_loras_per_batch=2)
    bench = Bench(executor, lora=lora, schedule_conservativeness=0.0)  # type: ignore[arg-type]
    asked = [(prompt, name) for name in names or ("",) for prompt in PROMPTS]
    for handle, (prompt, name) in enumerate(asked):
        bench.ask(handle, prompt, max_new_tokens=NEW, temperature=0.0, ignore_eos=True, adapter=name)
    while len(bench.out.ended) < len(asked):  # adapters are read on a thread
        bench.turn()
    return [bench.out.outputs[handle] for handle in range(len(asked))]


@pytest.mark.parametrize(
    ("model", "size", "stages", "modules"),
    [
        ("llama", 2, 1, LINEAR),
        ("untied", 4, 1, ENDS),
        ("latent", 2, 1, LATENT),
        ("moe", 2, 1, EXPERTS),
        ("llama", 1, 2, ENDS),  # whose head is the embedding
        ("untied", 2, 2, ENDS),
    ],
)
def test_ranks_give_the_tokens_of_merged_weights(
    tmp_path: Path, model: str, size: int, stages: int, modules: tuple[str, ...]
) -> None:
    base = write_checkpoint(tmp_path / "base", 3, **MODELS[model])
    (tmp_path / "adapters").mkdir()
    expected = alone(base, tokens_of)
    for seed, name in enumerate(("a", "b", "c"), 1):
        adapter = write_adapter(tmp_path / "adapters" / name, base, seed, rank=3 * seed, modules=modules)
        expected += alone(merge(base, adapter, tmp_path / f"{name}-merged"), tokens_of)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    flags = {"enable_lora": True, "max_total_tokens": 200}
    found = with_ranks(base, size, lambda ranks: tokens_of(ranks, tmp_path / "adapters", "", *"abc"), stages, **flags)
    assert found == expected


def test_an_adapter_that_one_rank_cannot_read_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_checkpoint(tmp_path / "base", 3, **MODELS["llama"])
    adapter, read = write_adapter(tmp_path / "adapter", base, 1), AdapterStore._read

    def read_on_first(store: AdapterStore, path: str) -> tuple[Adapter, str]:
        if store._loaded.topology.tp_rank and path.endswith("gone"):
            raise ModelError("It is gone.")
        return read(store, path.removesuffix("gone"))

    monkeypatch.setattr(AdapterStore, "_read", read_on_first)

    def use(ranks: Executor) -> list[list[int]]:
        with pytest.raises(ModelError, match="Another rank could not read"):
            ranks.control(LoadAdapter("a", f"{adapter}/gone")).wait()
        Adapters(ranks, LoraSettings()).load("a", str(adapter))
        return tokens_of(ranks)

    assert with_ranks(base, 2, use, enable_lora=True) == alone(base, tokens_of)


def test_an_adapter_for_other_sizes_is_refused_on_ranks(tmp_path: Path) -> None:
    """The part of a rank would fit a larger one, too."""
    base = write_checkpoint(tmp_path / "base", 3, **MODELS["llama"])
    large = write_checkpoint(tmp_path / "large", 3, **{**MODELS["llama"], "intermediate_size": 256})
    adapter = write_adapter(tmp_path / "adapter", large, 1, modules=("mlp.down_proj",))

    def use(ranks: Executor) -> None:
        with pytest.raises(ModelError, match=r"does not fit: B and A of .*down_proj' are \[64, 4\] and \[4, 256\]"):
            ranks.control(LoadAdapter("a", str(adapter))).wait()

    with_ranks(base, 2, use, enable_lora=True)
