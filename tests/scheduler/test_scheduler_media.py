"""Images in prompts, as the scheduler plans them: every token of an item is computed from its own encoder's output,
however prompts are cut, cached, retracted and shared, and whatever leaves the encoder's cache."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.core.media import MEDIA_ID, MediaItem, MediaPrompt, media_ids
from bough.core.plan import BatchPlan, IntArray, Limits, MediaLimits, StepResult
from bough.core.settings import MemorySettings, SchedulerSettings, SpeculativeSettings
from bough.messages.requests import Abort, LogprobRequest
from bough.scheduler.intake import Intake, opening
from bough.scheduler.media import Media
from bough.scheduler.ngram import NgramProposer
from tests.fakes.boxes import generate
from tests.fakes.executor import VOCAB, Done, FakeExecutor, oracle
from tests.fakes.scheduler_bench import Bench

PLACEHOLDER, ROW_BYTES = 96, 1 << 16


class Seeing(FakeExecutor):
    """Its encoders give the numbers that stand for an item; a file is a digest."""

    def __init__(self, *, whole: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._limits = replace(self._limits, media=MediaLimits(PLACEHOLDER, ROW_BYTES, whole))
        self.kept: dict[int, IntArray] = {}
        self.encoded: list[list[int]] = []  # rows of the items of each step
        self.positions: dict[int, list[list[int]]] = {}  # of the last prompt of each row
        self.whole = whole

    def launch(self, plan: BatchPlan) -> Done:
        for number in plan.dropped:
            del self.kept[number]
        for item in plan.encodes:
            assert item.output not in self.kept
            self.kept[item.output] = media_ids(bytes.fromhex(item.file), item.rows)
        self.encoded.append([item.rows for item in plan.encodes])
        tokens = plan.tokens.copy()
        assert not len(tokens) or tokens.max() < VOCAB
        first = len(tokens) - int(plan.given[plan.given == plan.query_lens].sum())
        for place, output, row, count in plan.media.tolist() if plan.media is not None else ():
            assert (tokens[first + place : first + place + count] == PLACEHOLDER).all()
            tokens[first + place : first + place + count] = self.kept[output][row : row + count]
            assert not self.whole or count == len(self.kept[output])
        return super().launch(replace(plan, tokens=tokens))


def image(name: int, count: int, begin: int, gap: int = 0) -> MediaItem:
    """With a gap it stands in two places."""
    digest = name.to_bytes(16, "big")
    spans = ((begin, count),) if not gap else ((begin, count // 2), (begin + count // 2 + gap, count - count // 2))
    return MediaItem("image", digest, spans, (), digest.hex())


def laid(tokens: list[int], *items: MediaItem) -> tuple[list[int], MediaPrompt]:
    """The tokens with items in their places."""
    ids = np.array(tokens, dtype=np.int32)
    for item in items:
        rows = media_ids(item.digest, item.count)
        for begin, size in item.spans:
            ids[begin : begin + size], rows = rows[:size], rows[size:]
    return ids.tolist(), MediaPrompt(items)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_outputs_are_those_of_an_undisturbed_run(seed: int, whole: bool) -> None:
    draw = random.Random(seed)
    executor = Seeing(rows=4, pages=90, page_size=1 if whole else draw.choice([1, 4]), whole=whole, chunk_tokens=12)
    memory = MemorySettings(mm_cache_size_mb=draw.choice([0, 1]), page_size=executor.page_size)
    bench = Bench(executor, memory=memory, enable_mixed_chunk=draw.random() < 0.7)
    expected = {}
    for handle in range(14):
        tokens, items = [draw.randrange(5)], list[MediaItem]()
        for _ in range(draw.randrange(3)):
            name, gap = draw.randrange(5), 0 if whole else draw.choice([0, 2])
            items.append(image(name, 5 + name, len(tokens), gap))
            tokens += [1] * (5 + name + gap + draw.randrange(1, 3))
        tokens += [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 12))]
        ids, media = laid(tokens, *items)
        new = draw.randrange(1, 12)
        bench.ask(handle, ids, max_new_tokens=new, media=media if items else None, stream=draw.random() < 0.5)
        expected[handle] = oracle(ids, new)
        bench.turn(draw.randrange(4))
    bench.run()
    assert bench.out.outputs == expected
    assert sum(map(len, executor.encoded)) == bench.scheduler._planner.media.figures["mm_encoded_items_total"]


def test_what_is_cached_is_not_encoded_again() -> None:
    executor = Seeing()
    bench = Bench(executor)
    for handle, end in enumerate((7, 8)):
        ids, media = laid([1, *[0] * 9, 2, end], image(1, 9, 1))
        bench.ask(handle, ids, max_new_tokens=2, media=media)
        bench.run()
        assert bench.out.outputs[handle] == oracle(ids, 2)
    assert sum(map(sum, executor.encoded)) == 9 and bench.out.started[1].cached_tokens == 11
    ids, media = laid([3, *[0] * 9, 2], image(1, 9, 1))  # the same behind another text: the output is kept
    bench.ask(2, ids, max_new_tokens=2, media=media)
    bench.run()
    assert bench.out.outputs[2] == oracle(ids, 2)
    figures = bench.scheduler._state()
    assert (figures["mm_encoded_items_total"], figures["mm_encoder_cache_hits_total"]) == (1, 1)


def test_a_flood_of_images_keeps_to_the_budget() -> None:
    executor = Seeing(chunk_tokens=16, context_length=64, pages=400)
    bench = Bench(executor, enable_mixed_chunk=True)
    for handle in range(6):
        ids, media = laid([1, *[0] * 30, 2], image(handle, 10, 1), image(50 + handle, 10, 15))
        bench.ask(handle, ids, max_new_tokens=2, media=media)
    bench.run()
    steps = list(zip(executor.encoded, executor.plans, strict=True))
    assert sum(len(items) for items, _ in steps) == 12
    for items, plan in steps:
        prompts = int(plan.given[plan.given == plan.query_lens].sum())
        assert prompts <= 16 and sum(items) + prompts <= 16 + 1
    big, media = laid([1, *[0] * 40, 2], image(99, 40, 1))  # larger than any budget: alone in its step
    bench.ask(9, big, max_new_tokens=1, media=media)
    bench.run()
    assert bench.out.outputs[9] == oracle(big, 1)


def test_outputs_leave_when_the_room_is_needed() -> None:
    executor = Seeing(pages=400)
    bench = Bench(executor, memory=MemorySettings(mm_cache_size_mb=1))  # 16 rows
    for handle in range(5):
        ids, media = laid([handle, *[0] * 8, 2], image(handle, 8, 1))
        bench.ask(handle, ids, max_new_tokens=1, media=media)
        bench.run()
    assert len(executor.kept) == 2
    assert bench.scheduler._state()["mm_encoder_cache_bytes"] == 16 * ROW_BYTES


def test_an_item_that_could_not_be_encoded_is_tried_again() -> None:
    executor = Seeing()
    bench = Bench(executor)
    read, failing = executor._read, [True]

    def fail_once(plan: BatchPlan, masks: Any) -> StepResult:
        failed = tuple(item.output for item in plan.encodes) if failing and plan.encodes else ()
        if failed:
            failing.clear()
        return replace(read(plan, masks), not_encoded=failed)

    executor._read = fail_once  # type: ignore[method-assign]
    ids, media = laid([1, *[0] * 9, 2, 3], image(1, 9, 1))
    for handle in range(3):
        bench.ask(handle, ids, max_new_tokens=1, media=media)
        bench.run()
    assert [bench.out.started[handle].cached_tokens for handle in range(3)] == [0, 0, 11]  # nothing of the failure
    assert sum(map(len, executor.encoded)) == 2 and len(executor.kept) == 1


def test_positions_of_prompts_go_with_their_chunks() -> None:
    executor = Seeing(chunk_tokens=8)
    bench = Bench(executor)
    ids, media = laid([1, *[0] * 9, 2, 3], image(1, 9, 1))
    places = np.arange(36, dtype=np.int32).reshape(3, 12) * 5
    bench.ask(0, ids, max_new_tokens=2, media=MediaPrompt(media.items, places.tobytes(), -4))
    bench.run()
    told = [plan.positions for plan in executor.plans if plan.positions is not None]
    assert (np.concatenate(told, axis=1) == places).all()
    assert [setup.delta for plan in executor.plans for setup in plan.setups] == [-4]
    bench.ask(1, [*ids, *bench.out.outputs[0][:1], 4], max_new_tokens=1, media=MediaPrompt(media.items, None, 0))
    bench.run()
    assert executor.plans[-1].positions is None


@cache
def alike() -> tuple[int, int]:
    """Two items whose first numbers are the same."""
    seen: dict[int, int] = {}
    for name in range(1 << 20):
        first = int(media_ids(name.to_bytes(16, "big"), 1)[0])
        if first in seen:
            return seen[first], name
        seen[first] = name
    raise AssertionError("none")


def test_items_with_the_same_first_number_share_nothing() -> None:
    executor = Seeing()
    bench = Bench(executor)
    for handle, name in enumerate(alike()):
        ids, media = laid([1, 2, *[0] * 4, 2], image(name, 4, 2))
        bench.ask(handle, ids, max_new_tokens=2, media=media)
        bench.run()
        assert bench.out.outputs[handle] == oracle(ids, 2)
    assert bench.out.started[1].cached_tokens == 0


def intake(**changes: Any) -> Intake:
    limits = replace(Limits(4, 1, (64,), 32, VOCAB, 16, "", media=MediaLimits(PLACEHOLDER, 8)), **changes)
    return Intake(limits, SchedulerSettings(allow_auto_truncate=True), (), media=Media(limits, 0))


IDS, SHOWN = laid([1, *[0] * 4, 2], image(1, 4, 1))
VECTORS = MediaPrompt(tuple(msgspec.structs.replace(item, kind="embeds") for item in SHOWN.items))


@pytest.mark.parametrize(
    ("ids", "media", "changes", "words"),
    [
        (IDS, SHOWN, {"media": None}, "reads text alone"),
        (IDS, VECTORS, {"media": None}, "^This model reads no input_embeds here"),
        (IDS, None, {}, "has 4 places for media, and its items take 0"),
        ([1, 2, 3, 4, 5, 6], SHOWN, {}, "has 0 places for media, and its items take 4"),
        (IDS[1:], SHOWN, {}, "or stand elsewhere"),
        ([1, *[MEDIA_ID + 5] * 4, 2], SHOWN, {}, "are not those of it"),
        (IDS, SHOWN, {"media": MediaLimits(0, 8, whole=True), "chunk_tokens": 3}, "larger --chunked-prefill-size"),
        (IDS, MediaPrompt(SHOWN.items, b"1234"), {}, "three numbers for each of 6 tokens"),
        ([*IDS, *[1] * 30], SHOWN, {}, "longer than the model's context"),
    ],
)
def test_refusals_say_why(ids: list[int], media: MediaPrompt | None, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        intake(**changes).request(generate(1, ids, media=media), 0, 0.0)


def test_drafts_and_logprobs_do_not_see_items() -> None:
    executor = Seeing(chunk_tokens=32)
    proposer = NgramProposer(SpeculativeSettings(speculative_algorithm="NGRAM"))
    bench = Bench(executor, proposer=proposer)
    first = oracle(IDS, 1)[0]
    ids, media = laid([1, first, *[0] * 4, 2, 9], image(1, 4, 2))
    bench.ask(0, ids, max_new_tokens=6, media=media, logprobs=LogprobRequest(start=0))
    bench.run()
    assert len(bench.out.outputs[0]) == 6
    assert (
        opening(intake().request(generate(1, IDS, media=SHOWN), 0, 0.0)).prompt_tail
        == np.array([1, 2], dtype=np.int32).tobytes()
    )
    assert not any(isinstance(reason, FinishAbort) for reason in bench.out.ended.values())


@pytest.mark.parametrize("name", ["job", None])
def test_an_abort_ends_requests_whose_media_were_still_prepared_when_it_came(name: str | None) -> None:
    bench = Bench(Seeing())
    ids, media = laid([1, 0, 0, 2], image(7, 2, 1))
    options: dict[str, Any] = {"media": media, "max_new_tokens": 2}
    bench.submit(Abort(name=name, made_at=5.0), Abort(99), Abort(name="nobody", made_at=9.0))
    bench.turn()
    bench.ask(1, ids, rid="job", made_at=4.0, **options)
    bench.ask(2, ids, rid="job-0", names=("job",), made_at=4.0, **options)
    bench.ask(3, ids, rid="job", made_at=6.0, **options)
    bench.ask(4, ids, rid="other", made_at=4.0, **options)
    bench.ask(5, ids, rid="job", **options)  # of another host, with another clock
    bench.run()
    ended = {1, 2} if name else {1, 2, 4}
    for handle in range(1, 6):
        reason = bench.out.ended[handle]
        assert isinstance(reason, FinishAbort) == (handle in ended)
        if isinstance(reason, FinishAbort):
            assert (reason.status_code, reason.err_type) == (499, "AbortError")


def test_aborts_that_scheduler_or_callers_make_themselves_leave_what_comes_alone() -> None:
    bench = Bench(Seeing())
    ids, media = laid([1, 0, 0, 2], image(7, 2, 1))
    bench.submit(Abort(), Abort(99))
    bench.turn()
    bench.ask(1, ids, made_at=4.0, media=media, max_new_tokens=2)
    bench.run()
    assert not isinstance(bench.out.ended[1], FinishAbort) and not bench.scheduler._intake.aborts
