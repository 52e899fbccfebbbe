"""What drafts cost and gain on a GPU, as JSON lines: `PYTHONPATH=. python` this file `verify qwen3-0.6b`, or
`serve NGRAM` (or `EAGLE3 --draft HEAD`, as `bough train-draft` writes it), or `distil TEXTS --draft FOLDER` and
`serve STANDALONE --draft FOLDER`.

`verify` drives the executor by hand with random weights: the time of steps that verify some tokens of each row, against
steps of one token. `serve` answers the prompts of `bough bench speculation` with the default model, with drafts and
without in turns. `distil` makes a smaller model with the default model's vocabulary, since none is published: its first
layers, trained on TEXTS, which `bough train-draft --texts TEXTS` wrote. None runs longer than `--limit` seconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import signal
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bough import Engine
from bough.core.plan import BatchPlan, Executor
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.plain_plans import decode_plan, prompt_plan
from bough.loader.locate import find_files
from bough.training.eagle3 import Text, load_model
from tests.bench.speculation import LOADS, compare

BATCHES, WIDTHS, KEYS = (1, 8, 64), (1, 2, 4, 8, 16), 512
STEPS, ROOM = 24, 3 * 24 * 16 + 64  # tokens that a row's pages have room for behind its prompt
NEW_TOKENS, ROUNDS, ANSWERED = 192, 4, (1, 4, 16, 64)


def drafted(step: int, batch: int, width: int, draw: np.random.Generator) -> BatchPlan:
    """Drafts that hardly ever hold: what is computed is the same."""
    plan = decode_plan(step, batch)
    if width == 1:
        return plan
    given, tokens = plan.given + width - 1, draw.integers(0, 1000, batch * (width - 1)).astype(np.int32)
    return replace(plan, query_lens=given + 1, given=given, tokens=tokens)


def run_steps(executor: Executor, batch: int, width: int, steps: int) -> tuple[float, float]:
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
    """`shape` may be `default`, the default model itself, also on a CPU."""
    flags: dict[str, Any] = {
        **({} if shape == "default" else {"model_shape": shape}),
        "context_length": 4096,
        "max_running_requests": max(BATCHES),
        "max_total_tokens": max(BATCHES) * (KEYS + ROOM),
        "chunked_prefill_size": KEYS,
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": max(WIDTHS),
    }
    settings = Settings.from_flat(flags)
    executor = build_executor(find_files(settings.model), settings).executor
    each, of_one = -(-(KEYS + ROOM) // settings.memory.page_size), dict[int, float]()
    for batch in BATCHES:
        for width in WIDTHS:
            for row in range(batch):  # each measurement begins with the same keys
                pages = np.arange(1 + row * each, 1 + (row + 1) * each, dtype=np.int32)
                executor.launch(prompt_plan(row, np.arange(KEYS, dtype=np.int32) % 1000 + row, pages)).wait()
            by = capture(executor, batch, width) if isinstance(executor, CudaExecutor) else "CPU"
            run_steps(executor, batch, width, 4)
            device_ms, wall_ms = run_steps(executor, batch, width, STEPS)
            of_one.setdefault(batch, device_ms)
            found = {"shape": shape, "batch": batch, "tokens_a_row": width, "keys": KEYS, "device_ms": device_ms}
            found |= {"wall_ms": wall_ms, "times_one": device_ms / of_one[batch]}
            report(found | {"by": by})
    executor.close()


def capture(executor: CudaExecutor, batch: int, width: int) -> str:
    """Has steps of this size launched by a CUDA graph, where there is one."""
    kinds, drafts = (executor._few_keys_graphs, executor._decode_graphs), executor._drafted.graphs
    short = executor._drafted.few_keys
    for graphs in kinds if width == 1 else (drafts[width], *((short[width],) if width in short else ())):
        if batch in graphs._sizes and batch not in graphs._graphs:
            with torch.inference_mode():
                graphs._graphs[batch] = graphs._capture(batch)
    return "graph" if width == 1 or batch in drafts[width]._graphs else "host"


def distil(texts: str, draft: str, whole: str | None, layers: int, steps: int, batch_size: int = 32) -> None:
    """The model's first layers, as a model of their own that learns the whole model's distributions."""
    files = find_files(Settings.from_flat({} if whole is None else {"model_path": whole}).model)
    model = load_model(files.folder, files.gguf, "auto")
    small = copy.deepcopy(model).float().requires_grad_(True).train()
    small.model.layers = small.model.layers[:layers]
    small.config.num_hidden_layers = layers
    small.config.layer_types = None
    learner = torch.optim.AdamW(small.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(learner, 1e-3, steps + 1, pct_start=0.04, cycle_momentum=False)
    read, draw = [Text(*json.loads(line)) for line in Path(texts).read_text().splitlines()], random.Random(0)
    for step in range(1, steps + 1):
        batch = draw.sample(read, batch_size)
        longest = max(len(text.ids) for text in batch)
        ids = torch.tensor([text.ids + [0] * (longest - len(text.ids)) for text in batch], device=model.device)
        own = torch.tensor([[text.start - 1 <= i < len(text.ids) - 1 for i in range(longest)] for text in batch])
        with torch.no_grad():
            wanted = model(input_ids=ids, use_cache=False).logits[own].float()
        with torch.autocast(model.device.type, torch.bfloat16):
            found = small.lm_head(small.model(input_ids=ids, use_cache=False).last_hidden_state[own]).float()
        loss = -(wanted.softmax(-1) * found.log_softmax(-1)).sum(-1).mean()
        learner.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        learner.step()
        rates.step()
        if step % (steps // 10) == 0:
            same = (found.argmax(-1) == wanted.argmax(-1)).float().mean()
            report({"step": step, "loss": loss.item(), "equal_best_tokens": same.item()})
    small.bfloat16().save_pretrained(draft)


def serve(options: argparse.Namespace) -> None:
    """An engine with drafts and one without, in turns."""
    kind, draft, model, batches = options.what, options.draft, options.model, options.batch_size
    rows = max(batches)
    flags: dict[str, Any] = {"context_length": 2048, "max_running_requests": rows, "max_total_tokens": 2048 * rows}
    given = {"speculative_algorithm": kind, "speculative_ngram_capacity": 0, "speculative_draft_model_path": draft}
    with Engine(model, **flags) as without, Engine(model, **flags, **given) as speculating:
        for engine in (without, speculating):
            engine.generate(list(LOADS.values()), {"max_new_tokens": 8})
        time.sleep(options.settle)  # graphs are captured when nothing runs
        for load in LOADS:
            for batch in batches:
                report(
                    {"speculation": kind, **compare(without, speculating, load, batch, options.tokens, options.rounds)}
                )


def report(line: dict[str, Any]) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
    print(json.dumps(rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("verify", "serve", "distil"))
    parser.add_argument("what", help="the shape, who guesses, or the texts")
    parser.add_argument("--draft", help="the folder of the head or the smaller model")
    parser.add_argument("--batch-size", type=int, nargs="+", default=ANSWERED, help="requests at once, each in turn")
    parser.add_argument("--layers", type=int, default=4, help="of the smaller model")
    parser.add_argument("--steps", type=int, default=1000, help="batches from which it learns")
    parser.add_argument("--model", help="another model than the default one")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds in which graphs are captured")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="of each answer")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="after the first")
    parser.add_argument("--limit", type=int, default=60, help="seconds after which it is ended")
    options = parser.parse_args()
    signal.alarm(options.limit)
    if options.part == "verify":
        verify(options.what)
    elif options.part == "distil":
        distil(options.what, options.draft, options.model, options.layers, options.steps)
    else:
        serve(options)


if __name__ == "__main__":
    main()
