"""`bough bench one-batch`: one batch straight through the executor, without processes, queues or text."""

import argparse
import contextlib
import json
import statistics
import time
from typing import Any

import numpy as np

from bough.core.errors import SettingsError
from bough.core.plan import Executor, Limits
from bough.core.setting_checks import require_counts
from bough.core.settings import Settings
from bough.executor.plain_plans import decode_plan, prompt_plan


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16], help="requests of a batch, in turn")
    load.add_argument("--input-len", type=int, default=128, help="tokens of each prompt")
    load.add_argument("--output-len", type=int, default=16, help="tokens of each answer")
    load.add_argument("--json", action="store_true", help="print one JSON object per batch size")


def main(args: argparse.Namespace, flat: dict[str, Any]) -> int:
    require_counts(args, ("batch_size", "input_len", "output_len"))
    from bough.executor.build import build_executor
    from bough.loader.locate import find_files

    settings = Settings.from_flat(flat)
    executor = build_executor(find_files(settings.model), settings).executor
    with contextlib.closing(executor):
        for size in args.batch_size:
            _check_fit(executor.limits(), size, args.input_len, args.output_len)
        run_batch(executor, 1, 8, 2)  # warm-up: the first step touches every weight
        while executor.idle():
            pass
        for size in args.batch_size:
            result = run_batch(executor, size, args.input_len, args.output_len)
            print(json.dumps(result) if args.json else _as_text(result))
    return 0


def _check_fit(limits: Limits, batch: int, input_len: int, output_len: int) -> None:
    """Refuses a batch that this executor cannot hold."""
    length = input_len + output_len
    if length > limits.context_length:
        problem = f"--input-len {input_len} and --output-len {output_len} are {length} tokens, the context is"
        advice = "Shorten one of them or give a larger --context-length."
        raise SettingsError(f"{problem} {limits.context_length} tokens. {advice}")
    if batch > limits.rows:
        problem = f"--batch-size {batch} is more than the {limits.rows} requests that run at once"
        raise SettingsError(f"{problem}; give a larger --max-running-requests.")
    held, needed = limits.pages[0] * limits.page_size, batch * _pages_of(limits, length) * limits.page_size
    if needed > held:
        problem = f"--batch-size {batch} needs {needed} tokens of KV cache, there are {held}"
        raise SettingsError(f"{problem}; take fewer, or give a larger --max-total-tokens or --mem-fraction-static.")


def _pages_of(limits: Limits, tokens: int) -> int:
    return -(-tokens // limits.page_size)


def run_batch(executor: Executor, batch: int, input_len: int, output_len: int) -> dict[str, Any]:
    """Prefills `batch` prompts in one step each, then decodes them together."""
    limits = executor.limits()
    pages_each = _pages_of(limits, input_len + output_len)
    assert batch <= limits.rows and batch * pages_each <= limits.pages[0], "the batch does not fit the KV cache"
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    for row in range(batch):
        tokens = rng.integers(0, min(limits.vocab_size, 10_000), input_len).astype(np.int32)
        first = 1 + row * pages_each
        pages = np.arange(first, first + pages_each, dtype=np.int32)
        executor.launch(prompt_plan(row, tokens, pages, limits.pages, limits.groups)).wait()
    prefill_s = time.perf_counter() - began
    step_s = []
    for step in range(output_len - 1):
        began = time.perf_counter()
        executor.launch(decode_plan(step, batch, len(limits.pages))).wait()
        step_s.append(time.perf_counter() - began)
    median_s = statistics.median(step_s) if step_s else float("nan")
    return {
        "batch_size": batch,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_latency_s": prefill_s,
        "prefill_throughput": batch * input_len / prefill_s,
        "median_decode_latency_ms": 1e3 * median_s,
        "median_decode_throughput": batch / median_s,
        "total_throughput": batch * (input_len + output_len) / (prefill_s + sum(step_s)),
    }


def _as_text(result: dict[str, Any]) -> str:
    return (
        f"batch {result['batch_size']:>4}, {result['input_len']} in, {result['output_len']} out: "
        f"prefill {result['prefill_latency_s']:.3f} s ({result['prefill_throughput']:.0f} tokens/s), "
        f"decode step {result['median_decode_latency_ms']:.2f} ms ({result['median_decode_throughput']:.1f} tokens/s)"
    )
