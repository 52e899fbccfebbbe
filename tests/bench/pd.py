"""Prefill/decode disaggregation: short chats and some long prompts, on one engine and on a pair, in turns.

`bough bench pd` runs it in a checkout. All engines run side by side with the same flags, but on CPUs each engine of the
pair has half the threads of the single engine. Requests arrive by Poisson; every eighth prompt is long. The main figure
is the p99 of the gaps between tokens of all streams, from the better round of each side. Then the transfer alone: a
long prompt that the prefill engine has cached goes to a decode engine that has not. The transfer's time is the time to
first token there, less that of the prefill engine itself; other load of the machine can hide it. The limit printed
beside it is how fast this machine copies in memory: the GPU's where the engines have one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import bough
from bough.core.setting_checks import require_above_zero, require_counts
from tests.bench.curves import add_plot_flag, check_plot, plot
from tests.bench.engines import gpu_copy_gb_s, on_gpu, state_of, warm
from tests.system.pairs import free_port

COUNTS = ("requests", "long_len", "long_every", "output_len", "vocab", "repeat")
SHORT = "tokens of a short prompt"
TRANSFERS = 5  # of which the fastest counts: what else runs can only add to it


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=int, default=256, help="requests of the run")
    load.add_argument("--rate", type=float, default=8.0, help="arrivals per second")
    load.add_argument("--short-len", type=int, nargs=2, default=[64, 256], metavar=("LEAST", "MOST"), help=SHORT)
    load.add_argument("--long-len", type=int, default=8000, help="tokens of a long prompt")
    load.add_argument("--long-every", type=int, default=8, help="one prompt of so many is long")
    load.add_argument("--output-len", type=int, default=128, help="tokens of each answer")
    load.add_argument("--vocab", type=int, default=10_000, help="largest token id in the prompts")
    load.add_argument("--repeat", type=int, default=2, help="rounds of each side")
    load.add_argument("--json", action="store_true", help="print one JSON object for each side, and one for the ratio")
    add_plot_flag(load)


@dataclass(slots=True)
class Timed:
    """One answer, in seconds from its arrival."""

    long: bool
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def main(args: argparse.Namespace, flat: dict[str, Any]) -> int:
    require_counts(args, COUNTS)
    require_above_zero(args, ("rate",))
    check_plot(args.plot)
    flat = {"skip_tokenizer_init": True, **flat}
    with ExitStack() as engines:

        def start(**more: Any) -> bough.Engine:
            engine = engines.enter_context(bough.Engine(**{**flat, **more}))
            warm(engine)
            return engine

        port, halves, gpu = {"disaggregation_bootstrap_port": free_port()}, {}, on_gpu(flat)
        if not gpu:
            halves = {"cpu_threads": max(1, (flat.get("cpu_threads") or os.cpu_count() or 2) // 2)}
        one = start()
        prefill = start(disaggregation_mode="prefill", **port, **halves)
        decode = start(disaggregation_mode="decode", prefill_url="http://127.0.0.1:1", **port, **halves)
        sides, rounds = {"one": [one], "pair": [decode, prefill]}, {"one": [], "pair": []}
        for number in range(args.repeat):
            for name in sorted(sides, reverse=bool(number % 2)):
                rounds[name].append(measure(sides[name], args))
        link = transfer(prefill, decode, args, gpu)
    best = {name: min(of_side, key=lambda each: each[0]["gap_p99_s"]) for name, of_side in rounds.items()}
    for name, (figures, _) in best.items():
        print(json.dumps({"side": name, **figures}) if args.json else as_text(name, figures))
    ratios = {
        key: best["pair"][0][key] / best["one"][0][key] if best["one"][0][key] else 0.0
        for key in ("gap_p50_s", "gap_p99_s", "ttft_p50_s", "ttft_p99_s", "out_tok_s")
    }
    answers = [[each.ids for each in best[name][1]] for name in best]
    same = sum(mine == theirs for mine, theirs in zip(*answers, strict=True))
    if args.json:
        print(json.dumps({"pair_by_one": ratios, **link, "same_answers": same, "requests": args.requests}))
    else:
        shown = ", ".join(f"{key.removesuffix('_s')} × {value:.2f}" for key, value in ratios.items())
        print(f"pair by one: {shown}; {same} of {args.requests} answers the same")
        print(as_transfer(link))
    plot(
        args.plot,
        f"Prompts of {args.long_len} tokens among short chats",
        {
            "Gap between tokens": {name: [gap for each in best[name][1] for gap in each.gaps_s] for name in best},
            "Time to first token": {name: [each.first_s for each in best[name][1]] for name in best},
        },
    )
    return 0


def measure(side: list[bough.Engine], args: argparse.Namespace) -> tuple[dict[str, Any], list[Timed]]:
    """A round: the same arrivals each time. Requests go to the side's first engine."""
    for engine in side:
        engine.flush_cache()
    draw, at_s, arrivals = random.Random(0), 0.0, []
    for number in range(args.requests):
        long = number % args.long_every == args.long_every - 1
        length = args.long_len if long else draw.randint(*args.short_len)
        arrivals.append((at_s, [draw.randint(0, args.vocab) for _ in range(length)], long))
        at_s += draw.expovariate(args.rate)
    began = time.perf_counter()
    answers = asyncio.run(play(side[0], arrivals, args.output_len))
    seconds = time.perf_counter() - began
    gaps = [gap for each in answers for gap in each.gaps_s]
    figures = {
        "seconds": seconds,
        "out_tok_s": sum(len(each.ids) for each in answers) / seconds,
        **spread("gap", gaps),
        "gap_max_s": max(gaps, default=0.0),
        **spread("ttft", [each.first_s for each in answers]),
        **spread("long_ttft", [each.first_s for each in answers if each.long]),
    }
    return figures, answers


async def play(engine: bough.Engine, arrivals: list[tuple[float, list[int], bool]], length: int) -> list[Timed]:
    params = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
    began = time.perf_counter()

    async def answer(at_s: float, prompt: list[int], long: bool) -> Timed:
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
        timed, asked, last = Timed(long), time.perf_counter(), 0.0
        async for piece in await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True):
            now = time.perf_counter()
            if last:
                timed.gaps_s.append(now - last)
            timed.first_s, last, timed.ids = timed.first_s or now - asked, now, piece["output_ids"]
        return timed

    return await asyncio.gather(*(answer(*arrival) for arrival in arrivals))


def transfer(prefill: bough.Engine, decode: bough.Engine, args: argparse.Namespace, gpu: bool) -> dict[str, Any]:
    """Bytes of one long prompt's pages, and how fast they came."""
    draw = random.Random(1)
    prompt = [draw.randint(0, args.vocab) for _ in range(args.long_len)]
    alone, paired, nbytes = [], [], 0
    asyncio.run(play(prefill, [(0.0, prompt, True)], 1))
    for _ in range(TRANSFERS):
        decode.flush_cache()
        before = state_of(decode)["transferred_bytes"]
        paired += asyncio.run(play(decode, [(0.0, prompt, True)], 1))
        nbytes = state_of(decode)["transferred_bytes"] - before
        alone += asyncio.run(play(prefill, [(0.0, prompt, True)], 1))
    seconds = min(each.first_s for each in paired) - min(each.first_s for each in alone)
    return {
        "failed_transfers": state_of(decode)["failed_transfers"],  # prompts that the decode engine computed itself
        "transferred_bytes": nbytes,
        "transfer_s": seconds,
        "transfer_gb_s": nbytes / seconds / 1e9 if seconds > 0 else None,
        "memory_gb_s": gpu_copy_gb_s("cuda") if gpu else memory_gb_s(nbytes),
    }


def memory_gb_s(nbytes: int) -> float:
    source, copies = np.ones(max(nbytes, 1), dtype=np.uint8), []
    for _ in range(TRANSFERS):
        began, target = time.perf_counter(), np.empty_like(source)
        target[:] = source
        copies.append(time.perf_counter() - began)
    return nbytes / min(copies) / 1e9


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    return {f"{name}_p{q}_s": float(np.percentile(seconds or [0.0], q)) for q in (50, 99)}


def as_text(name: str, figures: dict[str, Any]) -> str:
    gaps = " ".join(f"{word} {1e3 * figures[f'gap_{word}_s']:.1f}" for word in ("p50", "p99", "max"))
    firsts = " ".join(f"{word} {1e3 * figures[f'ttft_{word}_s']:.1f}" for word in ("p50", "p99"))
    long = f"of long prompts p50 {1e3 * figures['long_ttft_p50_s']:.1f}"
    return f"{name:>4}: gaps {gaps} ms; first token {firsts}, {long} ms; {figures['out_tok_s']:.1f} tok/s"


def as_transfer(link: dict[str, Any]) -> str:
    rate, size = link["transfer_gb_s"], f"transfer: {link['transferred_bytes'] / 1e6:.1f} MB"
    if rate is None:
        return f"{size}, in less time than first tokens vary by; memory {link['memory_gb_s']:.2f} GB/s"
    return f"{size} in {1e3 * link['transfer_s']:.1f} ms, {rate:.2f} GB/s; memory {link['memory_gb_s']:.2f} GB/s"
