"""The gain from host memory: chats whose contexts exceed the KV cache, with and without the host cache, in turns.

`bough bench tiers` runs it in a checkout. Each chat begins with its own context; all take turns in the same order, so
that the pages of a chat have been evicted when its next turn comes. With --active so many chats are held at a time, and
others begin when they have ended. Both engines run side by side, each with a KV cache for a share of the contexts.
Every round begins with empty caches; a figure is that of the best round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

import bough
from bough.core.setting_checks import require_counts
from tests.bench.curves import add_plot_flag, check_plot, plot
from tests.bench.engines import gpu_copy_gb_s, on_gpu, state_of, warm

RATE = "hicache_bytes_per_s"  # of copies in, as the engine has measured it: what it decides by
COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens")
FIRST = "tokens that a chat begins with"
FIGURES = ("load_back_tokens_total", "hicache_bytes_in_total", "hicache_bytes_out_total")


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--chats", type=int, default=16, help="chats of the run")
    load.add_argument("--active", type=int, help="chats that are held at a time; all when left out")
    load.add_argument("--turns", type=int, default=4, help="questions of each chat")
    load.add_argument("--context-len", type=int, nargs=2, default=[512, 1536], metavar=("LEAST", "MOST"), help=FIRST)
    load.add_argument("--question-len", type=int, default=32, help="tokens of each question")
    load.add_argument("--output-len", type=int, default=16, help="tokens of each answer")
    load.add_argument("--concurrency", type=int, default=4, help="chats that are answered at a time")
    load.add_argument("--share", type=float, default=0.25, help="of all contexts that fit the KV cache")
    load.add_argument("--vocab", type=int, default=10_000, help="largest token id in the prompts")
    load.add_argument("--repeat", type=int, default=2, help="runs of each setting")
    load.add_argument("--json", action="store_true", help="print one JSON object for each engine")
    add_plot_flag(load)


def main(args: argparse.Namespace, flat: dict[str, Any]) -> int:
    require_counts(args, ("chats", "turns", "question_len", "output_len", "concurrency", "vocab", "repeat", "active"))
    check_plot(args.plot)
    longest = args.context_len[1] + args.turns * (args.question_len + args.output_len)
    held = max(args.concurrency * longest, int(args.share * args.chats * longest))
    flat = {
        "skip_tokenizer_init": True,
        "max_total_tokens": held,
        "max_running_requests": args.concurrency,
        "hicache_ratio": 1.2 * args.chats * longest / held,  # all of them
        **flat,
    }
    rounds: dict[str, list[tuple[dict[str, Any], list[float]]]] = {"off": [], "on": []}
    with ExitStack() as engines:
        sides = {
            name: engines.enter_context(bough.Engine(**{**flat, "enable_hierarchical_cache": name == "on"}))
            for name in rounds
        }
        for engine in sides.values():
            warm(engine)
        for number in range(args.repeat):
            for name in sorted(sides, reverse=bool(number % 2)):
                rounds[name].append(measure(sides[name], args))
    chosen = {name: min(of_side, key=lambda each: each[0]["seconds"]) for name, of_side in rounds.items()}
    best = {name: figures for name, (figures, _) in chosen.items()}
    for name, figures in best.items():
        print(json.dumps({"tier": name, **figures}) if args.json else as_text(name, figures))
    if not args.json:
        first, speed = (best["off"][key] / best["on"][key] for key in ("ttft_p50_s", "seconds"))
        print(f"with the tier: {speed:.2f} × the throughput, first token {first:.2f} × as early")
    if on_gpu(flat):  # once the engines are gone
        limit = gpu_copy_gb_s("cpu")
        print(json.dumps({"link_gb_s": limit}) if args.json else f"the link: {limit:.1f} GB/s, from pinned memory")
    firsts = {f"tier {name}": seconds for name, (_, seconds) in chosen.items()}
    plot(args.plot, "Chats that do not fit the KV cache", {"Time to first token of later turns": firsts})
    return 0


def measure(engine: bough.Engine, args: argparse.Namespace) -> tuple[dict[str, Any], list[float]]:
    """A round: the same chats each time, told apart only by their seed. Also when first tokens of later turns came."""
    engine.flush_cache()
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randint(0, args.vocab) for _ in range(count)]

    chats = [ids(draw.randint(*args.context_len)) for _ in range(args.chats)]
    questions = [[ids(args.question_len) for _ in chats] for _ in range(args.turns)]
    before = state_of(engine)
    began = time.perf_counter()
    answers, later_s = asyncio.run(talk(engine, chats, questions, args))
    seconds = time.perf_counter() - began
    after = state_of(engine)
    later = [ttft for turn, ttft, _ in answers if turn]  # the first turn finds nothing anywhere
    prompt, cached, out = (sum(meta[key] for _, _, meta in answers) for key in COUNTED)
    later_tokens = sum(meta[key] for turn, _, meta in answers if turn for key in ("prompt_tokens", "completion_tokens"))
    figures = {
        "seconds": seconds,
        "total_tok_s": (prompt + out) / seconds,
        "later_tok_s": later_tokens / later_s if later_s else 0.0,
        "cached_share": cached / prompt,
        "ttft_p50_s": float(np.percentile(later or [0.0], 50)),
        "ttft_p99_s": float(np.percentile(later or [0.0], 99)),
        **{name: after[name] - before[name] for name in FIGURES if name in after},
        **({"copy_in_gb_s": after[RATE] / 1e9} if RATE in after else {}),
    }
    return figures, later


async def talk(
    engine: bough.Engine, chats: list[list[int]], questions: list[list[list[int]]], args: argparse.Namespace
) -> tuple[list[tuple[int, float, dict[str, Any]]], float]:
    """Of each answer: its turn, when its first token came, and what the engine says of it. Also how long all turns but
    the first took."""
    room = asyncio.Semaphore(args.concurrency)
    params = {"temperature": 0.0, "max_new_tokens": args.output_len, "ignore_eos": True}

    async def answer(turn: int, chat: list[int], question: list[int]) -> tuple[int, float, dict[str, Any]]:
        async with room:
            chat += question
            began, first = time.perf_counter(), 0.0
            pieces = []
            async for piece in await engine.async_generate(input_ids=chat, sampling_params=params, stream=True):
                first = first or time.perf_counter() - began
                pieces.append(piece)
            chat += pieces[-1]["output_ids"]
            return turn, first, pieces[-1]["meta_info"]

    answers, later_s, active = [], 0.0, args.active or args.chats
    for held in (slice(first, first + active) for first in range(0, args.chats, active)):
        for turn, asked in enumerate(questions):
            began = time.perf_counter()
            answers += await asyncio.gather(
                *(answer(turn, *pair) for pair in zip(chats[held], asked[held], strict=True))
            )
            later_s += time.perf_counter() - began if turn else 0.0
    return answers, later_s


def as_text(name: str, figures: dict[str, Any]) -> str:
    times = f"{figures['seconds']:7.2f} s, {figures['total_tok_s']:9.1f} tok/s, of later turns "
    times += f"{figures['later_tok_s']:9.1f}, {figures['cached_share']:.0%} cached"
    first = f"first token p50 {figures['ttft_p50_s'] * 1e3:.1f} ms, p99 {figures['ttft_p99_s'] * 1e3:.1f} ms"
    copied = "".join(f", {key.removesuffix('_total')} {figures[key]}" for key in FIGURES if key in figures)
    copied += f", copies in {figures['copy_in_gb_s']:.1f} GB/s" if "copy_in_gb_s" in figures else ""
    return f"tier {name:>3}: {times}; {first}{copied}"
