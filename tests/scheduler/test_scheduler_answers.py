"""What the scheduler tells about a request besides its tokens: that it cannot be read, what it cost, how often it was
retracted."""

from __future__ import annotations

from bough.core.finish import FinishAbort, FinishLength
from bough.messages.outputs import Open, Reply, StepOutput
from bough.messages.requests import Garbled
from tests.fakes.executor import FakeExecutor, oracle
from tests.fakes.scheduler_bench import Bench

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def test_a_request_that_cannot_be_read_is_refused_and_the_others_go_on() -> None:
    bench = Bench()
    bench.ask(1, PROMPT, max_new_tokens=4)
    bench.submit(Garbled(2, "Expected `str`"), Garbled(None, "noise"))
    bench.run()
    refusal = bench.out.ended[2]
    assert isinstance(refusal, FinishAbort) and refusal.status_code == 400 and "Expected `str`" in refusal.message
    assert bench.out.replies == [Reply(2, False, refusal.message)], "it may have been a command, whose caller waits"
    assert bench.out.outputs[1] == oracle(PROMPT, 4)


def test_a_garbled_message_about_a_running_request_does_not_end_it() -> None:
    bench = Bench()
    bench.ask(1, PROMPT, max_new_tokens=4)
    bench.turn(2)
    bench.submit(Garbled(1, "what?"))
    bench.run()
    assert bench.out.ended == {1: FinishLength(4)}


def test_a_cut_prompt_is_counted_as_it_was_used() -> None:
    bench = Bench(FakeExecutor(pages=256, context_length=32), allow_auto_truncate=True)
    bench.ask(1, PROMPT * 10, max_new_tokens=1)
    bench.ask(2, PROMPT, max_new_tokens=1)
    bench.run()
    assert [bench.out.started[h].prompt_tokens for h in (1, 2)] == [31, 8]


def test_retractions_are_told_with_the_first_token_after_them() -> None:
    bench = Bench(FakeExecutor(rows=1, pages=64), schedule_policy="priority")
    told: list[dict[int, tuple[int, str]]] = []
    pass_on = bench.out.tokens

    def listen(message: Open | StepOutput) -> None:
        if isinstance(message, StepOutput) and message.retractions:
            assert not message.ended
            told.append(message.retractions)
        pass_on(message)

    bench.out.tokens = listen  # type: ignore[method-assign]
    bench.ask(1, PROMPT, max_new_tokens=20, priority=0)
    for handle in (2, 3):
        bench.turn(5)
        bench.ask(handle, [handle, *PROMPT], max_new_tokens=2, priority=50)
    bench.run()
    assert told == [{1: (1, "default")}, {1: (2, "default")}] and bench.out.retractions == {1: 2, 2: 0, 3: 0}
