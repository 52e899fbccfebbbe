"""Several ranks in threads of one process: the tokens are those of one rank, whatever runs beside what; a rank does
what the first is told; and a failure on one shows on all."""

from __future__ import annotations

import functools
import json
import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bough.core.control import (
    CopyPagesIn,
    CopyPagesOut,
    ProfileStop,
    ReadWeight,
    RecordExperts,
    Sleep,
    SwapWeights,
    TakeTensors,
    Wake,
)
from bough.core.errors import EngineDeadError, ModelError, RankLostError, RequestError, SettingsError
from bough.core.plan import BatchPlan, Executor, Limits, PageSwap, StepResult
from bough.core.sampling_params import SamplingParams
from bough.core.settings import Settings
from bough.distributed.group import ALONE, RankGroup
from bough.executor import ranks, weights
from bough.executor.build import build_executor
from bough.executor.control import ModelControl
from bough.executor.load_model import LoadedModel, check_experts, check_split, resolve_config
from bough.executor.ranks import LeadingExecutor, Reporter, Results, follow
from bough.layers.placement import ExpertRecord, SpreadExperts, SpreadOptions
from bough.loader.locate import locate
from bough.messages.channels import Addresses
from bough.messages.ranks import LaunchPlan, Leave, RunCommand, ToRank, UseIdleTime, pack_array, unpack_array
from bough.messages.requests import Abort
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.grammars import EOS, PIECES, FakeGrammars, Places, grammar
from tests.fakes.one_row import PROMPT, go_on, tokens_of
from tests.fakes.ranks import (
    LLAMA,
    MODELS,
    PATIENCE_S,
    VOCAB,
    ThreadGroup,
    attention_groups,
    on_ranks,
    thread_groups,
)
from tests.fakes.scheduler_bench import Bench

T = TypeVar("T")
PAGES, NEW = 96, 30
MOVING = {"enable_eplb": True, "eplb_rebalance_num_iterations": 5}
PLACES: Places = [[11, 22, 33], [9], [8], [7], [11, 22], [44, 33]]
FLAGS = {
    "device": "cpu",
    "attention_backend": "torch",
    "cpu_threads": 1,
    "context_length": 128,
    "chunked_prefill_size": 16,
    "max_total_tokens": PAGES,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("ranks")
    return {name: write_checkpoint(base / name, 3, **config) for name, config in MODELS.items()}


class Orders:
    """The way to a rank, in memory; what is sent is encoded as on the way to a process."""

    def __init__(self, kind: Any = ToRank) -> None:
        self.queue: queue.Queue[bytes] = queue.Queue()
        # Made here, on one thread: msgspec crashes where two threads look at a type for the first time at once.
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=unpack_array)

    def send(self, message: Any) -> None:
        self.queue.put(msgspec.msgpack.encode(message, enc_hook=pack_array))

    def receive(self, timeout_s: float | None) -> list[Any]:
        try:
            frame = self.queue.get(block=timeout_s != 0.0, timeout=timeout_s)
        except queue.Empty:
            return []
        return [self._decoder.decode(frame)]


def build(folder: Path, group: RankGroup | None = None, **flags: Any) -> Executor:
    files = locate(str(folder))
    if group is None:
        return build_executor(files, Settings.from_flat({**FLAGS, **flags})).executor
    place = group.topology
    sizes = {"tp_size": place.tp_size, "ep_size": place.ep_size, "pp_size": place.pp_size}
    settings = Settings.from_flat({**FLAGS, **flags, **sizes})
    return build_executor(files, settings, group).executor


def with_ranks(
    folder: Path,
    size: int,
    use: Callable[[Executor], T],
    stages: int = 1,
    way: Callable[[], Orders] = Orders,
    ep_size: int = 1,
    host_pages: int = 0,
    **flags: Any,
) -> T:
    """What `use` makes of several ranks as one executor; with memory of their own for so many pages of each group."""
    ways, results = [way() for _ in range(1, size * stages)], Orders(StepResult)

    def work(group: ThreadGroup) -> list[T]:
        executor, place = build(folder, group, **flags), group.topology
        sizes = executor.limits().page_bytes if host_pages else ()
        host = [np.zeros((host_pages + 1, size), dtype=np.uint8) for size in sizes]
        if place.rank:
            reports = stages > 1 and place.is_last and place.tp_rank == 0
            follow(executor, ways[place.rank - 1], Reporter(results.send) if reports else None, host)
            return []
        arrived = Results(results.receive, PATIENCE_S) if stages > 1 else None

        def send(message: ToRank) -> None:
            for way in ways:
                way.send(message)

        leader = LeadingExecutor(executor, send, arrived)
        leader.host = host
        try:
            return [use(leader)]
        finally:
            leader.close()

    return on_ranks(size, work, ep_size, stages)[0][0]


def alone(folder: Path, use: Callable[[Executor], T], **flags: Any) -> T:
    executor = build(folder, **flags)
    try:
        return use(executor)
    finally:
        executor.close()


def mixed_load(executor: Executor) -> dict[int, list[int]]:
    """Prompts in chunks beside decodes, a cached prefix, a seed, penalties, a grammar, an abort and retractions."""
    bench = Bench(executor, eos_ids=(EOS,), grammars=FakeGrammars(), schedule_conservativeness=0.0)  # type: ignore[arg-type]
    draw = np.random.default_rng(5)
    prompts = [draw.integers(90, VOCAB, length).tolist() for length in (3, 40, 17, 5, 29, 1)]
    greedy = {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 0.0}
    for handle, prompt in enumerate(prompts):
        bench.ask(handle, prompt, **greedy)
    bench.ask(10, prompts[1], **{**greedy, "temperature": 0.9, "top_p": 0.9, "seed": 7})
    bench.ask(11, prompts[2], **greedy, repetition_penalty=1.3, frequency_penalty=0.4)
    bench.ask(12, prompts[3], temperature=0.0, max_new_tokens=40, regex=grammar(PLACES))
    bench.turn(6)
    bench.submit(Abort(4))
    bench.run()
    assert len(bench.out.ended) == 9 and sum(bench.out.retractions.values()) > 0
    text = b"".join(PIECES[token] for token in bench.out.outputs[12])
    assert len(text) == len(PLACES) and all(byte in place for byte, place in zip(text, PLACES, strict=True))
    return {handle: tokens for handle, tokens in bench.out.outputs.items() if handle != 4}


@functools.cache
def of_one_rank(folder: Path) -> dict[int, list[int]]:
    return alone(folder, mixed_load)


@pytest.mark.parametrize(
    ("model", "size"),
    [("llama", 2), ("llama", 4), ("untied", 2), ("untied", 4), ("moe", 2), ("moe", 4), ("latent", 4), ("states", 2)],
)
def test_ranks_give_the_tokens_of_one_under_a_mixed_load(folders: dict[str, Path], model: str, size: int) -> None:
    assert with_ranks(folders[model], size, mixed_load, check_ranks=True) == of_one_rank(folders[model])


@pytest.mark.parametrize(
    ("model", "size", "ep_size", "flags"),
    [
        ("moe", 4, 2, {}),
        ("latent", 2, 2, {"ep_num_redundant_experts": 2}),
        ("moe", 2, 2, {"moe_a2a_backend": "torch"}),
    ],
)
def test_experts_that_are_spread_give_the_tokens_of_one_rank(
    folders: dict[str, Path], model: str, size: int, ep_size: int, flags: dict[str, Any]
) -> None:
    assert with_ranks(folders[model], size, mixed_load, ep_size=ep_size, **flags) == of_one_rank(folders[model])


def test_a_draft_model_without_experts_goes_with_experts_that_are_spread(folders: dict[str, Path]) -> None:
    drafts = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(folders["llama"])}
    spread = {**MOVING, **COUNTING, "ep_num_redundant_experts": 2, "moe_a2a_backend": "torch"}
    flags = {**drafts, **spread, "speculative_adaptive": False, "enable_return_routed_experts": True}
    assert with_ranks(folders["moe"], 2, mixed_load, ep_size=2, **flags) == of_one_rank(folders["moe"])


def test_a_draft_model_that_ranks_cannot_share_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    path = str(write_checkpoint(tmp_path / "three", 3, **LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3}))
    drafts = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": path}
    told = r"The draft model three: --tp-size 2: num_heads \(3\) .* Sizes that fit this model: 1\."
    with pytest.raises(SettingsError, match=told):
        build(folders["llama"], thread_groups(2)[0], **drafts)


@pytest.mark.parametrize(
    ("model", "backend", "stages"), [("moe", "none", 1), ("latent", "torch", 1), ("moe", "none", 2)]
)
def test_experts_move_between_steps_and_no_token_changes(
    folders: dict[str, Path], model: str, backend: str, stages: int, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {**MOVING, "ep_num_redundant_experts": 2, "moe_a2a_backend": backend}
    with caplog.at_level("INFO", "bough.executor.control"):
        found = with_ranks(folders[model], 2, mixed_load, stages, ep_size=2, **flags)
    assert found == of_one_rank(folders[model])
    told = [record.getMessage() for record in caplog.records if "rebalanced" in record.getMessage()]
    assert len(told) > 3 and any("has read" in text for text in told)


@pytest.mark.parametrize("broken", ["check_weights", "load_weights"])
def test_experts_that_cannot_move_stay_and_those_that_moved_in_part_end_the_engine(
    folders: dict[str, Path], broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sound = getattr(weights, broken)

    def break_experts(slots: Any, *rest: Any, **options: Any) -> None:
        if all(".experts." in slot.name for slot in slots):  # those that move, if any do
            raise ModelError("A file has gone.")
        sound(slots, *rest, **options)

    monkeypatch.setattr(weights, broken, break_experts)
    flags: dict[str, Any] = {**MOVING, "ep_num_redundant_experts": 2, "ep_size": 2}
    if broken == "check_weights":
        assert with_ranks(folders["moe"], 2, mixed_load, **flags) == of_one_rank(folders["moe"])
        assert "experts could not be rebalanced: A file has gone." in caplog.text
        return
    with pytest.raises(EngineDeadError, match="Experts have moved in part: A file has gone"):
        with_ranks(folders["moe"], 2, mixed_load, **flags)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("model", "smaller", "tensor"),
    [
        ("llama", {"intermediate_size": 48}, r"layers\.0\.mlp\.(gate|down)_proj"),
        ("llama", {"num_key_value_heads": 2}, r"layers\.0\.self_attn\.k_proj"),
        ("llama", {"vocab_size": VOCAB - 9}, "embed_tokens"),
        ("moe", {"moe_intermediate_size": 16}, r"layers\.0\.mlp\.experts\.\d\.(gate|down)_proj"),
    ],
)
def test_weights_that_are_larger_than_the_configuration_are_refused(
    folders: dict[str, Path], size: int, model: str, smaller: dict[str, int], tensor: str
) -> None:
    flags = {"json_model_override_args": json.dumps(smaller)}
    told = rf"Tensor model\.{tensor}\.weight has shape \[\d+, \d+\], the model expects \[\d+, \d+\]"
    with pytest.raises(ModelError, match=told):
        if size == 1:
            build(folders[model], **flags)
        else:  # the last rank sees it
            build(folders[model], thread_groups(2)[1], **flags)


def record_of(executor: Executor, count: int = 6) -> tuple[list[int], list[list[int]]]:
    """The tokens of one request, and how often it has chosen each expert; those before and behind it do not count."""

    def tell(action: Literal["start", "stop", "dump"]) -> str:
        return executor.control(RecordExperts(action)).wait().message

    tokens_of(executor)
    with pytest.raises(RequestError, match="begin with /start_expert_distribution_record"):
        tell("stop")
    tell("start")
    tokens = tokens_of(executor, count)
    so_far = tell("dump")
    tell("stop")
    tokens_of(executor)
    assert tell("dump") == so_far
    tell("start")
    assert np.sum(json.loads(tell("dump"))) == 0
    return tokens, json.loads(so_far)


COUNTING = {"expert_distribution_recorder_mode": "stat"}


def chosen_by_transformers(folder: Path, tokens: list[int]) -> list[list[int]]:
    """After the last layer's attention only those tokens are computed that another is sampled behind."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    used = [*logits[:-1], logits[-1][len(PROMPT) - 1 :]]
    chosen = (layer.topk(model.config.num_experts_per_tok).indices.flatten() for layer in used)
    return [layer.bincount(minlength=model.config.num_experts).tolist() for layer in chosen]


def test_one_rank_counts_the_experts_that_transformers_chooses(folders: dict[str, Path]) -> None:
    tokens, counts = alone(folders["moe"], record_of, **COUNTING)
    assert counts == chosen_by_transformers(folders["moe"], PROMPT + tokens[:-1])


@pytest.mark.parametrize(
    ("model", "size", "stages", "flags"),
    [
        ("moe", 1, 2, {}),
        ("moe", 2, 2, {"ep_size": 2}),
        ("latent", 2, 1, {}),
        ("latent", 2, 1, {"ep_size": 2, **MOVING, "moe_a2a_backend": "torch"}),
    ],
)
def test_ranks_count_the_experts_that_one_chooses(
    folders: dict[str, Path], model: str, size: int, stages: int, flags: dict[str, Any]
) -> None:
    # The scheduler tells the first stage which tokens were sampled; here there is none.
    use = functools.partial(record_of, count=1 if stages > 1 else 6)
    tokens, counts = alone(folders[model], use, **COUNTING)
    first = 0 if model == "latent" else (len(PROMPT) + len(tokens) - 1) * 2
    assert [sum(layer) for layer in counts] == [first, len(tokens) * (3 if model == "latent" else 2)]
    assert alone(folders[model], tokens_of)[: len(tokens)] == tokens
    counting = {} if "enable_eplb" in flags else COUNTING  # which counts too
    assert with_ranks(folders[model], size, use, stages, **flags, **counting) == (tokens, counts)


def test_experts_that_are_not_counted_are_not_told(folders: dict[str, Path]) -> None:
    def start(executor: Executor) -> None:
        executor.control(RecordExperts("start")).wait()

    for use in (functools.partial(alone, folders["moe"], start), lambda: with_ranks(folders["moe"], 2, start)):
        with pytest.raises(RequestError, match="start with --expert-distribution-recorder-mode stat"):
            use()


def test_attention_groups_that_balance_experts_tell_no_counts(folders: dict[str, Path]) -> None:
    """Each counts the tokens of all."""
    config = resolve_config(locate(str(folders["moe"])), Settings.from_flat(FLAGS))
    record = ExpertRecord(SpreadExperts(attention_groups(2, 1)[0], SpreadOptions(count=True)), config)
    with pytest.raises(RequestError, match="and without --enable-dp-attention"):
        record.obey(RecordExperts("start"))


def other_page(plan: BatchPlan) -> BatchPlan:
    swap = PageSwap(row=0, group=0, first=2, pages=np.array([90], dtype=np.int32))
    return replace(plan, edits=(swap,)) if plan.step == 1 else plan


def other_row(plan: BatchPlan) -> BatchPlan:
    return replace(plan, rows=plan.rows + 1)


def other_prompt(plan: BatchPlan) -> BatchPlan:
    return replace(plan, tokens=plan.tokens + 1)


def other_sampling(plan: BatchPlan) -> BatchPlan:
    biased = SamplingParams(temperature=0.0, logit_bias={17: 100.0})
    return replace(plan, setups=tuple(replace(setup, sampling=biased) for setup in plan.setups))


@pytest.mark.parametrize(
    ("disturb", "words"),
    [
        (other_page, r"step 1: the digest of the page tables is \d+, not \d+ \(--check-ranks\)\."),
        (other_row, "step 0: the digest of the rows is"),
        (other_prompt, "step 0: the digest of the given tokens is"),
        (other_sampling, r"step 0: sampled token 0 is 17, not \d+ \(--check-ranks\)"),
    ],
)
def test_a_rank_that_goes_its_own_way_is_found(
    folders: dict[str, Path], disturb: Callable[[BatchPlan], BatchPlan], words: str
) -> None:
    class Disturbed(Orders):
        def send(self, message: ToRank) -> None:
            super().send(LaunchPlan(disturb(message.plan)) if isinstance(message, LaunchPlan) else message)

    with pytest.raises(EngineDeadError, match=f"Rank 1 differs from rank 0 in {words}"):
        with_ranks(folders["llama"], 2, tokens_of, way=Disturbed, check_ranks=True)


def test_tensors_reach_the_ranks_that_have_parts_of_them(folders: dict[str, Path], tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", 4, **LLAMA)
    tensors = load_file(other / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, tmp_path / "wrong")

    def use(executor: Executor) -> list[Any]:
        with pytest.raises(RequestError, match=r"has shape \[3\], not"):  # on all ranks, and none has changed
            executor.control(TakeTensors((str(tmp_path / "wrong"),))).wait()
        found: list[Any] = [tokens_of(executor)]
        executor.control(TakeTensors((str(other / "model.safetensors"),))).wait()
        for name, tensor in tensors.items():
            shown = json.loads(executor.control(ReadWeight(name, 10**6)).wait().message)
            assert torch.equal(torch.tensor(shown), tensor), name
        return [*found, tokens_of(executor)]

    expected = [alone(folders["llama"], tokens_of), alone(other, tokens_of)]
    assert with_ranks(folders["llama"], 2, use) == expected


def test_weights_are_swapped_and_memory_released_on_all_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", 4, **LLAMA)

    def use(executor: Executor) -> list[Any]:
        found: list[Any] = [tokens_of(executor)]
        with pytest.raises(ModelError, match="another model"):  # is found on all ranks, and none has changed
            executor.control(SwapWeights(str(folders["moe"]))).wait()
        found.append(tokens_of(executor))
        executor.control(SwapWeights(str(other))).wait()
        executor.control(Sleep()).wait()
        executor.control(Wake()).wait()
        return [*found, tokens_of(executor)]

    expected = [alone(folders["llama"], tokens_of)] * 2 + [alone(other, tokens_of)]
    assert expected[0] != expected[2] and with_ranks(folders["llama"], 2, use) == expected


def test_weights_that_one_rank_cannot_read_are_swapped_on_none(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on hosts with disks of their own."""
    other, find = write_checkpoint(tmp_path / "other", 4, **LLAMA), weights.WeightStore.find

    def find_on_first(store: weights.WeightStore, path: str, load_format: str | None) -> Any:
        if path == "elsewhere" and store._loaded.topology.rank:
            raise ModelError("This disk has no such folder.")
        return find(store, str(other) if path == "elsewhere" else path, load_format)

    monkeypatch.setattr(weights.WeightStore, "find", find_on_first)

    def use(executor: Executor) -> list[Any]:
        found: list[Any] = [tokens_of(executor)]
        with pytest.raises(RequestError, match="Another rank cannot do it; see its log"):
            executor.control(SwapWeights("elsewhere")).wait()
        return [*found, tokens_of(executor)]

    assert with_ranks(folders["llama"], 2, use) == [alone(folders["llama"], tokens_of)] * 2
    assert "This disk has no such folder." in caplog.text


def test_vectors_in_the_place_of_tokens_stay_on_one_host(folders: dict[str, Path]) -> None:
    """They are in a file there."""
    found = [with_ranks(folders["llama"], 2, lambda executor: executor.limits().media, nnodes=n) for n in (1, 2)]
    assert found[0] is not None and found[1] is None


@pytest.mark.parametrize(("model", "size"), [("llama", 2), ("untied", 4), ("latent", 2)])
def test_pages_of_all_ranks_are_copied_out_and_into_others(folders: dict[str, Path], model: str, size: int) -> None:
    def use(executor: Executor) -> None:
        expected, used = tokens_of(executor), len(PROMPT)
        pages, elsewhere = np.arange(1, 1 + used, dtype=np.int32), np.arange(60, 40, -1, dtype=np.int32)
        buffer = np.zeros((used, executor.limits().copied_bytes(0)), dtype=np.uint8)
        executor.control(CopyPagesOut(pages, buffer)).wait()
        assert all(part.any() for part in np.split(buffer, size, axis=1))
        executor.control(CopyPagesIn(elsewhere[:used].copy(), buffer)).wait()
        assert go_on(executor, expected[0], elsewhere, used, 5) == expected[1:]
        if model == "llama":  # of the others every rank has the same
            swapped = np.concatenate(np.split(buffer, size, axis=1)[::-1], axis=1)
            executor.control(CopyPagesIn(elsewhere[:used].copy(), swapped)).wait()
            assert go_on(executor, expected[0], elsewhere, used, 5) != expected[1:]

    with_ranks(folders[model], size, use)


def test_a_rank_that_fails_alone_ends_all() -> None:
    class Control(ModelControl):
        def _run(self, command: Any) -> Any:
            if self._group.topology.tp_rank:
                raise ModelError("this disk is broken")
            return super()._run(command)

    def work(group: ThreadGroup) -> str:
        class NoProfiler:
            def stop(self) -> str:
                return ""

        control = Control(None, None, group)  # type: ignore[arg-type]
        control._profiler = NoProfiler()  # type: ignore[assignment]
        with pytest.raises(RankLostError) as caught:
            control.run(ProfileStop())
        return str(caught.value)

    first, second = on_ranks(2, work)
    assert first == "Another rank could not do the command ProfileStop, which this one has done."
    assert second == "This rank could not do the command ProfileStop, which another has done: this disk is broken"


class Failing:
    """An executor whose steps fail, after the launch."""

    def __init__(self) -> None:
        self.idles = 0

    def launch(self, plan: Any) -> Any:
        return self

    def idle(self, busy: bool = False) -> bool:
        self.idles += 1
        return False

    def ready(self) -> bool:
        return True

    def wait(self) -> Any:
        raise ZeroDivisionError("in a step")


def test_a_step_that_fails_ends_the_rank_though_nothing_more_comes(folders: dict[str, Path]) -> None:
    orders, failing = Orders(), Failing()
    sent: list[ToRank] = []
    alone(folders["llama"], lambda executor: tokens_of(LeadingExecutor(executor, sent.append), 1))
    assert isinstance(sent[0], LaunchPlan)
    orders.send(UseIdleTime())
    orders.send(sent[0])
    with pytest.raises(ZeroDivisionError, match="in a step"):
        follow(failing, orders)  # type: ignore[arg-type]
    assert failing.idles == 1


def test_the_leader_sends_each_command_before_it_does_it_itself(folders: dict[str, Path]) -> None:
    sent: list[ToRank] = []

    def use(executor: Executor) -> None:
        leader = LeadingExecutor(executor, sent.append)
        leader.control(Sleep(("kv_cache",))).wait()
        assert not leader.idle(busy=True)
        leader.close()

    alone(folders["llama"], use)
    assert sent == [RunCommand(Sleep(("kv_cache",))), UseIdleTime(busy=True), Leave()]


@pytest.mark.parametrize(
    ("model", "size", "words"),
    [
        ("llama", 3, r"num_heads \(8\) cannot be divided among 3 ranks\. Sizes that fit this model: 1, 2, 4, 8\."),
        ("latent", 5, r"num_heads \(8\) cannot be .* Sizes that fit this model: 1, 2, 4, 8\."),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_those_that_do(
    folders: dict[str, Path], model: str, size: int, words: str
) -> None:
    with pytest.raises(SettingsError, match=f"--tp-size {size}: {words}"):
        build(folders[model], thread_groups(size)[0])


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("moe", {"tp_size": 4, "ep_size": 3}, "--ep-size 3 does not divide --tp-size 4"),
        ("llama", {"tp_size": 2, "ep_size": 2}, "LlamaForCausalLM has no experts"),
        ("llama", COUNTING, "LlamaForCausalLM has no experts that can be counted"),
        (
            "moe",
            {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, **COUNTING},
            "every group would count the tokens of all",
        ),
        ("moe", {"enable_eplb": True}, "--enable-eplb is for experts that are spread"),
        ("moe", {"ep_num_redundant_experts": 1}, "--ep-num-redundant-experts is for experts that are spread"),
        ("moe", {"moe_a2a_backend": "torch"}, "--moe-a2a-backend torch is for experts that are spread"),
        ("moe", {"tp_size": 4, "ep_size": 2, "moe_a2a_backend": "torch"}, "use --ep-size 4, or none"),
        ("moe", {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 5}, "there is use for at most 4"),
        (
            "moe",
            {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "enable_deterministic_inference": True},
            "which rank computes an expert must not change",
        ),
    ],
)
def test_experts_that_cannot_be_spread_so_are_refused_with_the_reason(
    folders: dict[str, Path], model: str, flags: dict[str, Any], words: str
) -> None:
    settings = Settings.from_flat({**FLAGS, **flags})
    with pytest.raises(SettingsError, match=words):
        check_experts(resolve_config(locate(str(folders[model])), settings), settings)


def test_inner_widths_that_do_not_fit_all_ranks_may_fit_those_that_share_an_expert(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 3, **{**MODELS["moe"], "moe_intermediate_size": 18})
    config = resolve_config(locate(str(folder)), Settings.from_flat(FLAGS))
    with pytest.raises(SettingsError, match=r"moe_intermediate_size \(18\) .* Sizes that fit this model: 1, 2\."):
        check_split(config, 4)
    check_split(config, 4, ep_size=2)
    with pytest.raises(SettingsError, match=r"--tp-size 6: num_heads .* Sizes that fit this model: 2, 4\."):
        check_split(config, 6, ep_size=2)


def test_another_engines_way_to_send_tokens_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"must be one of none, torch; got 'deepep'\. Bough has no such kernels"):
        Settings.from_flat({"moe_a2a_backend": "deepep"})


class Files:
    """Weights whose experts are to move after every second step."""

    rebalance_every = 2

    def __init__(self, error: Exception | None) -> None:
        self.error, self.looks = error, 0

    def rebalance(self) -> str:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return "All experts stay where they are."


@pytest.mark.parametrize(
    ("errors", "looks", "told"),
    [
        ([ModelError("the files are gone")] * 2, 3, ""),
        ([None, ModelError("the files are gone")], 1, "could not do the move of experts"),
        ([EngineDeadError("Experts have moved in part.")] * 2, 1, "moved in part"),
    ],
)
def test_experts_that_cannot_move_stay_but_ranks_that_differ_end_the_engine(
    errors: list[Exception | None], looks: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(group: ThreadGroup) -> str:
        weights: Any = Files(errors[group.topology.rank])
        control = ModelControl(weights, None, group)  # type: ignore[arg-type]
        try:
            for _ in range(7):
                control.begin_step()
        except EngineDeadError as error:
            return str(error)
        finally:
            assert weights.looks == looks
        return ""

    assert all(told in said and bool(said) == bool(told) for said in on_ranks(2, work))
    assert caplog.text.count("experts could not be rebalanced: the files are gone") == (0 if told else 6)


def test_one_process_cannot_be_several_ranks(folders: dict[str, Path]) -> None:
    with pytest.raises(SettingsError, match="--tp-size 2: this command runs the model in one process"):
        build_executor(locate(str(folders["llama"])), Settings.from_flat({**FLAGS, "tp_size": 2}))


def test_every_rank_of_every_replica_has_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(ranks, "resolve_device", lambda settings: torch.device("cuda"))
    monkeypatch.setattr(ranks, "open_group", lambda topology, *rest: topology.tp_rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)

    def join(tp_size: int, dp_size: int, rank: int, dp_rank: int) -> Any:
        settings = Settings.from_flat({"tp_size": tp_size, "dp_size": dp_size})
        return ranks.join_ranks(settings, rank, Addresses.in_folder(tmp_path), dp_rank)

    joined = [join(2, 3, rank, dp_rank) for dp_rank in range(3) for rank in range(2)]
    assert joined == [0, 1] * 3 and taken == [0, 1, 2, 3, 4, 5]
    assert join(1, 4, 0, 3) is ALONE and taken[-1] == 3
    with pytest.raises(
        SettingsError,
        match=r"--tp-size 2, --pp-size 1 and --dp-size 4: .* makes 8 on this host, and there are 6\.",
    ):
        join(2, 4, 0, 0)


@pytest.mark.parametrize(("model", "size"), [("untied", 4), ("moe", 2), ("latent", 8), ("states", 2)])
def test_a_simulated_rank_has_the_memory_of_a_real_one(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture, model: str, size: int
) -> None:
    def measure(loaded: LoadedModel) -> tuple[int, Limits]:
        loaded.executor.close()
        return loaded.weight_bytes, replace(loaded.executor.limits(), note="")

    files = locate(str(folders[model]))

    def real(group: ThreadGroup) -> tuple[int, Limits]:
        return measure(build_executor(files, Settings.from_flat({**FLAGS, "tp_size": size}), group))

    loaded = build_executor(files, Settings.from_flat({**FLAGS, "simulate_tp": size}))
    if model != "states":  # whose plans would have to name pages of states too
        assert all(0 <= token < VOCAB for token in tokens_of(loaded.executor))
    assert measure(loaded) == on_ranks(size, real)[0]
    assert f"--simulate-tp {size}: this is one rank's share" in caplog.text


def test_a_simulated_rank_is_refused_beside_others_and_where_it_does_not_fit(folders: dict[str, Path]) -> None:
    with pytest.raises(SettingsError, match="--simulate-tp runs one rank alone: leave out --tp-size"):
        build(folders["llama"], thread_groups(2)[0], simulate_tp=2)
    with pytest.raises(SettingsError, match=r"--simulate-tp 3: num_heads \(8\) cannot be divided among 3 ranks"):
        build(folders["llama"], simulate_tp=3)


def test_what_the_native_kernels_do_is_refused_with_the_reason(folders: dict[str, Path]) -> None:
    with pytest.raises(SettingsError, match=r"--quantization int8 .* cannot add up the results of several ranks"):
        build(folders["llama"], thread_groups(2)[0], quantization="int8", attention_backend="native")


def test_the_smallest_cache_decides(folders: dict[str, Path]) -> None:
    def pages(group: ThreadGroup) -> tuple[int, ...]:
        tokens = 40 if group.topology.tp_rank else 50
        executor = build(folders["llama"], group, max_total_tokens=tokens)
        executor.close()
        return executor.limits().pages

    assert on_ranks(2, pages) == [(40,), (40,)]
