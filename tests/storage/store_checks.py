"""Runs to store, and what holds for every store."""

from __future__ import annotations

import numpy as np

from bough.storage.store import RUN_TOKENS, Buffer, Store, run_keys

SIZE = 10_000  # of a run: lines of the checksum, and a rest
KEYS = run_keys(["model"], np.arange(8 * RUN_TOKENS, dtype=np.int32))


def content(number: int, size: int = SIZE) -> Buffer:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def empty(count: int, size: int = SIZE) -> list[Buffer]:
    return [np.zeros(size, np.uint8) for _ in range(count)]


def check_store(store: Store, *, clears: bool = True) -> None:
    """Of an empty store: what is put is there, in its order, until it is cleared."""
    assert store.put(KEYS[:3], [content(number) for number in range(3)]) == 3
    store.put([KEYS[5]], [content(5)])
    assert store.get(KEYS[5:], empty(3)) == 1 and store.get(KEYS[3:], empty(5)) == 0
    assert store.get([], []) == 0
    assert store.exists(KEYS) == 3 and store.exists(KEYS[5:]) == 1 and store.exists(KEYS[3:]) == 0
    buffers = empty(8)
    assert store.get(KEYS, buffers) == 3
    assert all(np.array_equal(buffers[number], content(number)) for number in range(3))
    store.put(KEYS[:1], [content(0)])  # again
    assert store.get(KEYS[:1], empty(1)) == 1
    assert store.get(KEYS[:1], empty(1, SIZE + 8)) == 0, "a run of another length is damaged"
    assert store.counts["corrupt"] == 1 and store.counts["failures"] == 0
    assert store.exists(KEYS[:1]) == 0 and store.put(KEYS[:1], [content(0)]) == 1
    assert store.get(KEYS[:1], empty(1)) == 1
    if clears:
        store.clear()
        assert store.get(KEYS[1:2], empty(1)) == 0
