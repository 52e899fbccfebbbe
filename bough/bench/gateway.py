"""`bough bench gateway`: what routing to cached prefixes gains, and what passing through the gateway costs.

Workers are stand-ins that model the time of an engine and hold its real cache (`gateway_model`), so that many of them
fit on a small machine. By default real processes are measured: stand-ins, `bough gateway`, and users over HTTP. With
`--simulate` the same policies run against the same model in virtual time, in one process and with the same result every
time. With `--overhead` the gateway is compared with calling the worker directly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from bough.bench import gateway_overhead
from bough.bench.gateway_figures import Served, as_text, summarise
from bough.bench.gateway_fleet import gateway_process, worker_processes
from bough.bench.gateway_live import drive
from bough.bench.gateway_loads import LOADS, Dialogue, LoadOptions
from bough.bench.gateway_model import Costs
from bough.bench.gateway_simulation import Simulation
from bough.bench.number_checks import require_above_zero, require_counts
from bough.gateway.policies import POLICIES

EVENT_TOKENS = 8  # tokens in an event of a live run, so that the machine's cores do not limit it
COUNTS = (
    "workers",
    "users",
    "requests",
    "system_prompts",
    "system_tokens",
    "question_tokens",
    "output_tokens",
    "turns",
    "connections",
    "stream_len",
    "processes",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    load, costs, overhead = LoadOptions(), Costs(), gateway_overhead.OverheadOptions()
    parser.add_argument("--simulate", action="store_true", help="in virtual time, without processes")
    parser.add_argument("--overhead", action="store_true", help="compare with calling a worker directly instead")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS), help="which loads are run")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=list(POLICIES),
        default=["round_robin", "cache_aware", "kv_events"],
        help="which policies are compared; the first is what the others are measured against",
    )
    parser.add_argument("--workers", type=int, default=8, help="stand-in workers")
    parser.add_argument("--users", type=int, default=128, help="users who each wait for their answer")
    parser.add_argument("--requests", type=int, default=2048, help="requests of a load")
    parser.add_argument("--system-prompts", type=int, default=load.system_prompts, help="system prompts of a load")
    parser.add_argument("--system-tokens", type=int, default=load.system_tokens, help="length of a system prompt")
    parser.add_argument("--question-tokens", type=int, default=load.question_tokens, help="length of a question")
    parser.add_argument("--output-tokens", type=int, default=load.output_tokens, help="longest answer")
    parser.add_argument("--turns", type=int, default=load.turns, help="turns of a conversation (multi-turn)")
    parser.add_argument("--hot-share", type=float, default=load.hot_share, help="share of the hot prompt (hot-prefix)")
    parser.add_argument("--seed", type=int, default=load.seed, help="the same seed makes the same load")
    parser.add_argument("--prefill-us", type=float, default=costs.prefill_us, help="prefill per uncached token, in µs")
    parser.add_argument("--decode-ms", type=float, default=costs.decode_ms, help="decode per token, in ms")
    parser.add_argument(
        "--crowd-ms", type=float, default=costs.crowd_ms, help="added to that by each other running request"
    )
    parser.add_argument("--cache-tokens", type=int, default=costs.cache_tokens, help="cache of a worker, in tokens")
    parser.add_argument("--connections", type=int, default=overhead.connections, help="clients at once (overhead)")
    parser.add_argument("--seconds", type=float, default=overhead.seconds, help="length of each load (overhead)")
    parser.add_argument("--stream-len", type=int, default=overhead.stream_len, help="tokens of a stream (overhead)")
    parser.add_argument("--step-ms", type=float, default=overhead.step_ms, help="pause between tokens (overhead)")
    parser.add_argument("--processes", type=int, default=overhead.processes, help="processes of the gateway")
    parser.add_argument("--top", type=int, default=12, help="functions of the gateway's profile shown (overhead)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")


def main(args: argparse.Namespace) -> int:
    require_counts(args, COUNTS)
    require_above_zero(args, ("seconds",))
    if args.overhead:
        _run_overhead(args)
        return 0
    for load in args.loads:
        dialogues = LOADS[load](_load_options(args))
        first: dict[str, Any] | None = None
        for policy in args.policies:
            served = _run(args, policy, dialogues)
            result: dict[str, Any] = {
                "load": load,
                "policy": policy,
                "simulated": args.simulate,
                **summarise(served, args.workers),
            }
            first = first or result
            result["times_the_first"] = {
                name: result[name] / first[name] for name in ("hit_rate", "requests_per_s") if first[name]
            }
            print(json.dumps(result) if args.json else as_text(result), flush=True)
    return 0


def _run(args: argparse.Namespace, policy: str, dialogues: Sequence[Dialogue]) -> list[Served]:
    costs = Costs(args.prefill_us, args.decode_ms, args.crowd_ms, args.cache_tokens)
    if args.simulate:
        return Simulation(policy, args.workers, costs, args.users, args.seed).run(dialogues)
    with (
        worker_processes(args.workers, costs, EVENT_TOKENS) as workers,
        gateway_process(workers, policy, args.processes) as gateway,
    ):
        return drive(gateway.url, dialogues, args.users)


def _load_options(args: argparse.Namespace) -> LoadOptions:
    return LoadOptions(
        requests=args.requests,
        system_prompts=args.system_prompts,
        system_tokens=args.system_tokens,
        question_tokens=args.question_tokens,
        output_tokens=args.output_tokens,
        turns=args.turns,
        hot_share=args.hot_share,
        seed=args.seed,
    )


def _run_overhead(args: argparse.Namespace) -> None:
    options = gateway_overhead.OverheadOptions(
        seconds=args.seconds,
        connections=args.connections,
        stream_len=args.stream_len,
        step_ms=args.step_ms,
        processes=args.processes,
    )
    for result in gateway_overhead.measure_overhead(options):
        print(json.dumps(result) if args.json else gateway_overhead.as_text(result, args.top), flush=True)
