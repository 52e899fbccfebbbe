"""What adapters cost on CPUs, as JSON lines: `PYTHONPATH=. python` this file.

Two engines in one process, with --enable-lora and without, take turns at the same requests on the default model:
`prompt` is a prompt of 512 tokens with one output, `one` and `eight` are decodes of that many short requests. With the
flag they have no adapter, all the same, or each its own. Adapters are random numbers of rank 16 on all linear layers.
The best of some turns counts, in seconds of the processor: other programs on the machine change these little. On one
thread, because threads that wait count as busy.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from bough.bench.offline import Job
from bough.core.settings import Settings
from bough.executor import adapters as executor_adapters
from bough.layers.adapters import Adapter
from tests.executor.gpu_bench_lora import Runner

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def measure(flags: dict[str, Any], rank: int, turns: int, output: int) -> dict[str, dict[str, float]]:
    def read(path: str, config: object, shapes: Mapping[str, tuple[int, int]], settings: object) -> Any:
        drawn: Adapter = {
            name: (torch.randn(rank, inputs) * 0.01, torch.randn(outputs, rank) * 0.01)
            for name, (outputs, inputs) in shapes.items()
            if name.endswith(LINEAR)
        }
        return drawn, path

    executor_adapters.read_adapter = read
    plain = Runner(Settings.from_flat({**flags, "disable_radix_cache": True}))
    adapted = Runner(Settings.from_flat({**flags, "disable_radix_cache": True, "enable_lora": True}))
    names = [f"adapter{n}" for n in range(8)]
    for name in names:
        adapted.adapters.load(name, name)
    prompts = [[7 + 13 * n + i for i in range(16)] for n in range(8)]
    loads = {
        "prompt": [Job([5 + 3 * i for i in range(512)], 1)],
        "one": [Job(prompts[0], output)],
        "eight": [Job(prompt, output) for prompt in prompts],
    }
    kinds = {
        "off": (plain, [""] * 8),
        "none": (adapted, [""] * 8),
        "1": (adapted, names[:1] * 8),
        "8": (adapted, names),
    }
    found: dict[str, dict[str, float]] = {load: {} for load in loads}
    for _ in range(turns):
        for load, jobs in loads.items():
            for kind, (runner, chosen) in list(kinds.items())[: 4 if len(jobs) > 1 else 3]:
                began = time.process_time()
                runner.run(jobs, chosen[: len(jobs)])
                seconds = time.process_time() - began
                found[load][kind] = min(found[load].get(kind, seconds), seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--output", type=int, default=32, help="tokens of each decode")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--flags", default="{}", help="settings of both engines, as JSON")
    options = parser.parse_args()
    flags = {"model_path": options.model, "max_total_tokens": 8192, "cpu_threads": 1, **json.loads(options.flags)}
    for load, times in measure(flags, options.rank, options.turns, options.output).items():
        relative = {f"{kind} speed": round(times["off"] / seconds, 3) for kind, seconds in times.items()}
        print(json.dumps({"load": load, "seconds": {k: round(v, 4) for k, v in times.items()}, **relative}))


if __name__ == "__main__":
    main()
