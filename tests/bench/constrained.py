"""`bough bench constrained`: the cost of structured output, and the gain of jump-forward.

First the masks alone, without a model: the host's work per step. Then an engine answers the same prompts constrained
and free, with and without jump-forward; free answers are as long as the constrained ones.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bough.bench.offline import as_text
from bough.constrained.backends import load_backend
from bough.constrained.interface import Matcher
from bough.constrained.prepare import prepare
from bough.constrained.vocabulary import Vocabulary
from tests.constrained.walks import allowed_tokens
from tests.fakes.grammar_specs import json_schema_spec

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
MASK_STEPS = 300
PROMPT = "Record {number} of the register of inhabitants, as JSON: "


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=int, default=32, help="constrained requests side by side")
    load.add_argument("--mask-vocab", type=int, default=50_000, help="tokens of the vocabulary of the masks' part")
    load.add_argument("--output-len", type=int, default=384, help="most tokens of an answer")
    load.add_argument("--rounds", type=int, default=3, help="how often each load runs; the median counts")
    load.add_argument("--masks-only", action="store_true", help="no engine: the masks' part alone")
    load.add_argument("--seed", type=int, default=0, help="of the prompts")
    load.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    backend = settings.get("grammar_backend", "xgrammar")
    figures = measure_masks(backend, args.requests, args.mask_vocab, args.seed)
    if not args.masks_only:
        figures |= measure_engine(settings, args.requests, args.output_len, args.rounds)
    print(json.dumps(figures) if args.json else as_text({"run": "constrained", **figures}))
    return 0


# ---- masks


def measure_masks(backend: str, requests: int, vocabulary_size: int, seed: int) -> dict[str, Any]:
    """The host's work for one step of `requests` constrained rows: accepting tokens, filling masks."""
    rng = random.Random(seed)
    vocabulary = made_up_vocabulary(vocabulary_size, rng)
    prepared = prepare(json_schema_spec(RECORD), backend)
    library = load_backend(prepared.backend, vocabulary)
    began = time.perf_counter()
    make = library.load(prepared.spec)
    compile_s = time.perf_counter() - began
    steps_us = _walk(make, requests, vocabulary, rng)
    return {
        "grammar_backend": prepared.backend,
        "mask_requests": requests,
        "mask_vocabulary": vocabulary.size,
        "compile_ms": 1e3 * compile_s,
        "mask_steps": len(steps_us),
        "mask_step_us_median": float(np.median(steps_us)),
        "mask_step_us_p99": float(np.percentile(steps_us, 99)),
        "mask_us_per_request": float(np.mean(steps_us)) / requests,
    }


def _walk(make: Callable[[], Matcher], requests: int, vocabulary: Vocabulary, rng: random.Random) -> list[float]:
    """Microseconds of each step. Choosing tokens and replacing finished rows is not timed."""
    rows = [make() for _ in range(requests)]
    masks = np.zeros((requests, vocabulary.mask_words), np.int32)
    chosen: list[int | None] = [None] * requests
    times = []
    for _ in range(MASK_STEPS):
        began = time.perf_counter()
        for row, mask, token in zip(rows, masks, chosen, strict=True):
            if token is not None:
                row.accept(token)
            row.fill(mask)
        times.append(1e6 * (time.perf_counter() - began))
        for at, row in enumerate(rows):
            chosen[at] = None if row.finished else int(rng.choice(allowed_tokens(masks[at])))
            if row.finished:
                rows[at] = make()
    return times


def made_up_vocabulary(size: int, rng: random.Random) -> Vocabulary:
    """All bytes, and short words with the punctuation of JSON."""
    pieces = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(pieces) < size - 1:
        word = "".join(rng.choice("etaoinshrdlucmfwyp") for _ in range(rng.randint(1, 8)))
        pieces[(rng.choice(("", "", " ", '"', ' "', '{"', "_")) + word).encode()] = None
    return Vocabulary((*pieces, b""), (len(pieces),))


# ---- an engine


def measure_engine(settings: dict[str, Any], requests: int, output_len: int, rounds: int) -> dict[str, Any]:
    prompts = [PROMPT.format(number=number) for number in range(requests)]
    jumping = _measure(settings, prompts, output_len, rounds)
    plain = _measure({**settings, "disable_jump_forward": True}, prompts, output_len, rounds)
    return {
        "answers": jumping.answers + plain.answers,
        "answers_valid": jumping.valid + plain.valid,
        "answers_cut": jumping.cut + plain.cut,
        "tokens_per_answer": jumping.tokens / jumping.answers,
        "free_tokens_per_s": jumping.free_rate,
        "constrained_tokens_per_s": jumping.bound_rate,
        "constrained_over_free": jumping.bound_rate / jumping.free_rate,
        "without_jump_free_tokens_per_s": plain.free_rate,
        "without_jump_tokens_per_s": plain.bound_rate,
        "without_jump_over_free": plain.bound_rate / plain.free_rate,
    }


@dataclass(slots=True)
class _Measured:
    bound_rate: float = 0.0
    free_rate: float = 0.0
    answers: int = 0
    valid: int = 0
    cut: int = 0  # by the limit on their tokens
    tokens: int = 0


def _measure(settings: dict[str, Any], prompts: list[str], output_len: int, rounds: int) -> _Measured:
    from bough.launch.engine import Engine

    measured, bound_rates, free_rates = _Measured(), [], []
    bound = {"max_new_tokens": output_len, "json_schema": RECORD, "temperature": 1.0}
    with Engine(**settings) as engine:
        _timed(engine, prompts[:2], [bound] * 2)  # warm: graphs, the grammar
        for _ in range(rounds):
            rate, answers = _timed(engine, prompts, [bound] * len(prompts))
            bound_rates.append(rate)
            lengths = [answer["meta_info"]["completion_tokens"] for answer in answers]
            free = [{"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0} for length in lengths]
            free_rates.append(_timed(engine, prompts, free)[0])
            _validate(answers, measured)
    measured.bound_rate, measured.free_rate = float(np.median(bound_rates)), float(np.median(free_rates))
    return measured


def _timed(engine: Any, prompts: list[str], sampling: list[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
    began = time.perf_counter()
    answers = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - began
    return sum(answer["meta_info"]["completion_tokens"] for answer in answers) / seconds, answers


def _validate(answers: list[dict[str, Any]], measured: _Measured) -> None:
    import jsonschema

    for answer in answers:
        measured.answers += 1
        measured.tokens += answer["meta_info"]["completion_tokens"]
        if answer["meta_info"]["finish_reason"]["type"] == "length":
            measured.cut += 1
        else:
            measured.valid += jsonschema.Draft202012Validator(RECORD).is_valid(json.loads(answer["text"]))
