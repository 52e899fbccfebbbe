"""What routing to cached prefixes gains, and what passing through the gateway costs.

`bough bench gateway` runs it in a checkout. Simulated workers hold an engine's real cache and model its time
(`gateway_simulation`), so that many of them fit on a small machine. By default real processes are measured: simulated
workers, `bough gateway`, and users over HTTP; with `--model` the workers are engines. With `--simulate` the same
policies run against the same model in virtual time, with the same result on every machine. With `--overhead`
the gateway is compared with calling the worker directly. With `--scale` its own work is measured for as many workers
as no machine could run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bough.core.errors import SettingsError
from bough.core.setting_checks import require_above_zero, require_counts
from bough.gateway.policies import POLICIES
from tests.bench import gateway_overhead, gateway_scale, gateway_turns
from tests.bench.gateway_overhead import OverheadOptions
from tests.bench.gateway_processes import (
    drive,
    gateway_of_engines,
    gateway_process,
    requests_of_workers,
    worker_processes,
)
from tests.bench.gateway_simulation import TOKEN_CHARS, Costs, Dialogue, Served, Simulation, Turn

COUNTS = (
    *("workers", "users", "requests", "system_prompts", "system_tokens", "question_tokens", "output_tokens", "turns"),
    *("connections", "stream_len", "processes"),
)
ADDED_AT_S, SHARE_WITHIN_S = 3.0, 5.0  # when the last worker joins, and how long it has to get its share
EVENT_TOKENS = 8  # tokens in an event of a live run, so that the machine's cores do not limit it

Group = TypeVar("Group", "LoadOptions", Costs, OverheadOptions)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How large a load is; lengths are in tokens."""

    requests: int = 2048
    system_prompts: int = 128
    system_tokens: int = 2048
    question_tokens: int = 256
    output_tokens: int = 64
    turns: int = 8
    hot_share: float = 0.8
    seed: int = 1


HELP = {
    "requests": "requests of a load",
    "system_prompts": "system prompts of a load",
    "system_tokens": "length of a system prompt",
    "question_tokens": "length of a question",
    "output_tokens": "longest answer",
    "turns": "turns of a conversation (multi-turn)",
    "hot_share": "share of the hot prompt (hot-prefix)",
    "seed": "the same seed makes the same load",
    "prefill_us": "prefill per uncached token, in µs",
    "decode_ms": "decode per token, in ms",
    "crowd_ms": "added to that by each other running request",
    "cache_tokens": "cache of a worker, in tokens",
    "seconds": "length of each load (overhead)",
    "connections": "clients at once (overhead)",
    "stream_len": "tokens of a stream (overhead)",
    "step_ms": "pause between tokens (overhead)",
    "processes": "processes of the gateway",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulate", action="store_true", help="in virtual time, without processes")
    parser.add_argument("--overhead", action="store_true", help="compare with calling a worker directly instead")
    parser.add_argument("--against", nargs="+", metavar="DIR", help="compare the gateways of other checkouts instead")
    parser.add_argument(
        "--scale", action="store_true", help="measure the gateway's own work per request and worker instead"
    )
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), help="which loads are run; all if left out")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=list(POLICIES),
        default=["round_robin", "cache_aware", "cost", "kv_events"],
        help="which policies are compared; the first is what the others are measured against",
    )
    parser.add_argument("--model", help="engines with this model as workers, instead of simulated ones")
    parser.add_argument("--workers", type=int, default=8, help="workers")
    parser.add_argument("--users", type=int, default=128, help="users who each wait for their answer")
    for field in (field for group in (LoadOptions, Costs, OverheadOptions) for field in dataclasses.fields(group)):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help=HELP[field.name])
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")


def main(args: argparse.Namespace) -> int:
    require_counts(args, COUNTS)
    require_above_zero(args, ("seconds",))
    if args.model is not None and (args.simulate or args.overhead or args.scale):
        raise SettingsError("--model starts engines: leave out --simulate, --overhead and --scale.")
    if args.against:
        for turns in gateway_turns.measure_turns(args.against, args.connections, args.seconds, args.stream_len):
            print(json.dumps(turns) if args.json else gateway_turns.as_text(turns), flush=True)
        return 0
    if args.overhead:
        for cost in gateway_overhead.measure_overhead(_chosen(OverheadOptions, args)):
            print(json.dumps(cost) if args.json else gateway_overhead.as_text(cost), flush=True)
        return 0
    if args.scale:
        return _scale(args)
    if not args.simulate and WORKER_ADDED in (args.loads or ()):
        raise SettingsError(f"the load {WORKER_ADDED} runs in virtual time only: add --simulate.")
    for load in args.loads or [load for load in LOADS if args.simulate or load != WORKER_ADDED]:
        dialogues = LOADS[load](_chosen(LoadOptions, args))
        first: dict[str, Any] | None = None
        for policy in args.policies:
            added = load == WORKER_ADDED
            result: dict[str, Any] = {"load": load, "policy": policy, "simulated": args.simulate}
            if args.model is not None:
                result.update(_run_engines(args, policy, dialogues))
            else:
                served = _run(args, policy, dialogues, added)
                result.update(summarise(served, args.workers))
                if added:
                    result["added_share"] = added_share(served, args.workers)
            first = first or result
            result["times_the_first"] = {
                name: result[name] / first[name] for name in ("hit_rate", "requests_per_s") if first[name]
            }
            print(json.dumps(result) if args.json else as_text(result), flush=True)
    return 0


def _scale(args: argparse.Namespace) -> int:
    dialogues = LOADS[(args.loads or ["shared-prefix"])[0]](_chosen(LoadOptions, args))
    for policy in args.policies:
        result = gateway_scale.measure_scale(policy, args.workers, dialogues, args.users)
        print(json.dumps(result) if args.json else gateway_scale.as_text(result), flush=True)
    polls = gateway_scale.measure_polls(args.workers)
    print(json.dumps(polls) if args.json else gateway_scale.as_text(polls))
    return 0


def _run(args: argparse.Namespace, policy: str, dialogues: Sequence[Dialogue], added: bool) -> list[Served]:
    costs = _chosen(Costs, args)
    if args.simulate:
        at_s = ADDED_AT_S if added else 0.0
        return Simulation(policy, args.workers, costs, args.users, args.seed, args.processes, at_s).run(dialogues)
    with (
        worker_processes(args.workers, costs, EVENT_TOKENS) as workers,
        gateway_process(workers, policy, args.processes) as gateway,
    ):
        return drive(gateway.url, dialogues, args.users)


def _run_engines(args: argparse.Namespace, policy: str, dialogues: Sequence[Dialogue]) -> dict[str, Any]:
    """Engines do not say which of them has answered, but the gateway counts."""
    with gateway_of_engines(args.workers, args.model, args.cache_tokens, policy, args.processes) as gateway:
        served = drive(gateway.url, dialogues, args.users)
        sent = requests_of_workers(gateway.url)
    imbalance = max(sent) * args.workers / sum(sent)
    return {**summarise(served, args.workers), "requests_imbalance": imbalance, "prefill_imbalance": None}


def _chosen(group: type[Group], args: argparse.Namespace) -> Group:
    """The fields of an options class as the flags set them."""
    return group(**{field.name: getattr(args, field.name) for field in dataclasses.fields(group)})


# ---- loads


def shared_prefix(options: LoadOptions) -> list[Dialogue]:
    """Many system prompts, each with many questions, in random order."""
    draw = random.Random(options.seed)
    systems = [_text(draw, options.system_tokens) for _ in range(options.system_prompts)]
    return [(_turn(draw, draw.choice(systems), options),) for _ in range(options.requests)]


def hot_prefix(options: LoadOptions) -> list[Dialogue]:
    """One system prompt takes most of the traffic."""
    draw = random.Random(options.seed)
    hot, *others = (_text(draw, options.system_tokens) for _ in range(max(2, options.system_prompts)))
    return [
        (_turn(draw, hot if draw.random() < options.hot_share else draw.choice(others), options),)
        for _ in range(options.requests)
    ]


def multi_turn(options: LoadOptions) -> list[Dialogue]:
    """Conversations that send their whole history again with every turn."""
    draw = random.Random(options.seed)
    return [
        tuple(_turn(draw, "", options) for _ in range(options.turns))
        for _ in range(max(1, options.requests // options.turns))
    ]


def short_prompts(options: LoadOptions) -> list[Dialogue]:
    """Short questions that begin alike."""
    draw = random.Random(options.seed)
    return [
        (Turn(f"Answer question number {number:08d}", _turn(draw, "", options).output_tokens),)
        for number in range(options.requests)
    ]


def worker_added(options: LoadOptions) -> list[Dialogue]:
    """Chats that all have the same system prompt, while a worker joins."""
    return shared_prefix(dataclasses.replace(options, system_prompts=1))


WORKER_ADDED = "worker-added"
LOADS: dict[str, Callable[[LoadOptions], list[Dialogue]]] = {
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "hot-prefix": hot_prefix,
    "short-prompts": short_prompts,
    WORKER_ADDED: worker_added,
}


def _turn(draw: random.Random, before: str, options: LoadOptions) -> Turn:
    """A question behind `before`. Answers differ in length, so that users fall out of step as real ones do."""
    output_tokens = draw.randint(max(1, options.output_tokens // 2), options.output_tokens)
    return Turn(before + _text(draw, options.question_tokens), output_tokens)


def _text(draw: random.Random, tokens: int) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=tokens * TOKEN_CHARS))


# ---- figures


def summarise(served: Sequence[Served], workers: int) -> dict[str, Any]:
    """The figures of a run. `imbalance` is the busiest worker's share over the mean: 1 is even."""
    prompts = sum(each.prompt_tokens for each in served)
    cached = sum(each.cached_tokens for each in served)
    duration_s = max(each.sent_s + each.total_s for each in served) - min(each.sent_s for each in served)
    answered = Counter(each.worker for each in served)
    computed: Counter[str] = Counter()
    for each in served:
        computed[each.worker] += each.prompt_tokens - each.cached_tokens
    return {
        "requests": len(served),
        "duration_s": duration_s,
        "hit_rate": cached / prompts,
        "requests_per_s": len(served) / duration_s,
        "output_tokens_per_s": sum(each.output_tokens for each in served) / duration_s,
        "ttft_ms": _spread([each.first_s for each in served]),
        "latency_ms": _spread([each.total_s for each in served]),
        "requests_imbalance": max(answered.values()) * workers / len(served),
        "prefill_imbalance": max(computed.values()) * workers / max(1, sum(computed.values())),
        "prediction_error": _prediction_error(served),
    }


def added_share(served: Sequence[Served], workers: int) -> float:
    """Of the requests in the seconds after a worker has joined, how many it got, over the mean of all workers."""
    sent = [each for each in served if ADDED_AT_S <= each.sent_s < ADDED_AT_S + SHARE_WITHIN_S]
    return sum(each.worker == f"worker-{workers - 1}" for each in sent) * workers / max(1, len(sent))


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.quantile(np.array(seconds), [0.5, 0.99])
    return {"p50": 1e3 * float(p50), "p99": 1e3 * float(p99)}


def _prediction_error(served: Sequence[Served]) -> float | None:
    """Mean distance between the share of a prompt that was expected to be cached and the share that was."""
    errors = [
        abs(each.expected_cached - each.cached_tokens / each.prompt_tokens)
        for each in served
        if each.expected_cached is not None
    ]
    return sum(errors) / len(errors) if errors else None


def as_text(result: dict[str, Any]) -> str:
    way = "in virtual time" if result["simulated"] else "through a gateway, on this machine's clock"
    lines = [f"{result['load']}, {result['policy']} ({result['requests']:,} requests, {way}):"]
    for name, value in result.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{part} {figure:,.1f}" for part, figure in value.items())
            lines.append(f"  {name.replace('_', ' '):<22} {shown}")
        elif isinstance(value, float):
            lines.append(f"  {name.replace('_', ' '):<22} {value:,.3f}")
    return "\n".join(lines)
