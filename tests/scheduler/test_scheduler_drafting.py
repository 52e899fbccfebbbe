"""Drafts change how fast an answer comes, not what of it is cached."""

from __future__ import annotations

import pytest

from tests.fakes.executor import VOCAB, FakeExecutor
from tests.fakes.scheduler_bench import Bench

STOPS = tuple(range(0, VOCAB, 6))


def cached_afterwards(drafts: int, seed: int, max_new: int, page_size: int) -> tuple[list[int], int]:
    """An answer, and how much of it and its prompt the next turn of the conversation finds."""
    executor = FakeExecutor(rows=4, pages=200, page_size=page_size, context_length=128, drafts=drafts)
    bench = Bench(executor, eos_ids=STOPS)
    prompt = [5, 6, 7, 8, 9, seed]
    bench.ask(1, prompt, max_new_tokens=max_new)
    bench.run()
    answer = bench.out.outputs[1]
    bench.ask(2, [*prompt, *answer, 3], max_new_tokens=1)
    bench.run()
    return answer, bench.out.started[2].cached_tokens


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("drafts", [2, 4])
def test_as_much_of_a_stopped_answer_is_cached_as_without_drafts(drafts: int, page_size: int) -> None:
    for seed in range(8):
        for max_new in range(1, 9):
            plain = cached_afterwards(0, seed, max_new, page_size)
            assert cached_afterwards(drafts, seed, max_new, page_size) == plain, (seed, max_new)
