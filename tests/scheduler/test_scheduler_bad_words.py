"""Words of several tokens that an answer must not say, in the loop and with grammars."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.finish import FinishAbort
from bough.core.plan import mask_words
from bough.core.sampling_params import SamplingParams
from bough.messages.requests import LogprobRequest, Thinking
from bough.scheduler.constraint import Constraint
from tests.fakes.executor import VOCAB, FakeExecutor, GuessingProposer, next_token
from tests.fakes.executor import oracle as free_oracle
from tests.fakes.grammars import EOS, FakeCompiled, FakeGrammars, Places, grammar
from tests.fakes.scheduler_bench import Bench

Words = tuple[tuple[int, ...], ...]


def oracle(prompt: list[int], max_new: int, words: Words) -> list[int]:
    """The rule itself, over the whole output."""
    output: list[int] = []
    for _ in range(max_new):
        mask = np.ones(32 * mask_words(VOCAB), dtype=np.uint8)
        for *head, last in words:
            if output[len(output) - len(head) :] == head:
                mask[last] = 0
        allowed = np.packbits(mask, bitorder="little").view(np.int32)
        output.append(next_token(np.array(prompt + output, dtype=np.int32), allowed))
    return output


def words_in(prompt: list[int], count: int) -> Words:
    """Words that the answer would say, one after the other, were they not forbidden."""
    words: list[tuple[int, ...]] = []
    for i in range(count):
        output = oracle(prompt, 12, tuple(words))
        words.append(tuple(output[i : i + 2 + i % 2]))
    return tuple(words)


@pytest.mark.parametrize("overlap", [True, False])
def test_bad_words_are_not_said(overlap: bool) -> None:
    b, words = Bench(disable_overlap_schedule=not overlap), words_in([1, 2], 6)
    b.ask(0, [1, 2], max_new_tokens=12, bad_words=words)
    b.ask(1, [1, 2], max_new_tokens=12)
    b.run()
    assert b.out.outputs[0] == oracle([1, 2], 12, words) != b.out.outputs[1] == free_oracle([1, 2], 12)


def test_the_prompt_does_not_count_and_a_resumed_answer_does() -> None:
    first, second = free_oracle([1, 2], 2)
    b = Bench()
    b.ask(0, [1, 2], max_new_tokens=4, bad_words=((2, first),))
    b.ask(1, [1, 2], max_new_tokens=4, bad_words=((first, second),), output_ids=np.int32([first]).tobytes())
    b.run()
    assert b.out.outputs[0] == free_oracle([1, 2], 4)
    assert [first, *b.out.outputs[1]] == oracle([1, 2], 4, ((first, second),))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 50),
    drafts=st.integers(0, 3),
    proposed=st.integers(0, 3),
    overlap=st.booleans(),
    logprobs=st.booleans(),
    pages=st.integers(24, 60),
)
def test_drafts_and_retractions_change_nothing(
    seed: int, drafts: int, proposed: int, overlap: bool, logprobs: bool, pages: int
) -> None:
    executor = FakeExecutor(pages=pages, rows=4, drafts=0 if proposed else drafts)
    proposer = GuessingProposer(proposed) if proposed else None
    b = Bench(executor, proposer=proposer, disable_overlap_schedule=not overlap)
    prompts = [[seed, 1], [seed, 2], [seed, 3]]
    asked = LogprobRequest() if logprobs else None
    for handle, prompt in enumerate(prompts):
        b.ask(handle, prompt, max_new_tokens=12, bad_words=words_in(prompt, 5), logprobs=asked)
    b.run()
    for handle, prompt in enumerate(prompts):
        assert b.out.outputs[handle] == oracle(prompt, 12, words_in(prompt, 5))


def allowed(constraint: Constraint, generated: int = 0) -> set[int]:
    words = np.zeros(mask_words(VOCAB), dtype=np.int32)
    constraint.allow(words, generated)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def test_they_hold_in_thinking_and_in_a_grammar() -> None:
    places: Places = [[9, 40], [9, 50], [8]]
    thinking = Thinking((90,), (91,), (91,), begun=True)
    c = Constraint(FakeCompiled(places), SamplingParams(), {EOS}, (EOS,), thinking, ((5, 6), (91, 9), (40, 9)))
    assert c.accept(5) and 6 not in allowed(c) and not c.accept(6) and c.accept(7) and 6 in allowed(c)
    assert c.accept(91) and allowed(c) == {40} and c.accept(40)
    assert allowed(c) == {50} and not c.accept(9) and c.accept(50) and allowed(c) == {8} and not c.forced()


def test_a_grammar_that_must_say_one_ends_its_request_with_the_reason() -> None:
    places: Places = [[9], [8], [7], [6], [5]]
    b = Bench(eos_ids=(EOS,), grammars=FakeGrammars())
    for handle, words in enumerate((((8, 7),), ((8, 6),))):
        b.ask(handle, [1, 2], max_new_tokens=9, regex=grammar(places), bad_words=words)
    b.run()
    refused = b.out.ended[0]
    assert isinstance(refused, FinishAbort) and refused.status_code == 400 and refused.field == "bad_words"
    assert b.out.outputs[1] == [9, 8, 7, 6, 5, EOS]
