"""Time to first token of known conversations after a restart, with the prefix cache in files.

`bough bench restart` runs it in a checkout. One engine answers each conversation for the first time (cold), then a
further question in each (never restarted). Then a second engine starts with the files of the first and answers the same
further questions (from disk). Conversations run one at a time, so that no prompt waits for another. The files are
dropped from the operating system's page cache before the second engine starts, so that they are read from the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import bough
from bough.core.setting_checks import require_counts
from bough.storage.files import FOLDER_VARIABLES
from bough.storage.store import RUN_TOKENS
from tests.bench.curves import add_plot_flag, check_plot, plot
from tests.bench.engines import state_of, warm

WRITING_S = 120.0  # for a conversation to be written
KINDS = ("cold", "from disk", "never restarted")


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--conversations", type=int, default=100, help="conversations before and after the restart")
    load.add_argument("--context-len", type=int, default=2000, help="tokens that each begins with")
    load.add_argument("--question-len", type=int, default=32, help="tokens of each question")
    load.add_argument("--output-len", type=int, default=8, help="tokens of each answer")
    load.add_argument("--vocab", type=int, default=10_000, help="largest token id in the prompts")
    load.add_argument("--folder", metavar="PATH", help="where the files are made; the disk of /tmp when left out")
    load.add_argument("--keep-in-memory", action="store_true", help="leave the files in the memory of the system")
    load.add_argument("--json", action="store_true", help="print one JSON object")
    add_plot_flag(load)


def main(args: argparse.Namespace, flat: dict[str, Any]) -> int:
    require_counts(args, ("conversations", "context_len", "question_len", "output_len", "vocab"))
    check_plot(args.plot)
    longest = args.context_len + 2 * (args.question_len + args.output_len)
    flat = {
        "skip_tokenizer_init": True,
        "max_total_tokens": (args.conversations + 2) * (longest + 64),  # one that goes on has all on the device
        "max_running_requests": 8,
        "hicache_ratio": 1.2,
        "hicache_storage_prefetch_policy": "wait_complete",
        **flat,
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "file",
    }
    draw = random.Random(0)

    def prompts(length: int) -> list[list[int]]:
        return [[draw.randint(0, args.vocab) for _ in range(length)] for _ in range(args.conversations)]

    contexts, first, further = prompts(args.context_len), prompts(args.question_len), prompts(args.question_len)
    begun, gone_on = ([c + q for c, q in zip(contexts, asked, strict=True)] for asked in (first, further))
    with tempfile.TemporaryDirectory(dir=args.folder) as name, patch.dict(os.environ, {FOLDER_VARIABLES[0]: name}):
        Path(name).chmod(0o700)
        with bough.Engine(**flat) as engine:
            warm(engine)
            whole = args.context_len // RUN_TOKENS * RUN_TOKENS
            cold = ask(engine, begun, args.output_len, lambda number: wait_written(engine, number * whole))
            never = ask(engine, gone_on, args.output_len)
        tell(f"answered before the restart; cold {1e3 * spread([each[0] for each in cold])['ttft_p50_s']:.1f} ms")
        stored = [path for path in Path(name).iterdir() if not path.name.startswith(".")]
        nbytes = sum(path.stat().st_size for path in stored)
        if not args.keep_in_memory:
            forget(stored)
            tell("the files are on the disk alone")
        began = time.perf_counter()
        with bough.Engine(**flat) as engine:
            start_s = time.perf_counter() - began
            warm(engine)
            disk = ask(engine, gone_on, args.output_len)
    firsts = dict(zip(KINDS, ([each[0] for each in answers] for answers in (cold, disk, never)), strict=True))
    result = {
        "conversations": args.conversations,
        "context_len": args.context_len,
        "stored_bytes": nbytes,
        "start_s": start_s,
        **{f"{kind.replace(' ', '_')}_{name}": value for kind in KINDS for name, value in spread(firsts[kind]).items()},
        "tokens_from_disk": sum(meta["cached_tokens_details"]["disk"] for _, meta, _ in disk),
        "same_answers": sum(one[2] == other[2] for one, other in zip(disk, never, strict=True)),
    }
    print(json.dumps(result) if args.json else as_text(result))
    plot(args.plot, "A server that starts again", {"Time to first token": firsts})
    return 0


def tell(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def ask(
    engine: bough.Engine, prompts: list[list[int]], length: int, then: Callable[[int], None] = lambda number: None
) -> list[tuple[float, dict[str, Any], list[int]]]:
    """Of each, in turn: when its first token came, what the engine says of it, and the answer. `then` is called with
    the number of prompts so far."""
    answers = []
    params = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
    for prompt in prompts:
        began, first, last = time.perf_counter(), 0.0, {}
        for piece in engine.generate(input_ids=prompt, sampling_params=params, stream=True):
            first, last = first or time.perf_counter() - began, piece
        answers.append((first, last["meta_info"], last["output_ids"]))
        then(len(answers))
    return answers


def wait_written(engine: bough.Engine, tokens: int) -> None:
    """Until so many are in files: what an engine computes faster than the disk writes is dropped in the end."""
    until = time.monotonic() + WRITING_S
    while True:
        state = state_of(engine)
        written, dropped = (state[f"hicache_storage_{name}_total"] for name in ("written_tokens", "dropped_runs"))
        if written >= tokens:
            return
        if dropped or time.monotonic() > until:
            raise RuntimeError(f"only {written} of {tokens} tokens were written; {dropped} runs were dropped")
        time.sleep(0.1)


def forget(files: list[Path]) -> None:
    """Drops them from the system's memory, once they are on the disk."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def spread(seconds: list[float]) -> dict[str, float]:
    return {f"ttft_p{q}_s": float(np.percentile(seconds, q)) for q in (50, 99)}


def as_text(result: dict[str, Any]) -> str:
    count, size = result["conversations"], f"{result['stored_bytes'] / 1e6:.1f} MB"
    lines = [f"{count} conversations of {result['context_len']} tokens, {size}"]
    for kind in KINDS:
        p50, p99 = (1e3 * result[f"{kind.replace(' ', '_')}_ttft_p{q}_s"] for q in (50, 99))
        lines.append(f"{kind:>16}: first token p50 {p50:9.1f} ms, p99 {p99:9.1f} ms")
    same = f"{result['same_answers']} of {count} answers the same"
    return "\n".join(
        [*lines, f"{result['tokens_from_disk']} tokens came from disk; {same}; start {result['start_s']:.1f} s"]
    )
