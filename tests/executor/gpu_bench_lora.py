"""What adapters cost on a GPU, as one JSON line: `PYTHONPATH=. python` this file `off`, or a number of adapters.

Scheduler and executor in one process answer W1 (`bough.bench.offline`) with Llama-3.1-8B's shape, random weights and
adapters of rank 16 on all linear layers, which requests choose in turn. `off`: without --enable-lora; `0`: with it, and
no request uses it. All adapters are copies of one, in slots of their own, which costs the same as if they differed.
Behind the load one request measures an adapter that is not in a slot yet, and again when it is.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Mapping
from typing import Any

import torch

from bough.bench.offline import Job, sampling_of, workload
from bough.core.settings import Settings
from bough.executor import adapters as executor_adapters
from bough.executor.build import build_executor
from bough.executor.cuda_executor import CudaExecutor
from bough.layers.adapters import Adapter
from bough.loader.locate import find_files
from bough.scheduler.adapters import Adapters
from bough.scheduler.loop import Scheduler
from tests.fakes.boxes import FakeInbox, FakeOutbox, generate

RANK, SLOTS, ROWS = 16, 64, 256


def random_adapter(shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    """Made on the device, kept in pinned memory of the host, as adapters are that were read."""

    def draw(*shape: int) -> torch.Tensor:
        return (0.01 * torch.randn(shape, device="cuda")).to(torch.bfloat16).cpu().pin_memory()

    return {name: (draw(RANK, inputs), draw(outputs, RANK)) for name, (outputs, inputs) in shapes.items()}


class Runner:
    """Asks, and turns the scheduler's loop until all is answered."""

    def __init__(self, settings: Settings) -> None:
        self.executor = build_executor(find_files(settings.model), settings).executor
        self._inbox, self._out, self._asked = FakeInbox(), FakeOutbox(), 0
        self.adapters = Adapters(self.executor if settings.lora.enable_lora else None, settings.lora)
        parts = {"memory": settings.memory, "settings": settings.scheduler, "adapters": self.adapters}
        self._scheduler = Scheduler(self.executor, self._inbox, self._out, **parts)  # type: ignore[arg-type]

    def run(self, jobs: list[Job], adapters: list[str]) -> float:
        """Seconds."""
        handles = range(self._asked, self._asked + len(jobs))
        self._asked += len(jobs)
        began = time.perf_counter()
        for handle, job, name in zip(handles, jobs, adapters, strict=True):
            self._inbox.pending.append(generate(handle, job.prompt, adapter=name, **sampling_of(job)))
        while not all(handle in self._out.ended for handle in handles):
            self._scheduler.turn()
        assert all(len(self._out.outputs[h]) == job.output_tokens for h, job in zip(handles, jobs, strict=True))
        return time.perf_counter() - began


def measure(adapters: int | None, shape: str, requests: int) -> dict[str, Any]:
    flags: dict[str, Any] = {"model_shape": shape, "context_length": 8192, "max_running_requests": ROWS}
    flags |= {"disable_tree_attention": True, "enable_lora": adapters is not None, "max_loras_per_batch": SLOTS}
    began = time.perf_counter()
    runner = Runner(Settings.from_flat(flags))
    executor = runner.executor
    assert isinstance(executor, CudaExecutor)
    names = [f"adapter{n}" for n in range(adapters or 0)] or [""]
    if adapters:
        drawn: list[Adapter] = []

        def read(path: str, config: object, shapes: Mapping[str, tuple[int, int]], settings: object) -> Any:
            if not drawn:
                drawn.append(random_adapter(shapes))
            return drawn[0], path

        executor_adapters.read_adapter = read
        for name in [*names, "cold"]:
            runner.adapters.load(name, name)
    adapted = executor._adapted_graphs, executor._adapted_mixed_graphs
    with torch.inference_mode():
        for graphs in adapted if adapters else (executor._decode_graphs, executor._mixed_graphs):
            while graphs.capture_next():
                pass
    warm = workload("W1", seed=1)[:32]
    runner.run([Job(job.prompt, 16) for job in warm], [names[n % len(names)] for n in range(len(warm))])
    found: dict[str, Any] = {"adapters": "off" if adapters is None else adapters, "shape": shape, "rank": RANK}
    found |= {"slots": SLOTS, "start_s": time.perf_counter() - began}
    jobs = workload("W1")[:requests]
    seconds = runner.run(jobs, [names[n % len(names)] for n in range(len(jobs))])
    tokens = sum(job.output_tokens for job in jobs)
    found |= {"requests": len(jobs), "seconds": seconds, "output_tok_s": tokens / seconds}
    if adapters:
        for number, kind in enumerate(("cold", "placed")):
            one = [Job([100 + number] * 128, 1)]  # of which nothing is cached
            found[f"first_token_{kind}_ms"] = 1e3 * runner.run(one, ["cold"])
    found["device"] = torch.cuda.get_device_name()
    executor.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", help=f"off, or how many, up to {SLOTS}")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--requests", type=int, default=256, help="of W1's")
    parser.add_argument("--limit", type=int, default=120, help="seconds after which it is ended")
    options = parser.parse_args()
    signal.alarm(options.limit)
    count = None if options.adapters == "off" else int(options.adapters)
    line = measure(count, options.shape, options.requests)
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}))


if __name__ == "__main__":
    main()
