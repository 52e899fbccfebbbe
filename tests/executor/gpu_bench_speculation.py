"""What drafts cost and gain on a GPU, as JSON lines: `PYTHONPATH=. python` this file `verify qwen3-0.6b`, or
`serve NGRAM` (or `EAGLE3 --draft HEAD`, as `bough train-draft` writes it).

`verify` drives the executor by hand with random weights: the time of steps that verify some tokens of each row, against
steps of one token. `serve` answers the prompts of `bough bench speculation` with the default model, with drafts and
without in turns. Neither runs longer than `--limit` seconds.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bough import Engine
from bough.core.plan import BatchPlan
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.plain_plans import decode_plan, prompt_plan
from bough.loader.locate import find_files
from tests.bench.speculation import LOADS, compare

BATCHES, WIDTHS, KEYS = (1, 8, 64), (1, 2, 4, 8, 16), 512
STEPS, ROOM = 24, 3 * 24 * 16 + 64  # tokens that a row's pages have room for behind its prompt
NEW_TOKENS, ROUNDS, ANSWERED = 192, 4, (1, 4, 8, 16)


def drafted(step: int, batch: int, width: int, draw: np.random.Generator) -> BatchPlan:
    """Drafts that hardly ever hold: what is computed is the same."""
    plan = decode_plan(step, batch)
    if width == 1:
        return plan
    given, tokens = plan.given + width - 1, draw.integers(0, 1000, batch * (width - 1)).astype(np.int32)
    return replace(plan, query_lens=given + 1, given=given, tokens=tokens)


def run_steps(executor: CudaExecutor, batch: int, width: int, steps: int) -> tuple[float, float]:
    """Milliseconds of a step on the device, and on the wall: one step is launched ahead."""
    draw, spans, before = np.random.default_rng(0), [], None
    began = time.perf_counter()
    for step in range(steps):
        running = executor.launch(drafted(step, batch, width, draw))
        if before is not None:
            spans.append(before.wait().device_span)
        before = running
    assert before is not None
    before.wait()
    wall = (time.perf_counter() - began) / steps
    taken = [span[1] - span[0] for span in spans[len(spans) // 3 :] if span is not None]
    return 1e3 * statistics.median(taken), 1e3 * wall


def verify(shape: str) -> None:
    flags: dict[str, Any] = {
        "model_shape": shape,
        "context_length": 4096,
        "max_running_requests": max(BATCHES),
        "max_total_tokens": max(BATCHES) * (KEYS + ROOM),
        "chunked_prefill_size": KEYS,
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": max(WIDTHS),
    }
    settings = Settings.from_flat(flags)
    executor = build_executor(find_files(settings.model), settings).executor
    assert isinstance(executor, CudaExecutor)
    size, drafts = settings.memory.page_size, executor._drafted.graphs
    each, of_one = -(-(KEYS + ROOM) // size), dict[int, float]()
    for batch in BATCHES:
        for width in WIDTHS:
            for row in range(batch):  # each measurement begins with the same keys
                pages = np.arange(1 + row * each, 1 + (row + 1) * each, dtype=np.int32)
                executor.launch(prompt_plan(row, np.arange(KEYS, dtype=np.int32) % 1000 + row, pages)).wait()
            kinds = executor._few_keys_graphs, executor._decode_graphs
            short = executor._drafted.few_keys
            captured = kinds if width == 1 else (drafts[width], *((short[width],) if width in short else ()))
            for graphs in captured:
                if batch in graphs._sizes and batch not in graphs._graphs:
                    with torch.inference_mode():
                        graphs._graphs[batch] = graphs._capture(batch)
            run_steps(executor, batch, width, 4)
            device_ms, wall_ms = run_steps(executor, batch, width, STEPS)
            of_one.setdefault(batch, device_ms)
            found = {"shape": shape, "batch": batch, "tokens_a_row": width, "keys": KEYS, "device_ms": device_ms}
            found |= {"wall_ms": wall_ms, "times_one": device_ms / of_one[batch]}
            captured_size = width == 1 or batch in drafts[width]._graphs
            report(found | {"by": "graph" if captured_size else "host"})
    executor.close()


def serve(kind: str, draft: str | None, model: str | None, settle_s: float) -> None:
    """An engine with drafts and one without, in turns."""
    flags: dict[str, Any] = {"context_length": 2048, "max_running_requests": 16, "max_total_tokens": 32768}
    given = {"speculative_algorithm": kind, "speculative_ngram_capacity": 0, "speculative_draft_model_path": draft}
    with Engine(model, **flags) as without, Engine(model, **flags, **given) as speculating:
        for engine in (without, speculating):
            engine.generate(list(LOADS.values()), {"max_new_tokens": 8})
        time.sleep(settle_s)  # graphs are captured when nothing runs
        for load in LOADS:
            for batch in ANSWERED:
                report({"speculation": kind, **compare(without, speculating, load, batch, NEW_TOKENS, ROUNDS)})


def report(line: dict[str, Any]) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
    print(json.dumps(rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("verify", "serve"))
    parser.add_argument("what", help="the shape, or who guesses")
    parser.add_argument("--draft", help="the folder of the head")
    parser.add_argument("--model", help="another model than the default one")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds in which graphs are captured")
    parser.add_argument("--limit", type=int, default=60, help="seconds after which it is ended")
    options = parser.parse_args()
    signal.alarm(options.limit)
    if options.part == "verify":
        verify(options.what)
    else:
        serve(options.what, options.draft, options.model, options.settle)


if __name__ == "__main__":
    main()
