"""The text of a stream that can go on elsewhere: what goes to the client, and what is asked of the next worker."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.gateway.resume import CannotResumeError, ResumableText, WorkerFailedError

STREAM = (
    b': seed 7\n: events 2\ndata: {"id":"c1","created":5,"role":1}\n\n: ids 1,2\ndata: {"id":"c1","text":"a"}\n\n'
    b": keep-alive\n\n"
    b': ids 3\ndata: {"id":"c1","text":"b"}\n\n'
    b': events 2\n: ids 4\ndata: {"id":"c1","text":"c"}\n\ndata: [DONE]\n\n'
)
SHOWN = (
    b'data: {"id":"c1","created":5,"role":1}\n\ndata: {"id":"c1","text":"a"}\n\n: keep-alive\n\n'
    b'data: {"id":"c1","text":"b"}\n\ndata: {"id":"c1","text":"c"}\n\ndata: [DONE]\n\n'
)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(bounds)]


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_comments_of_the_protocol_are_taken_out_in_any_chunking(places: list[int]) -> None:
    text = ResumableText()
    shown = b"".join(text.feed(chunk) for chunk in cut(STREAM, places)) + text.rest()
    assert shown == SHOWN
    assert text.annotated and text.output_ids == [1, 2, 3, 4]


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_a_foreign_stream_passes_byte_for_byte(places: list[int]) -> None:
    for foreign in (SHOWN, SHOWN.replace(b"\n", b"\r\n"), b"data: no end"):
        text = ResumableText()
        assert b"".join(text.feed(chunk) for chunk in cut(foreign, places)) + text.rest() == foreign
        assert not text.annotated


@given(st.integers(0, len(STREAM)))
def test_what_is_asked_next_is_what_was_not_shown(place: int) -> None:
    text = ResumableText()
    shown = text.feed(STREAM[:place])
    assert SHOWN.startswith(shown)
    body = json.loads(text.body(b'{"prompt": "x", "stream": true}'))
    if b"data:" not in shown:
        assert body == {"prompt": "x", "stream": True}
        return
    ids = [1, 2] + [3] * (b'"b"' in shown) + [4] * (b'"c"' in shown)
    assert body == {
        "prompt": "x",
        "stream": True,
        "resume": {"output_ids": ids, "seed": 7, "id": "c1", "created": 5},
    }


def test_a_worker_that_begins_anew_is_not_passed_on() -> None:
    text = ResumableText()
    text.feed(STREAM[: STREAM.index(b": events 2\n: ids 4")])
    for anew in (b'data: {"id":"c2","text":"a"}\n\n', b'data: {"id":"c2","text":"a"}\r\n\r\n'):
        text.restart()
        with pytest.raises(CannotResumeError):
            text.feed(anew)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"dead","type":"EngineDeadError","code":503}}\n\n',
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"dead"}}\n\n',
    ],
)
def test_an_error_of_the_worker_is_a_reason_to_go_elsewhere(event: bytes) -> None:
    text = ResumableText()
    text.feed(STREAM[: STREAM.index(b": keep-alive")])
    with pytest.raises(WorkerFailedError, match="dead"):
        text.feed(event)


@given(st.lists(st.integers(0, 10_000), max_size=6))
def test_what_came_before_an_error_goes_out_first(places: list[int]) -> None:
    """Also where both come at once: the next worker goes on behind the ids that are known here."""
    begun, shown = STREAM[: STREAM.index(b": events 2\n: ids 4")], SHOWN[: SHOWN.index(b'data: {"id":"c1","text":"c"}')]
    error = b'data: {"error":{"message":"dead","type":"EngineDeadError"}}\n\ndata: [DONE]\n\n'
    text, seen = ResumableText(), b""
    with pytest.raises(WorkerFailedError, match="dead"):
        for chunk in cut(begun + error, places):
            seen += text.feed(chunk)
        text.rest()
    assert (seen, text.output_ids) == (shown, [1, 2, 3])
    text.restart()
    assert text.feed(b': ids 4\ndata: {"id":"c1","text":"c"}\n\n') == b'data: {"id":"c1","text":"c"}\n\n'


def test_an_error_of_the_request_is_the_clients() -> None:
    text = ResumableText()
    text.feed(STREAM[: STREAM.index(b": keep-alive")])
    event = b'data: {"error":{"message":"bad","type":"BadRequestError","code":400}}\n\n'
    assert text.feed(event) == event


def test_a_stream_that_ends_early_has_lost_its_worker() -> None:
    text = ResumableText()
    text.feed(STREAM[: STREAM.index(b": keep-alive")])
    with pytest.raises(WorkerFailedError):
        text.rest()


BARE = b': ids 1,2\ndata: {"text":"a"}\n\n: ids 3\ndata: {"text":"b"}\n\n: ids \ndata: {"end":1}\n\ndata: [DONE]\n\n'
APART = BARE.replace(b"\ndata: {", b"\n\ndata: {")
LATE = b'data: {"role":1}\n\n' + BARE


@given(st.sampled_from([BARE, APART, LATE]), st.lists(st.integers(0, 10_000), max_size=12))
def test_ids_alone_are_the_protocol_in_the_events_block_or_before_it(stream: bytes, places: list[int]) -> None:
    text = ResumableText()
    shown = b"".join(text.feed(chunk) for chunk in cut(stream, places)) + text.rest()
    plain = b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\ndata: {"end":1}\n\ndata: [DONE]\n\n'
    assert shown == (b'data: {"role":1}\n\n' if stream is LATE else b"") + plain
    assert text.annotated and text.output_ids == [1, 2, 3]


def test_ids_count_when_their_event_has_gone_out() -> None:
    text = ResumableText()
    assert text.feed(APART[: APART.index(b'data: {"text":"b"')]) == b'data: {"text":"a"}\n\n'
    assert text.output_ids == [1, 2]
    text.restart()
    assert text.feed(b': ids 3\n\ndata: {"text":"b"}\n\n') == b'data: {"text":"b"}\n\n'
    assert text.output_ids == [1, 2, 3]


def test_a_resumed_stream_may_have_nothing_left_but_its_end() -> None:
    text = ResumableText()
    text.feed(BARE[: BARE.index(b": ids \n")])
    text.restart()
    assert text.feed(b"data: [DONE]\n\n") + text.rest() == b"data: [DONE]\n\n"


def native(first: int, last: int, delivered: int) -> bytes:
    """The events of /generate for tokens `first` to `last` from a worker that has computed those after `delivered`."""
    events = []
    for token in range(first, last + 1):
        own = list(range(delivered + 1, token + 1))
        meta = {
            "id": "g",
            "prompt_tokens": 3,
            "completion_tokens": token,
            "output_token_logprobs": [[-0.5 * each, each, None] for each in own],
            "output_token_logprobs_length": len(own),
            "output_top_logprobs": [[[-0.25, each, None]] for each in own],
            "e2e_latency": 0.1,
        }
        event = {"text": "x" * token, "output_ids": list(range(1, token + 1)), "meta_info": meta}
        text = json.dumps(event, separators=(",", ":"))
        seed = ": seed 1\n" if token == first else ""
        events.append(f"{seed}: ids {token}\ndata: {text}\n\n")
    return "".join(events).encode() + (b"data: [DONE]\n\n" if last == 9 else b"")


@given(st.integers(1, 7), st.integers(1, 7), st.lists(st.integers(0, 10_000), max_size=6))
def test_logprobs_of_a_native_stream_are_whole_after_any_failovers(one: int, more: int, places: list[int]) -> None:
    undisturbed = ResumableText()
    expected = undisturbed.feed(native(1, 9, 0)) + undisturbed.rest()
    other = min(8, one + more)
    text = ResumableText()
    shown = text.feed(native(1, one, 0) + b": ids 99\ndata: {")
    for first, last in ((one + 1, other), (other + 1, 9)):
        text.restart()
        shown += b"".join(map(text.feed, cut(native(first, last, first - 1), places)))
    assert shown + text.rest() == expected
