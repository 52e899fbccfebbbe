"""`bough bench lang`: the interpreter's CPU time per primitive, and what shared prefixes gain.

Few-shot questions and a tree of thought run on the engine, and then the same calls one by one without the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import bough as sgl
from bough.bench.offline import as_text
from bough.core.setting_checks import require_counts
from bough.lang import loop
from bough.lang.backends.base import Backend, GenOutput, GenRequest, Usage
from bough.lang.backends.endpoint import EngineBackend
from bough.lang.chat import FORMATS, ChatFormat
from bough.lang.choices import Scores

Call = Callable[[Backend], Coroutine[Any, Any, Any]]
SHOTS = [
    ("What is the capital of Italy?", "Rome"),
    ("Who wrote Hamlet?", "William Shakespeare"),
    ("What is the chemical symbol of gold?", "Au"),
    ("How many legs has a spider?", "Eight"),
    ("Which planet is the largest?", "Jupiter"),
    ("What is the boiling point of water?", "100 degrees Celsius"),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci"),
    ("In which year did the First World War begin?", "1914"),
]
REPEATS = 5
PROBLEM = "Share 12 apples among 3 children and 2 dogs, so that nobody is sad."


def add_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--questions", type=int, default=200, help="few-shot questions in the batch")
    load.add_argument("--shots", type=int, default=16, help="worked examples before each question")
    load.add_argument("--fan-out", type=int, default=4, help="branches at each thought")
    load.add_argument("--depth", type=int, default=3, help="thoughts on each path")
    load.add_argument("--output-len", type=int, default=8, help="tokens of an answer or a thought")
    load.add_argument("--primitives", type=int, default=2000, help="primitives for the interpreter's cost")
    load.add_argument("--interpreter-only", action="store_true", help="start no engine")
    load.add_argument("--json", action="store_true", help="print one JSON object per run")


def main(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    require_counts(args, ("questions", "shots", "fan_out", "depth", "output_len", "primitives"))
    results: list[dict[str, Any]] = [{"run": "interpreter, CPU µs per primitive", **interpreter_costs(args.primitives)}]
    if not args.interpreter_only:
        results += _engine_runs(args, settings)
    for result in results:
        print(json.dumps(result, ensure_ascii=False) if args.json else as_text(result))
    return 0


# ---- the interpreter


class InstantBackend(Backend):
    @property
    def chat_format(self) -> ChatFormat:
        return FORMATS["chatml"]

    async def generate(self, request: GenRequest) -> GenOutput:
        return GenOutput(["a"], [{}])

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        yield GenOutput(["a"], [{}])

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        return Scores([[(-1.0, 0, "a")] for _ in choices], None, [{}])


def interpreter_costs(count: int) -> dict[str, float]:
    """CPU time of all threads per primitive of each kind; the best of a few repeats."""
    return {name: min(_cost_us(body, count) for _ in range(REPEATS)) for name, body in BODIES.items()}


def _cost_us(body: Callable[[Any, int], None], count: int) -> float:
    program, backend = sgl.function(body), InstantBackend()
    began = time.process_time()
    program.run(count, backend=backend)
    return (time.process_time() - began) / count * 1e6


def _text(s: Any, count: int) -> None:
    for _ in range(count):
        s += "a"


def _role(s: Any, count: int) -> None:
    for _ in range(count // 3):  # a beginning, a text, an end
        s += sgl.user("a")


def _gen(s: Any, count: int) -> None:
    for _ in range(count):
        s += sgl.gen("a")


def _gen_and_read(s: Any, count: int) -> None:
    for _ in range(count // 2):
        s += sgl.gen("a")
        _ = s["a"]


def _select(s: Any, count: int) -> None:
    for _ in range(count):
        s += sgl.select("a", choices=["a", "b"])


def _fork(s: Any, count: int) -> None:
    branches = s.fork(max(1, count // 3))  # a branch, a generation, a join
    branches += sgl.gen("a")
    branches.join()


BODIES = {
    "text": _text,
    "role": _role,
    "gen": _gen,
    "gen_and_read": _gen_and_read,
    "select": _select,
    "fork": _fork,
}


# ---- on the engine


@sgl.function
def few_shot(s: Any, question: str, shots: int, max_tokens: int) -> None:
    s += "Answer each question in a few words.\n\n"
    for i in range(shots):
        asked, answer = SHOTS[i % len(SHOTS)]
        s += f"Q: {asked}\nA: {answer}\n\n"
    s += f"Q: {question}\nA:" + sgl.gen("answer", max_tokens=max_tokens, ignore_eos=True)


@sgl.function
def tree_of_thought(s: Any, problem: str, fan_out: int, depth: int, max_tokens: int) -> None:
    s += f"Problem: {problem}\nThoughts, step by step:\n"
    leaves = [s]
    for step in range(1, depth + 1):
        leaves = [branch for leaf in leaves for branch in leaf.fork(fan_out)]
        for way, leaf in enumerate(leaves):
            leaf += f"{step}. Way {way % fan_out + 1}:"
            leaf += sgl.gen("thought", max_tokens=max_tokens, ignore_eos=True) + "\n"
    for leaf in leaves:
        leaf += "Is this good? Answer: " + sgl.select("verdict", choices=["yes", "no"])
    s["verdicts"] = [leaf["verdict"] for leaf in leaves]


class RecordingBackend(EngineBackend):
    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.calls: list[Call] = []

    async def generate(self, request: GenRequest) -> GenOutput:
        self.calls.append(lambda backend: backend.generate(request))
        return await super().generate(request)

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        self.calls.append(lambda backend: backend.score(text, choices, unconditional=unconditional))
        return await super().score(text, choices, unconditional=unconditional)


def _engine_runs(args: argparse.Namespace, settings: dict[str, Any]) -> list[dict[str, Any]]:
    from bough.launch.engine import Engine

    loads: dict[str, Callable[[RecordingBackend], Usage]] = {
        f"few-shot batch of {args.questions}": lambda backend: _run_few_shot(args, backend),
        f"tree of thought, fan-out {args.fan_out}, depth {args.depth}": lambda backend: _run_tree(args, backend),
    }
    results: list[dict[str, Any]] = []
    asked: dict[str, list[Call]] = {}
    with Engine(**settings) as engine:
        engine.generate("warm", {"max_new_tokens": 2})
        for name, load in loads.items():
            engine.flush_cache()
            backend = RecordingBackend(engine)
            began = time.perf_counter()
            usage = load(backend)
            duration_s = time.perf_counter() - began
            asked[name] = backend.calls
            share = usage.cached_tokens / max(1, usage.prompt_tokens)
            results.append({"run": name, "duration_s": duration_s, "cached_share": share, **_shown(usage)})
    with Engine(**{**settings, "disable_radix_cache": True}) as engine:
        engine.generate("warm", {"max_new_tokens": 2})
        plain = EngineBackend(engine)
        for result in results:
            began = time.perf_counter()
            for call in asked[result["run"]]:
                loop.wait_for(call(plain))
            result["one_by_one_uncached_s"] = time.perf_counter() - began
            result["speed_up"] = result["one_by_one_uncached_s"] / result["duration_s"]
    return results


def _run_few_shot(args: argparse.Namespace, backend: RecordingBackend) -> Usage:
    common = {"shots": args.shots, "max_tokens": args.output_len}
    items = [{"question": f"What is {i} plus {i * 7 % 101}?", **common} for i in range(args.questions)]
    states = few_shot.run_batch(items, temperature=0, backend=backend)
    for error in states.errors.values():
        raise error  # the figures of a load that was not served mean nothing
    return sum((state.get_usage() for state in states), Usage())


def _run_tree(args: argparse.Namespace, backend: RecordingBackend) -> Usage:
    state = tree_of_thought.run(PROBLEM, args.fan_out, args.depth, args.output_len, temperature=0, backend=backend)
    return state.get_usage()


def _shown(usage: Usage) -> dict[str, int]:
    return {
        "requests": usage.requests,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
