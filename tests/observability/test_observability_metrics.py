"""Counting, adding up over processes, the page, and the documentation of what stands on it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from bough.messages.requests import GetState
from bough.observability.metrics import ALL_METRICS, BY_NAME, STATE_METRICS, state_figures
from bough.observability.metrics_page import metrics_page
from bough.observability.processes import cpu_seconds
from bough.observability.request_meter import Counts, RequestMeter, slices
from tests.fakes.executor import FakeExecutor
from tests.fakes.scheduler_bench import Bench
from tests.storage.test_storage_store import Kept
from tests.storage.test_storage_tier import Rig

DOCUMENTED = re.compile(r"^\| `(bough:\w+)` \| (\w+) \|", re.MULTILINE)


def state_of(bench: Bench) -> dict[str, object]:
    bench.submit(GetState(99))
    bench.turn()
    return bench.out.replies[-1].data


def figures_of(bench: Bench) -> dict[str, float]:
    return state_figures(state_of(bench))


def test_the_documentation_lists_what_stands_on_the_page() -> None:
    limits = {
        "memory_usage": {"weight": 1.0, "kvcache": 2.0},
        "startup_time": {"load_weight": 1.0, "tokenizer_e2e": 2.0},
    }
    state = state_of(Rig(Kept()).bench) | {"device_busy_share": 0.5}
    page = metrics_page(
        RequestMeter().totals(), [state], "tiny", limits=[limits], cpu_seconds={"scheduler": 1.0}
    ).decode()
    shown = re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE)
    text = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    assert len(shown) == len(ALL_METRICS)
    assert sorted(shown) == sorted(DOCUMENTED.findall(text))
    for name, label, values in (
        ("forward_execution_seconds_total", "category", ["extend", "decode", "mixed"]),
        ("startup_time_seconds", "phase", ["load_weight", "tokenizer_e2e"]),
    ):
        assert re.findall(rf'^bough:{name}{{.*{label}="(\w+)"', page, re.MULTILINE) == values


def test_the_schedulers_state_has_every_figure() -> None:
    bench = Bench(FakeExecutor(rows=2, pages=40), host_pages=(60,), decode_log_interval=4)
    for handle in range(6):
        bench.ask(handle, [handle, *range(10, 18)], max_new_tokens=12)
    bench.turn(6)
    figures = figures_of(bench)
    of_a_store = {name for name in figures_of(Rig(Kept()).bench) if name.startswith("hicache_storage_")}
    assert {metric.name for metric in STATE_METRICS} - figures.keys() - of_a_store <= {"device_busy_share"}
    assert figures["num_running_reqs"] and figures["num_queue_reqs"] and figures["gen_throughput"]
    assert figures["token_usage"] == pytest.approx(figures["num_used_tokens"] / 40)
    bench.run()
    figures = figures_of(bench)
    assert figures["num_running_reqs"] == figures["gen_throughput"] == 0
    assert figures["evicted_tokens_total"], "the six prompts and outputs do not fit at once"


def test_tokens_of_each_step_by_what_was_done() -> None:
    bench = Bench(FakeExecutor(chunk_tokens=16))
    for handle, prompt in enumerate(([*range(1, 31)], [*range(1, 21), 50], [7])):
        bench.ask(handle, prompt, max_new_tokens=5)
        bench.run()
    tokens = {"prefill_compute": 30 + 1 + 1, "prefill_cache": 20, "decode": 3 * 4}
    state = state_of(bench)
    assert state["realtime_tokens"] == tokens
    page = metrics_page(None, [state], "tiny", "sglang").decode()
    for mode, count in tokens.items():
        assert re.search(rf'^sglang:realtime_tokens_total{{[^}}]*mode="{mode}"[^}}]*}} {count}\.0$', page, re.MULTILINE)


def test_cpu_seconds_of_a_process_count_for_its_part_of_the_server() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\n"
    helper = [sys.executable, "-c", burn + "print(flush=True); input()"]
    code = (
        f"import setproctitle, subprocess; setproctitle.setproctitle('bough::scheduler')\n"
        f"with subprocess.Popen({helper}, stdin=-1, stdout=-1) as helper:\n"
        "    helper.stdout.readline(); print(flush=True); input()\n"
        "    helper.communicate(b'\\n'); print(flush=True); input()\n"
    )
    main = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"  # with the same pipes
    command = [sys.executable, "-c", main]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        while_it_runs = cpu_seconds(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        when_it_has_ended = cpu_seconds(child.pid)
        child.communicate(b"\n")
    assert set(while_it_runs) == {"tokenizer", "scheduler"}
    assert 0.1 <= while_it_runs["scheduler"] <= when_it_has_ended["scheduler"]


def test_the_progress_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bough.scheduler.stats"):
        bench = Bench(decode_log_interval=3)
        bench.ask(1, [1, 2, 3, 4], max_new_tokens=8)
        bench.ask(2, [1, 2, 3, 5], max_new_tokens=8)
        bench.run()
    pattern = r"running 2, queued 0, token usage 0\.\d\d \(\d+ of \d+\), cache hit rate 0\.\d\d, [\d.]+ tokens/s"
    assert re.match(pattern, caplog.messages[0])


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0.0, 60.0)), max_size=20))
def test_a_histogram_is_what_prometheus_makes_of_the_same(chunks: list[tuple[int, float]]) -> None:
    theirs = Histogram("theirs", "", buckets=BY_NAME["inter_token_latency_seconds"].buckets, registry=None)
    meter = RequestMeter()
    for count, seconds in chunks:
        meter.more_tokens(count, seconds)
        for _ in range(count):
            theirs.observe(seconds / count)
    page = metrics_page(meter.totals(), [], "tiny").decode()
    ours = {
        (sample.name.removeprefix("bough:inter_token_latency_seconds"), sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    (family,) = theirs.collect()
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            found = ours[sample.name.removeprefix("theirs"), sample.labels.get("le")]
            assert found == pytest.approx(sample.value), sample


def test_processes_that_share_a_folder_are_added_up(tmp_path: Path) -> None:
    meters = [RequestMeter(tmp_path, number) for number in range(3)]
    for number, meter in enumerate(meters):
        meter.started(10 * number, number, 0.001)
        meter.ended(number, 0.5, 0, incomplete=number == 1)
    (tmp_path / "counts3").write_bytes(b"half ma")  # a process that is just starting
    named = {metric.name: numbers for metric, numbers in slices(meters[2].totals()).items()}
    assert meters[0].totals() == meters[2].totals()
    assert named["prompt_tokens_total"] == [30] and named["cached_tokens_total"] == [3]
    assert named["num_requests_total"] == [3] and named["num_aborted_requests_total"] == [1]
    assert sum(named["e2e_request_latency_seconds"][:-1]) == 3 and named["e2e_request_latency_seconds"][-1] == 1.5


def test_counts_begin_at_zero_and_stay_apart(tmp_path: Path) -> None:
    first = Counts(4, tmp_path, 0)
    first.cells[1] += 2
    assert Counts(4, tmp_path, 1).totals() == first.totals() == [0, 2, 0, 0]
    assert Counts(4).totals() == [0, 0, 0, 0]
