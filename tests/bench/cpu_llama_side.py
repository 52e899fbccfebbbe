"""llama.cpp's side of `bough bench cpu`, through the C API alone: a script for the environment that llama_cpp lives in.

It needs nothing but the standard library, numpy and llama_cpp, because that environment does not have Bough; it speaks
the lines of JSON of `cpu_cases`. Batches are numpy arrays that the C structure points to, the best token is numpy's
argmax, so that no Python stands between llama.cpp and its speed. Before a load is first measured, the ways in which
llama.cpp could run it are tried (attention fused or not; one cache for all sequences or one each) and the best is kept.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import sys
import time
from typing import Any

import numpy as np

BATCH_TOKENS = 2048
CONTEXT_STEP = 256  # llama.cpp rounds contexts up to this
TRIES = 2  # runs of each way: the first of a context is slower
FIRST = {"prefix": [], "prompts": [[1, 2, 3, 4]], "output_tokens": 1}
ATTENTION = {"auto": -1, "off": 0}  # whether attention is one fused operation


class Batch:
    """A `llama_batch` over numpy arrays; each token belongs to one sequence."""

    def __init__(self, llama: Any, tokens: int) -> None:
        self.tokens = np.zeros(tokens, dtype=np.int32)
        self.positions = np.zeros(tokens, dtype=np.int32)
        self.sequences = np.zeros(tokens, dtype=np.int32)
        self.wanted = np.zeros(tokens, dtype=np.int8)
        self._counts = np.ones(tokens, dtype=np.int32)
        self._addresses = self.sequences.ctypes.data + 4 * np.arange(tokens, dtype=np.uintp)
        self._struct = llama.llama_batch()
        fields: dict[str, np.ndarray[Any, Any]] = {
            "token": self.tokens,
            "pos": self.positions,
            "n_seq_id": self._counts,
            "seq_id": self._addresses,
            "logits": self.wanted,
        }
        types = dict(llama.llama_batch._fields_)
        for name, array in fields.items():
            setattr(self._struct, name, ctypes.cast(array.ctypes.data, types[name]))

    def of(self, count: int) -> Any:
        """The structure, for the first `count` tokens."""
        self._struct.n_tokens = count
        return self._struct


class Session:
    """A context made for one load, and one run of it."""

    def __init__(self, llama: Any, model: Any, threads: int, case: dict[str, Any], way: tuple[str, bool]) -> None:
        self._llama = llama
        self._case = case
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        params = llama.llama_context_default_params()
        params.n_seq_max = len(case["prompts"])
        params.n_ctx = context_tokens(case, unified=way[1])
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = ATTENTION[way[0]]
        params.kv_unified = way[1]
        self._context = llama.llama_init_from_model(model, params)
        assert self._context, "llama.cpp made no context"
        self._memory = llama.llama_get_memory(self._context)
        self._batch = Batch(llama, BATCH_TOKENS)

    def close(self) -> None:
        self._llama.llama_free(self._context)

    def run(self) -> dict[str, float]:
        case, batch, count = self._case, self._batch, len(self._case["prompts"])
        shared = len(case["prefix"])
        self._llama.llama_memory_clear(self._memory, False)
        clock = time.process_time if case.get("cpu_time") else time.perf_counter
        began = clock()
        if shared:
            self._feed([(0, position, token, False) for position, token in enumerate(case["prefix"])])
            for sequence in range(1, count):
                self._llama.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        own = [
            (sequence, shared + place, token, place == len(prompt) - 1)
            for sequence, prompt in enumerate(case["prompts"])
            for place, token in enumerate(prompt)
        ]
        last = self._feed(own)
        first = clock()
        batch.sequences[:count] = np.arange(count)
        batch.positions[:count] = [shared + len(prompt) for prompt in case["prompts"]]
        batch.wanted[:count] = 1
        for _ in range(case["output_tokens"] - 1):
            batch.tokens[:count] = last
            self._decode(count)
            last = [self._best(place) for place in range(count)]
            batch.positions[:count] += 1
        done = clock()
        return {"first_s": first - began, "total_s": done - began}

    def _feed(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """(sequence, position, token, whether the next token is wanted), in batches; the tokens that follow."""
        found = []
        for start in range(0, len(tokens), BATCH_TOKENS):
            part = tokens[start : start + BATCH_TOKENS]
            batch, count = self._batch, len(part)
            columns = np.array(part, dtype=np.int32).T
            batch.sequences[:count], batch.positions[:count], batch.tokens[:count], batch.wanted[:count] = columns
            self._decode(count)
            found += [self._best(int(place)) for place in np.flatnonzero(batch.wanted[:count])]
        return found

    def _decode(self, count: int) -> None:
        code = self._llama.llama_decode(self._context, self._batch.of(count))
        assert code == 0, f"llama_decode answers {code}"

    def _best(self, place: int) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())


def context_tokens(case: dict[str, Any], *, unified: bool) -> int:
    """Room for all sequences: with one cache, what is shared counts once."""
    own = [len(prompt) + case["output_tokens"] for prompt in case["prompts"]]
    shared = len(case["prefix"])
    needed = shared + sum(own) if unified else shared + max(own)
    rounded = -(-needed // CONTEXT_STEP) * CONTEXT_STEP
    return int(rounded) if unified else int(rounded) * len(own)


def ways_of(case: dict[str, Any]) -> list[tuple[str, bool]]:
    return list(itertools.product(ATTENTION, (False, True) if len(case["prompts"]) > 1 else (False,)))


class Sessions:
    """Runs loads, each in the best way there is for it. Owns one context at a time: that of the load at hand."""

    def __init__(self, llama: Any, model: Any, threads: int) -> None:
        self._llama = llama
        self._model = model
        self._threads = threads
        self._name = ""
        self._session: Session | None = None

    def run(self, case: dict[str, Any]) -> dict[str, float]:
        if self._session is None or self._name != case["name"]:
            self._choose(case)
        assert self._session is not None
        return self._session.run()

    def _choose(self, case: dict[str, Any]) -> None:
        """Tries every way and keeps the context of the best."""
        if self._session is not None:
            self._session.close()
        key = "first_s" if case["counted"] == "prompt" else "total_s"
        best_s = float("inf")
        self._name, self._session = case["name"], None
        for way in ways_of(case):
            session = Session(self._llama, self._model, self._threads, case, way)
            taken_s = min(session.run()[key] for _ in range(TRIES))
            loser = self._session if taken_s < best_s else session
            if taken_s < best_s:
                self._session, best_s = session, taken_s
            if loser is not None:
                loser.close()


def main() -> None:
    order = json.loads(sys.stdin.readline())
    last = order["spawned"]
    parts = []

    def lap(name: str) -> None:
        nonlocal last
        now = time.monotonic()
        parts.append((name, now - last))
        last = now

    llama = importlib.import_module("llama_cpp.llama_cpp")
    lap("imports")
    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(order["model"].encode(), llama.llama_model_default_params())
    assert model, f"llama.cpp cannot load {order['model']}"
    lap("load")
    session = Session(llama, model, order["threads"], FIRST, ("auto", False))
    session.run()
    lap("first token")
    session.close()
    say({"parts": parts})
    sessions = Sessions(llama, model, order["threads"])
    for line in sys.stdin:
        say(sessions.run(json.loads(line)))


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
