"""A load of `bough bench cpu` as plans for an executor: the shared prefix once, then all prompts, then decodes.

Stands in for the scheduler: owns the row and page numbers of one load. Rows begin on the pages of what they share, and
prompts are cut to the executor's chunks, several of them in a step where they fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bough.core.errors import SettingsError
from bough.core.plan import BatchPlan, IntArray, Limits, RowSetup
from bough.core.sampling_params import SamplingParams
from bough.executor.plain_plans import decode_plan
from tests.bench.cpu_cases import Case

NO_PAGES: IntArray = np.zeros(0, dtype=np.int32)
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a row has to compute before it samples, on which pages."""

    row: int
    shared_pages: IntArray
    shared_tokens: int
    own_pages: IntArray  # for the prompt and all that is generated
    tokens: IntArray
    sample: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt."""

    prompt: Prompt
    first: int
    count: int


class CasePlans:
    """The plans of one load on an executor whose rows and pages are all free."""

    def __init__(self, case: Case, limits: Limits, sampling: SamplingParams = GREEDY) -> None:
        self._sampling = sampling
        self._limits = limits
        self._outputs = case.output_tokens
        self._rows = len(case.prompts)
        self._next_page = 1  # page 0 belongs to nobody
        size = limits.page_size
        whole = len(case.prefix) // size * size  # pages are shared whole
        shared = self._take(whole)
        self._prefix = Prompt(0, NO_PAGES, 0, shared, _array(case.prefix[:whole]), sample=False)
        self._prompts = [
            Prompt(
                row,
                shared,
                whole,
                self._take(len(case.prefix) - whole + len(own) + case.output_tokens),
                _array(case.prefix[whole:] + own),
                sample=True,
            )
            for row, own in enumerate(case.prompts)
        ]
        if self._rows > limits.rows or self._next_page - 1 > limits.pages[0]:
            raise SettingsError(
                f"The load {case.name!r} needs {self._rows} rows and {self._next_page - 1} pages, the executor has "
                f"{limits.rows} and {limits.pages[0]}; raise --max-running-requests or --max-total-tokens."
            )

    def prompts(self) -> Iterator[BatchPlan]:
        """What is shared, then what each row has of its own; after these, every row has its first token."""
        if len(self._prefix.tokens):
            yield from map(self._plan, self._cut([self._prefix]))
        yield from map(self._plan, self._cut(self._prompts))

    def decodes(self) -> Iterator[BatchPlan]:
        return (decode_plan(step, self._rows) for step in range(self._outputs - 1))

    def _take(self, tokens: int) -> IntArray:
        count = -(-tokens // self._limits.page_size)
        first, self._next_page = self._next_page, self._next_page + count
        return np.arange(first, first + count, dtype=np.int32)

    def _cut(self, prompts: list[Prompt]) -> Iterator[list[Chunk]]:
        """The chunks of each step."""
        step: list[Chunk] = []
        room = self._limits.chunk_tokens
        for prompt in prompts:
            done = 0
            while done < len(prompt.tokens):
                count = min(room, len(prompt.tokens) - done)
                step.append(Chunk(prompt, done, count))
                done, room = done + count, room - count
                if not room:
                    yield step
                    step, room = [], self._limits.chunk_tokens
        if step:
            yield step

    def _plan(self, chunks: list[Chunk]) -> BatchPlan:
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int32)
        pages = [chunk.prompt.own_pages if chunk.first == 0 else NO_PAGES for chunk in chunks]
        ends = [chunk.first + chunk.count == len(chunk.prompt.tokens) for chunk in chunks]
        return BatchPlan(
            step=0,
            setups=tuple(self._setup(chunk.prompt) for chunk in chunks if chunk.first == 0),
            edits=(),
            rows=np.array([chunk.prompt.row for chunk in chunks], dtype=np.int32),
            query_lens=counts,
            given=counts,
            tokens=np.concatenate([chunk.prompt.tokens[chunk.first : chunk.first + chunk.count] for chunk in chunks]),
            new_pages=(np.concatenate(pages),),
            new_page_counts=(np.array([len(of_row) for of_row in pages], dtype=np.int32),),
            sample=np.array([end and chunk.prompt.sample for end, chunk in zip(ends, chunks, strict=True)]),
        )

    def _setup(self, prompt: Prompt) -> RowSetup:
        total = prompt.shared_tokens + len(prompt.tokens)
        cached = (prompt.shared_pages,)
        return RowSetup(prompt.row, self._sampling, 0, cached, prompt.shared_tokens, 0, None, total, None, ())


def _array(tokens: list[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)
