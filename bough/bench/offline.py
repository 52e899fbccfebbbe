"""`bough bench offline`: all requests at once through the offline engine.

Engines are compared on four seeded loads of token ids, at temperature 0.6. W1: 256 requests, prompts and outputs of
100-1024 tokens. W2: 512 requests over 8 prefixes of 1024 tokens, 64 own tokens, 64 outputs. W3: one request, 128 in,
512 out. W4: 32 prompts of 4096 tokens, one output.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import psutil

from bough.bench.metrics import shown
from bough.core.errors import RequestError
from bough.core.files import table_beside
from bough.core.setting_checks import add_table, require_counts

FLAGS = table_beside(__file__, "flags.toml")["offline"]
WORKLOADS = ("W1", "W2", "W3", "W4")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_table(parser, FLAGS, workload={"choices": [*WORKLOADS, "random", "shared-prefix"]})


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    require_counts(args, ("num_prompts", "input_len", "output_len", "groups", "per_group", "vocab", "repeat"))
    loads = {name: _jobs_of(name, args) for name in args.workload}
    results = _measure(settings, loads, args.repeat, "", process_age_s())
    if args.compare_no_cache:  # the second engine of a process: its start is its own
        plain = _measure({**settings, "disable_radix_cache": True}, loads, args.repeat, " without prefix cache", 0.0)
        for cached, uncached in zip(results, plain, strict=True):
            cached["speed_up"] = uncached["duration_s"] / cached["duration_s"]
        results += plain
    for result in results:
        print(json.dumps(result) if args.json else as_text(result))
    return 0


def _jobs_of(name: str, args: argparse.Namespace) -> list[Job]:
    if name == "random":
        draw, inputs = random.Random(args.seed), range(args.input_len)
        return [Job([draw.randint(0, args.vocab) for _ in inputs], args.output_len) for _ in range(args.num_prompts)]
    if name == "shared-prefix":
        return shared_prefix_jobs(
            args.groups, args.per_group, args.prefix_len, args.input_len, args.output_len, args.seed, args.vocab
        )
    return workload(name, args.seed, args.vocab)


def _measure(
    settings: dict[str, Any], loads: dict[str, list[Job]], repeat: int, label: str, before_s: float
) -> list[dict[str, Any]]:
    """Runs each load `repeat` times on an empty cache; the best run counts. `before_s` has already passed since the
    start."""
    began = time.perf_counter() - before_s
    from bough.launch.engine import Engine  # which takes its time, and is part of the start

    with Engine(**settings) as engine:
        engine.generate(input_ids=[1, 2, 3, 4], sampling_params={"max_new_tokens": 2, "ignore_eos": True})
        first_token_s = time.perf_counter() - began
        while engine.get_server_info()["internal_states"][0]["warming_up"]:
            time.sleep(0.05)
        warm_s = time.perf_counter() - began
        runs = {name: [_run_once(engine, jobs) for _ in range(repeat)] for name, jobs in loads.items()}
    return [
        {
            "run": name + label,
            **min(of_load, key=lambda run: float(run["duration_s"])),
            "durations_s": [run["duration_s"] for run in of_load],
            "first_token_s": first_token_s,  # from the start of the process
            "warm_s": warm_s,  # and until every graph is captured
        }
        for name, of_load in runs.items()
    ]


def _run_once(engine: Any, jobs: list[Job]) -> dict[str, Any]:
    engine.flush_cache()
    began = time.perf_counter()
    outputs = engine.generate(
        input_ids=[job.prompt for job in jobs], sampling_params=[sampling_of(job) for job in jobs]
    )
    duration_s = time.perf_counter() - began
    meta = [output["meta_info"] for output in outputs]
    failed = [m["finish_reason"]["message"] for m in meta if m["finish_reason"]["type"] == "abort"]
    if failed:  # the figures of a load that was not served mean nothing
        raise RequestError(f"{len(failed)} of {len(jobs)} requests failed, the first with: {failed[0]}")
    prompt, cached, out = (sum(m[k] for m in meta) for k in ("prompt_tokens", "cached_tokens", "completion_tokens"))
    return {
        "successful_requests": len(jobs),
        "duration_s": duration_s,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": out,
        "request_throughput": len(jobs) / duration_s,
        "input_throughput": prompt / duration_s,
        "output_throughput": out / duration_s,
        "total_throughput": (prompt + out) / duration_s,
        "ms_per_output_token": 1e3 * duration_s / out,
        "retractions": sum(m["num_retractions"] for m in meta),
    }


def process_age_s() -> float:
    """Seconds since this process was started. psutil adds a boot time in whole seconds, which is taken out again where
    there is a clock that runs since then."""
    started_s = psutil.Process().create_time()
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return time.time() - started_s
    return time.clock_gettime(time.CLOCK_BOOTTIME) - (started_s - psutil.boot_time())


def as_text(result: dict[str, Any]) -> str:
    lines = [f"{result['run']}:"]
    for name, value in result.items():
        if name != "run":
            values = ", ".join(map(shown, value if isinstance(value, list) else [value]))
            lines.append(f"  {name.replace('_', ' '):<31} {values:>14}")
    return "\n".join(lines)


# ---- the loads


@dataclass(frozen=True, slots=True)
class Job:
    prompt: list[int]
    output_tokens: int


def workload(name: str, seed: int = 0, vocab: int = 10_000) -> list[Job]:
    r = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [r.randint(0, vocab) for _ in range(n)]

    if name == "W1":
        prompts = [ids(r.randint(100, 1024)) for _ in range(256)]
        return [Job(p, r.randint(100, 1024)) for p in prompts]
    if name == "W2":
        prefixes = [ids(1024) for _ in range(8)]
        jobs = [Job(prefixes[i % 8] + ids(64), 64) for i in range(512)]
        r.shuffle(jobs)
        return jobs
    if name == "W3":
        return [Job(ids(128), 512)]
    return [Job(ids(4096), 1) for _ in range(32)]


def shared_prefix_jobs(
    groups: int, per_group: int, prefix_len: int, question_len: int, output_len: int, seed: int = 0, vocab: int = 10_000
) -> list[Job]:
    """Groups of requests that share a prefix, shuffled."""
    r = random.Random(seed)
    jobs = []
    for _ in range(groups):
        prefix = [r.randint(0, vocab) for _ in range(prefix_len)]
        jobs += [Job(prefix + [r.randint(0, vocab) for _ in range(question_len)], output_len) for _ in range(per_group)]
    r.shuffle(jobs)
    return jobs


def sampling_of(job: Job) -> dict[str, Any]:
    return {"max_new_tokens": job.output_tokens, "temperature": 0.6, "ignore_eos": True}
