"""What HTTP costs: a real server whose executor answers at once, and clients that do the least.

`bough bench edge` runs it in a checkout. Two loads at the same number of connections: whole answers (requests per
second) and streams (tokens per second). Beside the rates stands the CPU time of each process per request and per token,
which holds on a busy machine too; py-spy shows what it is spent on. Tokens of a stream coalesce into one event when the
server is behind, so events are counted on their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil

from bough.bench.driver import run_parts
from bough.core.child_environment import child_environment
from bough.core.errors import EngineDeadError, SettingsError
from bough.core.setting_checks import require_above_zero, require_counts
from tests.bench.edge_client import Request, Tally, send_for
from tests.bench.null_executor import STEP_VARIABLE

EXIT_TIMEOUT_S = 60.0

PROMPT = "The quick brown fox jumps over the lazy dog, and then it rests for a while in the shade of an old tree. " * 2
ROUTES = {
    "completions": ("/v1/completions", "prompt"),
    "chat": ("/v1/chat/completions", "messages"),
    "generate": ("/generate", "text"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--route", choices=list(ROUTES), default="completions", help="which endpoint is asked")
    parser.add_argument("--connections", type=int, default=64, help="clients at once")
    parser.add_argument("--procs", type=int, default=1, help="client processes")
    parser.add_argument("--http-procs", type=int, default=1, help="HTTP processes of the server")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load")
    parser.add_argument("--output-len", type=int, default=16, help="tokens of a whole answer")
    parser.add_argument("--stream-len", type=int, default=128, help="tokens of a streamed answer")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step of the fake executor")
    parser.add_argument("--model", help="whose tokenizer and configuration are used; the default model when left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object per load")


def main(args: argparse.Namespace) -> int:
    require_counts(args, ("connections", "procs", "http_procs", "output_len", "stream_len"))
    require_above_zero(args, ("seconds",))
    if args.procs > args.connections:
        raise SettingsError(f"--procs {args.procs} is more than there are --connections ({args.connections}).")
    with EdgeServer.running(args) as server:
        for stream, length in ((False, args.output_len), (True, args.stream_len)):
            request = request_of(args.route, length, stream)
            send_for(server.url, request, args.connections, min(1.0, args.seconds))  # warm-up
            result = measure(server, request, length, args)
            print(json.dumps(result) if args.json else as_text(result))
    return 0


def request_of(route: str, output_tokens: int, stream: bool) -> Request:
    path, field = ROUTES[route]
    limits: dict[str, object] = {"ignore_eos": True, "temperature": 0.6}
    body: dict[str, object]
    if route == "generate":
        body = {field: PROMPT, "sampling_params": {**limits, "max_new_tokens": output_tokens}}
    else:
        prompt: object = [{"role": "user", "content": PROMPT}] if route == "chat" else PROMPT
        body = {"model": "any", field: prompt, **limits, "max_tokens": output_tokens}
    return Request(path, {**body, "stream": stream}, stream)


class EdgeServer:
    """The server under measurement; always ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        welcome = process.stdout.readline()
        found = re.search(r"served at (\S+)", welcome)
        if found is None:
            raise EngineDeadError(f"The server did not start: {welcome or 'its log above says why'}")
        self.url = found[1]

    @classmethod
    @contextlib.contextmanager
    def running(cls, args: argparse.Namespace) -> Iterator[EdgeServer]:
        settings = {"port": 0, "log_level": "warning", "tokenizer_worker_num": args.http_procs}
        if args.model is not None:
            settings["model"] = args.model
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.bench.null_executor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**child_environment(), STEP_VARIABLE: str(args.step_ms)},
        )
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(settings))
            process.stdin.close()
            yield cls(process)
        finally:
            process.terminate()
            try:
                process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def cpu_s(self) -> dict[str, float]:
        """CPU time so far, by role."""
        spent = {"http": _cpu_of(psutil.Process(self._process.pid))}
        for child in psutil.Process(self._process.pid).children(recursive=True):
            role = next((word for word in child.cmdline() if word.startswith("bough::")), "other")
            name = role.removeprefix("bough::").replace("server", "http")
            spent[name] = spent.get(name, 0.0) + _cpu_of(child)
        return spent


def _cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(server: EdgeServer, request: Request, output_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    def part(number: int, on_progress: object) -> Tally:
        return send_for(server.url, request, len(range(number, args.connections, args.procs)), args.seconds)

    before, began = server.cpu_s(), time.perf_counter()
    tallies = run_parts(args.procs, part, lambda: lambda answered: None)
    seconds = time.perf_counter() - began
    after = server.cpu_s()
    answers = sum(tally.answers for tally in tallies)
    tokens = answers * output_tokens
    cpu = {role: spent - before.get(role, 0.0) for role, spent in after.items()}
    cpu["clients"] = sum(tally.cpu_s for tally in tallies)
    events = sum(tally.events for tally in tallies)
    return {
        "run": f"{request.path}, {'streams' if request.stream else 'whole answers'} of {output_tokens} tokens",
        "connections": args.connections,
        "duration_s": seconds,
        "requests": answers,
        "requests_per_s": answers / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_event": tokens / events if events else None,
        "bytes_per_token": sum(tally.received_bytes for tally in tallies) / max(1, tokens),
        "cpu_us_per_request": {role: 1e6 * spent / max(1, answers) for role, spent in cpu.items()},
        "cpu_us_per_token": {role: 1e6 * spent / max(1, tokens) for role, spent in cpu.items()},
        "http_cpu_us_per_event": 1e6 * cpu["http"] / events if events else None,
        "cores_used": {role: spent / seconds for role, spent in cpu.items()},
    }


def as_text(result: dict[str, Any]) -> str:
    lines = [f"{result['run']}, {result['connections']} connections:"]
    for name, value in result.items():
        if isinstance(value, float):
            lines.append(f"  {name.replace('_', ' '):<22} {value:>12,.2f}")
        elif isinstance(value, dict):
            shown = ", ".join(f"{role} {figure:,.2f}" for role, figure in value.items())
            lines.append(f"  {name.replace('_', ' '):<22} {shown}")
    return "\n".join(lines)
