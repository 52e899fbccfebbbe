"""The gateway benchmark without processes: stand-in engines, loads, figures, and policies in virtual time."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.cli.bench import run as bench
from bough.core.errors import SettingsError
from bough.memory.tree.events import BlockStored, KVEvent
from tests.bench.gateway import ADDED_AT_S, LOADS, WORKER_ADDED, LoadOptions, added_share, summarise
from tests.bench.gateway_simulation import PAGE_TOKENS, Costs, EngineModel, Served, Simulation, answer_text, tokenize

SMALL = LoadOptions(requests=400, system_prompts=64, system_tokens=512, question_tokens=64, output_tokens=32)
COSTS = Costs(cache_tokens=8192)


def simulated(load: str, policy: str, **costs: Any) -> dict[str, Any]:
    model = Costs(**{"cache_tokens": 8192, "prefill_us": 400.0, **costs})
    return summarise(Simulation(policy, 4, model, users=32).run(LOADS[load](SMALL)), 4)


def test_a_prefix_in_text_is_a_prefix_in_tokens() -> None:
    assert tokenize("abcdefgh").tolist() == tokenize("abcdefghijkl").tolist()[:2]
    assert len(answer_text(3, 5)) == 20 and answer_text(3, 5) != answer_text(4, 5)


def test_a_stand_in_remembers_prompts_and_answers() -> None:
    events: list[KVEvent] = []
    model = EngineModel(COSTS, events.append)
    prompt = "x" * 4 * 64
    first = model.begin(tokenize(prompt))
    assert first.cached_tokens == 0 and model.prefill_s(first) == pytest.approx(64 * 100e-6)
    model.finish(first, tokenize(prompt + answer_text(1, 32)))
    again = model.begin(tokenize(prompt + answer_text(1, 32) + "more" * 16))
    assert again.cached_tokens == 96
    assert [len(event.token_ids) for event in events if isinstance(event, BlockStored)] == [64, 32, 16]


def test_answers_made_at_once_slow_each_other() -> None:
    model = EngineModel(Costs(decode_ms=10.0, crowd_ms=1.0))
    model.begin(tokenize("a" * 80))
    assert model.decode_s(10) == pytest.approx(0.1)
    model.begin(tokenize("b" * 80))
    assert model.decode_s(10) == pytest.approx(0.11)


@given(prompts=st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=25))
@settings(deadline=None, max_examples=50)
def test_a_stand_in_never_holds_more_than_its_cache(prompts: list[list[int]]) -> None:
    """Requests overlap: the cache may be full of what running ones hold, and then new prompts are not cached."""
    stored = 0

    def count(event: KVEvent) -> None:
        nonlocal stored
        hashes = getattr(event, "block_hashes", ())
        stored += len(hashes) if isinstance(event, BlockStored) else -len(hashes)
        assert 0 <= stored <= 10

    model = EngineModel(Costs(cache_tokens=10 * PAGE_TOKENS), count)
    running = []
    for pieces in prompts:
        tokens = np.repeat(np.array(pieces, dtype=np.int32), PAGE_TOKENS)
        request = model.begin(tokens)
        assert request.cached_tokens <= request.prompt_tokens
        running.append((request, tokens))
        if len(running) > 2:
            model.finish(*running.pop(0))
    for request, tokens in running:
        model.finish(request, tokens)


@pytest.mark.parametrize("load", LOADS)
def test_a_load_is_as_large_as_asked_and_the_same_for_the_same_seed(load: str) -> None:
    dialogues = LOADS[load](SMALL)
    assert dialogues == LOADS[load](SMALL)
    assert sum(map(len, dialogues)) == SMALL.requests
    assert all(len(turn.text) > 0 and 16 <= turn.output_tokens <= 32 for each in dialogues for turn in each)


@pytest.mark.parametrize("policy", ["cache_aware", "cost", "kv_events"])
@pytest.mark.parametrize(("load", "hits", "throughput"), [("shared-prefix", 3.0, 1.7), ("multi-turn", 2.0, 1.5)])
def test_routing_to_the_cache_beats_taking_turns(policy: str, load: str, hits: float, throughput: float) -> None:
    turns, routed = simulated(load, "round_robin"), simulated(load, policy)
    assert routed["hit_rate"] > hits * turns["hit_rate"]
    assert routed["requests_per_s"] > throughput * turns["requests_per_s"]
    assert routed["prediction_error"] < 0.2


def test_exact_knowledge_helps_where_caches_are_too_small() -> None:
    """`cache_aware` does not see evictions: it expects what is gone, `kv_events` does not."""
    guessed = simulated("shared-prefix", "cache_aware", cache_tokens=4096)
    known = simulated("shared-prefix", "kv_events", cache_tokens=4096)
    assert known["prediction_error"] < 0.6 * guessed["prediction_error"]
    assert known["requests_per_s"] > guessed["requests_per_s"]


@pytest.mark.parametrize("load", ["shared-prefix", "multi-turn"])
def test_cost_finds_as_much_cached_as_cache_aware_and_answers_as_many(load: str) -> None:
    """At the size of the documented benchmark."""
    runs = {
        policy: summarise(Simulation(policy, 8, Costs(), users=128).run(LOADS[load](LoadOptions())), 8)
        for policy in ("cache_aware", "cost")
    }
    assert runs["cost"]["hit_rate"] >= runs["cache_aware"]["hit_rate"]
    assert runs["cost"]["requests_per_s"] >= runs["cache_aware"]["requests_per_s"]


def cold(load: str, policy: str, seed: int, workers: int, prefill_us: float, **options: int) -> dict[str, Any]:
    """A short load, four users a worker, from the first prompt on, when nothing is known of the workers' speed."""
    sizes = {"system_tokens": 192, "question_tokens": 24, "output_tokens": 16, "turns": 6, **options}
    dialogues = LOADS[load](LoadOptions(requests=48 * workers, system_prompts=6 * workers, seed=seed, **sizes))
    model = Costs(prefill_us=prefill_us, decode_ms=20.0, cache_tokens=16_384)
    return summarise(Simulation(policy, workers, model, 4 * workers, seed).run(dialogues), workers)


@pytest.mark.parametrize("prefill_us", [100.0, 2500.0])  # engines on a small GPU and on a core of a CPU
@pytest.mark.parametrize(
    ("load", "workers", "options"),
    [
        ("shared-prefix", 2, {}),
        ("shared-prefix", 3, {"system_tokens": 96}),
        ("multi-turn", 8, {"question_tokens": 128}),
    ],
)
def test_from_a_cold_start_cost_finds_as_much_cached_as_cache_aware(
    load: str, workers: int, options: dict[str, int], prefill_us: float
) -> None:
    rates: dict[str, list[float]] = {"cache_aware": [], "cost": []}
    for seed in range(1, 7):
        runs = {policy: cold(load, policy, seed, workers, prefill_us, **options) for policy in rates}
        assert runs["cost"]["hit_rate"] >= runs["cache_aware"]["hit_rate"]
        for policy, run in runs.items():
            rates[policy].append(run["requests_per_s"])
    assert sum(rates["cost"]) >= 0.99 * sum(rates["cache_aware"])  # a hundredth is the luck of a short load


@pytest.mark.parametrize("prefill_us", [100.0, 2500.0])
@pytest.mark.parametrize("workers", [2, 4])
def test_few_workers_share_short_prompts_and_a_hot_prefix_from_a_cold_start(workers: int, prefill_us: float) -> None:
    spread, kept = (
        [cold("hot-prefix", policy, seed, workers, prefill_us) for seed in range(1, 6)]
        for policy in ("cost", "cache_aware")
    )
    assert sum(run["requests_per_s"] for run in spread) > sum(run["requests_per_s"] for run in kept)
    assert max(run["requests_imbalance"] for run in spread) < 0.9 * min(run["requests_imbalance"] for run in kept)
    for seed in range(1, 6):
        assert cold("short-prompts", "cost", seed, workers, prefill_us)["requests_imbalance"] <= 1.2


@pytest.mark.parametrize("processes", [1, 4])
def test_short_prompts_that_begin_alike_spread(processes: int) -> None:
    served = Simulation("cost", 8, Costs(), users=128, processes=processes).run(LOADS["short-prompts"](LoadOptions()))
    assert summarise(served, 8)["requests_imbalance"] <= 1.2


@pytest.mark.parametrize("processes", [1, 4])
def test_a_worker_that_joins_under_load_carries_its_share(processes: int) -> None:
    load = LOADS[WORKER_ADDED](LoadOptions())
    shares = {
        policy: added_share(Simulation(policy, 8, Costs(), 128, 1, processes, ADDED_AT_S).run(load), 8)
        for policy in ("cache_aware", "cost")
    }
    assert shares["cache_aware"] == 0.0 and 0.9 <= shares["cost"] <= 1.3


def test_processes_that_see_only_their_own_requests_find_what_is_cached() -> None:
    load = LOADS["multi-turn"](LoadOptions())
    cost, hashed = (
        summarise(Simulation(policy, 8, Costs(), 128, 1, processes=4).run(load), 8)
        for policy in ("cost", "prefix_hash")
    )
    assert cost["hit_rate"] > hashed["hit_rate"] and cost["requests_per_s"] > hashed["requests_per_s"]


def test_a_worker_joins_in_virtual_time_only() -> None:
    with pytest.raises(SettingsError, match="add --simulate"):
        bench(["gateway", "--loads", WORKER_ADDED])


def test_a_hot_prefix_crowds_nobody() -> None:
    turns, routed = simulated("hot-prefix", "round_robin"), simulated("hot-prefix", "kv_events")
    assert routed["requests_imbalance"] < 2.0
    assert routed["requests_per_s"] > turns["requests_per_s"]


def test_a_simulation_repeats() -> None:
    assert simulated("hot-prefix", "kv_events") == simulated("hot-prefix", "kv_events")


def test_figures() -> None:
    served = [
        Served("a", 100, 50, 0.4, 10, sent_s=0.0, first_s=0.1, total_s=1.0),
        Served("a", 100, 100, 1.0, 10, sent_s=1.0, first_s=0.3, total_s=1.0),
        Served("b", 200, 50, 0.25, 10, sent_s=0.0, first_s=0.2, total_s=3.0),
    ]
    figures = summarise(served, workers=2)
    assert (figures["duration_s"], figures["hit_rate"], figures["requests_per_s"]) == (3.0, 0.5, 1.0)
    assert figures["ttft_ms"]["p50"] == pytest.approx(200)
    assert figures["requests_imbalance"] == pytest.approx(4 / 3)
    assert figures["prefill_imbalance"] == pytest.approx(1.5)
    assert figures["prediction_error"] == pytest.approx(0.1 / 3)


def test_the_command_prints_a_line_of_json_per_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--simulate --json --loads shared-prefix --requests 40 --workers 2 --users 4 --system-tokens 64"
    assert bench(["gateway", *flags.split()]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["policy"] for row in rows] == ["round_robin", "cache_aware", "cost", "kv_events"]
    assert rows[0]["times_the_first"]["requests_per_s"] == 1.0 and rows[0]["simulated"] is True
    assert bench(["gateway", *flags.replace("--json", "--policies random").split()]) == 0
    assert capsys.readouterr().out.startswith("shared-prefix, random (40 requests, in virtual time):")


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(SettingsError, match="--workers must be at least 1"):
        bench(["gateway", "--workers", "0"])


@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_a_load_takes_time(seconds: str) -> None:
    with pytest.raises(SettingsError, match=f"^--seconds must be above 0, got {seconds}.$"):
        bench(["gateway", "--overhead", "--seconds", seconds])
