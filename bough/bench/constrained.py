"""`bough bench constrained`: what structured output costs, and what jump-forward gives back.

First the masks alone: many requests walk one schema over a vocabulary of the given size, and each step's work on the
host is timed; no model runs. Then an engine answers the same prompts three times in one run: freely, under a schema,
and under it without jump-forward. Tokens that the grammar forces are output tokens like any other.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bough.constrained.backends import load_backend
from bough.constrained.interface import Matcher
from bough.constrained.masks import allowed_tokens
from bough.constrained.prepare import prepare
from bough.constrained.spec import json_schema_spec
from bough.constrained.vocabulary import Vocabulary

NAME = {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"}
RECORD = {
    "type": "object",
    "properties": {
        "first_name": NAME,
        "family_name": NAME,
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
        "occupation": {"enum": ["baker", "engineer", "gardener", "physician", "teacher"]},
        "is_currently_employed": {"type": "boolean"},
        "address": {
            "type": "object",
            "properties": {
                "street": NAME,
                "house_number": {"type": "integer", "minimum": 1, "maximum": 99},
                "city": NAME,
            },
            "required": ["street", "house_number", "city"],
        },
    },
    "required": ["first_name", "family_name", "year_of_birth", "occupation", "is_currently_employed", "address"],
}
PROMPT = "Record {number} of the register of inhabitants, as JSON: "


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=int, default=32, help="constrained requests side by side")
    load.add_argument("--mask-vocab", type=int, default=50_000, help="tokens of the vocabulary of the masks' part")
    load.add_argument("--output-len", type=int, default=96, help="most tokens of an answer")
    load.add_argument("--masks-only", action="store_true", help="no engine: the masks' part alone")
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    backend = settings.get("grammar_backend", "xgrammar")
    figures = measure_masks(backend, args.requests, args.mask_vocab, args.seed)
    if not args.masks_only:
        figures |= measure_engine(settings, args.requests, args.output_len)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(
                f"{name.replace('_', ' '):<36}{value:>14,.2f}" if isinstance(value, float) else f"{name:<36}{value:>14}"
            )
    return 0


# ---- masks


def measure_masks(backend: str, requests: int, vocabulary_size: int, seed: int) -> dict[str, Any]:
    """The host's work for one step of `requests` constrained rows: stepping over their tokens, filling their masks."""
    rng = random.Random(seed)
    vocabulary = made_up_vocabulary(vocabulary_size, rng)
    library = load_backend(backend, vocabulary)
    spec = prepare(json_schema_spec(RECORD), backend).spec
    began = time.perf_counter()
    make = library.load(library.compile(spec))
    compile_s = time.perf_counter() - began
    steps_us = _walk(make, requests, vocabulary, rng)
    return {
        "grammar_backend": backend,
        "mask_requests": requests,
        "mask_vocabulary": vocabulary.size,
        "compile_ms": 1e3 * compile_s,
        "mask_steps": len(steps_us),
        "mask_step_us_median": float(np.median(steps_us)),
        "mask_step_us_p99": float(np.percentile(steps_us, 99)),
        "mask_us_per_request": float(np.mean(steps_us)) / requests,
    }


def _walk(make: Callable[[], Matcher], requests: int, vocabulary: Vocabulary, rng: random.Random) -> list[float]:
    """Microseconds of each step until every row has ended; what is chosen is chosen outside the clock."""
    rows = [make() for _ in range(requests)]
    masks = np.zeros((requests, vocabulary.mask_words), np.int32)
    chosen: list[int | None] = [None] * requests
    times = []
    while not all(row.finished for row in rows):
        began = time.perf_counter()
        for row, mask, token in zip(rows, masks, chosen, strict=True):
            if token is not None:
                row.accept(token)
            row.fill(mask)
        times.append(1e6 * (time.perf_counter() - began))
        chosen = [
            None if row.finished else int(rng.choice(allowed_tokens(mask)))
            for row, mask in zip(rows, masks, strict=True)
        ]
    return times


def made_up_vocabulary(size: int, rng: random.Random) -> Vocabulary:
    """All bytes, and words of one to eight letters with what stands around words in JSON."""
    pieces = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(pieces) < size - 1:
        word = "".join(rng.choice("etaoinshrdlucmfwyp") for _ in range(rng.randint(1, 8)))
        pieces[(rng.choice(("", "", " ", '"', ' "', '{"', "_")) + word).encode()] = None
    return Vocabulary((*pieces, b""), (len(pieces),))


# ---- an engine


def measure_engine(settings: dict[str, Any], requests: int, output_len: int) -> dict[str, Any]:
    """Tokens per second of the same prompts, free and constrained, with and without jump-forward."""
    prompts = [PROMPT.format(number=number) for number in range(requests)]
    free = {"max_new_tokens": output_len, "ignore_eos": True, "temperature": 1.0}
    bound = {"max_new_tokens": 4 * output_len, "json_schema": RECORD, "temperature": 1.0}
    free_rate, jump_rate = _rates(settings, prompts, [free, bound])
    (plain_rate,) = _rates({**settings, "disable_jump_forward": True}, prompts, [bound])
    return {
        "free_tokens_per_s": free_rate,
        "constrained_tokens_per_s": jump_rate,
        "constrained_without_jump_per_s": plain_rate,
        "constrained_over_free": jump_rate / free_rate,
        "without_jump_over_free": plain_rate / free_rate,
    }


def _rates(settings: dict[str, Any], prompts: list[str], loads: list[dict[str, Any]]) -> list[float]:
    from bough.launch.engine import Engine

    rates = []
    with Engine(**settings) as engine:
        for load in loads:
            engine.generate(prompts[:2], {**load, "max_new_tokens": 8})  # warm: graphs, the grammar
            began = time.perf_counter()
            outputs = engine.generate(prompts, load)
            seconds = time.perf_counter() - began
            rates.append(sum(output["meta_info"]["completion_tokens"] for output in outputs) / seconds)
    return rates
