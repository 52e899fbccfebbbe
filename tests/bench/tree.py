"""How fast the radix tree matches, inserts and evicts prompts that share prefixes: `bough bench tree`; and what the
snapshots of the web page cost.

It measures the host-side accounting alone: no model runs, and a page is only a number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter_ns, thread_time_ns
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from bough.core.errors import SettingsError
from bough.core.setting_checks import require_counts
from bough.memory.tree.pool import PagePool
from bough.memory.tree.snapshot import snapshot
from bough.memory.tree.tree import RadixTree
from bough.server.live_tree import MAX_NODES

SHARED_PREFIXES = 100
VOCABULARY = 128_000
SNAPSHOTS = 20
EVICT_PAGES = 1_024  # pages freed by one call while the tree is emptied: about what a large prefill step asks for

Result = TypeVar("Result")


class Stopwatch:
    """Adds up the time of one kind of call."""

    def __init__(self) -> None:
        self.calls = 0
        self.total_ns = 0

    def measure(self, call: Callable[..., Result], *args: object) -> Result:
        start = perf_counter_ns()
        result = call(*args)
        self.total_ns += perf_counter_ns() - start
        self.calls += 1
        return result

    @property
    def mean_us(self) -> float:
        return self.total_ns / max(1, self.calls) / 1_000


def make_prompts(prompts: int, length: int, shared: float, seed: int) -> npt.NDArray[np.int32]:
    """Random prompts, [prompts, length]; the first `shared` of each is one of a few common prefixes."""
    random = np.random.default_rng(seed)
    head = int(length * shared)
    tokens = random.integers(0, VOCABULARY, (prompts, length), dtype=np.int32)
    prefixes = random.integers(0, VOCABULARY, (SHARED_PREFIXES, head), dtype=np.int32)
    tokens[:, :head] = prefixes[random.integers(0, SHARED_PREFIXES, prompts)]
    return tokens


def run(
    prompts: int = 10_000, length: int = 2_000, shared: float = 0.5, page_size: int = 1, seed: int = 0
) -> dict[str, float]:
    """Serves each prompt once (match, then insert), matches all again, looks at the tree as the page does, then evicts
    everything; returns the figures."""
    keys = make_prompts(prompts, length, shared, seed)
    per_prompt = length // page_size
    pool = PagePool(prompts * per_prompt)
    tree = RadixTree(page_size)
    match, insert, hit, evict = Stopwatch(), Stopwatch(), Stopwatch(), Stopwatch()
    cached = 0
    for key in keys:
        found = match.measure(tree.match, key)
        cached += found.length
        pages = np.concatenate([found.pages, pool.take(per_prompt - len(found.pages))])
        insert.measure(tree.insert, key, pages)
    for key in keys:
        hit.measure(tree.match, key)
    began_ns = thread_time_ns()
    for _ in range(SNAPSHOTS):
        seen = snapshot(tree, MAX_NODES)
    snapshot_us = (thread_time_ns() - began_ns) / SNAPSHOTS / 1_000
    held = tree.total_pages
    while tree.evictable_pages:
        pool.give(evict.measure(tree.evict, EVICT_PAGES))
    served_s = (match.total_ns + insert.total_ns) / 1e9
    return {
        "prompts": prompts,
        "tokens_per_prompt": length,
        "page_size": page_size,
        "cached_fraction": cached / (prompts * length),
        "prompts_per_s": prompts / served_s,
        "tokens_per_s": prompts * length / served_s,
        "match_us": match.mean_us,
        "insert_us": insert.mean_us,
        "full_hit_match_us": hit.mean_us,
        "nodes": seen["nodes"],
        "snapshot_cpu_us": snapshot_us,
        "snapshot_bytes": len(msgspec.json.encode(seen)),
        "pages_evicted": held,
        "evict_call_us": evict.mean_us,
        "evict_pages_per_s": held / (evict.total_ns / 1e9),
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=10_000, help="prompts in the tree")
    parser.add_argument("--length", type=int, default=2_000, help="tokens in each prompt")
    parser.add_argument("--shared", type=float, default=0.5, help="fraction of each prompt that is a common prefix")
    parser.add_argument("--page-size", type=int, default=1, help="tokens of a page")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")


def main(args: argparse.Namespace) -> int:
    require_counts(args, ("prompts", "length", "page_size"))
    if args.page_size > args.length:  # a prompt is cached in whole pages: there would be nothing in the tree
        raise SettingsError(f"--page-size {args.page_size} is more than --length {args.length}.")
    if not 0 <= args.shared <= 1:
        raise SettingsError(f"--shared must be between 0 and 1, got {args.shared:g}.")
    for name, value in run(args.prompts, args.length, args.shared, args.page_size, args.seed).items():
        print(f"{name:<20}{value:>18,.2f}")
    return 0
