"""The scheduler's record of its last steps and requests: complete, bounded, and without the ids of callers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from bough.messages.requests import Abort, GetTimeline, GetTree
from bough.observability import timeline as kept
from tests.fakes.executor import FakeExecutor
from tests.fakes.grammars import EOS, FakeGrammars, grammar
from tests.fakes.scheduler_bench import Bench


def timeline(bench: Bench, since: float = 0.0, name: str = "") -> dict[str, Any]:
    bench.submit(GetTimeline(99, since, name))
    bench.turn()
    return bench.out.replies[-1].data


def run(bench: Bench) -> None:
    """A turn takes a second."""
    for _ in range(2000):
        bench.now += 1.0
        bench.turn()
        if not bench.scheduler._requests and not bench.scheduler._in_flight:
            return
    raise AssertionError("the scheduler does not come to rest")


def of(shown: dict[str, Any], handle: int) -> dict[str, Any]:
    found: dict[str, Any] = next(request for request in shown["requests"] if request["id"] == handle)
    return found


def stages(request: dict[str, Any]) -> list[str]:
    return [name for name, _, _ in request["stages"]]


def tokens(request: dict[str, Any], stage: str) -> int:
    return sum(count for name, _, count in request["stages"] if name == stage)


def test_a_request_is_followed_from_its_arrival_to_its_end() -> None:
    bench = Bench(FakeExecutor(chunk_tokens=16))
    bench.now = 5.0
    bench.ask(1, list(range(1, 41)), max_new_tokens=6)
    run(bench)
    seen = of(timeline(bench), 1)
    assert stages(seen) == ["queued", "prefill", "prefill", "prefill", "decode"]
    assert tokens(seen, "prefill") == seen["prompt"] == 40 and tokens(seen, "decode") == seen["output"] == 6
    times = [seen["arrived"], *(end for _, end, _ in seen["stages"])]
    assert times[0] == 6.0 and all(before <= after for before, after in pairwise(times)) and seen["ended"]


def test_waits_for_a_grammar_and_after_a_retraction_are_stages_of_their_own() -> None:
    bench = Bench(eos_ids=(EOS,), grammars=FakeGrammars(6))
    bench.ask(1, [1, 2], max_new_tokens=20, regex=grammar([[1, 2, 3, 40]] * 6))
    run(bench)
    waited = of(timeline(bench), 1)
    assert stages(waited)[:2] == ["queued", "grammar"] and stages(waited)[-1] == "decode"
    (_, began, _), (_, ended, _) = waited["stages"][:2]
    assert ended - began >= 5

    executor = FakeExecutor(rows=6, pages=96, context_length=100, chunk_tokens=64)
    small = Bench(executor, schedule_conservativeness=0.0)
    for handle in range(6):
        small.ask(handle, [handle + 1] * (10 + handle), max_new_tokens=30)
    run(small)
    shown = timeline(small)
    retracted = [request for request in shown["requests"] if "retracted" in stages(request)]
    assert len(retracted) == sum(count > 0 for count in small.out.retractions.values()) > 0
    for request in retracted:
        assert tokens(request, "decode") == 30 and stages(request).count("prefill") >= 2


def test_what_runs_is_shown_with_what_it_does_now() -> None:
    bench = Bench(FakeExecutor(rows=1))
    bench.ask(1, [1, 2, 3], max_new_tokens=50)
    bench.ask(2, [4, 5, 6], max_new_tokens=50)
    bench.turn(5)
    shown = timeline(bench)
    running, waiting = of(shown, 1), of(shown, 2)
    assert stages(running)[-1] == "decode" and 0 < tokens(running, "decode") == running["output"] < 50
    assert stages(waiting) == ["queued"] and not running["ended"] and not waiting["ended"]
    bench.submit(Abort())
    run(bench)
    assert of(timeline(bench), 2)["ended"] and stages(of(timeline(bench), 2)) == ["queued"]


def test_steps_have_their_times_in_order_and_only_news_is_sent() -> None:
    bench = Bench(FakeExecutor(chunk_tokens=16))
    bench.ask(1, list(range(1, 41)), max_new_tokens=6)
    run(bench)
    shown = timeline(bench)
    assert [step[0] for step in shown["steps"]] == list(range(len(shown["steps"])))
    assert [step[-1] for step in shown["steps"][:3]] == [16, 16, 8] and shown["steps"][3][-2:] == (1, 0)
    for _, *times, _, _, _ in shown["steps"]:
        assert times == sorted(times) and len(times) == 6
    bench.now += 1.0
    assert not timeline(bench, shown["now"])["steps"] and not timeline(bench, shown["now"])["requests"]
    bench.ask(2, [7], max_new_tokens=1)
    run(bench)
    assert [request["id"] for request in timeline(bench, shown["now"])["requests"]] == [2]


def test_the_record_is_bounded() -> None:
    bench = Bench()
    for handle in range(kept.REQUESTS + 10):
        bench.ask(handle, [1, 2, 3], max_new_tokens=5)
        run(bench)
    shown = timeline(bench)
    assert len(shown["requests"]) == kept.REQUESTS and len(shown["steps"]) == kept.STEPS


def test_a_caller_finds_its_request_and_learns_no_other_name() -> None:
    bench = Bench()
    bench.ask(1, [1, 2], max_new_tokens=2, rid="mine")
    bench.ask(2, [1, 2], max_new_tokens=2, rid="secret")
    run(bench)
    shown = timeline(bench, name="mine")
    assert shown["found"] == 1 and timeline(bench, name="other")["found"] is None
    assert "secret" not in repr(shown)


def test_the_tree_tells_which_requests_read_it_by_the_numbers_of_the_timeline() -> None:
    bench = Bench(FakeExecutor(rows=2, pages=256))

    def readers() -> dict[int, tuple[int, int]]:
        """Each with the locks and the children of the last node that it holds."""
        bench.submit(GetTree(98, 100))
        bench.turn()
        shown = bench.out.replies[-1].data
        return {number: (shown["locks"][at], shown["parent"].count(at)) for number, at in shown["readers"]}

    common = list(range(1, 21))
    for handle in (1, 2, 3):  # the third has no row to run in
        bench.ask(handle, [*common, 30 + handle], max_new_tokens=30, rid=f"secret-{handle}")
    bench.turn(8)
    seen = readers()
    assert set(seen) == {1, 2} and all(locks == 1 and below == 0 for locks, below in seen.values())
    assert set(seen) < {request["id"] for request in timeline(bench)["requests"]}
    bench.submit(Abort(1), Abort(2))
    bench.turn(8)
    assert set(readers()) == {3}
    run(bench)
    assert readers() == {}
