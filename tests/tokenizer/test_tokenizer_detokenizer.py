"""The detokenizer's promises: one terminal delta, text cut at stops, tokens after the end dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bough.core.finish import FinishAbort, FinishLength, FinishReason, FinishStop
from bough.core.sampling_params import SamplingParams
from bough.messages.outputs import Delta, Deltas, Ended, LogprobRun, Open, Reply, Started, StepOutput
from bough.messages.requests import ProcessCommand, Shutdown, StreamEnded
from bough.tokenizer.detokenizer import Detokenizer
from tests.fakes.tokenizer import ByteTokenizer


class Outlet:
    def __init__(self) -> None:
        self.items: list[Delta] = []
        self.messages = 0
        self.stopped: list[int] = []
        self.replays: list[Delta] = []
        self.told: list[ProcessCommand | Reply] = []

    def deltas(self, message: Deltas) -> None:
        self.messages += 1
        self.items += message.items
        self.replays += message.replays

    def stream_ended(self, message: StreamEnded) -> None:
        self.stopped.append(message.handle)

    def tell_clients(self, message: ProcessCommand) -> None:
        self.told.append(message)

    def reply(self, message: Reply) -> None:
        self.told.append(message)


def start(stream: bool = True, interval: int = 1, **sampling: Any) -> tuple[Detokenizer, Outlet]:
    outlet = Outlet()
    detokenizer = Detokenizer(ByteTokenizer(), outlet, interval)  # type: ignore[arg-type]
    detokenizer.handle(Open(1, SamplingParams.parse(sampling), b"", stream))
    return detokenizer, outlet


def step(token: int, end: FinishReason | None = None, handle: int = 1, **more: Any) -> StepOutput:
    ended = [] if end is None else [Ended(handle, end, 2)]
    return StepOutput(
        np.array([handle], dtype=np.int64).tobytes(), np.array([token], dtype=np.int32).tobytes(), ended=ended, **more
    )


def feed(detokenizer: Detokenizer, text: bytes, end: FinishReason) -> None:
    for i, token in enumerate(text):
        detokenizer.handle(step(token, end if i == len(text) - 1 else None))


def text_of(outlet: Outlet) -> str:
    return "".join(d.text for d in outlet.items)


def ids_of(outlet: Outlet) -> list[int]:
    return [i for d in outlet.items for i in np.frombuffer(d.ids, dtype=np.int32).tolist()]


@given(st.text(max_size=30), st.integers(1, 5), st.booleans())
def test_deltas_join_to_the_text_and_end_once(text: str, interval: int, stream: bool) -> None:
    data = text.encode() or b"x"
    detokenizer, outlet = start(stream, interval)
    feed(detokenizer, data, FinishLength(len(data)))
    assert text_of(outlet) == data.decode() and ids_of(outlet) == list(data)
    assert [d.finish for d in outlet.items] == [None] * (len(outlet.items) - 1) + [FinishLength(len(data))]
    assert stream or len(outlet.items) == 1


def test_half_a_character_waits_for_the_other_half() -> None:
    detokenizer, outlet = start()
    feed(detokenizer, "é".encode(), FinishLength(2))
    assert [d.text for d in outlet.items] == ["", "é"]


def test_an_end_inside_a_character_shows_the_replacement() -> None:
    detokenizer, outlet = start()
    feed(detokenizer, "é".encode()[:1], FinishLength(1))
    assert text_of(outlet) == "\ufffd"


def test_a_stop_string_ends_the_stream_here_and_tells_the_scheduler() -> None:
    detokenizer, outlet = start(stop=["END"])
    feed(detokenizer, b"ab ENDcd", FinishLength(8))
    assert text_of(outlet) == "ab " and bytes(ids_of(outlet)) == b"ab END"
    assert outlet.items[-1].finish == FinishStop("END") and outlet.stopped == [1]
    assert sum(d.finish is not None for d in outlet.items) == 1


def test_a_stop_string_in_the_last_token_wins_over_the_length() -> None:
    detokenizer, outlet = start(stop=["cd"])
    feed(detokenizer, b"abcd", FinishLength(4))
    assert outlet.items[-1].finish == FinishStop("cd") and outlet.stopped == []
    assert outlet.items[-1].retractions == 2


def test_half_a_stop_string_goes_out_when_the_text_ends() -> None:
    detokenizer, outlet = start(stop=["END"])
    feed(detokenizer, b"abEN", FinishLength(4))
    assert text_of(outlet) == "abEN"


def test_a_stop_token_is_in_the_ids_but_not_in_the_text() -> None:
    detokenizer, outlet = start()
    feed(detokenizer, b"ab!", FinishStop(ord("!")))
    assert text_of(outlet) == "ab" and bytes(ids_of(outlet)) == b"ab!"
    detokenizer, outlet = start(no_stop_trim=True)
    feed(detokenizer, b"ab!", FinishStop(ord("!")))
    assert text_of(outlet) == "ab!"


def test_a_refusal_without_tokens_still_ends_the_stream() -> None:
    detokenizer, outlet = start(stream=False)
    detokenizer.handle(StepOutput(ended=[Ended(1, FinishAbort("no"), 0)]))
    assert [d.finish for d in outlet.items] == [FinishAbort("no")]


def test_start_and_logprobs_travel_with_their_tokens() -> None:
    detokenizer, outlet = start(interval=2)
    run = LogprobRun(b"", b"", 0, b"", b"", b"")
    detokenizer.handle(
        StepOutput(
            np.array([1], dtype=np.int64).tobytes(),
            np.array([97], dtype=np.int32).tobytes(),
            started=[Started(1, 9, 5, 0.0)],
            logprobs={1: run},
        )
    )
    detokenizer.handle(step(98, logprobs={1: run}))
    detokenizer.handle(step(99, FinishLength(3), logprobs={1: run}))
    assert [len(d.logprobs) for d in outlet.items] == [1, 2] and outlet.items[0].started == Started(1, 9, 5, 0.0)
    assert outlet.items[1].started is None


def test_a_regex_that_cannot_be_searched_ends_that_request_alone() -> None:
    detokenizer, outlet = start(stop_regex=[r"(\w+\s?)+\d\d\d$"])
    detokenizer.handle(Open(2, SamplingParams(), b"", True))
    for _ in range(5000):
        detokenizer.handle(step(ord("a")))
        if outlet.stopped:
            break
    assert outlet.stopped == [1] and isinstance(outlet.items[-1].finish, FinishAbort)
    detokenizer.handle(step(ord("b"), FinishLength(1), handle=2))
    assert outlet.items[-1].handle == 2 and outlet.items[-1].text == "b"


def test_a_regex_that_cannot_be_compiled_here_ends_that_request_alone() -> None:
    detokenizer, outlet = start()
    deep = "(" * 2000 + ")" * 2000  # the edge may have had more room to recurse
    detokenizer.handle(Open(1, SamplingParams(stop_regex=(deep,)), b"", True))
    detokenizer.handle(Open(2, SamplingParams(), b"", True))
    detokenizer.handle(step(ord("a")))
    assert outlet.stopped == [1] and isinstance(outlet.items[-1].finish, FinishAbort)
    detokenizer.handle(step(ord("b"), FinishLength(1), handle=2))
    assert outlet.items[-1].handle == 2 and outlet.items[-1].text == "b"


def test_a_slow_regex_in_the_flush_ends_that_request_alone() -> None:
    detokenizer, outlet = start(stop_regex=[r"(\w+\s?)+\d\d\d$"])
    detokenizer.handle(Open(2, SamplingParams(), b"", True))
    stops = detokenizer._streams[1].stops
    assert stops is not None
    stops._spent_s = 1e9  # every search from now on is one too many
    detokenizer.handle(StepOutput(ended=[Ended(1, FinishLength(0), 0)]))
    assert isinstance(outlet.items[-1].finish, FinishAbort) and outlet.stopped == []
    detokenizer.handle(step(ord("b"), FinishLength(1), handle=2))
    assert outlet.items[-1].text == "b"


def test_a_stop_that_half_a_character_completes_counts() -> None:
    detokenizer, outlet = start(stop=["b\ufffd"])
    feed(detokenizer, "abé".encode()[:3], FinishLength(3))
    assert text_of(outlet) == "a" and outlet.items[-1].finish == FinishStop("b\ufffd")
    detokenizer, outlet = start(stop=["b\ufffd"])
    feed(detokenizer, "abé".encode()[:3], FinishAbort("gone", 499))
    assert outlet.items[-1].finish == FinishAbort("gone", 499)


def test_retractions_are_known_when_a_stop_string_ends_the_stream() -> None:
    detokenizer, outlet = start(stop=["b"])
    detokenizer.handle(step(ord("a")))
    detokenizer.handle(step(ord("b"), retractions={1: (3, "new"), 99: (1, "")}))
    assert outlet.items[-1].finish == FinishStop("b") and outlet.items[-1].retractions == 3
    assert outlet.items[-1].weight_version == "new"


def test_shutdown_ends_the_loop() -> None:
    detokenizer, _ = start()
    assert detokenizer.handle(Shutdown()) is False


def resume(
    data: bytes, ended: FinishReason | None = None, interval: int = 1, **sampling: Any
) -> tuple[Detokenizer, Outlet]:
    outlet = Outlet()
    detokenizer = Detokenizer(ByteTokenizer(), outlet, interval)  # type: ignore[arg-type]
    output = np.array(list(data), dtype=np.int32).tobytes()
    detokenizer.handle(Open(1, SamplingParams.parse(sampling), b"", True, output, ended))
    return detokenizer, outlet


@given(st.text("ab é😀", min_size=2, max_size=12), st.integers(0, 20), st.lists(st.sampled_from(["b a", "é", "aab"])))
def test_a_resumed_stream_sends_what_the_broken_one_had_not(text: str, at: int, stop: list[str]) -> None:
    data = text.encode()
    detokenizer, whole = start(stop=stop)
    feed(detokenizer, data, FinishLength(len(data)))
    at = min(at, len(ids_of(whole)) - 1)
    had = [d.text for d in whole.items][:at]
    detokenizer, rest = resume(data[:at], stop=stop) if at else start(stop=stop)
    feed(detokenizer, data[at:], FinishLength(len(data)))
    assert [d.text for d in rest.replays] == (["".join(had)] if at else [])
    assert [d.text for d in rest.items] == [d.text for d in whole.items][at:]
    assert rest.items[-1].finish == whole.items[-1].finish


@given(st.text("ab é", min_size=1, max_size=8), st.sampled_from([FinishLength(3), FinishStop(0)]))
def test_a_stream_that_was_complete_is_told_to_end(text: str, ended: FinishReason) -> None:
    _, outlet = resume(text.encode(), ended, stop=["aa"])
    (end,), (replay,) = outlet.items, outlet.replays
    assert (end.text, end.ids) == ("", b"")
    assert end.finish == (FinishStop("aa") if "aa" in text[: len(text) - isinstance(ended, FinishStop)] else ended)
    shown = text[:-1] if isinstance(ended, FinishStop) and len(text[-1].encode()) == 1 else None
    assert shown is None or replay.text == shown.partition("aa")[0]
    assert outlet.stopped == []


def test_a_stop_string_among_the_resumed_tokens_ends_the_request_in_the_scheduler_too() -> None:
    detokenizer, outlet = resume(b"ab END", stop=["END"])
    assert [d.finish for d in outlet.items] == [FinishStop("END")] and outlet.stopped == [1]
    detokenizer.handle(step(97))
    assert len(outlet.items) == 1


def test_the_first_token_after_a_resumption_goes_out_at_once() -> None:
    detokenizer, outlet = resume(b"ab", interval=3)
    detokenizer.handle(step(99))
    assert [d.text for d in outlet.items] == ["c"]


# Several tokens of one request in one step ----------------------------------------------------------------------------


def run_of(tokens: bytes, end: FinishReason | None = None, **more: Any) -> StepOutput:
    ended = [] if end is None else [Ended(1, end, 0)]
    ids, counts = np.array(list(tokens), dtype=np.int32), np.array([len(tokens)], dtype=np.int32)
    return StepOutput(np.array([1]).tobytes(), ids.tobytes(), counts.tobytes(), ended=ended, **more)


def test_tokens_that_come_together_are_one_delta() -> None:
    detokenizer, outlet = start()
    detokenizer.handle(run_of(b"abc"))
    assert [d.text for d in outlet.items] == ["abc"] and not outlet.stopped
    detokenizer.handle(run_of(b"de", FinishLength(5)))
    assert text_of(outlet) == "abcde" and ids_of(outlet) == list(b"abcde")
    assert outlet.items[-1].finish == FinishLength(5)


def test_only_the_last_of_them_is_the_stop_token() -> None:
    detokenizer, outlet = start()
    detokenizer.handle(run_of(b"ab!", FinishStop(ord("!"))))
    assert text_of(outlet) == "ab" and ids_of(outlet) == list(b"ab!")


def test_a_stop_string_cuts_them() -> None:
    for end in (None, FinishLength(5)):
        detokenizer, outlet = start(stop="c")
        detokenizer.handle(run_of(b"abcde", end))
        assert text_of(outlet) == "ab" and ids_of(outlet) == list(b"abc")
        assert outlet.items[-1].finish == FinishStop("c") and outlet.stopped == ([] if end else [1])
        detokenizer.handle(run_of(b"fg"))
        assert text_of(outlet) == "ab"


def test_their_logprobs_come_once() -> None:
    detokenizer, outlet = start()
    scores = LogprobRun(b"", b"", 0, b"", b"", b"")
    detokenizer.handle(run_of(b"abc", logprobs={1: scores}))
    assert outlet.items[0].logprobs == [scores]


def test_a_command_for_all_processes_reaches_the_clients_before_the_reply() -> None:
    detokenizer, outlet = start()
    command = ProcessCommand(7, log_requests=True)
    assert detokenizer.handle(command)
    assert outlet.told == [command, Reply(7, True)]
