"""Two schedulers over fake executors, whose tokens depend on every page that is read; both page accounts are audited
after every turn."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.core.parallel_settings import DisaggregationSettings
from bough.disaggregation import prefill, wire
from bough.messages.requests import Abort, Bootstrap, LogprobRequest
from tests.fakes.engine_pair import HERE, EnginePair
from tests.fakes.executor import VOCAB, FakeExecutor, make_groups, oracle
from tests.fakes.grammars import EOS, FakeGrammars, Places, grammar
from tests.fakes.scheduler_bench import Bench


def prompt_of(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 7 + i * i * seed) % VOCAB for i in range(length)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [True, False])
def test_answers_are_those_of_one_engine(page_size: int, overlap: bool) -> None:
    pair = EnginePair(
        lambda: FakeExecutor(rows=4, pages=512 // page_size, page_size=page_size, chunk_tokens=16),
        disable_overlap_schedule=not overlap,
    )
    prompts = {handle: prompt_of(handle, 3 + 5 * handle % 40) for handle in range(12)}
    for handle, prompt in prompts.items():
        pair.ask(handle, prompt, max_new_tokens=1 + handle % 9)
    pair.run()
    for handle, prompt in prompts.items():
        assert pair.decode.out.outputs[handle] == oracle(prompt, 1 + handle % 9)
        assert pair.decode.out.ended[handle] == FinishLength(1 + handle % 9)
        assert pair.decode.out.started[handle].prompt_tokens == len(prompt)
    assert pair.prefill.out.outputs == {}  # nobody there has asked
    # Of each prompt the decode engine computes no more than what does not fill a page, and the tokens it answers with.
    most = sum(len(prompt) % page_size for prompt in prompts.values()) + sum(handle % 9 for handle in range(12))
    assert pair.decode.executor.computed_tokens <= most
    assert pair.used_pages() == (0, 0)
    assert pair.decode.scheduler._state()["transfers"] == pair.prefill.scheduler._state()["transfers"] == 12


def test_pages_come_chunk_by_chunk_and_only_those_that_are_missing() -> None:
    pair = EnginePair(lambda: FakeExecutor(pages=256, chunk_tokens=8))
    prompt = prompt_of(1, 40)
    pair.ask(1, prompt, max_new_tokens=2)
    while not pair.decode.scheduler._cache.tree.total_pages:
        pair.turn()
    assert pair.prefill.executor.computed_tokens < 40, "the first pages are there before the prompt is computed"
    pair.run()
    assert pair.to_decode.sent == 4 * 40
    assert pair.prefill.executor.order.count("CopyPagesOut") == 5
    pair.ask(2, [*prompt[:30], *prompt_of(2, 10)], max_new_tokens=2)
    pair.run()
    assert pair.to_decode.sent == 4 * (40 + 10)
    assert pair.decode.out.outputs[2] == oracle([*prompt[:30], *prompt_of(2, 10)], 2)


@pytest.mark.parametrize("piece_bytes", [8, 1 << 20])
@pytest.mark.parametrize("kind", ["window", "state"])
def test_pages_of_every_group_travel(kind: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of two pages, too."""
    monkeypatch.setattr(prefill, "PIECE_BYTES", piece_bytes)
    groups = make_groups(1, 8, [(6, 64)] if kind == "window" else [], [8] if kind == "state" else [])
    pair = EnginePair(lambda: FakeExecutor(pages=256, chunk_tokens=8, groups=groups))
    for handle in range(4):
        pair.ask(handle, prompt_of(handle, 30 + handle), max_new_tokens=5)
    pair.run()
    for handle in range(4):
        assert pair.decode.out.outputs[handle] == oracle(prompt_of(handle, 30 + handle), 5)
    assert pair.decode.executor.computed_tokens == 4 * 4  # no token of a prompt


ANY = [1, 2, 3, 40]
FORCED: dict[str, Places] = {  # bytes that the tokenizer merges, so sampling would cut them differently
    "first": [[1], [2], [3], [4], [9], [1], ANY, ANY],
    "behind the first token": [ANY, [1], [2], [3], [4], [9], [1], ANY],
    "both": [[1], [2], [3], [4], ANY, [1], [2], [3], [9], [8], ANY],
    "everything": [ANY, [1], [2], [3], [4], [1]],
    "nothing": [ANY] * 6,
}


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("room", [3, 6, 30])
@pytest.mark.parametrize("forced", FORCED)
def test_text_that_a_grammar_forces_is_that_of_one_engine(forced: str, room: int, scored: bool) -> None:
    for page_size in (1, 4):

        def make(page_size: int = page_size) -> FakeExecutor:
            return FakeExecutor(rows=4, pages=256, page_size=page_size, chunk_tokens=8)

        own = {"eos_ids": (EOS,), "disable_overlap_schedule": page_size > 1}
        pair, alone = EnginePair(make, grammars=FakeGrammars(), **own), Bench(make(), grammars=FakeGrammars(), **own)
        wants: dict[str, object] = {"max_new_tokens": room, "regex": grammar(FORCED[forced])}
        wants |= {"logprobs": LogprobRequest(start=2, top=2)} if scored else {}
        for handle in range(6):
            for bench in (pair, alone):
                bench.ask(handle, prompt_of(handle, 7 + 3 * handle), **wants)
        pair.run()
        alone.run()
        assert pair.decode.out.outputs == alone.out.outputs
        assert pair.decode.out.ended == alone.out.ended
        assert pair.decode.out.scored == alone.out.scored and pair.decode.out.scores == alone.out.scores
        assert pair.used_pages() == (0, 0) and pair.prefill.out.outputs == {}
        assert pair.decode.scheduler._state()["transfers"] == pair.prefill.scheduler._state()["transfers"] == 6


@pytest.mark.parametrize("groups", [(), make_groups(1, 8, [(6, 64)], [])])
def test_engines_of_a_pair_may_have_a_tier_below_the_device(groups: Any) -> None:
    """Neither device holds two of the prompts with their answers. Both find the first again on their hosts."""

    def make() -> FakeExecutor:
        return FakeExecutor(pages=70, chunk_tokens=16, groups=groups)

    pair = EnginePair(make, host_pages=(300, *(200 for _ in groups)))
    for handle, seed in enumerate([1, 2, 3, 1, 2]):
        pair.ask(handle, prompt_of(seed, 50), max_new_tokens=6)
        pair.run()
        assert pair.decode.out.outputs[handle] == oracle(prompt_of(seed, 50), 6)
    for bench in (pair.prefill, pair.decode):
        figures = bench.scheduler._cache.figures
        assert figures["hicache_bytes_out_total"] > 0
    assert pair.prefill.scheduler._cache.figures["load_back_tokens_total"] > 0
    assert pair.used_pages() == (0, 0)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["", "window", "state"])
def test_what_the_host_of_the_decode_engine_has_does_not_travel_again(page_size: int, kind: str) -> None:
    """Its device holds one prompt at a time."""
    if kind == "state" and page_size > 1:
        return
    groups = make_groups(page_size, 8, [(6, 64)] if kind == "window" else [], [8] if kind == "state" else [])

    def make(pages: int) -> FakeExecutor:
        sizes = {"pages": pages // page_size, "page_size": page_size, "context_length": 128}
        return FakeExecutor(**sizes, chunk_tokens=16, groups=groups)

    pair = EnginePair(lambda: make(400), decode_executor=make(88), host_pages=(400, *(200 for _ in groups)))
    sent = []
    for handle, seed in enumerate([1, 2, 1]):
        before = pair.to_decode.sent
        pair.ask(handle, [*prompt_of(seed, 60), *prompt_of(9, handle)], max_new_tokens=6)
        pair.run()
        assert pair.decode.out.outputs[handle] == oracle([*prompt_of(seed, 60), *prompt_of(9, handle)], 6)
        sent.append(pair.to_decode.sent - before)
    assert pair.decode.scheduler._cache.figures["load_back_tokens_total"] > 0
    assert sent[2] < sent[0] // 2, sent
    assert pair.used_pages() == (0, 0)


def test_logprobs_of_the_prompt_and_of_the_first_token_travel() -> None:
    pair, alone = EnginePair(), Bench()
    wants = {"max_new_tokens": 4, "logprobs": LogprobRequest(start=2, top=2)}
    pair.ask(1, prompt_of(3, 12), **wants)
    alone.ask(1, prompt_of(3, 12), **wants)
    pair.run()
    alone.run()
    assert pair.decode.out.scored[1] == alone.out.scored[1]
    assert pair.decode.out.scores[1] == alone.out.scores[1]
    assert pair.decode.out.started[1].input_logprobs == alone.out.started[1].input_logprobs


def test_an_answer_may_end_with_its_first_token() -> None:
    pair, prompt = EnginePair(), prompt_of(5, 9)
    first = oracle(prompt, 1)[0]
    pair.ask(1, prompt, max_new_tokens=5, stop_token_ids=(first,))
    pair.ask(2, prompt, max_new_tokens=1)
    pair.ask(3, prompt, max_new_tokens=0, logprobs=LogprobRequest(start=0))
    pair.run()
    assert pair.decode.out.ended == {1: FinishStop(first), 2: FinishLength(1), 3: FinishLength(0)}
    assert pair.decode.out.outputs == {1: [first], 2: [first]}
    assert pair.decode.out.started[3].input_logprobs is not None


def test_a_resumed_request_goes_on_where_it_was() -> None:
    pair, prompt = EnginePair(), prompt_of(6, 9)
    answer = oracle(prompt, 8)
    pair.ask(1, prompt, max_new_tokens=8, output_ids=np.array(answer[:3], dtype=np.int32).tobytes())
    pair.run()
    assert pair.decode.out.outputs[1] == answer[3:]


def test_a_router_may_send_the_request_to_both() -> None:
    pair, prompt = EnginePair(), prompt_of(7, 20)
    for handle, first in ((1, pair.prefill), (2, pair.decode)):
        room, both = Bootstrap("prefill", 8998, 100 + handle), (pair.prefill, pair.decode)
        for bench in sorted(both, key=lambda bench, first=first: bench is not first):  # type: ignore[misc]
            bench.ask(handle, prompt, max_new_tokens=6, bootstrap=room)
            pair.turn(3)
    pair.run()
    assert [pair.decode.out.outputs[handle] for handle in (1, 2)] == [oracle(prompt, 6)] * 2
    assert [pair.prefill.out.outputs[handle] for handle in (1, 2)] == [oracle(prompt, 1)] * 2


def test_different_prompts_for_one_room_are_refused_on_both_sides() -> None:
    pair = EnginePair()
    pair.prefill.ask(1, prompt_of(1, 9), bootstrap=Bootstrap(room=5))
    pair.ask(1, prompt_of(2, 9), bootstrap=Bootstrap("prefill", 8998, 5))
    pair.run()
    for bench in (pair.prefill, pair.decode):
        assert isinstance(bench.out.ended[1], FinishAbort) and "different prompts" in bench.out.ended[1].message


def test_a_room_belongs_to_the_decode_engine_that_has_claimed_it() -> None:
    """A second request with the same number is refused, and does not end the first."""
    pair, prompt, room = EnginePair(lambda: FakeExecutor(chunk_tokens=4)), prompt_of(1, 40), Bootstrap("prefill", 1, 5)
    pair.prefill.ask(1, prompt, bootstrap=room)
    pair.ask(1, prompt, max_new_tokens=3, bootstrap=room)
    pair.turn(3)
    side = pair.sides["prefill"]
    side.receive("another", msgspec.structs.replace(side._rooms[5].claim, digest=b"other"), None, pair.now)
    refusal = msgspec.msgpack.decode(pair.to_decode.queue.pop()[0], type=wire.ToDecode)
    assert isinstance(refusal, wire.Failed) and refusal.status_code == 400 and "bootstrap_room" in refusal.reason
    pair.run()
    assert pair.decode.out.outputs[1] == oracle(prompt, 3)


@pytest.mark.parametrize(
    ("unlike", "word"),
    [({"page_size": 2}, "page_size (1 and 2)"), ({"cache_dtype": "fp8"}, "cache_dtype"), ({"tp_size": 2}, "tp_size")],
)
def test_engines_that_do_not_fit_are_refused_before_anything_is_computed(unlike: dict[str, object], word: str) -> None:
    pair = EnginePair(unlike=unlike)
    pair.ask(1, prompt_of(1, 9))
    pair.run()
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and reason.status_code == 400 and word in reason.message
    assert pair.prefill.executor.computed_tokens == 0


def test_pages_of_other_weights_are_not_used() -> None:
    pair = EnginePair()
    pair.prefill.scheduler._control.facts["weight_version"] = "2"
    pair.ask(1, prompt_of(1, 9))
    pair.run()
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and "other weights" in reason.message and reason.status_code == 503
    assert pair.decode.scheduler._cache.tree.total_pages == 0


def test_what_the_prefill_engine_refuses_is_refused() -> None:
    pair = EnginePair(lambda: FakeExecutor(context_length=16), decode_executor=FakeExecutor(context_length=64))
    pair.ask(1, prompt_of(1, 30))
    pair.run()
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and "context length of 16" in reason.message


def test_memory_that_is_too_small_for_what_arrives_costs_time_and_no_answer() -> None:
    small = FakeExecutor(rows=4, pages=70, chunk_tokens=16)
    pair = EnginePair(lambda: FakeExecutor(pages=512, chunk_tokens=16), decode_executor=small)
    for handle in range(8):
        pair.ask(handle, prompt_of(handle, 40), max_new_tokens=10)
    pair.run()
    for handle in range(8):
        assert pair.decode.out.outputs[handle] == oracle(prompt_of(handle, 40), 10)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_client_that_leaves_frees_both_engines() -> None:
    pair = EnginePair(lambda: FakeExecutor(pages=256, chunk_tokens=4))
    pair.ask(1, prompt_of(1, 40), max_new_tokens=5)
    pair.turn(4)
    assert pair.used_pages()[0] > 0  # it is in the middle of the prompt
    pair.decode.submit(Abort(1))
    pair.run()
    assert isinstance(pair.decode.out.ended[1], FinishAbort)
    assert pair.used_pages() == (0, 0) and pair.prefill.executor.computed_tokens < 40


def test_a_client_that_leaves_at_once_leaves_nothing() -> None:
    pair = EnginePair()
    pair.ask(1, prompt_of(1, 9))
    pair.decode.turn()
    pair.decode.submit(Abort(1))
    pair.decode.turn()
    pair.carry()  # the claim and its end arrive together
    pair.run()
    assert pair.prefill.executor.computed_tokens == 0


@pytest.mark.parametrize("turns", range(1, 8))
def test_a_client_may_leave_at_any_moment(turns: int) -> None:
    pair = EnginePair(lambda: FakeExecutor(pages=256, chunk_tokens=8))
    pair.ask(1, prompt_of(1, 20), max_new_tokens=5)
    pair.prefill.ask(2, prompt_of(2, 20), bootstrap=Bootstrap(room=5))
    pair.ask(2, prompt_of(2, 20), max_new_tokens=5, bootstrap=Bootstrap("prefill", 8998, 5))
    pair.turn(turns)
    for bench in (pair.prefill, pair.decode):
        bench.submit(Abort())  # after whatever has just come from the other engine
    pair.run()
    assert {1, 2} <= pair.decode.out.ended.keys() and pair.used_pages() == (0, 0)


def test_a_decode_engine_that_dies_frees_the_prefill_engine() -> None:
    pair = EnginePair(lambda: FakeExecutor(pages=256, chunk_tokens=4))
    pair.ask(1, prompt_of(1, 60), max_new_tokens=2)
    pair.turn(4)
    pair.prefill.submit()
    pair.kill("decode")
    pair.wait(6.0)
    assert not pair.left("prefill") and pair.used_pages()[0] == 0


def test_a_prefill_engine_that_dies_is_an_honest_error_within_seconds() -> None:
    pair = EnginePair(lambda: FakeExecutor(pages=256, chunk_tokens=4))
    pair.ask(1, prompt_of(1, 40), max_new_tokens=5)
    pair.turn(4)
    pair.kill("prefill")
    pair.wait(6.0)
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and reason.err_type == "PrefillUnavailableError"
    assert reason.status_code == 503 and not pair.left("decode") and pair.used_pages()[1] == 0


def test_with_a_prefill_engine_of_its_own_choice_a_decode_engine_helps_itself() -> None:
    pair = EnginePair(lambda: FakeExecutor(pages=256, chunk_tokens=4), home=HERE)
    pair.ask(1, prompt_of(1, 40), max_new_tokens=5, bootstrap=None)
    pair.turn(4)
    pair.kill("prefill")
    pair.run()
    assert pair.decode.out.outputs[1] == oracle(prompt_of(1, 40), 5)


def test_an_engine_borrows_another_only_while_prompts_wait_that_fill_a_step() -> None:
    auto = DisaggregationSettings(disaggregation_mode="auto")
    pair = EnginePair(lambda: FakeExecutor(rows=8, pages=512, chunk_tokens=16), home=HERE, settings=auto)
    for handle in (1, 2):  # one after the other: each finds nobody before it
        pair.ask(handle, prompt_of(handle, 15), max_new_tokens=3, bootstrap=None)
        pair.run()
    assert pair.prefill.executor.computed_tokens == 0
    for handle in range(3, 7):
        pair.ask(handle, prompt_of(handle, 40), max_new_tokens=3, bootstrap=None)
    pair.run()
    assert pair.prefill.executor.computed_tokens == 3 * 40  # the first of them is computed here
    pair.ask(7, prompt_of(7, 12), max_new_tokens=3)  # a router has named the prefill engine
    pair.run()
    assert pair.prefill.executor.computed_tokens == 3 * 40 + 12
    for handle, length in ((1, 15), (2, 15), (3, 40), (4, 40), (5, 40), (6, 40), (7, 12)):
        assert pair.decode.out.outputs[handle] == oracle(prompt_of(handle, length), 3)


def test_a_prompt_in_the_middle_of_its_chunks_counts_as_one_that_waits() -> None:
    auto = DisaggregationSettings(disaggregation_mode="auto")
    pair = EnginePair(lambda: FakeExecutor(rows=8, pages=512, chunk_tokens=8), home=HERE, settings=auto)
    pair.ask(1, prompt_of(1, 60), max_new_tokens=3, bootstrap=None)
    pair.turn(2)
    assert not len(pair.decode.scheduler._queue)
    pair.ask(2, prompt_of(2, 20), max_new_tokens=3, bootstrap=None)
    pair.run()
    assert pair.prefill.executor.computed_tokens == 20
    assert pair.decode.out.outputs[2] == oracle(prompt_of(2, 20), 3)


@pytest.mark.parametrize("turns", [0, 6])
def test_an_engine_that_hangs_while_its_connection_lives_is_given_up(turns: int) -> None:
    pair = EnginePair(lambda: FakeExecutor(pages=256, chunk_tokens=4))
    pair.alive["prefill"] = turns > 0
    pair.ask(1, prompt_of(1, 40), max_new_tokens=5)
    pair.turn(turns)
    pair.alive["prefill"] = False
    pair.wait(25.0)
    assert 1 not in pair.decode.out.ended
    pair.wait(6.0)
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and "stalled" in reason.message and not pair.left("decode")


def test_an_engine_may_take_its_time_as_long_as_its_loop_runs() -> None:
    pair = EnginePair()
    pair.prefill.scheduler._paused = True
    pair.ask(1, prompt_of(1, 40), max_new_tokens=5)
    pair.wait(90.0)
    pair.prefill.scheduler._paused = False
    pair.run()
    assert pair.decode.out.outputs[1] == oracle(prompt_of(1, 40), 5)


def test_a_room_that_nobody_claims_ends() -> None:
    pair = EnginePair(settings=DisaggregationSettings(disaggregation_claim_timeout_s=3.0))
    pair.prefill.ask(1, prompt_of(1, 9), bootstrap=Bootstrap(room=5))
    pair.wait(2.0)
    assert 1 not in pair.prefill.out.ended
    pair.wait(2.0)
    reason = pair.prefill.out.ended[1]
    assert isinstance(reason, FinishAbort) and "Only one of the two" in reason.message and not pair.left("prefill")


def test_a_claim_whose_request_does_not_come_ends_on_both_sides() -> None:
    pair = EnginePair(settings=DisaggregationSettings(disaggregation_claim_timeout_s=3.0))
    pair.ask(1, prompt_of(1, 9), bootstrap=Bootstrap("prefill", 8998, 5))
    pair.wait(2.0)
    assert 1 not in pair.decode.out.ended
    pair.wait(2.0)
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and "Only one of the two" in reason.message and reason.status_code == 503
    assert not pair.left("prefill") and not pair.left("decode") and pair.used_pages() == (0, 0)


def test_hours_of_silence_do_no_harm() -> None:
    pair = EnginePair()
    pair.ask(1, prompt_of(1, 9), max_new_tokens=3)
    pair.run()
    pair.now += 10_000.0
    pair.wait(1.0)
    pair.ask(2, prompt_of(2, 9), max_new_tokens=3)
    pair.run()
    assert pair.decode.out.outputs[2] == oracle(prompt_of(2, 9), 3)


# -- shared memory -----------------------------------------------------------------------------------------------------


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_pages_go_through_shared_memory_which_comes_back_and_is_used_again() -> None:
    pair = EnginePair(lambda: FakeExecutor(pages=512, chunk_tokens=8), shared=True)
    lender, opened = pair.sides["prefill"]._transport, list[int]()
    for handle in range(1, 9):
        pair.ask(handle, prompt_of(handle, 40), max_new_tokens=4)
        pair.run()
        assert pair.decode.out.outputs[handle] == oracle(prompt_of(handle, 40), 4)
        gc.collect()
        opened.append(open_files())
    assert pair.to_decode.sent == 0 and opened[3:] == [opened[3]] * 5, "later prompts take what there is"
    pair.ask(9, prompt_of(9, 50), max_new_tokens=4)
    pair.turn(4)
    gc.collect()
    assert sum(map(len, lender._free.values())) < len(lender._places), "some is lent"
    pair.kill("decode")
    pair.wait(61.0)
    gc.collect()
    assert sum(map(len, lender._free.values())) == len(lender._places)


def test_transports_that_contradict_each_other_are_refused() -> None:
    pair = EnginePair(settings=DisaggregationSettings(disaggregation_transfer_backend="shm"))
    pair.ask(1, prompt_of(1, 9))
    pair.run()
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and "different --disaggregation-transfer-backend" in reason.message


def test_shared_memory_that_cannot_be_had_is_refused_where_it_was_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = EnginePair(settings=DisaggregationSettings(disaggregation_transfer_backend="shm"), shared=True)
    hosts = iter(["one host", "another"])
    monkeypatch.setattr(wire, "neighbours", lambda: next(hosts))
    pair.ask(1, prompt_of(1, 9))
    pair.run()
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and "cannot share memory" in reason.message
