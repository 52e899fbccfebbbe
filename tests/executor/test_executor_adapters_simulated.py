"""Adapters on the CUDA executor, without a GPU: many in one batch, by graphs and without, give the tokens of merged
weights. Triton's interpreter computes, as in `test_executor_cuda_simulated`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import transformers

from bough.core.control import LoadAdapter, PlaceAdapter
from bough.core.errors import ResourceError
from bough.core.plan import Limits
from bough.core.settings import LoraSettings, Settings
from bough.executor import adapters as executor_adapters
from bough.executor.adapters import AdapterInputs
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.cuda_parts import assemble, graph_sizes, verified_drafts
from bough.executor.graphs import GraphSizes
from bough.executor.load_model import LoadedWeights, load_model, resolve_config
from bough.executor.sizing import StepShape
from bough.executor.staging import Staging
from bough.kernels.triton_ops import TRITON
from bough.loader.locate import locate
from bough.messages.requests import LogprobRequest
from bough.scheduler.ngram import NgramProposer
from tests.executor.test_executor_cuda_simulated import CPU, no_device  # noqa: F401  (a fixture for all tests here)
from tests.fakes.adapters import EMBEDDING, EXPERTS, HEAD, LINEAR, ROUTER, merge, write_adapter
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import MODELS
from tests.fakes.scheduler_bench import Bench
from tests.parity.engines import LocalEngine
from tests.parity.test_lora import prompts_of

SAMPLED, ROWS = 3, 9
PROMPT = prompts_of(1)[0]  # longer than a chunk
KINDS: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 1},
    {"rank": 16, "strength": 0.2},
    {"modules": LINEAR[:1]},
    {"modules": LINEAR[4:]},
    {"layers": (1,)},
    {"rank": 20, "strength": 0.2},  # takes other memory for all slots
    {"modules": LINEAR[-1:]},
]
OPTIONS = {"max_new_tokens": SAMPLED, "temperature": 0.0, "ignore_eos": True}


class Trained(NamedTuple):
    base: Path
    adapters: list[Path]
    expected: list[list[int]]  # the model's own first


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("lora"), KINDS)


def train(folder: Path, kinds: list[dict[str, Any]], **config: Any) -> Trained:
    return train_on(write_checkpoint(folder / "base", 1, **config), kinds)


def train_on(base: Path, kinds: list[dict[str, Any]]) -> Trained:
    folder = base.parent
    adapters = [write_adapter(folder / f"a{n}", base, n, **kind) for n, kind in enumerate(kinds)]
    models = [base, *(merge(base, path, folder / f"{path.name}-merged") for path in adapters)]
    flags = {"dtype": "float32", "attention_backend": "torch", "max_total_tokens": 1024}
    expected = [LocalEngine(model, new=SAMPLED, **flags).ask(PROMPT)[0][0] for model in models]
    assert len(set(map(tuple, expected))) > len(expected) // 2, "adapters must change something"
    return Trained(base, adapters, expected)


@pytest.fixture
def load(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[LoadedWeights, Settings]]:
    def loaded(slots: int, base: Path = trained.base) -> tuple[LoadedWeights, Settings]:
        monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: TRITON)
        settings = Settings.from_flat({"dtype": "float32", "enable_lora": True, "max_loras_per_batch": slots})
        files = locate(str(base))
        weights = load_model(files, settings, resolve_config(files, settings), CPU)
        assert weights.adapters is not None
        weights.adapters.reserve(1)
        return weights, settings

    return loaded


def build(weights: LoadedWeights, settings: Settings, sizes: GraphSizes, capture: bool = True) -> CudaExecutor:
    limits = Limits(ROWS, 1, (700,), 64, weights.config.vocab_size, 16, "")
    executor = assemble(weights, settings, limits, sizes)
    while capture and executor.idle():
        pass
    return executor


def bench_of(executor: CudaExecutor, trained: Trained, slots: int, **options: Any) -> Bench:
    bench = Bench(cast(Any, executor), lora=LoraSettings(max_loras_per_batch=slots), **options)
    for path in trained.adapters:
        bench.scheduler._adapters.load(path.name, str(path))
    return bench


def check(bench: Bench, trained: Trained, first: int) -> None:
    """One request for each adapter, and one for the model itself."""
    names = ["", *(path.name for path in trained.adapters)]
    for number, name in enumerate(names):
        bench.ask(first + number, PROMPT, adapter=name, **OPTIONS)
    bench.run()
    assert [bench.out.outputs[first + number] for number in range(len(names))] == trained.expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        (3, GraphSizes()),
        pytest.param(
            8,
            GraphSizes(decode=(9,), mixed=(8, 24), adapted=True),  # in the smaller one all rows may end
            marks=pytest.mark.long,
        ),
    ],
)
def test_eight_adapters_and_none_in_one_batch_give_the_tokens_of_merged_weights(
    trained: Trained, load: Callable[[int], tuple[LoadedWeights, Settings]], slots: int, sizes: GraphSizes
) -> None:
    executor = build(*load(slots), sizes, capture=False)
    bench = bench_of(executor, trained, slots, enable_mixed_chunk=True)
    while executor.idle():
        pass
    for turn in range(2):  # the second time prefixes are cached
        check(bench, trained, 9 * turn)
    assert all(bench.out.started[9 + number].cached_tokens == len(PROMPT) - 1 for number in range(9))
    used = [bool(graphs._uses) for graphs in (executor._adapted_graphs, executor._adapted_mixed_graphs)]
    assert used == [sizes.adapted] * 2
    executor.close()


OF_EXPERTS: list[dict[str, Any]] = [
    {"modules": (ROUTER, "self_attn.q_proj", EMBEDDING, HEAD), "fused": True, "strength": 0.2},
    {"modules": EXPERTS, "rank": 20, "layers": (1,)},  # takes other memory for all slots
    {"modules": LINEAR[:4]},
]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("captured", [True, pytest.param(False, marks=pytest.mark.long)])
def test_adapters_of_experts_and_of_the_ends_give_the_tokens_of_merged_weights(
    tmp_path: Path, load: Callable[..., tuple[LoadedWeights, Settings]], captured: bool, tied: bool
) -> None:
    shape = {**MODELS["moe"], "head_dim": 16, "tie_word_embeddings": tied}
    trained = train(tmp_path, OF_EXPERTS, **shape)
    sizes = GraphSizes(decode=(4,), mixed=(8, 24), adapted=True) if captured else GraphSizes()
    executor = build(*load(3, trained.base), sizes, capture=False)
    bench = bench_of(executor, trained, 3, enable_mixed_chunk=True)
    while executor.idle():
        pass
    check(bench, trained, 0)
    used = [bool(graphs._uses) for graphs in (executor._adapted_graphs, executor._adapted_mixed_graphs)]
    assert used == [captured] * 2
    executor.close()


OF_LATENTS: list[dict[str, Any]] = [
    {"modules": ("kv_b_proj",), "strength": 0.5},
    {"modules": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), "rank": 20},
    {"modules": ("q_b_proj", "o_proj")},
]


@pytest.mark.long
@pytest.mark.parametrize("captured", [True, False])
def test_adapters_of_latent_attention_give_the_tokens_of_merged_weights(
    tmp_path: Path, load: Callable[..., tuple[LoadedWeights, Settings]], captured: bool
) -> None:
    small = {"num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 2}  # the interpreter is slow
    trained = train(tmp_path, OF_LATENTS, **{**MODELS["latent"], **small})
    sizes = GraphSizes(decode=(4,), mixed=(8, 24), adapted=True) if captured else GraphSizes()
    executor = build(*load(3, trained.base), sizes, capture=False)
    bench = bench_of(executor, trained, 3, enable_mixed_chunk=True)
    while executor.idle():
        pass
    check(bench, trained, 0)
    used = [bool(graphs._uses) for graphs in (executor._adapted_graphs, executor._adapted_mixed_graphs)]
    assert used == [captured] * 2
    executor.close()


@pytest.mark.slow
def test_adapters_of_what_scales_shared_experts_give_the_tokens_of_merged_weights(
    tmp_path: Path, load: Callable[..., tuple[LoadedWeights, Settings]]
) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 48}
    sizes |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=32, vocab_size=128)
    torch.manual_seed(1)
    model = transformers.Qwen2MoeForCausalLM(config)
    for weight in (each for each in model.parameters() if each.dim() > 1):
        weight.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "base")
    kinds: list[dict[str, Any]] = [
        {"modules": ("shared_expert_gate", "shared_expert.up_proj"), "strength": 1.0},
        {"modules": ("shared_expert_gate",), "rank": 20, "strength": 2.0},
    ]
    trained = train_on(tmp_path / "base", kinds)
    executor = build(*load(2, trained.base), GraphSizes())
    check(bench_of(executor, trained, 2), trained, 0)
    executor.close()


@pytest.mark.slow
def test_prompt_logprobs_have_the_adapters_head(
    tmp_path: Path, load: Callable[..., tuple[LoadedWeights, Settings]]
) -> None:
    trained, found = train(tmp_path, [{"modules": (HEAD,)}, {"modules": (EMBEDDING, HEAD)}]), []
    executor = build(*load(2, trained.base), GraphSizes())
    merged = [LocalEngine(trained.base.parent / f"a{n}-merged", new=1, dtype="float32") for n in range(2)]
    bench = bench_of(executor, trained, 2)
    for handle, engine in enumerate(merged):
        engine.ask(PROMPT, logprobs=LogprobRequest(start=0))
        bench.ask(handle, PROMPT, adapter=f"a{handle}", logprobs=LogprobRequest(start=0), **OPTIONS)
        bench.run()
        for out, number in ((bench.out, handle), (engine.out, 0)):
            run = out.started[number].input_logprobs
            assert run is not None
            found.append(np.frombuffer(run.logprobs, dtype=np.float32))
    for own, expected in (found[:2], found[2:]):
        assert len(own) == len(PROMPT) - 1 and own == pytest.approx(expected, abs=1e-4)
    executor.close()


@pytest.mark.slow
def test_drafts_are_verified_with_adapters_by_the_host(
    trained: Trained, load: Callable[[int], tuple[LoadedWeights, Settings]]
) -> None:
    weights, _ = load(2)
    drafting = Settings.from_flat({"speculative_algorithm": "NGRAM"})
    assert verified_drafts(weights, drafting) == 0
    executor = build(weights, drafting, GraphSizes())
    bench = bench_of(executor, trained, 2, proposer=NgramProposer(drafting.speculative))
    for handle in range(4):  # the last two are drafted from what the first two have said
        bench.ask(handle, PROMPT, adapter=trained.adapters[handle % 2].name, **OPTIONS)
        bench.run()
        assert bench.out.outputs[handle] == trained.expected[1 + handle % 2]
    executor.close()


@pytest.mark.slow
def test_rows_without_adapters_take_the_plain_graphs(
    trained: Trained, load: Callable[[int], tuple[LoadedWeights, Settings]]
) -> None:
    executor = build(*load(2), GraphSizes(decode=(4,), mixed=(24,), adapted=True))
    bench = bench_of(executor, trained, 2)
    bench.ask(0, PROMPT, **OPTIONS)
    bench.run()
    assert bench.out.outputs[0] == trained.expected[0]
    assert executor._decode_graphs._uses and executor._mixed_graphs._uses
    assert not executor._adapted_graphs._uses and not executor._adapted_mixed_graphs._uses
    executor.close()


def test_a_larger_rank_drops_graphs_and_a_lack_of_memory_is_told(
    trained: Trained, load: Callable[[int], tuple[LoadedWeights, Settings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, settings = load(2)
    executor = build(weights, settings, GraphSizes(decode=(1,), adapted=True))
    executor.control(LoadAdapter("small", str(trained.adapters[0]))).wait()
    assert executor._adapted_graphs._graphs, "there was memory for it"

    def too_much(rank: int, names: object) -> None:
        raise torch.OutOfMemoryError

    with (
        monkeypatch.context() as patch,
        pytest.raises(ResourceError, match="rank 20; start with --max-lora-rank 20"),
    ):
        patch.setattr(weights.adapters, "reserve", too_much)
        executor.control(LoadAdapter("large", str(trained.adapters[6]))).wait()
    executor.control(LoadAdapter("large", str(trained.adapters[6]))).wait()
    assert not executor._adapted_graphs._graphs
    assert executor.control(PlaceAdapter("large", 1)).ready(), "it is queued like a step"
    executor.close()


def test_graphs_for_adapters_are_counted(load: Callable[[int], tuple[LoadedWeights, Settings]]) -> None:
    weights, settings = load(2)
    shape = StepShape(64, 128, 128, 64, 128, 1, 2, 2)
    sizes = graph_sizes(weights, settings, shape, forward_bytes=0)
    assert sizes.adapted
    plain = GraphSizes(sizes.decode, sizes.mixed, sizes.few_keys, sizes.shared)
    assert sizes.count == plain.count + 2 * len(sizes.decode) + len(sizes.mixed)


@pytest.mark.parametrize("tokens", [1, 5, 40, 700])
def test_any_step_fits_the_buffer(tokens: int) -> None:
    """Each token with a slot of its own, all with the same, and none, padded or not."""
    inputs = AdapterInputs(700, 700, CPU, Staging(CPU, 1))
    ends = np.arange(0, tokens, 3)
    for slots in (np.arange(tokens) + 1, np.ones(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.int64)):
        for size, ends_size in ((0, 0), (min(700, 2 * tokens), tokens)):
            rows = inputs.send(slots, ends, size, ends_size)
            for part, expected in ((rows.tokens, slots), (rows.ends, slots[ends])):
                found = np.zeros(len(part.slots), dtype=np.int64)
                for slot, first, count in part.blocks.tolist():
                    assert count <= part.block_rows
                    found[part.order[first : first + count].numpy()] = slot
                assert found.tolist() == part.slots.tolist()
                assert found[: len(expected)].tolist() == expected.tolist() and not found[len(expected) :].any()
    assert executor_adapters.adapter_rows(np.zeros(3, dtype=np.int64), np.array([2])) is None
