"""The gain from speculative decoding: the same requests with and without it, in turns.

`bough bench speculation` runs it in a checkout. The answers of three loads repeat parts of their prompts (editing code,
copying records, summarising), those of one do not (prose); temperature 0. The ratio compares the times of both engines,
each in the better of its rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from typing import Any

import bough
from bough.core.setting_checks import require_counts

CODE = """import json

def read_config(path):
    with open(path) as handle:
        data = json.load(handle)
    return data

def write_config(path, data):
    with open(path, "w") as handle:
        json.dump(data, handle, indent=2)

def merge_configs(first, second):
    merged = dict(first)
    for key, value in second.items():
        merged[key] = value
    return merged
"""
RECORDS = "".join(
    json.dumps({"id": i, "name": name, "city": city, "active": True}) + "\n"
    for i, (name, city) in enumerate([("Ann", "Oslo"), ("Ben", "Rome"), ("Cem", "Izmir"), ("Dia", "Pune")] * 2)
)
REPORT = (
    "The north bridge was closed on Monday because of ice. The south bridge stayed open on Monday. On Tuesday the "
    "north bridge was opened again for cars, and on Wednesday for trucks. The ferry did not run on Monday and Tuesday. "
)
LOADS = {
    "edit": f"{CODE}\n# The same code again, with a comment above every function:\n\nimport json\n\n",
    "json": f"{RECORDS}\nThe same records again, sorted by id:\n",
    "summary": f"{REPORT}{REPORT}\nIn short, repeating the report: The north bridge was closed on Monday",
    "prose": "Write a story about a fox who wanted to learn to swim.\n\nOnce upon a time",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16], help="requests at once, each in turn")
    load.add_argument("--output-len", type=int, default=96, help="tokens of each answer")
    load.add_argument("--load", nargs="+", default=list(LOADS), choices=list(LOADS), help="what is asked")
    load.add_argument("--repeat", type=int, default=3, help="runs, on and off in turns")
    load.add_argument("--json", action="store_true", help="print one JSON object per load and batch size")


def main(args: argparse.Namespace, flat: dict[str, Any]) -> int:
    require_counts(args, ("batch_size", "output_len", "repeat"))
    # All rounds ask the same: NGRAM would find the answers of the earlier ones, which nobody has in use.
    given = {"speculative_algorithm": "NGRAM", "speculative_ngram_capacity": 0, **flat}
    with ExitStack() as engines:
        without = engines.enter_context(bough.Engine(**{**flat, "speculative_algorithm": None}))
        speculating = engines.enter_context(bough.Engine(**given))
        for name in args.load:
            for size in args.batch_size:
                result = compare(without, speculating, name, size, args.output_len, args.repeat)
                print(json.dumps(result) if args.json else as_text(result), flush=True)
    return 0


def compare(
    without: bough.Engine, speculating: bough.Engine, name: str, size: int, tokens: int, repeat: int
) -> dict[str, Any]:
    """Every request of a batch differs at its beginning, so that none has another's text cached."""
    prompts = [f"Task {i} of {size}.\n{LOADS[name]}" for i in range(size)]
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    answers: dict[bool, list[dict[str, Any]]] = {}
    for _ in range(repeat + 1):  # the first is a warm-up
        for on, engine in ((False, without), (True, speculating)):
            began = time.perf_counter()
            answers[on] = engine.generate(prompts, params)
            seconds[on].append(time.perf_counter() - began)
    meta = [answer["meta_info"] for answer in answers[True]]
    same = sum(a["output_ids"] == b["output_ids"] for a, b in zip(answers[False], answers[True], strict=True))
    off, on = (min(seconds[each][1:]) for each in (False, True))
    return {
        "load": name,
        "batch_size": size,
        "off_tok_s": size * tokens / off,
        "on_tok_s": size * tokens / on,
        "ratio": off / on,
        "tokens_per_step": size * tokens / max(sum(m["spec_verify_ct"] for m in meta), 1),
        "accept_rate": sum(m["spec_num_correct_drafts"] for m in meta)
        / max(sum(m["spec_num_proposed_drafts"] for m in meta), 1),
        "same_answers": same,
    }


def as_text(result: dict[str, Any]) -> str:
    speeds = f"{result['off_tok_s']:8.1f} -> {result['on_tok_s']:8.1f} tok/s = {result['ratio']:.2f} ×"
    drafts = f"{result['tokens_per_step']:.2f} tokens a step, {result['accept_rate']:.0%} of the drafts held"
    same = f"{result['same_answers']} of {result['batch_size']} answers the same"
    return f"{result['load']:>8} × {result['batch_size']:<3} {speeds}; {drafts}; {same}"
