"""The CUDA executor's own logic without a GPU: Triton's interpreter computes, a graph is a function that runs again.

What is told apart here is which graph a step takes, padding, and the way of tokens from step to step; that nothing
waits, and that early launches keep their order, only a device can tell (`test_no_sync_gpu.py`, `test_graphs_gpu.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from bough.attention import triton_backend
from bough.attention.torch_backend import TorchAttention
from bough.core.control import CopyPagesIn, CopyPagesOut, Sleep, SwapWeights, Wake
from bough.core.errors import SettingsError
from bough.core.model_config import IndexConfig, LatentConfig, ModelConfig, RecurrentConfig
from bough.core.plan import BatchPlan, Executor, InFlight, Limits, TokenMasks
from bough.core.settings import Settings
from bough.distributed.group import ALONE, RankGroup, SimulatedGroup
from bough.distributed.topology import Topology
from bough.executor import cuda_copies, cuda_executor, cuda_parts, graphs, staging
from bough.executor.cuda_drafts import DraftedStep, DraftedSteps, drafted_sizes
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.cuda_parts import assemble, graph_sizes, verified_drafts
from bough.executor.graphs import GraphSizes
from bough.executor.load_draft import find_draft
from bough.executor.load_model import LoadedWeights, load_model, resolve_config
from bough.executor.plain_plans import decode_plan, prompt_plan
from bough.executor.sizing import StepShape
from bough.executor.threaded import ThreadedExecutor
from bough.executor.torch_executor import TorchExecutor
from bough.executor.weights import WeightStore
from bough.kernels.decode_attention import shared
from bough.kernels.decode_attention.work import DecodeWork
from bough.kernels.ops import REFERENCE
from bough.kernels.prefill_attention.triton import PrefillConfig
from bough.kernels.projected_decode import triton as projected
from bough.kernels.triton_ops import INVARIANT, TRITON
from bough.loader.locate import locate
from bough.memory.pools.group_pool import GroupPool, Part
from bough.memory.pools.kv_pool import KVPool
from bough.messages.requests import LogprobRequest
from bough.models.registry import build_model
from bough.scheduler.draft_lengths import DraftLengths
from tests.disaggregation.test_disaggregation_pools import hand_over
from tests.executor.test_executor_drafts import check_outputs
from tests.executor.test_executor_mixed_inputs import CONFIG
from tests.executor.test_executor_tiers import round_trip, through_a_store
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.grammars import EOS, FakeGrammars, Places, grammar
from tests.fakes.known_answers import RightOrWrong
from tests.fakes.one_row import go_on
from tests.fakes.one_row import tokens_of as greedy_tokens
from tests.fakes.ranks import ThreadGroup, thread_groups
from tests.fakes.scheduler_bench import Bench
from tests.fakes.triton_interpreter import INTERPRETED_PROGRAMS
from tests.parity.draft_models import add_mtp, write_deepseek, write_eagle3, write_target
from tests.parity.test_families import make

CPU = torch.device("cpu")
LIMITS = Limits(4, 1, (200,), 64, 60, 32, "")
SETTINGS = Settings.from_flat({})
GRAPHS = GraphSizes(decode=(1, 2, 4), mixed=(16,), few_keys=(1, 2, 4))


class HostEvent:
    """When the host came here: there, everything queued before is done."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._at = time.monotonic()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        return 1e3 * (later._at - self._at)


class Rerun:
    """A graph: its result stands where it stood when it was captured."""

    def __init__(self, run: Callable[[], torch.Tensor], pool: object) -> None:
        self._run = run
        self._output = run()

    def replay(self) -> torch.Tensor:
        return self._output.copy_(self._run())


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    for name in ("current_stream", "graph_pool_handle", "synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(staging, "pinned_bytes", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(graphs, "Captured", Rerun)
    monkeypatch.setattr(cuda_executor, "rare_pieces", lambda *args: [])
    monkeypatch.setattr(cuda_parts, "DecodeWork", partial(DecodeWork, programs=INTERPRETED_PROGRAMS))
    monkeypatch.setattr(cuda_parts, "LATENT_WORK", {"programs": INTERPRETED_PROGRAMS})


def share_of(group: RankGroup) -> LoadedWeights:
    torch.manual_seed(0)
    model = build_model(CONFIG, group.topology, torch.float16, CPU, group)
    for slot in model.slots():
        slot.target.normal_(0.0, 0.3)
    return LoadedWeights(model, CONFIG, torch.float16, CPU, group.topology, 0, torch.float16, group=group)


@pytest.fixture(scope="module")
def loaded() -> LoadedWeights:
    return share_of(ALONE)


@pytest.fixture(scope="module", params=[1, 2])
def rank(request: pytest.FixtureRequest) -> LoadedWeights:
    """All of the model, or what one of two ranks has."""
    return share_of(ALONE if request.param == 1 else SimulatedGroup(2))


def build(loaded: LoadedWeights, graphs: GraphSizes) -> CudaExecutor:
    executor = assemble(loaded, SETTINGS, LIMITS, graphs)
    while executor.idle():
        pass
    return executor


def plans(lengths: list[int], decodes: int) -> Iterator[BatchPlan]:
    """Prompts of these lengths, then so many decodes of all their rows."""
    for row, length in enumerate(lengths):
        pages = np.arange(1, 41, dtype=np.int32) + 40 * row
        yield prompt_plan(row, (np.arange(length, dtype=np.int32) * 7 + row) % 60, pages)
    for step in range(decodes):
        yield decode_plan(step, len(lengths))


def tokens_of(executor: CudaExecutor, lengths: list[int], decodes: int = 3, busy: bool = False) -> list[list[int]]:
    """What each step samples; each is launched before the one before it is looked at. With `busy` a graph may be
    captured behind each launch, and only there."""
    found, before = [], None
    for plan in plans(lengths, decodes):
        captured = [len(graphs._graphs) for graphs in executor._graphs]
        running = executor.launch(plan)
        assert captured == [len(graphs._graphs) for graphs in executor._graphs]
        if busy:
            executor.idle(busy=True)
        if before is not None:
            found.append(before.wait().tokens[:, 0].tolist())
        before = running
    assert before is not None
    found.append(before.wait().tokens[:, 0].tolist())
    executor.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[5], [9, 3, 20]])
def test_graphs_change_nothing(loaded: LoadedWeights, lengths: list[int]) -> None:
    eager = tokens_of(build(loaded, GraphSizes()), lengths)
    assert [len(step) for step in eager] == [1] * len(lengths) + [len(lengths)] * 3
    assert tokens_of(build(loaded, GRAPHS), lengths) == eager
    late = assemble(loaded, SETTINGS, LIMITS, GRAPHS)
    assert tokens_of(late, lengths, 6, busy=True)[: len(eager)] == eager
    kind, size = late._few_keys_graphs, {1: 1, 3: 4}[len(lengths)]
    assert [list(graphs._graphs) for graphs in (kind, late._decode_graphs)] == [[size], []]


@pytest.mark.slow
def test_a_rank_runs_by_graphs_and_with_its_checks(loaded: LoadedWeights) -> None:
    group = SimulatedGroup(2)
    model = build_model(CONFIG, group.topology, torch.float16, CPU, group)
    for slot in model.slots():
        slot.target.normal_(0.0, 0.3)
    rank = replace(loaded, model=model, topology=group.topology, group=group)
    checked = Settings.from_flat({"check_ranks": True})
    expected = tokens_of(assemble(rank, checked, LIMITS, GraphSizes()), [9, 3])
    assert tokens_of(build(rank, GRAPHS), [9, 3]) == expected
    step = StepShape(64, 128, CONFIG.vocab_size, CONFIG.hidden_size, CONFIG.context_length, 1, 2, 2)
    assert graph_sizes(rank, SETTINGS, step, 0).count and not graph_sizes(rank, checked, step, 0).count


@pytest.mark.slow
@pytest.mark.parametrize(("most_keys", "few"), [(24, 1), (27, 4), (23, 0)])
def test_decodes_take_the_graphs_that_fit_their_keys(
    loaded: LoadedWeights, monkeypatch: pytest.MonkeyPatch, most_keys: int, few: int
) -> None:
    """Two rows of 22 tokens in all, which have two more with each step."""
    monkeypatch.setattr(projected, "MOST_KEYS", most_keys)
    executor = build(loaded, GraphSizes(decode=(2,), few_keys=(2,)))
    tokens_of(executor, [5, 17], decodes=2)
    kinds: list[Any] = [executor._few_keys_graphs, executor._decode_graphs]
    uses = [graphs._uses[2] for graphs in kinds]
    assert uses == [min(few, 2), 2 - min(few, 2)]


@pytest.mark.slow
def test_a_shared_prefix_is_read_once_and_changes_nothing(rank: LoadedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows on the pages of one prompt of 20 tokens, two of them with two more in common."""
    monkeypatch.setattr(shared, "MIN_SAVED", 1)
    monkeypatch.setattr(shared, "PART_KEYS", 1)
    limits, common = replace(LIMITS, shares_reads=True), np.array([0, 20, 22], dtype=np.int32)
    found = []
    for sizes, told in ((GraphSizes(), None), (GraphSizes(), common), (replace(GRAPHS, shared=(4,)), common)):
        executor = assemble(rank, SETTINGS, limits, sizes)
        while executor.idle():
            pass
        tokens = []
        for row, tail in enumerate(([1, 2], [3, 4, 5], [3, 4, 6, 7])):
            pages = np.arange(1, 41, dtype=np.int32) + 40 * row
            pages[: [0, 20, 22][row]] -= 40  # the row before it has them
            prompt = np.array([*range(20), *tail], dtype=np.int32)
            tokens.append(executor.launch(prompt_plan(row, prompt, pages)).wait().tokens.tolist())
        for step in range(4):
            plan = replace(decode_plan(step, 3), common=told)
            tokens.append(executor.launch(plan).wait().tokens.tolist())
        executor.close()
        found.append(tokens)
    assert executor._shared_graphs._uses[4] == 4
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("cache", [torch.float16, torch.float8_e5m2])
def test_chunks_of_prompts_read_the_prefix_that_they_extend_once(
    rank: LoadedWeights, monkeypatch: pytest.MonkeyPatch, cache: torch.dtype
) -> None:
    """Three chunks behind one cached prompt of 32 tokens, beside a row that decodes."""
    small = PrefillConfig(block_m=32, block_n=16, pack=2, num_warps=4, num_stages=2)
    monkeypatch.setattr(cuda_parts, "config_for", lambda *shape: small)
    monkeypatch.setattr(triton_backend, "PROGRAMS", 1)
    fields, prefill = list[int](), triton_backend.prefill_attention

    def noted(*args: Any, **more: Any) -> torch.Tensor:
        fields.append(args[9].shape[1])
        return prefill(*args, **more)

    monkeypatch.setattr(triton_backend, "prefill_attention", noted)
    limits = replace(LIMITS, shares_reads=True)
    prefix, tails = np.arange(32, dtype=np.int32), ([1, 2], [3, 4, 5], [3, 4, 6, 7])
    firsts = [
        prompt_plan(row, np.array(tail, np.int32), np.arange(48, dtype=np.int32)) for row, tail in enumerate(tails, 1)
    ]
    setups = [replace(plan.setups[0], pages=(np.arange(1, 33, dtype=np.int32),), length=32) for plan in firsts]
    lens, step = np.array([1, *map(len, tails)], np.int32), firsts[0]
    step = replace(
        step,
        setups=tuple(setups),
        rows=np.arange(4, dtype=np.int32),
        query_lens=lens,
        given=np.array([0, *lens[1:]], np.int32),
        tokens=np.concatenate(tails, dtype=np.int32),
        new_pages=(np.arange(100, 130, dtype=np.int32),),
        new_page_counts=(np.array([0, 10, 10, 10], np.int32),),
        sample=np.ones(4, dtype=np.bool_),
    )
    found = []
    for common in (None, np.array([0, 0, 32, 32], np.int32)):
        executor = assemble(replace(rank, cache_dtype=cache), SETTINGS, limits, GraphSizes())
        executor.launch(prompt_plan(0, prefix, np.arange(1, 49, dtype=np.int32))).wait()
        fields.clear()
        tokens = [executor.launch(replace(step, common=common)).wait().tokens.tolist()]
        assert set(fields) == ({2} if common is None else {2, 4}), "the last layer looks at the ends alone"
        tokens += [executor.launch(decode_plan(number, 4)).wait().tokens.tolist() for number in range(1, 4)]
        executor.close()
        found.append(tokens)
    assert found[0] == found[1]


def test_without_graphs_for_few_keys_all_decodes_take_the_others(loaded: LoadedWeights) -> None:
    executor = build(loaded, GraphSizes(decode=(1, 2, 4)))
    tokens_of(executor, [5], decodes=3)
    assert executor._decode_graphs._uses[1] == 3


@pytest.mark.parametrize(
    ("dtype", "cache", "flags", "few"),
    [
        (torch.float16, torch.float16, {}, [1, 2, 4, 8, 12, 16]),
        (torch.bfloat16, torch.bfloat16, {"cuda_graph_max_bs_decode": 5}, [1, 2, 4, 5]),
        (torch.float32, torch.float32, {}, []),
        (torch.bfloat16, torch.float8_e5m2, {}, []),
        (torch.bfloat16, torch.bfloat16, {"enable_deterministic_inference": True}, []),
        (torch.bfloat16, torch.bfloat16, {"disable_cuda_graph": True}, []),
        (torch.bfloat16, torch.bfloat16, {"prefill_attention_backend": "torch"}, [1, 2, 4, 8, 12, 16]),
        (torch.bfloat16, torch.bfloat16, {"decode_attention_backend": "torch"}, []),
    ],
)
def test_which_decodes_with_few_keys_have_graphs(
    dtype: torch.dtype, cache: torch.dtype, flags: dict[str, Any], few: list[int]
) -> None:
    model: Any = None
    weights = LoadedWeights(model, CONFIG, dtype, CPU, Topology(), 0, cache)
    shape = StepShape(64, 128, CONFIG.vocab_size, CONFIG.hidden_size, CONFIG.context_length, 1, 2, 2)
    sizes = graph_sizes(weights, Settings.from_flat(flags), shape, forward_bytes=0)
    assert list(sizes.few_keys) == few
    assert not (sizes.mixed and "torch" in flags.values()), "its prompts need lengths on the host"


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_heads_that_triton_cannot_multiply_are_refused_with_what_to_do(
    loaded: LoadedWeights, deterministic: bool
) -> None:
    settings = Settings.from_flat({"enable_deterministic_inference": deterministic})
    narrow = dataclasses.replace(loaded, config=replace(CONFIG, head_dim=8))
    with pytest.raises(
        SettingsError, match="more than 8 columns, and this model's have 8; use --attention-backend torch"
    ):
        assemble(narrow, settings, LIMITS, GraphSizes())
    assemble(dataclasses.replace(loaded, config=replace(CONFIG, head_dim=10)), settings, LIMITS, GraphSizes())


@pytest.mark.slow
def test_decodes_with_drafts_give_the_tokens_of_decodes_without(loaded: LoadedWeights) -> None:
    check_outputs(lambda: build(loaded, GraphSizes()), 9, {1, 4}, near=5e-3)  # 16 bits


@pytest.mark.parametrize("few", [False, True])
def test_graphs_with_drafts_give_the_tokens_of_decodes_without(loaded: LoadedWeights, few: bool) -> None:
    prompts = [[(7 * i + row) % 60 for i in range(9 - 2 * row)] for row in range(2)]

    def answers(executor: CudaExecutor, proposer: RightOrWrong | None = None) -> list[list[int]]:
        bench = Bench(cast(Any, executor), proposer=proposer)
        for row, prompt in enumerate(prompts):
            bench.ask(row, prompt, max_new_tokens=9, ignore_eos=True, temperature=0.0)
        bench.run()
        return [[*prompt, *bench.out.outputs[row]] for row, prompt in enumerate(prompts)]

    wanted = answers(build(loaded, GraphSizes()))
    settings = Settings.from_flat({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4})
    sizes = {1: [1, 2], 4: [1, 2]}
    captured = GraphSizes(drafted=sizes, drafted_few=sizes if few else {})
    executor = assemble(loaded, settings, LIMITS, captured)
    while executor.idle():
        pass
    assert answers(executor, RightOrWrong(wanted)) == wanted
    steps = executor._drafted
    used = {kind: sum(each._uses.total() for each in kinds.values()) for kind, kinds in
            (("few", steps.few_keys), ("any", steps.graphs))}  # fmt: skip
    assert bool(used["few"]) == few and bool(used["any"]) != few
    executor.close()


LATENTS = replace(CONFIG, num_kv_heads=1, head_dim=20, latent=LatentConfig(20, 8, 12, 10))


INDEX = IndexConfig(heads=9, head_dim=14, top=7, layers=(True, False))
SPARSE = replace(LATENTS, latent=LatentConfig(20, 8, 12, 10, query_rank=16, index=INDEX))


def latent_weights(config: ModelConfig) -> LoadedWeights:
    torch.manual_seed(0)
    model = build_model(config, Topology(), torch.float16, CPU)
    for slot in model.slots():
        slot.target.normal_(0.0, 0.3)
    return LoadedWeights(model, config, torch.float16, CPU, Topology(), 0, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(LATENTS, id="full"), pytest.param(SPARSE, id="sparse")])
def test_latent_attention_gives_the_same_by_graphs_in_deterministic_mode_and_by_torch(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough.kernels.sparse_index.triton.PROGRAMS", INTERPRETED_PROGRAMS)
    weights, lengths, wanted = latent_weights(config), [9, 28], []
    for flags in ({"attention_backend": "torch"}, {}, {"enable_deterministic_inference": True}):
        settings = Settings.from_flat(flags)
        mixed = () if flags else (16,)  # of the two prompts one is captured, the other is long enough to be expanded
        sizes = GraphSizes() if "attention_backend" in flags else GraphSizes((1, 4), mixed)
        executor = assemble(weights, settings, LIMITS, sizes)
        while executor.idle():
            pass
        found = tokens_of(executor, lengths, decodes=2)
        wanted = wanted or found
        assert found == wanted
    check_outputs(lambda: assemble(weights, SETTINGS, LIMITS, GraphSizes()), 9, {1, 4}, near=5e-3)


def test_of_latents_only_short_steps_with_prompts_have_graphs() -> None:
    model: Any = None
    weights = LoadedWeights(model, LATENTS, torch.bfloat16, CPU, Topology(), 0, torch.bfloat16)
    step = StepShape(64, 8192, 60, 32, 64, 1, 2, 2)
    sizes = graph_sizes(weights, SETTINGS, step, forward_bytes=0)
    assert (sizes.decode[-1], sizes.mixed[-1], list(sizes.few_keys)) == (64, cuda_parts.MOST_ABSORBED, [])
    by_triton, by_torch = (
        cuda_parts.attention_bytes(weights, Settings.from_flat({"attention_backend": name}), rows=4)
        for name in ("triton", "torch")
    )
    assert by_torch > by_triton > 1 << 28


QWEN = replace(CONFIG, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128, intermediate_size=3072)
LLAMA = replace(CONFIG, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=14_336)


@pytest.mark.parametrize(("config", "weights", "mixed"), [(QWEN, 15_728_640, 8704), (LLAMA, 218_103_808, 3072)])
def test_prompts_of_a_small_model_have_graphs_up_to_a_full_chunk(config: ModelConfig, weights: int, mixed: int) -> None:
    model: Any = None
    loaded = LoadedWeights(model, config, torch.bfloat16, CPU, Topology(), 0, torch.bfloat16)
    step = StepShape(512, 8192, config.vocab_size, config.hidden_size, config.context_length, 1, 2, 2)
    assert config.layer_weights == weights
    assert graph_sizes(loaded, SETTINGS, step, forward_bytes=0).mixed[-1] == mixed


@pytest.mark.slow
def test_weights_are_swapped_under_graphs_and_memory_is_released_with_them(tmp_path: Path) -> None:
    """That the addresses in real graphs hold, only a device can tell (`test_control_gpu.py`)."""
    settings = Settings.from_flat({"dtype": "float16"})
    folders = [write_checkpoint(tmp_path / str(seed), seed) for seed in (1, 2)]
    executors, graphs_of = [], GraphSizes(decode=(1,), mixed=(16,), few_keys=(1,))
    for folder in folders:
        files = locate(str(folder))
        loaded = load_model(files, settings, resolve_config(files, settings), CPU)
        limits = dataclasses.replace(LIMITS, vocab_size=loaded.config.vocab_size)
        executors.append(assemble(loaded, settings, limits, graphs_of, WeightStore(loaded, files, settings)))
        while executors[-1].idle():
            pass
    first, second = executors
    before, wanted = greedy_tokens(first, 2), greedy_tokens(second, 2)
    assert before != wanted
    captured = [dict(graphs._graphs) for graphs in first._graphs]
    first.control(SwapWeights(str(folders[1])))
    assert greedy_tokens(first, 2) == wanted, "a step waits for the command before it"
    assert [dict(graphs._graphs) for graphs in first._graphs] == captured
    assert "weights and kv_cache" in first.control(Sleep()).wait().obstacle
    assert not first.idle() and not any(graphs._graphs for graphs in first._graphs)
    assert not any(tensor.untyped_storage().nbytes() for tensor in first._pool.keys)
    first.control(Wake()).wait()
    assert greedy_tokens(first, 2) == wanted
    assert first.idle(), "graphs are captured again"
    for executor in executors:
        executor.close()


@pytest.mark.slow
def test_modules_of_transformers_give_the_same_tokens_without_graphs(tmp_path: Path) -> None:
    files = locate(str(write_checkpoint(tmp_path / "a", 1)))
    shape = StepShape(64, 128, 128, 64, 128, 1, 2, 2)
    found, graphs = [], []
    for impl in ("bough", "transformers"):
        settings = Settings.from_flat({"dtype": "float32", "model_impl": impl})
        loaded = load_model(files, settings, resolve_config(files, settings), CPU)
        graphs.append(graph_sizes(loaded, settings, shape, forward_bytes=0).count)
        limits = dataclasses.replace(LIMITS, vocab_size=loaded.config.vocab_size)
        executor = assemble(loaded, settings, limits, GraphSizes())
        found.append(greedy_tokens(executor, 3))
        executor.close()
    assert found[0] == found[1]
    assert graphs[0] > graphs[1] == 0


RECURRENT = replace(
    CONFIG,
    architecture="Qwen3NextForCausalLM",
    recurrent=RecurrentConfig((True, False), heads=4, value_dim=12, conv_width=4, key_heads=2, key_dim=10),
    attention_gate=True,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["graphs", "no graphs", "deterministic"])
def test_states_are_those_of_torchs_executor(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the scheduler: prompts in chunks beside decodes, and one that goes on with the copy of a state."""
    table = INVARIANT if kind == "deterministic" else TRITON
    settings = Settings.from_flat({"enable_deterministic_inference": kind == "deterministic"})
    limits = Limits(3, 4, (60, 6), 64, 60, 8, "", groups=RECURRENT.kv_groups)
    executors: list[Executor] = []
    for ops in (REFERENCE, table):
        monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic, ops=ops: ops)
        model = build_model(RECURRENT, Topology(), torch.float32, CPU)
        torch.manual_seed(0)
        for slot in model.slots():
            slot.fill(0, torch.randn(slot.target.shape) * 0.3)
        loaded = LoadedWeights(model, RECURRENT, torch.float32, CPU, Topology(), 0, torch.float32)
        if ops is REFERENCE:
            pool = cuda_parts.build_pool(loaded, limits.pages, limits.page_size)
            executors.append(ThreadedExecutor(TorchExecutor(model, pool, TorchAttention(), limits)))
        else:
            sizes = GraphSizes(decode=(1, 3), mixed=(11,)) if kind == "graphs" else GraphSizes()
            executors.append(assemble(loaded, settings, limits, sizes))
    prompt, outputs = [int(token) for token in np.arange(19) * 7 % 60], []
    for executor in executors:
        bench = Bench(cast(Any, executor), enable_mixed_chunk=True)
        options = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
        for handle, given in enumerate(([3, 4, 5], prompt)):
            bench.ask(handle, given, **options)
        bench.run()
        bench.ask(2, [*prompt, 1, 2], **options)
        bench.run()
        assert bench.out.started[2].cached_tokens > 0
        outputs.append(bench.out.outputs)
        executor.close()
    assert outputs[0] == outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["graphs", pytest.param("deterministic", marks=pytest.mark.long)])
def test_states_go_on_by_the_drafts_that_hold(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host verifies: beside chunks of prompts, whose states are kept, and behind steps without drafts by graphs."""
    ops = INVARIANT if kind == "deterministic" else TRITON
    monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: ops)
    model = build_model(RECURRENT, Topology(), torch.float32, CPU)
    torch.manual_seed(0)
    for slot in model.slots():
        slot.fill(0, torch.randn(slot.target.shape) * 0.3)
    loaded = LoadedWeights(model, RECURRENT, torch.float32, CPU, Topology(), 0, torch.float32)
    limits = Limits(3, 4, (60, 12), 64, 60, 8, "", groups=RECURRENT.kv_groups)
    long = [int(token) for token in np.arange(19) * 7 % 60]
    prompts, answers, cached = [[3, 4, 5], long, [*long, 1, 2]], list[list[int]](), list[int]()
    for flags in ({}, NGRAM):
        settings = Settings.from_flat({"enable_deterministic_inference": kind == "deterministic", **flags})
        sizes = GraphSizes(decode=(1, 3), mixed=(11,)) if kind == "graphs" else GraphSizes()
        executor = assemble(loaded, settings, limits, sizes)
        bench = Bench(cast(Any, executor), proposer=RightOrWrong(answers) if flags else None, enable_mixed_chunk=True)
        for handle in range(3):
            bench.ask(handle, prompts[handle], temperature=0.0, max_new_tokens=6, ignore_eos=True)
            if handle:
                bench.run()
        found = [[*prompt, *bench.out.outputs[handle]] for handle, prompt in enumerate(prompts)]
        cached.append(bench.out.started[2].cached_tokens)
        executor.close()
        answers = answers or found
        assert found == answers
    drafting = bench.scheduler._planner.drafting
    assert 0 < drafting.held < drafting.proposed
    assert min(cached) > 0  # chunks end elsewhere: drafts take a share of a step


class TwoStages:
    """Both stages on one thread, one after the other."""

    def __init__(self, first: CudaExecutor, last: CudaExecutor) -> None:
        self._stages, self.limits = (first, last), last.limits

    def launch(self, plan: BatchPlan) -> InFlight:
        first, last = (stage.launch(plan) for stage in self._stages)
        assert len(first.wait().tokens) == 0
        return last

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        for stage in self._stages:
            stage.supply_masks(step, masks)

    def idle(self, busy: bool = False) -> bool:
        first, last = (stage.idle(busy) for stage in self._stages)
        return first and last


@pytest.mark.slow
@pytest.mark.parametrize("captured", [GraphSizes(), GraphSizes(decode=(1, 2), mixed=(16,))])
def test_stages_give_the_tokens_of_one(monkeypatch: pytest.MonkeyPatch, captured: GraphSizes) -> None:
    monkeypatch.setattr(ThreadGroup, "minimum", lambda self, values: tuple(values))  # nobody else is there to be asked
    config, vocab_size = replace(CONFIG, vocab_size=97), 97

    def stage(group: RankGroup) -> CudaExecutor:
        model, weights = build_model(config, group.topology, torch.float32, CPU, group), torch.Generator()
        for slot in model.slots():
            slot.target.normal_(0.0, 0.3, generator=weights.manual_seed(len(slot.name) + sum(slot.name.encode())))
        loaded = LoadedWeights(model, config, torch.float32, CPU, group.topology, 0, torch.float32, group=group)
        limits = replace(LIMITS, vocab_size=vocab_size, stages=group.topology.pp_size)
        return assemble(loaded, SETTINGS, limits, captured)

    def tokens(executor: Any) -> dict[int, list[int]]:
        while executor.idle():
            pass
        places: Places = [[11, 22, 33], [44, 33]]
        bench = Bench(executor, eos_ids=(EOS,), grammars=FakeGrammars())  # type: ignore[arg-type]
        greedy = {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0.0}
        bench.ask(0, [20] * 12, **greedy)
        bench.ask(1, [5, 6, 7], **greedy, logprobs=LogprobRequest(start=0))
        bench.ask(2, [5, 6], temperature=0.0, max_new_tokens=12, regex=grammar(places))
        bench.run()
        return dict(bench.out.outputs)

    assert tokens(TwoStages(*(stage(group) for group in thread_groups(1, stages=2)))) == tokens(stage(ALONE))


class NoStream:
    """Everything happens in the order of the host."""

    def __init__(self, device: object = None) -> None:
        self.waited = 0

    def wait_stream(self, other: object) -> None:
        self.waited += 1

    def wait_event(self, event: HostEvent) -> None:
        self.waited += 1

    def record_event(self) -> HostEvent:
        return HostEvent()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> NoStream:
    steps = NoStream()
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: steps)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return steps


def eight_bits() -> CudaExecutor:
    torch.manual_seed(0)
    model = build_model(CONFIG, Topology(), torch.float16, CPU)
    for slot in model.slots():
        slot.target.normal_(0.0, 0.3)
    scales = [(0.05 * (1 + layer), 0.03) for layer in range(CONFIG.num_layers)]
    weights = LoadedWeights(model, CONFIG, torch.float16, CPU, Topology(), 0, torch.float8_e4m3fn, scales)
    page_bytes = KVPool(CONFIG, (1,), 1, torch.float8_e4m3fn, CPU, Topology()).groups[0].page_bytes
    limits = Limits(2, 1, (64,), 64, CONFIG.vocab_size, 8, "", page_bytes=(page_bytes,))
    return assemble(weights, SETTINGS, limits, GraphSizes())


@pytest.mark.slow
def test_eight_bits_and_their_scales_come_back(steps: NoStream) -> None:
    """On the simulated GPU."""
    executor = eight_bits()
    round_trip(executor)
    through_a_store(executor)
    executor.close()


@pytest.mark.slow
def test_eight_bits_and_their_scales_are_handed_over(steps: NoStream) -> None:
    engines = eight_bits(), eight_bits()
    hand_over(*engines, close=2e-3)  # the first token is computed like a prompt there, in half precision
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(("beside", "parts"), [(True, 1), (False, 1), (True, 8)])
@pytest.mark.parametrize(
    ("config", "dtype", "group"),
    [
        (CONFIG, torch.float16, 0),
        (CONFIG, torch.float8_e4m3fn, 0),
        (replace(CONFIG, num_kv_heads=1, head_dim=20, latent=LatentConfig(20, 8, 12, 10)), torch.float16, 0),
        (RECURRENT, torch.float16, 0),
        (RECURRENT, torch.float16, 1),
    ],
)
def test_a_gpu_copies_in_pieces_to_scattered_places(
    config: ModelConfig,
    dtype: torch.dtype,
    group: int,
    beside: bool,
    parts: int,
    steps: NoStream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty pages in pieces of three or more, which go round the ring of buffers; in parts where they are pinned."""
    monkeypatch.setattr(cuda_copies, "PART_BYTES", 1)
    monkeypatch.setattr(cuda_copies, "RING", 2)
    monkeypatch.setattr(cuda_copies, "LEAST_RING", 2)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: parts > 1)
    monkeypatch.setattr(cuda_copies, "copy_lines", lambda to, origin: to.copy_(origin))
    pool = KVPool(config, (32,) * len(config.kv_groups), 2, dtype, CPU, Topology())
    of_group = pool.groups[group]
    for name in ("PIECE_BYTES", "RING_BYTES"):
        monkeypatch.setattr(cuda_copies, name, 3 * of_group.page_bytes)
    draw = np.random.default_rng(0)
    every = torch.arange(33)
    of_group.write_pages(every, torch.randint(0, 100, (33, of_group.page_bytes), dtype=torch.uint8))
    pages, others = (draw.permutation(np.arange(1, 33, dtype=np.int32))[:20] for _ in range(2))
    slots = np.sort(draw.permutation(np.arange(1, 50, dtype=np.int32))[:20])
    buffer = np.zeros((50, of_group.page_bytes), dtype=np.uint8)
    wanted = of_group.read_pages(torch.from_numpy(pages))
    copies = cuda_copies.PageCopies(pool, CPU, ALONE)
    copies.start(CopyPagesOut(pages, buffer, group, slots, beside)).wait()
    assert (steps.waited == 0) == beside, "later steps wait for what is not copied beside them"
    assert torch.equal(torch.from_numpy(buffer[slots]), wanted)
    assert not np.delete(buffer, slots, axis=0).any()
    before, ticket = steps.waited, copies.start(CopyPagesIn(others, buffer, group, slots))
    assert ticket.ready() and ticket.wait().seconds is not None
    assert torch.equal(of_group.read_pages(torch.from_numpy(others)), wanted)
    copies.wait_for()
    layers = sum(map(config.attends, range(config.num_layers)))
    assert steps.waited - before == (layers if parts > 1 and not group else 1)


@pytest.mark.parametrize("group", [0, 1])
def test_pages_that_go_to_another_engine_of_the_gpu_stay_there(group: int, steps: NoStream) -> None:
    pool = KVPool(RECURRENT, (32, 32), 2, torch.float16, CPU, Topology())
    of_group, copies = pool.groups[group], cuda_copies.PageCopies(pool, CPU, ALONE)
    wanted = torch.randint(0, 100, (33, of_group.page_bytes), dtype=torch.uint8)
    of_group.write_pages(torch.arange(33), wanted)
    pages, others = np.array([3, 1, 7], dtype=np.int32), np.array([20, 9, 30], dtype=np.int32)
    content: Any = torch.zeros(3, of_group.page_bytes, dtype=torch.uint8)
    copies.start(CopyPagesOut(pages, content, group)).wait()
    assert torch.equal(content, of_group.read_pages(torch.from_numpy(pages))) and content.any()
    assert not copies._hands_out, "no thread of the host touches them"
    copies.start(CopyPagesIn(others, content, group, np.array([2, 0, 1], dtype=np.int32))).wait()
    assert torch.equal(of_group.read_pages(torch.from_numpy(others)), content[[2, 0, 1]])


class LateStream(NoStream):
    """What is scattered to pages here is written when the steps wait for an event behind it, and not before."""

    def __init__(self, device: object = None) -> None:
        super().__init__()
        self.put_off: list[Callable[[], None]] = []

    def record_event(self) -> HostEvent:
        event = HostEvent()
        event.writes = self.put_off.copy()  # type: ignore[attr-defined]
        return event

    def wait_event(self, event: HostEvent) -> None:
        for write in getattr(event, "writes", ()):
            write()


@pytest.mark.parametrize(("captured", "order"), [(False, "WAWA"), (True, "WWAA")])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_layer_waits_for_its_own_part_of_pages_on_their_way(
    loaded: LoadedWeights, captured: bool, order: str, copies: int, steps: NoStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prefix that comes by one copy or by two: what the first layer reads of both comes before the second's. A step
    that a graph runs waits for everything."""
    current, happened, write_pages = [steps], list[str](), cuda_copies._copy_pages

    @contextlib.contextmanager
    def stream(entered: NoStream) -> Iterator[None]:
        current.append(entered)
        yield
        current.pop()

    def write_late(pool: GroupPool, part: Part, pages: torch.Tensor, content: torch.Tensor, **ways: bool) -> None:
        held, written = content.clone(), list[bool]()

        def write() -> None:
            if not written:
                write_pages(pool, part, pages, held, **ways)
                written.append(True)
                happened.append("W")

        assert isinstance(current[-1], LateStream), "not on the steps' stream"
        current[-1].put_off.append(write)

    executor = assemble(loaded, SETTINGS, LIMITS, GraphSizes(mixed=(16,)) if captured else GraphSizes())
    while captured and executor.idle():
        pass
    first = prompt_plan(0, np.array([5, 9, 17, 33, 2, 44, 50], dtype=np.int32), np.arange(1, 33, dtype=np.int32))
    expected = [int(executor.launch(plan).wait().tokens[0, 0]) for plan in (first, decode_plan(1, 1))]
    pages, elsewhere = np.arange(1, 8, dtype=np.int32), np.arange(60, 40, -1, dtype=np.int32)
    buffer = np.zeros((7, executor._pool.groups[0].page_bytes), dtype=np.uint8)
    executor.control(CopyPagesOut(pages, buffer)).wait()

    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(NoStream, "wait_event", LateStream.wait_event)
    monkeypatch.setattr(cuda_copies, "_copy_pages", write_late)
    monkeypatch.setattr(cuda_copies, "PART_BYTES", 1)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(cuda_copies, "copy_lines", lambda to, origin: to.copy_(origin))
    executor._copies, run = cuda_copies.PageCopies(executor._pool, CPU, ALONE), executor._attention.run

    def attend(*args: Any) -> torch.Tensor:
        happened.append("A")
        return run(*args)

    monkeypatch.setattr(executor._attention, "run", attend)
    for part in np.array_split(np.arange(7), copies):
        executor.control(CopyPagesIn(elsewhere[part], buffer[part]))
    assert go_on(executor, expected[0], elsewhere, 7, 1) == expected[1:]
    assert "".join(happened) == order.replace("W", "W" * copies)
    executor.close()


class EarlyStream(NoStream):
    """What is read here is read as early as the device may: it finds what pages held when the last event that this
    stream has waited for was recorded."""

    seen: Any = None

    def wait_event(self, event: HostEvent) -> None:
        self.seen = event


@pytest.mark.parametrize(("how", "early"), [("kernels", "EEEL"), ("a graph", "LLLL"), ("behind a copy in", "LLLL")])
def test_pages_leave_layer_by_layer_while_later_ones_are_computed(
    how: str, early: str, steps: NoStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To memory that is not pinned. Each part goes as soon as its layers are done, and has their bits then; a graph
    says nothing of its layers, and pages that are themselves on their way are waited for."""
    config, entered, order, launched = replace(CONFIG, num_layers=4), list[NoStream](), list[str](), list[bool]()
    torch.manual_seed(0)
    model = build_model(config, Topology(), torch.float16, CPU)
    for slot in model.slots():
        slot.target.normal_(0.0, 0.3)
    weights = LoadedWeights(model, config, torch.float16, CPU, Topology(), 0, torch.float16)

    @contextlib.contextmanager
    def stream(current: NoStream) -> Iterator[None]:
        entered.append(current)
        yield
        entered.pop()

    def read_early(pool: GroupPool, part: Part, pages: torch.Tensor, content: torch.Tensor, into_pages: bool) -> None:
        now, at = pool._tensors, entered[-1]
        if into_pages:
            return pool.write_pages(pages, content, part)
        assert isinstance(at, EarlyStream), "not on the steps' stream"
        order.append("E" if at.seen.early else "L")
        pool._tensors = at.seen.tensors
        content.copy_(pool.read_pages(pages, part))
        pool._tensors = now
        return None

    monkeypatch.setattr(torch.cuda, "Stream", EarlyStream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(cuda_copies, "PART_BYTES", 1)
    executor = assemble(weights, SETTINGS, LIMITS, GraphSizes(mixed=(16,)) if how == "a graph" else GraphSizes())
    while how == "a graph" and executor.idle():
        pass
    pool = executor._pool.groups[0]

    def record_event() -> HostEvent:
        event: Any = HostEvent()
        event.tensors, event.early = tuple(tensor.clone() for tensor in pool._tensors), not launched
        return cast(HostEvent, event)

    monkeypatch.setattr(steps, "record_event", record_event)
    pages, other = np.arange(1, 8, dtype=np.int32), np.array([90], dtype=np.int32)
    buffers = [np.zeros((7, pool.page_bytes), dtype=np.uint8) for _ in range(2)]
    executor.control(CopyPagesOut(pages, buffers[0])).wait()  # from then on steps mark their layers
    tokens = np.array([5, 9, 17, 33, 2, 44, 50], dtype=np.int32)
    running = executor.launch(prompt_plan(0, tokens, np.arange(1, 33, dtype=np.int32)))
    launched.append(True)
    monkeypatch.setattr(cuda_copies, "_copy_pages", read_early)
    if how == "behind a copy in":
        executor.control(CopyPagesIn(other, buffers[0][:1]))
    ticket = executor.control(CopyPagesOut(pages, buffers[1]))
    assert "".join(order) == early
    running.wait()
    ticket.wait()
    assert ticket.ready()
    wanted = pool.read_pages(torch.from_numpy(pages))
    assert wanted.any() and torch.equal(torch.from_numpy(buffers[1]), wanted)
    executor.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "topk"),
    [
        ("EAGLE3", 1),
        ("EAGLE3", 2),
        ("mtp", 1),
        *(pytest.param(k, n, marks=pytest.mark.long) for k in ("STANDALONE", "NEXTN") for n in (1, 2)),
    ],
)
def test_draft_models_change_nothing(kind: str, topk: int, tmp_path: Path) -> None:
    """Through the scheduler: prompts in chunks beside decodes, a grammar, logprobs of a prompt, and a cached prefix."""
    target = write_deepseek(tmp_path / "target") if kind == "NEXTN" else write_target(tmp_path / "target", layers=4)
    path = {"STANDALONE": target, "EAGLE3": tmp_path / "head"}.get(kind)
    if kind == "EAGLE3":
        write_eagle3(tmp_path / "head")
    if kind == "mtp":
        target, kind = add_mtp(make("qwen3_next", tmp_path / "mtp").folder), "NEXTN"
    asked = {"speculative_algorithm": kind, "speculative_draft_model_path": path, "speculative_eagle_topk": topk}
    files, found = locate(str(target)), []
    for flags in ({}, asked):
        settings = Settings.from_flat({"dtype": "float32", "context_length": 64, **flags})
        config = resolve_config(files, settings)
        loaded, draft = load_model(files, settings, config, CPU), find_draft(settings, files, config)
        limits = Limits(4, 2, (80,), 64, config.vocab_size, 8, "", drafts=3 if flags else 0, adaptive_drafts=False)
        limits = replace(limits, draft_levels=2 if flags and topk > 1 else 0, groups=config.kv_groups)
        limits = replace(limits, pages=(80, 12)[: len(limits.groups)])
        beside = None if draft is None else draft.load(settings, loaded)
        executor = assemble(loaded, settings, limits, GraphSizes(), draft=beside)
        bench = Bench(cast(Any, executor), eos_ids=(EOS,), grammars=FakeGrammars(), enable_mixed_chunk=True)
        greedy: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
        bench.ask(0, [20, 21] * 6, **greedy)
        bench.ask(1, [5, 6, 7], **greedy, logprobs=LogprobRequest(start=0))
        bench.ask(2, [5, 6], temperature=0.0, max_new_tokens=9, regex=grammar([[11, 22, 33], [44, 33]] * 4))
        bench.run()
        bench.ask(3, [20, 21] * 6 + [4, 5], **greedy)
        bench.run()
        found.append((bench.out.outputs, bench.out.started[3].cached_tokens))
        executor.close()
    assert found[0] == found[1] and found[0][1] > 0
    held, proposed = [0, 0], [0, 0]  # of requests without a grammar and with one
    for handle, drafts in bench.out.drafts.items():
        assert drafts is not None
        held[handle == 2] += sum(n * steps for n, steps in enumerate(drafts.held))
        proposed[handle == 2] += drafts.proposed
    assert held[0] >= proposed[0] / topk > 0 if kind == "STANDALONE" else proposed[0] > 6
    assert proposed[1] > 0


NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_new_tokens": 10},
    {"temperature": 0.9, "top_p": 0.8, "seed": 4, "max_new_tokens": 9},
    {"temperature": 0.0, "frequency_penalty": 0.4, "max_new_tokens": 3},
]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[DraftedStep]:
    """The steps that the device verifies."""
    found, launch = [], DraftedSteps.launch

    def watched(self: DraftedSteps, *args: Any) -> DraftedStep:
        found.append(launch(self, *args))
        return found[-1]

    monkeypatch.setattr(DraftedSteps, "launch", watched)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "page_size"), [("graphs", 2), ("eager", 1), ("host", 1)])
def test_drafts_of_the_host_change_nothing(
    loaded: LoadedWeights,
    verified: list[DraftedStep],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    page_size: int,
) -> None:
    """Greedy and drawn tokens, beside a row with a penalty, which the host verifies and which ends first. A step is
    launched before what the one before it gave is read."""
    if kind == "host":
        monkeypatch.setattr(cuda_parts, "verified_drafts", lambda loaded, settings: 0)
    prompts = [[5, 9, 17, 33, 2], [8, 8, 8], [3, 4]]
    limits = replace(LIMITS, page_size=page_size, pages=(200 // page_size,))
    answers: list[list[int]] = []
    for flags in ({}, NGRAM):
        sizes = GraphSizes(drafted={1: (2,), 4: (2,)} if flags and kind == "graphs" else {})
        executor = assemble(loaded, Settings.from_flat(flags), limits, sizes)
        while executor.idle():
            pass
        bench = Bench(cast(Any, executor), proposer=RightOrWrong(answers) if flags else None)
        for handle, (prompt, asked) in enumerate(zip(prompts, KINDS, strict=True)):
            bench.ask(handle, prompt, ignore_eos=True, **asked)
        bench.run()
        found = [[*prompt, *bench.out.outputs[handle]] for handle, prompt in enumerate(prompts)]
        executor.close()
        answers = answers or found
        assert found == answers
    drafting = bench.scheduler._planner.drafting
    assert 0 < drafting.held < drafting.proposed
    assert (4 in {step.width for step in verified}) == (kind != "host")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["EAGLE3", *(pytest.param(k, marks=pytest.mark.long) for k in ("STANDALONE", "NEXTN"))]
)
def test_draft_models_guess_the_same_by_graphs_and_beside_the_host(
    kind: str, tmp_path: Path, verified: list[DraftedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_deepseek(tmp_path / "target") if kind == "NEXTN" else write_target(tmp_path / "target", layers=4)
    path = {"STANDALONE": target, "NEXTN": None, "EAGLE3": tmp_path / "head"}[kind]
    if kind == "EAGLE3":
        write_eagle3(tmp_path / "head")
    asked = {"speculative_algorithm": kind, "speculative_draft_model_path": path}
    settings = Settings.from_flat({"dtype": "float32", "context_length": 64, **asked})
    files = locate(str(target))
    config = resolve_config(files, settings)
    loaded, draft = load_model(files, settings, config, CPU), find_draft(settings, files, config)
    assert draft is not None
    limits = Limits(2, 2, (40,), 64, config.vocab_size, 32, "", drafts=3, adaptive_drafts=False)
    found: list[Any] = []
    for sizes in ({4: (2,)}, None):
        if sizes is None:
            monkeypatch.setattr(cuda_parts, "verified_drafts", lambda loaded, settings: 0)
        graphs, beside = GraphSizes(drafted=sizes or {}), draft.load(settings, loaded)
        executor = assemble(loaded, settings, limits, graphs, draft=beside)
        while executor.idle():
            pass
        bench = Bench(cast(Any, executor))
        for handle, (prompt, new) in enumerate((([20, 21, 5, 3, 7], 6), ([5, 6], 5))):
            bench.ask(handle, prompt, temperature=0.0, max_new_tokens=new, ignore_eos=True)
        bench.run()
        drafting, drafter = bench.scheduler._planner.drafting, executor._drafter
        assert drafter is not None
        found.append((bench.out.outputs, drafting.held, drafting.proposed, drafter._first[:2].tolist()))
        executor.close()
    assert found[0] == found[1] and found[0][2] > 5
    assert len(verified) > 1 and all(step.width == 4 for step in verified)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EAGLE3", pytest.param("STANDALONE", marks=pytest.mark.long)])
def test_steps_are_plain_while_a_draft_model_sleeps(
    kind: str, tmp_path: Path, verified: list[DraftedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the graphs of an engine without one, prompts as well, and each is launched before the one ahead of it
    is read; awake or asleep, or in turns, requests get the same."""
    target, head = write_target(tmp_path / "target", layers=4), tmp_path / "head"
    path = write_eagle3(head) if kind == "EAGLE3" else target
    asked = {"speculative_algorithm": kind, "speculative_draft_model_path": path}
    settings = Settings.from_flat({"dtype": "float32", "context_length": 64, **asked})
    files = locate(str(target))
    config = resolve_config(files, settings)
    loaded, draft = load_model(files, settings, config, CPU), find_draft(settings, files, config)
    assert draft is not None
    limits = Limits(2, 2, (60,), 64, config.vocab_size, 32, "", drafts=3, adaptive_drafts=False)
    graphs = GraphSizes(decode=(2,), mixed=(16, 32), drafted={1: (2,), 4: (2,)})
    executor = assemble(loaded, settings, limits, graphs, draft=draft.load(settings, loaded))
    while executor.idle():
        pass
    uses = [graphs._uses for graphs in (executor._decode_graphs, executor._mixed_graphs)]
    answers, drafted, replayed = list[Any](), list[int](), list[int]()
    knowing = [True], [True], [True, True, True, False], [True]
    for resting, knows in zip(([False], [True], [False], [True, False]), knowing, strict=True):
        rests, known = itertools.cycle(resting), itertools.cycle(knows)
        monkeypatch.setattr(DraftLengths, "resting", property(partial(lambda rests, _: next(rests), rests)))
        monkeypatch.setattr(DraftLengths, "knows_cost", partial(lambda known, *_: next(known), known))
        bench = Bench(cast(Any, executor))
        bench.ask(99, [30, 31, 32], max_new_tokens=2)  # before anything is cached, requests are awake in any case
        bench.run()
        before, ahead = [uses_of.total() for uses_of in uses], set[int]()
        verified.clear()
        bench.out.outputs.clear()
        for handle, prompt in enumerate(([20, 21, 5, 3, 7], [5, 6])):
            bench.ask(handle, prompt, temperature=0.0, max_new_tokens=20, ignore_eos=True)
        bench.turn(2)
        while bench.scheduler._requests:
            bench.turn()
            ahead.add(len(bench.scheduler._in_flight))
        answers.append(bench.out.outputs)
        drafted.append(sum(step.width > 1 for step in verified))
        replayed.append(min(uses_of.total() - was for uses_of, was in zip(uses, before, strict=True)))
        assert 1 in ahead, "a step is launched before the one ahead of it is read"
        for handle, prompt in enumerate(([20, 21, 5, 3, 7], [5, 6])):
            bench.ask(10 + handle, [*prompt, *bench.out.outputs[handle], 4], temperature=0.0, max_new_tokens=6)
        bench.run()
        assert [bench.out.started[10 + handle].cached_tokens for handle in (0, 1)] == [24, 20]
        answers[-1] |= bench.out.outputs
    executor.close()
    assert all(each == answers[0] for each in answers)
    assert drafted[0] and not drafted[1] and drafted[2] and drafted[3]
    assert replayed[0] == 0 and replayed[1] == 1 and not drafted[1]


@pytest.mark.parametrize("by_host", [True, False])
def test_pages_for_drafts_that_fail_keep_their_places(
    loaded: LoadedWeights, monkeypatch: pytest.MonkeyPatch, by_host: bool
) -> None:
    """The next step was planned as if they held: the page that it brings is for a later token than its own."""
    if by_host:
        monkeypatch.setattr(cuda_parts, "verified_drafts", lambda loaded, settings: 0)
    executor = assemble(loaded, Settings.from_flat(NGRAM), LIMITS, GraphSizes())
    pages = np.arange(1, 11, dtype=np.int32)
    executor.launch(prompt_plan(0, np.arange(4, dtype=np.int32), pages[:4]))
    three, one = (np.array([count], dtype=np.int32) for count in (3, 1))
    plan, wrong = decode_plan(1, 1), np.full(2, 59, dtype=np.int32)
    drafted = replace(plan, query_lens=three, given=three - 1, tokens=wrong)
    first = executor.launch(replace(drafted, new_pages=(pages[4:7],), new_page_counts=(three,)))
    second = executor.launch(replace(plan, step=2, new_pages=(pages[7:8],), new_page_counts=(one,)))
    assert bool(executor._drafted._unread) != by_host, "the second is launched before the first is read"
    assert first.wait().counts.tolist() == second.wait().counts.tolist() == [1]
    assert executor._inputs.page_tables[0][0, :8].tolist() == pages[:8].tolist()
    assert int(executor._inputs.mirror.held_by(np.array([0], dtype=np.int32))[2][0]) == 6
    executor.close()


def test_sizes_of_steps_with_drafts_are_few() -> None:
    assert drafted_sizes(24, 0) == {}
    assert drafted_sizes(24, 3) == {width: [1, 2, 4, 8, 16, 24] for width in (1, 2, 3, 4)}
    wide = drafted_sizes(512, 7)
    assert list(wide) == [1, 2, 3, 4, 6, 8] and wide[8] == [1, 2, 4, 8, 16, 32] and wide[3][-2:] == [64, 85]
    model: Any = None
    weights = LoadedWeights(model, CONFIG, torch.bfloat16, CPU, Topology(), 0, torch.bfloat16)
    shape = StepShape(64, 128, CONFIG.vocab_size, CONFIG.hidden_size, CONFIG.context_length, 1, 2, 2)
    sizes = graph_sizes(weights, Settings.from_flat({**NGRAM, "cuda_graph_max_bs_decode": 4}), shape, 0)
    assert sizes.drafted == drafted_sizes(4, 3) and sizes.decode[-1] == 4
    model_path = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "x"}
    beside = graph_sizes(weights, Settings.from_flat(model_path), shape, 0)
    assert beside.drafted == drafted_sizes(64, 3) and beside.decode[-1] == 64 and beside.scratch_bytes > 0
    for flags in ({"check_ranks": True}, {"decode_attention_backend": "torch"}):
        assert not verified_drafts(weights, Settings.from_flat(NGRAM | flags))
