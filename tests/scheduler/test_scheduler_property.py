"""Random loads: whatever happens, every request ends once with what it would have got alone, and no page is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.core.model_config import KVGroup
from bough.core.settings import EVICTION_POLICIES, SCHEDULE_POLICIES, WRITE_POLICIES, MemorySettings
from bough.messages.requests import Abort, LogprobRequest, StreamEnded
from tests.fakes.executor import FakeExecutor, GuessingProposer, PipelineExecutor, make_groups, oracle
from tests.fakes.scheduler_bench import Bench

# Few different tokens and short prompts: shared prefixes, splits and duplicates are the rule.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
# Prompt logprobs are computed anew although the tree has their pages, which makes duplicates that must be swapped.
STARTS = st.sampled_from([None, None, -1, 0, 5])
ASK = st.tuples(st.just("ask"), PROMPTS, st.integers(0, 14), st.integers(0, 40), st.sampled_from(["", "x"]), STARTS)
END = st.tuples(st.sampled_from(["abort", "end"]), st.integers(0, 30))
TURN = st.tuples(st.just("turn"), st.integers(1, 6))
CONFIG = st.fixed_dictionaries(
    {
        "schedule_policy": st.sampled_from(SCHEDULE_POLICIES),
        "enable_mixed_chunk": st.booleans(),
        "disable_overlap_schedule": st.booleans(),
        "schedule_conservativeness": st.sampled_from([0.0, 0.3, 1.0]),
        "priority_scheduling_preemption_threshold": st.just(5),
    }
)
MACHINE = st.tuples(st.sampled_from([1, 2, 4]), st.integers(24, 60), st.integers(1, 5), st.integers(4, 20))


ACTIONS = st.lists(st.one_of(ASK, ASK, END, TURN), max_size=40)


@settings(deadline=None, max_examples=150)
@given(ACTIONS, CONFIG, MACHINE, st.booleans())
def test_any_load_ends_well(actions: list, config: dict, machine: tuple, share: bool) -> None:  # type: ignore[type-arg]
    play(actions, config, machine, share)


@settings(deadline=None, max_examples=150)
@given(ACTIONS, CONFIG, MACHINE, st.booleans(), st.integers(1, 3))
def test_any_load_ends_well_with_0_to_4_tokens_a_row_and_step(  # type: ignore[type-arg]
    actions: list, config: dict, machine: tuple, share: bool, drafts: int
) -> None:
    executor = play(actions, config, machine, share, drafts=drafts)
    assert set(executor.counts) <= {*range(drafts + 2)}


@settings(deadline=None, max_examples=150)
@given(ACTIONS, CONFIG, MACHINE, st.booleans(), st.integers(1, 4))
def test_any_load_ends_well_with_drafts_of_the_host(  # type: ignore[type-arg]
    actions: list, config: dict, machine: tuple, share: bool, most: int
) -> None:
    play(actions, config, machine, share, proposer=GuessingProposer(most))


WINDOWS = st.lists(st.tuples(st.integers(1, 9), st.integers(7, 40)), max_size=2)
STATES = st.lists(st.integers(0, 6), max_size=1)
WRITES = st.builds(
    MemorySettings,
    hicache_write_policy=st.sampled_from(WRITE_POLICIES),
    radix_eviction_policy=st.sampled_from(EVICTION_POLICIES),
)


@settings(deadline=None, max_examples=150)
@given(ACTIONS, CONFIG, MACHINE, st.booleans(), st.integers(0, 2), WINDOWS, STATES)
def test_any_load_ends_well_with_windows_and_states(  # type: ignore[type-arg]
    actions: list, config: dict, machine: tuple, share: bool, drafts: int, windows: list, states: list
) -> None:
    page_size, _, rows, _ = machine
    play(actions, config, machine, share, drafts=drafts, groups=make_groups(page_size, rows, windows, states))


@settings(deadline=None, max_examples=200)
@given(ACTIONS, CONFIG, MACHINE, st.integers(0, 2), WINDOWS, STATES, WRITES, st.data())
def test_any_load_ends_well_with_a_tier_below_the_device(  # type: ignore[type-arg]
    actions: list,
    config: dict,
    machine: tuple,
    drafts: int,
    windows: list,
    states: list,
    writes: MemorySettings,
    data: st.DataObject,
) -> None:
    """Of any size, also smaller than what the device holds."""
    page_size, _, rows, _ = machine
    groups = make_groups(page_size, rows, windows, states)
    pages = data.draw(st.tuples(*(st.integers(1, 90) for _ in range(1 + len(groups)))))
    play(actions, config, machine, True, drafts=drafts, groups=groups, memory=writes, host_pages=pages)


@settings(deadline=None, max_examples=150)
@given(ACTIONS, CONFIG, MACHINE, st.booleans(), st.integers(2, 4), WINDOWS, STATES, st.sampled_from([None, 1, 2]))
def test_any_load_ends_well_in_a_pipeline(  # type: ignore[type-arg]
    actions: list, config: dict, machine: tuple, share: bool, stages: int, windows: list, states: list, most: int | None
) -> None:
    page_size, _, rows, _ = machine
    groups = make_groups(page_size, rows, windows, states)
    config = {**config, "pp_max_micro_batch_size": most}
    play(actions, config, machine, share, groups=groups, make=partial(PipelineExecutor, stages))


@pytest.mark.parametrize("overlap", [True, False])
def test_decodes_give_from_none_to_four_tokens(overlap: bool) -> None:
    executor = FakeExecutor(drafts=3, context_length=64)
    bench = Bench(executor, disable_overlap_schedule=not overlap)
    prompts = {handle: [handle, 1, 2] for handle in range(20)}
    for handle, prompt in prompts.items():
        bench.ask(handle, prompt, max_new_tokens=40)
    bench.run()
    assert bench.out.outputs == {handle: oracle(prompt, 40) for handle, prompt in prompts.items()}
    assert set(executor.counts) == {0, 1, 2, 3, 4}


def play(
    actions: list,  # type: ignore[type-arg]
    config: dict,  # type: ignore[type-arg]
    machine: tuple,  # type: ignore[type-arg]
    share: bool,
    drafts: int = 0,
    proposer: GuessingProposer | None = None,
    groups: Sequence[tuple[KVGroup, int]] = (),
    make: Callable[..., FakeExecutor] = FakeExecutor,
    memory: MemorySettings | None = None,
    host_pages: tuple[int, ...] | None = None,
    handover: Callable[..., Any] | None = None,
) -> FakeExecutor:
    page_size, tokens, rows, chunk = machine
    executor = make(
        rows=rows,
        pages=tokens // page_size,
        page_size=page_size,
        context_length=48,
        chunk_tokens=max(chunk, page_size),
        drafts=drafts,
        groups=groups,
    )
    stops = frozenset({7, 8, 9})
    memory = memory or MemorySettings(disable_radix_cache=not share)
    parts = {"memory": memory, "proposer": proposer, "host_pages": host_pages, "handover": handover}
    bench = Bench(executor, eos_ids=tuple(stops), **parts, **config)
    asked: dict[int, tuple[list[int], int]] = {}
    ended_early: set[int] = set()
    for action in actions:
        match action:
            case ("ask", prompt, max_new, priority, namespace, start):
                options = {"max_new_tokens": max_new, "priority": priority, "namespace": namespace}
                logprobs = None if start is None else LogprobRequest(start=start)
                bench.ask(len(asked), prompt, logprobs=logprobs, **options)
                asked[len(asked)] = (prompt, max_new)
            case ("abort", handle):
                bench.submit(Abort(handle))
            case ("end", handle):
                bench.submit(StreamEnded(handle))
                ended_early.add(handle)
            case ("turn", times):
                bench.turn(times)
    bench.run()
    for handle, (prompt, max_new) in asked.items():
        expected = oracle(prompt, max_new, stops)
        output, reason = bench.out.outputs[handle], bench.out.ended.get(handle)
        assert output == expected[: len(output)]
        if reason is None:
            assert handle in ended_early
        elif isinstance(reason, FinishStop):
            assert output == expected and reason.matched == expected[-1]
        elif isinstance(reason, FinishLength):
            fits = min(max_new, min(48, tokens // page_size * page_size) - len(prompt))
            assert reason.length == len(output) == fits
        else:
            assert isinstance(reason, FinishAbort)
    return executor
