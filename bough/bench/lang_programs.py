"""The programs that `bough bench lang` runs, and the back ends it runs them on: one that answers at once, to see what
the interpreter costs, and one that remembers what it was asked, so that the same can be asked again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import bough as sgl
from bough.lang.backends.base import Backend, GenOutput, GenRequest, Scores
from bough.lang.backends.in_process import EngineBackend
from bough.lang.chat import ChatFormat
from bough.lang.named_templates import FORMATS

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


class AtOnce(Backend):
    """Answers everything at once with the same letter."""

    @property
    def chat_format(self) -> ChatFormat:
        return FORMATS["chatml"]

    async def generate(self, request: GenRequest) -> GenOutput:
        return GenOutput(["a"], [{}])

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        yield GenOutput(["a"], [{}])

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        return Scores([[(-1.0, 0, "a")] for _ in choices], None, [{}])


class Remembering(EngineBackend):
    """Keeps its calls, in the order in which they came."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.calls: list[Call] = []

    async def generate(self, request: GenRequest) -> GenOutput:
        self.calls.append(lambda backend: backend.generate(request))
        return await super().generate(request)

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        self.calls.append(lambda backend: backend.score(text, choices, unconditional=unconditional))
        return await super().score(text, choices, unconditional=unconditional)
