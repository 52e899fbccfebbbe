"""All that a request is goes from engine to engine: what it samples by, its adapter, its images, its draft model's
pages. What cannot be handed over is computed where it arrives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.core.finish import FinishAbort, FinishLength
from bough.core.plan import BatchPlan, RowSetup, StepResult
from bough.core.pooling import ALL_STATES
from bough.core.settings import LoraSettings, Settings
from bough.disaggregation import wire
from bough.executor.build import build_executor
from bough.launch.parts import check_adapters
from bough.loader.locate import locate
from bough.messages.requests import Bootstrap, ChangeAdapters, Thinking
from tests.disaggregation.test_disaggregation_pair import prompt_of
from tests.fakes.engine_pair import HERE, EnginePair
from tests.fakes.executor import oracle
from tests.fakes.scheduler_bench import Bench
from tests.parity.draft_models import write_eagle3, write_target
from tests.scheduler.test_scheduler_media import Seeing, image, laid

ROUTED = Bootstrap("prefill", 8998, 5)


def setups(bench: Bench) -> list[RowSetup]:
    return [setup for plan in bench.executor.plans for setup in plan.setups]


def ask_both(pair: EnginePair, handle: int, prompt: list[int], **options: Any) -> None:
    """As a router does."""
    for bench in (pair.prefill, pair.decode):
        bench.ask(handle, prompt, bootstrap=ROUTED, **options)


# -- what it samples by ------------------------------------------------------------------------------------------------


def test_a_row_goes_on_with_its_seed_position_and_penalty_history() -> None:
    """Random numbers are a function of seed and position; penalties count what stands in the history."""
    pair, prompt = EnginePair(), prompt_of(3, 12)
    pair.ask(1, prompt, max_new_tokens=5, seed=77, temperature=0.9, frequency_penalty=0.5, min_new_tokens=3)
    pair.run()
    (before,), (behind,) = setups(pair.prefill), setups(pair.decode)
    assert before.seed == behind.seed == 77 and (before.generated, behind.generated) == (0, 1)
    assert before.history is not None and before.history.tolist() == prompt
    assert behind.history is not None and behind.history.tolist() == [*prompt, *oracle(prompt, 1)]
    assert before.prompt_len == behind.prompt_len == 12
    assert behind.sampling.frequency_penalty == before.sampling.frequency_penalty == 0.5
    assert behind.sampling.min_new_tokens == before.sampling.min_new_tokens == 3


@pytest.mark.parametrize("budget", [0, 1, 2, 4])
def test_a_thought_is_cut_where_one_engine_cuts_it(budget: int) -> None:
    prompt, pair, alone = prompt_of(4, 10), EnginePair(), Bench()
    thinking = Thinking(start=(49,), end=(50,), cut=(50,), begun=True, budget=budget)
    for bench in (pair, alone):
        bench.ask(1, prompt, max_new_tokens=9, thinking=thinking)
        bench.run()
    assert pair.decode.out.outputs == alone.out.outputs and 50 in alone.out.outputs[1]


# -- adapters ----------------------------------------------------------------------------------------------------------


def with_adapters(**paths: tuple[str, str]) -> EnginePair:
    """Each by its name, with the content that the prefill and the decode engine have."""
    pair = EnginePair(lora=LoraSettings())
    for call, (name, contents) in enumerate(paths.items()):
        for bench, path in zip((pair.prefill, pair.decode), contents, strict=True):
            if path:
                bench.submit(ChangeAdapters(call, name, path))
                bench.turn()
                assert bench.out.replies[-1].ok
    return pair


def test_a_request_has_its_adapter_on_both_engines() -> None:
    pair, prompt = with_adapters(a=("/a", "/a"), b=("/b", "/b")), prompt_of(1, 20)
    for handle, name in enumerate(["a", "b", "", "a"]):
        pair.ask(handle, prompt, max_new_tokens=3, adapter=name)
        pair.run()
        assert pair.decode.out.outputs[handle] == oracle(prompt, 3)
        for bench in (pair.prefill, pair.decode):
            placed = bench.executor.placed.get(setups(bench)[-1].adapter, "")
            assert placed == name, "computed with it, there and here"
    assert pair.to_decode.sent == 4 * 20 * 3, "prefixes belong to an adapter: only those of the last were there"


def test_adapters_of_one_name_that_differ_are_refused() -> None:
    pair = with_adapters(a=("/a", "/other"))
    pair.ask(1, prompt_of(1, 20), adapter="a")
    pair.run()
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and reason.status_code == 400 and "adapters" in reason.message
    assert pair.prefill.executor.computed_tokens == 0 and pair.used_pages() == (0, 0)


def test_an_adapter_that_the_prefill_engine_lacks_is_named() -> None:
    pair = with_adapters(a=("", "/a"))
    pair.ask(1, prompt_of(1, 20), adapter="a")
    pair.run()
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and reason.status_code == 404 and "no adapter 'a'" in reason.message


def test_engines_of_a_pair_may_have_adapters() -> None:
    check_adapters(Settings.from_flat({"enable_lora": True, "disaggregation_mode": "decode"}))


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("routed", [False, True])
def test_images_are_encoded_by_the_prefill_engine(routed: bool, page_size: int) -> None:
    pair = EnginePair(lambda: Seeing(pages=128, page_size=page_size, chunk_tokens=8), shared=True)
    for handle, end in enumerate((7, 8)):
        ids, media = laid([1, *[0] * 9, 2, 3, 4, end], image(1, 9, 1))
        (ask_both if routed else EnginePair.ask)(pair, handle, ids, max_new_tokens=4, media=media)
        pair.run()
        assert pair.decode.out.outputs[handle] == oracle(ids, 4)
        assert pair.used_pages() == (0, 0)
    encoded = [sum(map(sum, bench.executor.encoded)) for bench in (pair.prefill, pair.decode)]  # type: ignore[attr-defined]
    assert encoded == [9, 0]
    assert pair.decode.scheduler._state()["transfers"] == 2


def test_images_keep_prompts_apart() -> None:
    pair = EnginePair(lambda: Seeing(pages=128), shared=True)
    for handle in (1, 2):
        ids, media = laid([1, *[0] * 9, 2], image(handle, 9, 1))
        pair.ask(handle, ids, max_new_tokens=4, media=media)
        pair.run()
        assert pair.decode.out.outputs[handle] == oracle(ids, 4)


def test_positions_of_images_hold_for_the_answer() -> None:
    pair = EnginePair(Seeing, shared=True)
    ids, media = laid([1, *[0] * 9, 2, 3], image(1, 9, 1))
    places = np.arange(36, dtype=np.int32).reshape(3, 12)
    pair.ask(1, ids, max_new_tokens=3, media=type(media)(media.items, places.tobytes(), -4))
    pair.run()
    told = [plan.positions for plan in pair.prefill.executor.plans if plan.positions is not None]
    assert (np.concatenate(told, axis=1) == places).all()
    assert [setup.delta for bench in (pair.prefill, pair.decode) for setup in setups(bench)] == [-4, -4]


@pytest.mark.parametrize("routed", [False, True])
def test_images_in_memory_of_another_host_are_encoded_there(routed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the decode engine, of which nobody hears; a router has sent them to both."""
    pair = EnginePair(lambda: Seeing(pages=128))
    hosts = iter(["one host", "another"])
    monkeypatch.setattr(wire, "neighbours", lambda: next(hosts))
    ids, media = laid([1, *[0] * 9, 2, 3], image(1, 9, 1))
    (ask_both if routed else EnginePair.ask)(pair, 1, ids, max_new_tokens=4, media=media)
    pair.run()
    assert pair.decode.out.outputs[1] == oracle(ids, 4) and pair.used_pages() == (0, 0)
    assert (pair.prefill.executor.computed_tokens > 0) == routed


def test_an_image_that_failed_on_one_engine_is_tried_again() -> None:
    """It has a namespace of its own there from then on, and is the same prompt all the same."""
    pair = EnginePair(Seeing, shared=True)
    read, failing = pair.prefill.executor._read, [True]

    def fail_once(plan: BatchPlan, masks: Any) -> StepResult:
        failed = tuple(item.output for item in plan.encodes) if failing and plan.encodes else ()
        if failed:
            failing.clear()
        return replace(read(plan, masks), not_encoded=failed)

    pair.prefill.executor._read = fail_once  # type: ignore[method-assign]
    ids, media = laid([1, *[0] * 9, 2, 3], image(1, 9, 1))
    for handle in range(3):
        pair.ask(handle, ids, max_new_tokens=3, media=media)
        pair.run()
        assert pair.decode.out.ended[handle] == FinishLength(3)


# -- draft models ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["itself", "EAGLE3"])
def test_pages_of_a_draft_model_are_handed_over(kind: str, tmp_path: Path) -> None:
    """A model that is its own draft model is always right, if it finds all that it has computed of the prompt."""
    target = write_target(tmp_path / "target")
    path = target if kind == "itself" else write_eagle3(tmp_path / "draft")
    algorithm = {"itself": "STANDALONE"}.get(kind, kind)
    flags = {"device": "cpu", "cpu_threads": 1, "dtype": "float32", "attention_backend": "torch"}
    flags |= {"max_total_tokens": 256, "max_running_requests": 2, "chunked_prefill_size": 8}
    drafts = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(path)}
    drafts |= {"disaggregation_mode": "decode"}

    def make(**more: Any) -> Any:
        return build_executor(locate(str(target)), Settings.from_flat({**flags, **more})).executor

    pair, alone = EnginePair(lambda: make(**drafts), decode_executor=make(**drafts)), Bench(make())
    for handle in range(3):
        for bench in (pair, alone):
            bench.ask(handle, prompt_of(handle, 21), max_new_tokens=20, temperature=0.0, ignore_eos=True)
            bench.run()
    assert pair.decode.out.outputs == alone.out.outputs
    assert pair.decode.scheduler._committer.prefilled_tokens == 3, "prompts were handed over"
    drafting = pair.decode.scheduler._planner.drafting
    assert drafting.proposed > 0 and (kind != "itself" or drafting.held == drafting.proposed)
    for each in (pair.prefill, pair.decode, alone):
        each.executor.close()


# -- what stays --------------------------------------------------------------------------------------------------------


def test_what_gives_vectors_is_computed_where_it_arrives() -> None:
    """The states of the prompt and of its first token would stay behind on the prefill engine."""
    pair, prompt = EnginePair(home=HERE, enable_return_hidden_states=True), prompt_of(1, 9)
    pair.ask(1, prompt, max_new_tokens=3, pooling=ALL_STATES, bootstrap=None)
    pair.ask(2, prompt, max_new_tokens=3, pooling=ALL_STATES)
    pair.run()
    assert pair.decode.out.outputs[1] == oracle(prompt, 3) and setups(pair.decode)[0].pooling == ALL_STATES
    reason = pair.decode.out.ended[2]
    assert isinstance(reason, FinishAbort) and "computes the prompt itself" in reason.message
    assert pair.prefill.executor.computed_tokens == 0
