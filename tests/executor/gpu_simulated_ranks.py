"""One rank's share of large models on one GPU, as a table: `PYTHONPATH=. python tests/executor/gpu_simulated_ranks.py`.

Each case is a shape and the number of ranks of which one is run (`--simulate-tp`). 256 requests decode together; of the
steps with all of them the table has the median on the device, of the host's work (planning, launching, committing), and
the host's share of the device's time, which must stay below 1. The modelled columns are docs/scaling.md's: the same
step, and its exchanges, which no figure here contains.

The case `protocol`, which must be asked for, runs W1 and W3 with Qwen3-0.6B's shape, in turns on a plain engine and on
one whose first rank sends its plans to a process and sums through a process group of its own: what the code for ranks
costs at N = 1.

Cases of a wave start side by side, each in a process, and measure one after the other. A case that fails says why.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

from bough.bench.offline import Job, sampling_of, workload
from bough.core.finish import FinishAbort
from bough.core.settings import Settings
from bough.distributed.cost_model import GPUS, Cluster, Load, Split, step_cost
from bough.distributed.group import ALONE, RankGroup, TorchGroup
from bough.distributed.topology import ONE_RANK
from bough.executor.build import build_executor
from bough.executor.load_model import resolve_config
from bough.executor.ranks import LeadingExecutor
from bough.executor.splits import share_of
from bough.loader.locate import find_files
from bough.messages.channels import Sender
from bough.messages.outputs import Open, Reply, StepOutput
from bough.messages.ranks import pack_array
from bough.messages.requests import Ping, ProcessCommand
from bough.observability.timeline import Timeline
from bough.scheduler.loop import Scheduler
from tests.fakes.boxes import FakeInbox, generate

ROWS, PROMPT, OUTPUT, WARM_OUTPUT = 256, 512, 64, 16
WAVES = (
    ("llama-3.1-8b:8", "llama-3.1-8b:2", "llama-3.1-70b:8", "llama-3.1-70b:4"),
    ("deepseek-v3:8",),
)
ROOT = Path(__file__).parents[2]
TINY = {  # for a try without a GPU
    "llama": {"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 128},
    "deepseek": {"n_routed_experts": 16, "moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "intermediate_size": 128},
}
DRAIN = """
import os, sys, zmq
socket, parent = zmq.Context().socket(zmq.PULL), os.getppid()
socket.RCVHWM = 0
socket.bind(sys.argv[1])
while os.getppid() == parent:
    if socket.poll(1000):
        socket.recv()
"""


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    ranks: int
    layers: int | None
    tiny: bool

    @staticmethod
    def parse(text: str, tiny: bool) -> Case:
        """SHAPE:RANKS or SHAPE:RANKS:LAYERS."""
        shape, *numbers = text.split(":")
        ranks, layers = (*map(int, numbers), *(1, 0)[len(numbers) :])
        return Case(text, shape, ranks, layers or None, tiny)

    @property
    def on_gpu(self) -> bool:
        return not self.tiny and torch.cuda.is_available()

    def settings(self, rows: int, **more: Any) -> Settings:
        overrides: dict[str, Any] = {} if self.layers is None else {"num_hidden_layers": self.layers}
        if self.tiny:
            overrides |= {"hidden_size": 64, "num_hidden_layers": self.layers or 4, "vocab_size": 512}
            overrides |= TINY[self.shape.split("-")[0]]
        flat: dict[str, Any] = {"model_shape": self.shape, "simulate_tp": self.ranks, "context_length": 4096}
        flat |= {"max_running_requests": rows, "json_model_override_args": json.dumps(overrides)}
        if self.shape.startswith("deepseek"):
            flat["simulate_routing"] = "uniform"
            if self.on_gpu:
                flat["quantization"] = "fp8"
        if not self.on_gpu:
            flat |= {"device": "cpu", "attention_backend": "torch", "cpu_threads": 1}
        return Settings.from_flat(flat | more)


class OneRank(TorchGroup):
    """A process group of one, through which every sum and every token goes all the same."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._exchange("sum up", dist.all_reduce, x, dist.ReduceOp.SUM, None)
        return x

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        self._exchange("share tokens", dist.broadcast, x, 0, None)
        return x

    @classmethod
    def open(cls, device: torch.device) -> OneRank:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
        return cls(ONE_RANK, device)


class Outbox:
    """Sends what a detokenizer gets to a process that reads it, and counts the requests that have ended."""

    def __init__(self, send: Sender) -> None:
        self._send, self.ended = send, 0

    def tokens(self, message: Open | StepOutput | Ping | ProcessCommand) -> None:
        self._send.send(message)
        if isinstance(message, StepOutput):
            self.ended += len(message.ended)
            assert not any(isinstance(each.reason, FinishAbort) for each in message.ended), message.ended

    def reply(self, message: Reply) -> None:
        pass


class Runner:
    """Scheduler and executor in this process."""

    def __init__(self, settings: Settings, folder: Path, group: RankGroup = ALONE) -> None:
        context: zmq.Context[Any] = zmq.Context()
        self.loaded = build_executor(find_files(settings.model), settings, group)
        self.executor: Any = self.loaded.executor
        if isinstance(group, OneRank):
            rank = Sender(context, drain(folder / "rank"), pack=pack_array)
            self.executor = LeadingExecutor(self.loaded.executor, rank.send)
        self._inbox, self._out, self.timeline = FakeInbox(), Outbox(Sender(context, drain(folder / "text"))), Timeline()
        parts: dict[str, Any] = {"memory": settings.memory, "settings": settings.scheduler, "timeline": self.timeline}
        self._scheduler = Scheduler(self.executor, self._inbox, self._out, **parts)
        self._asked = 0

    def run(self, jobs: Sequence[Job]) -> float:
        """Seconds."""
        began = time.perf_counter()
        for job in jobs:
            self._inbox.pending.append(generate(self._asked, job.prompt, **sampling_of(job)))
            self._asked += 1
        while self._out.ended < self._asked:
            self._scheduler.turn()
        return time.perf_counter() - began

    def capture_used(self) -> None:
        """The graphs of the sizes that came up more than once."""
        while self.executor.idle(True):
            pass


def drain(path: Path) -> str:
    """The address of a new process that throws away what it gets, and ends with this one."""
    address, nothing = f"ipc://{path}", subprocess.DEVNULL
    subprocess.Popen([sys.executable, "-c", DRAIN, address], stdin=nothing, stdout=nothing)
    return address


def decode_load(rows: int, vocab: int, output: int) -> list[Job]:
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocab, (rows, PROMPT), generator=draw).tolist()
    return [Job(prompt, output) for prompt in prompts]


def measure_steps(case: Case, folder: Path, rows: int) -> Any:
    """Builds and warms up; then, when asked to go on, what the table has."""
    began = time.perf_counter()
    tokens = rows * (PROMPT + OUTPUT + 64)
    settings = case.settings(rows, max_total_tokens=tokens, chunked_prefill_size=4096, page_size=1)
    runner, vocab = Runner(settings, folder), 500 if case.tiny else 10_000
    runner.run(decode_load(rows, vocab, WARM_OUTPUT))
    runner.capture_used()
    start_s = time.perf_counter() - began
    yield
    since = time.monotonic()
    runner.run(decode_load(rows, vocab, OUTPUT))  # their prompts are cached
    steps = runner.timeline.show([], since, 0.0, "")["steps"]
    full = [step for step in steps if step[8:] == (rows, 0)][4:]
    on_device = statistics.median(end - begin for *_, (begin, end), _, _ in full)
    on_host = statistics.median(step[3] - step[1] + step[6] - step[5] for step in full)
    each = (full[-1][6] - full[0][6]) / (len(full) - 1)
    config, limits = resolve_config(find_files(settings.model), settings), runner.executor.limits()
    width = 1.0 if settings.model.quantization == "fp8" else 2.0
    share = share_of(config, width, torch.bfloat16, case.ranks)
    cost = step_cost(share, Cluster(GPUS["H200"], 8), Split(case.ranks), Load(rows, PROMPT + OUTPUT / 2))
    peak = torch.cuda.max_memory_reserved() if case.on_gpu else 0
    yield {
        "case": case.name,
        "layers": config.num_layers,
        "weights, GiB": runner.loaded.weight_bytes / 2**30,
        "KV, KiB a token": sum(limits.page_bytes) / 2**10,
        "largest memory, GiB": peak / 2**30,
        "steps": len(full),
        "device, ms": 1e3 * on_device,
        "host, ms": 1e3 * on_host,
        "host / device": on_host / on_device,
        "each step, ms": 1e3 * each,
        "modelled, ms": 1e3 * (sum(cost.values()) - cost["exchange"]),
        "modelled exchanges, ms": 1e3 * cost["exchange"],
        "start, s": start_s,
    }


def measure_protocol(case: Case, folder: Path, rows: int) -> Any:
    shape = Case(case.name, "qwen3-0.6b", 1, None, case.tiny)
    group = OneRank.open(torch.device("cuda" if case.on_gpu else "cpu"))
    few = {"max_total_tokens": 64 * rows} if case.tiny else {"max_total_tokens": 330_000}
    runners = {}
    for name, of in (("plain", ALONE), ("ranks", group)):
        (own := folder / name).mkdir()
        runners[name] = Runner(shape.settings(rows, **few), own, of)
    w1, w3 = workload("W1"), workload("W3")
    if case.tiny:
        w1, w3 = ([Job([each % 500 for each in job.prompt[:8]], 8) for job in load[:rows]] for load in (w1, w3))
    for runner in runners.values():
        runner.run(w1)
        runner.run(w3)
        runner.capture_used()
    yield
    seconds: dict[str, dict[str, list[float]]] = {load: {name: [] for name in runners} for load in ("W1", "W3")}
    for load, jobs, turns in (("W3", w3, 16), ("W1", w1, 8)):
        for turn in range(turns):  # a prompt that is cached costs both the same
            for name in list(runners)[:: 1 - 2 * (turn % 2)]:
                seconds[load][name].append(runners[name].run(jobs))
    best = {load: {name: min(runs) for name, runs in found.items()} for load, found in seconds.items()}
    steps = w3[0].output_tokens
    yield {
        "case": case.name,
        **{f"W1 {name}, s": taken for name, taken in best["W1"].items()},
        "W1 slower by, %": 100 * (best["W1"]["ranks"] / best["W1"]["plain"] - 1),
        **{f"W3 {name}, us a step": 1e6 * taken / steps for name, taken in best["W3"].items()},
        "W3 slower by, us": 1e6 * (best["W3"]["ranks"] - best["W3"]["plain"]) / steps,
        "all": seconds,
    }


def run_case(case: Case, rows: int) -> None:
    """A child: says that it is ready, waits for a line, and says what it has measured."""
    with tempfile.TemporaryDirectory() as folder:
        steps = (measure_protocol if case.shape == "protocol" else measure_steps)(case, Path(folder), rows)
        next(steps)
        print(json.dumps({"ready": case.name}), flush=True)
        sys.stdin.readline()
        print(json.dumps(next(steps)), flush=True)
    os._exit(0)  # sockets and threads of executors have nothing left to do


class Child:
    def __init__(self, case: Case, rows: int, limit_s: float) -> None:
        command = [sys.executable, __file__, "--child", json.dumps(asdict(case)), "--rows", str(rows)]
        self.case, self._log = case, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        )
        timer = threading.Timer(limit_s, self.process.kill)
        timer.daemon = True
        timer.start()
        self._ready = False

    def wait_ready(self) -> None:
        self._ready = self._line() is not None

    def measure(self) -> dict[str, Any]:
        """What it has found, or the end of what it wrote."""
        if self._ready:
            assert self.process.stdin is not None
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        found = self._line() if self._ready else None
        self.process.wait()
        self._log.seek(0)
        return found or {"case": self.case.name, "failed": self._log.read()[-1500:]}

    def _line(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0])
    cells = [[f"{row[n]:.3g}" if isinstance(row[n], float) else str(row[n]) for n in names] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [names, ["---"] * len(names), *cells])


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "SHAPE:RANKS, SHAPE:RANKS:LAYERS or protocol, all in one wave; default: " + ", then ".join(map(str, WAVES))
    parser.add_argument("cases", nargs="*", help=about)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which what still runs is ended")
    parser.add_argument("--tiny", action="store_true", help="narrow models on the CPU, to try this script")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        run_case(Case(**options.child), options.rows)
        return []
    began, found = time.monotonic(), []
    for wave in (options.cases,) if options.cases else WAVES:
        cases = [Case.parse(text, options.tiny) for text in wave]
        left_s = options.limit - (time.monotonic() - began)
        children = [Child(case, options.rows, max(0.1, left_s)) for case in cases]
        for child in children:
            child.wait_ready()
        for child in children:
            found.append(child.measure())
            print(json.dumps(found[-1]), flush=True)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    if whole := [each for each in found if "steps" in each]:
        print(table(whole))
    return found


if __name__ == "__main__":
    main()
