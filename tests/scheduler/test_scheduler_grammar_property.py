"""Random loads of constrained and free requests: each gets what it would have got alone, whatever the schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.core.model_config import KVGroup
from bough.core.settings import MemorySettings
from bough.messages.requests import Abort, LogprobRequest
from tests.fakes.executor import FakeExecutor, GuessingProposer, make_groups
from tests.fakes.executor import oracle as free_oracle
from tests.fakes.grammars import EOS, PIECES, FakeGrammars, Places, grammar, oracle
from tests.fakes.scheduler_bench import Bench
from tests.scheduler.test_scheduler_property import STATES, WINDOWS

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
# Mostly one byte is possible: long forced runs, with choices between them; low bytes merge into pairs.
PLACE = st.one_of(st.integers(0, 12).map(lambda b: [b]), st.integers(0, 6).map(lambda b: [b]), st.just([1, 2, 3, 40]))
PLACES = st.lists(PLACE, max_size=16)
STARTS = st.sampled_from([None, None, -1, 0])
ASK = st.tuples(st.just("ask"), PROMPTS, st.one_of(st.none(), PLACES, PLACES), st.integers(0, 14), STARTS)
ABORT = st.tuples(st.just("abort"), st.integers(0, 30))
TURN = st.tuples(st.just("turn"), st.integers(1, 6))
CONFIG = st.fixed_dictionaries(
    {
        "enable_mixed_chunk": st.booleans(),
        "disable_overlap_schedule": st.booleans(),
        "disable_jump_forward": st.booleans(),
        "schedule_conservativeness": st.sampled_from([0.0, 1.0]),
    }
)
MACHINE = st.tuples(st.sampled_from([1, 2, 4]), st.integers(24, 60), st.integers(1, 5), st.integers(4, 20))


ACTIONS = st.lists(st.one_of(ASK, ASK, ABORT, TURN), max_size=30)


@settings(deadline=None, max_examples=60)
@given(ACTIONS, CONFIG, MACHINE, st.booleans(), st.integers(0, 3))
def test_any_load_follows_its_grammars(actions, config, machine, share, looks) -> None:  # type: ignore[no-untyped-def]
    play(actions, config, machine, share, looks)


@settings(deadline=None, max_examples=60)
@given(ACTIONS, CONFIG, MACHINE, st.booleans(), st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_any_load_follows_its_grammars_with_drafts(  # type: ignore[no-untyped-def]
    actions, config, machine, share, looks, drafts, of_host
) -> None:
    """Drafts of the host are verified under masks; with those of the device, grammars take one token a step."""
    if of_host:
        play(actions, config, machine, share, looks, proposer=GuessingProposer(drafts))
    else:
        play(actions, config, machine, share, looks, drafts=drafts)


class ForeseeingProposer(GuessingProposer):
    """Guesses what is sampled where nothing is laid down, which grammars may spell in another way."""

    def __init__(self, text: list[int], most: int) -> None:
        super().__init__(most)
        self._text = text

    def propose(self, known: np.ndarray, namespace: str, count: int) -> tuple[np.ndarray, int]:
        return np.array(self._text[len(known) :][:count], dtype=np.int32), 0


@settings(deadline=None, max_examples=100)
@given(PROMPTS, PLACES, st.integers(1, 20), st.booleans(), st.integers(1, 8), st.booleans())
def test_drafts_that_hold_do_not_keep_a_grammar_from_laying_text(  # type: ignore[no-untyped-def]
    prompt, places, max_new, scored, drafts, jumps
) -> None:
    foreseen = oracle(prompt, places, max_new, jumps=False)
    assert foreseen is not None
    executor = FakeExecutor(rows=1, pages=60, page_size=1, context_length=48, chunk_tokens=8)
    proposer = ForeseeingProposer(prompt + foreseen, drafts)
    bench = Bench(executor, eos_ids=(EOS,), grammars=FakeGrammars(), proposer=proposer, disable_jump_forward=not jumps)
    logprobs = LogprobRequest(start=-1) if scored else None
    bench.ask(0, prompt, max_new_tokens=max_new, regex=grammar(places), logprobs=logprobs)
    bench.run()
    output = bench.out.outputs[0]
    assert output == oracle(prompt, places, max_new, jumps=jumps, logprobs=scored)
    assert not scored or bench.out.scores[0] == [-token for token in output]


@settings(deadline=None, max_examples=60)
@given(ACTIONS, CONFIG, MACHINE, st.booleans(), st.integers(0, 3), WINDOWS, STATES)
def test_any_load_follows_its_grammars_with_windows_and_states(  # type: ignore[no-untyped-def]
    actions, config, machine, share, looks, windows, states
) -> None:
    """Forced and refused tokens cut rows back, to where their windows and states must be found."""
    page_size, _, rows, _ = machine
    play(actions, config, machine, share, looks, groups=make_groups(page_size, rows, windows, states))


def play(  # type: ignore[no-untyped-def]
    actions,
    config,
    machine,
    share,
    looks,
    drafts: int = 0,
    proposer: GuessingProposer | None = None,
    groups: Sequence[tuple[KVGroup, int]] = (),
) -> None:
    page_size, tokens, rows, chunk = machine
    executor = FakeExecutor(
        rows=rows,
        pages=tokens // page_size,
        page_size=page_size,
        context_length=48,
        chunk_tokens=max(chunk, page_size),
        drafts=drafts,
        groups=groups,
    )
    memory = MemorySettings(disable_radix_cache=not share)
    bench = Bench(executor, eos_ids=(EOS,), memory=memory, grammars=FakeGrammars(looks), proposer=proposer, **config)
    asked: dict[int, tuple[list[int], Places | None, int, bool]] = {}
    for action in actions:
        match action:
            case ("ask", prompt, places, max_new, start):
                logprobs = None if start is None else LogprobRequest(start=start)
                options = {} if places is None else {"regex": grammar(places)}
                bench.ask(len(asked), prompt, logprobs=logprobs, max_new_tokens=max_new, **options)
                asked[len(asked)] = (prompt, places, max_new, start is not None)
            case ("abort", handle):
                bench.submit(Abort(handle))
            case ("turn", times):
                bench.turn(times)
    bench.run()
    room = min(48, tokens // page_size * page_size)
    jumps = not config["disable_jump_forward"] and all(group.kind != "state" for group, _ in groups)
    for handle, (prompt, places, asked_new, scored) in asked.items():
        max_new = min(asked_new, room - len(prompt))
        output, reason = bench.out.outputs[handle], bench.out.ended[handle]
        if places is None:
            expected = free_oracle(prompt, max_new, frozenset({EOS}))
        else:
            found = oracle(prompt, places, max_new, jumps=jumps, logprobs=scored)
            assert found is not None
            expected = found
            text = b"".join(PIECES[token] for token in output)
            assert all(byte in place for byte, place in zip(text, places, strict=False)), (output, places)
        assert output == expected[: len(output)]
        if scored:
            assert bench.out.scored[handle] == output
            assert bench.out.scores[handle] == [-token for token in output]
        if isinstance(reason, FinishStop):
            assert output == expected and reason.matched == EOS == output[-1]
        elif isinstance(reason, FinishLength):
            assert output == expected and reason.length == len(output) == max_new
        else:
            assert isinstance(reason, FinishAbort) and reason.status_code == 499
    for handle, (prompt, _, _, _) in asked.items():  # what the tree has of them is what was told
        follow_up = [*prompt, *bench.out.outputs[handle]]
        if len(follow_up) + 2 <= room:
            bench.ask(100 + handle, follow_up, max_new_tokens=2)
            bench.run()
            assert bench.out.outputs[100 + handle] == free_oracle(follow_up, 2, frozenset({EOS}))
