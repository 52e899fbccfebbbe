"""What holds whatever a store is made of: names, checksums, failures, transfers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.storage import store as store_module
from bough.storage import tier as tier_module
from bough.storage.store import HEADER, RUN_TOKENS, Buffer, Store, header_of, run_keys
from bough.storage.tier import Transfers
from tests.storage.store_checks import KEYS, SIZE, check_store, content, empty

TOKENS = np.arange(1000, dtype=np.int32)


class Kept:
    """A dictionary, which can be told to fail or to wait."""

    errors = (OSError,)

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.broken = False
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()

    def exists(self, key: str) -> bool:
        self._begin()
        return key in self.values

    def write(self, key: str, header: bytes, run: Buffer) -> bool:
        self._begin()
        self.values[key] = header + run.tobytes()
        return True

    def read(self, key: str, header: bytearray, run: Buffer) -> bool:
        self._begin()
        value = self.values.get(key)
        if value is not None and len(value) == len(header) + len(run):
            header[:], run[:] = value[: len(header)], np.frombuffer(value, np.uint8, offset=len(header))
        return value is not None

    def remove(self, key: str) -> None:
        self.values.pop(key, None)

    def clear(self) -> None:
        self.values.clear()

    def close(self) -> None:
        self.values.clear()

    def _begin(self) -> None:
        self.calls += 1
        assert self.gate.wait(10)
        if self.broken:
            raise TimeoutError("no answer")


# ---- names


def test_a_name_covers_everything_before_it() -> None:
    keys = run_keys(["model"], TOKENS)
    assert len(keys) == 3 and len({*keys}) == 3 and all(len(bytes.fromhex(key)) == 32 for key in keys)
    assert run_keys(["model"], TOKENS[:600]) == keys[:2] and run_keys(["model"], TOKENS[:255]) == []
    for position in (0, 255, 256, 767):
        other = TOKENS.copy()
        other[position] += 1
        same = position // RUN_TOKENS
        changed = run_keys(["model"], other)
        assert changed[:same] == keys[:same] and not {*changed[same:]} & {*keys[same:]}


def test_names_go_on_behind_a_run() -> None:
    keys = run_keys(["model"], TOKENS)
    assert run_keys(["model"], TOKENS[512:], after=keys[1]) == keys[2:]


def test_what_a_run_depends_on_changes_its_name() -> None:
    identities = [["a", "b", ""], ["a", "", "b"], ["ab", "", ""], ["a", "b"], ['a","b', ""], ["A", "b", ""]]
    assert len({run_keys(identity, TOKENS)[0] for identity in identities}) == len(identities)


def test_names_do_not_depend_on_the_arrays_form() -> None:
    keys = run_keys(["model"], TOKENS)
    assert run_keys(["model"], TOKENS.astype(np.int64)) == keys
    assert run_keys(["model"], np.repeat(TOKENS, 2)[::2]) == keys


# ---- checksums


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_value_is_never_taken_for_the_run(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3 * 4096))
    run = content(size, size)
    header = header_of(KEYS[0], run)
    other = run.copy()
    kind = data.draw(st.sampled_from(["bits", "zeros", "swap", "roll", "cut", "name"]))
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    if kind == "bits":
        other[start] ^= data.draw(st.integers(1, 255))
    elif kind == "zeros":
        other[start:stop] = 0
    elif kind == "swap":
        other[start], other[stop - 1] = run[stop - 1], run[start]
    elif kind == "roll":
        other = np.roll(run, start)
    elif kind == "cut":
        other = run[:start]
    same = np.array_equal(other, run) and kind != "name"
    assert (header_of(KEYS[1 if kind == "name" else 0], other) == header) == same


@pytest.mark.parametrize("words", [(0, 512), (0, 1), (3, 515), (511, 1023)])
def test_changes_that_cancel_out_in_a_sum_show_in_the_other(words: tuple[int, int]) -> None:
    run = content(0, 8 * 4096)
    other = run.copy().view(np.uint64)
    other[words[0]] += np.uint64(1)
    other[words[1]] -= np.uint64(1)
    assert header_of(KEYS[0], other.view(np.uint8)) != header_of(KEYS[0], run)


@pytest.mark.parametrize("position", [0, 3, 4, 35, 36, 43, 44, 47, 48, 4096, 48 + SIZE - 1])  # of each part, both ends
def test_damage_anywhere_means_not_there(position: int) -> None:
    kept = Kept()
    store = Store(kept)
    store.put(KEYS[:3], [content(number) for number in range(3)])
    value = bytearray(kept.values[KEYS[1]])
    value[position] ^= 1
    kept.values[KEYS[1]] = bytes(value)
    assert store.get(KEYS[:3], empty(3)) == 1
    assert store.counts["corrupt"] == 1 and KEYS[1] not in kept.values
    store.put(KEYS[1:2], [content(1)])
    assert store.get(KEYS[:3], empty(3)) == 3


def test_the_header_is_as_long_as_it_says() -> None:
    assert HEADER.size == 48 == len(header_of(KEYS[0], content(0)))


# ---- failures


def test_every_store_does_what_this_one_does() -> None:
    check_store(Store(Kept()))


def test_a_store_that_fails_has_nothing_and_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    store = Store(kept)
    store.put(KEYS[:2], [content(0), content(1)])
    clock = [100.0]
    monkeypatch.setattr(store_module.time, "monotonic", lambda: clock[0])
    kept.broken, kept.calls = True, 0
    assert store.get(KEYS[:2], empty(2)) == 0 and store.get(KEYS[:2], empty(2)) == 0 and kept.calls == 1
    kept.broken = False
    assert store.put(KEYS[2:3], [content(2)]) == 1, "writing has not failed"
    clock[0] += store_module.PAUSE_S
    assert store.get(KEYS[:3], empty(3)) == 3
    assert store.counts["failures"] == 1


def test_what_cannot_be_written_is_dropped_and_counted() -> None:
    kept = Kept()
    kept.broken = True
    store = Store(kept)
    assert store.put(KEYS[:3], [content(0)] * 3) == 0
    assert store.counts == {"written": 0, "dropped": 3, "failures": 1}


def test_failures_are_logged_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "PAUSE_S", 0.0)
    kept = Kept()
    kept.broken = True
    store = Store(kept)
    for _ in range(20):
        store.get(KEYS, empty(len(KEYS)))
    assert store.counts["failures"] == 20 and len(caplog.records) == 5


def test_a_defect_is_no_failure() -> None:
    with pytest.raises(ValueError):
        Store(Kept()).put(KEYS[:2], [content(0)])


# ---- transfers


def test_writes_wait_in_a_queue_of_so_many_bytes() -> None:
    kept = Kept()
    transfers = Transfers(Store(kept), 3 * SIZE)
    kept.gate.clear()
    writes = [transfers.put([key], [content(number)]) for number, key in enumerate(KEYS[:5])]
    assert [write is None for write in writes] == [False, False, False, True, True] and transfers.dropped == 2
    kept.gate.set()
    assert [write.result(10) for write in writes if write is not None] == [1, 1, 1]
    again = transfers.put(KEYS[3:5], [content(3), content(4)])
    assert again is not None and again.result(10) == 2
    assert transfers.store.get(KEYS, empty(len(KEYS))) == 5
    transfers.close()


def test_what_goes_wrong_in_a_thread_is_logged_and_counted_and_the_next_is_tried(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kind that the backend does not tell of, too."""
    kept = Kept()
    transfers = Transfers(Store(kept), 8 * SIZE)
    write, monkeypatched = kept.write, monkeypatch.context
    with monkeypatched() as patch:
        patch.setattr(kept, "write", lambda *_: [][0])
        patch.setattr(kept, "read", lambda *_: [][0])
        patch.setattr(kept, "remove", lambda *_: [][0])
        future = transfers.put(KEYS[:1], [content(0)])
        fetch = transfers.fetch(KEYS[:2], SIZE)
        transfers.remove(KEYS[:1])
        assert future is not None
        for each in (future, fetch.future, transfers._writer.submit(int)):
            each.exception(10)
        assert fetch.settled("wait_complete") and not fetch.runs
    assert transfers.store.counts["failures"] == 3 and "IndexError" in caplog.text
    assert kept.write == write
    again = transfers.put(KEYS[:1], [content(0)])
    assert again is not None and again.result(10) == 1
    fetch = transfers.fetch(KEYS[:1], SIZE)
    fetch.future.result(10)
    assert len(fetch.runs) == 1
    transfers.close()


def test_a_fetch_says_how_far_it_got() -> None:
    transfers = Transfers(Store(Kept()), 8 * SIZE)
    transfers.store.put(KEYS[:3], [content(number) for number in range(3)])
    fetch = transfers.fetch(KEYS[:5], SIZE)
    fetch.future.result(10)
    assert len(fetch.runs) == 3 and np.array_equal(fetch.runs[2], content(2))
    assert all(fetch.settled(policy) for policy in ("timeout", "best_effort", "wait_complete"))
    transfers.close()


def test_a_fetch_that_is_stopped_begins_no_further_run() -> None:
    kept = Kept()
    transfers = Transfers(Store(kept), 8 * SIZE)
    transfers.store.put(KEYS[:3], [content(0)] * 3)
    kept.gate.clear()
    kept.calls = 0
    fetch = transfers.fetch(KEYS[:3], SIZE)
    fetch.stopped = True
    kept.gate.set()
    fetch.future.result(10)
    assert len(fetch.runs) <= 1 and kept.calls == len(fetch.runs)
    transfers.close()


def test_policies_wait_for_a_fetch_in_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(tier_module.time, "monotonic", lambda: clock[0])
    kept = Kept()
    transfers = Transfers(Store(kept), 8 * SIZE)
    kept.gate.clear()
    fetch = transfers.fetch(KEYS[:4], SIZE)
    policies = ("best_effort", "timeout", "wait_complete")
    assert [fetch.settled(policy) for policy in policies] == [True, False, False]
    clock[0] = 1.24
    assert not fetch.settled("timeout")
    clock[0] = 1.25  # 1 s, and 0.25 s for 1,024 tokens
    assert [fetch.settled(policy) for policy in policies] == [True, True, False]
    kept.gate.set()
    fetch.future.result(10)
    assert fetch.settled("wait_complete")
    transfers.close()


def test_what_waits_is_written_at_the_end() -> None:
    kept = Kept()
    kept.close = lambda: None  # type: ignore[method-assign]
    transfers = Transfers(Store(kept), 8 * SIZE)
    for number, key in enumerate(KEYS):
        transfers.put([key], [content(number)])
    transfers.close()
    assert {*kept.values} == {*KEYS}
