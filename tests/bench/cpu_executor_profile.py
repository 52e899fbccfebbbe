"""A load on the executor alone, in this process, with an eye on its thread: what a decode step divides into.

Stands in for the scheduler, as `cpu_plans` does; under a grammar also for what fills the masks: it does so while the
forward pass runs, as the scheduler does. Owns nothing beyond one run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from bough.constrained.interface import Compiled, Matcher
from bough.core.plan import BatchPlan, Executor, TokenMasks
from bough.core.sampling_params import SamplingParams
from bough.core.settings import Settings
from bough.launch.grammars import GrammarDesk
from bough.launch.parts import end_ids, open_tokenizer
from bough.loader.locate import ModelFiles
from tests.bench.cpu_cases import Case
from tests.bench.cpu_plans import CasePlans
from tests.bench.cpu_step_costs import Cost
from tests.bench.thread_sampler import ThreadSampler
from tests.fakes.grammar_specs import json_schema_spec

if TYPE_CHECKING:
    from bough.executor.load_model import LoadedModel

FORWARD, SAMPLING, WAITING = "forward pass", "sampling, masks applied", "waiting for masks"
REST = "rows, layout, results"
FORWARD_ROOMS = frozenset({"models", "layers", "attention", "kernels", "native"})
EXECUTOR_FILES = {"native_tapes.py": "native", "native_sampling.py": "sampling"}  # they call compiled work
POLL_S = 0.01


def executor_costs(
    flat: dict[str, Any], case: Case, sampling: SamplingParams, schema: dict[str, Any] | None = None
) -> dict[str, Cost]:
    """What each part of a decode step takes on the executor's thread, the largest first."""
    from bough.executor.build import build_executor
    from bough.loader.locate import locate

    files, settings = locate(flat["model"]), Settings.from_flat(flat)
    loaded = build_executor(files, settings)
    try:
        compiled = None if schema is None else _compile(schema, files, settings, loaded)
        return _watch(loaded.executor, case, sampling, compiled)
    finally:
        loaded.executor.close()


def _compile(schema: dict[str, Any], files: ModelFiles, settings: Settings, loaded: LoadedModel) -> Compiled:
    ends = end_ids(files, loaded.config, settings.model)
    vocabulary = loaded.executor.limits().vocab_size
    desk = GrammarDesk(lambda: open_tokenizer(files, settings.model), ends, vocabulary, settings.scheduler)
    ticket = desk.request(json_schema_spec(schema))
    while not ticket.done:
        time.sleep(POLL_S)
    desk.close()
    return ticket.result()


def _watch(executor: Executor, case: Case, sampling: SamplingParams, grammar: Compiled | None) -> dict[str, Cost]:
    plans = CasePlans(case, executor.limits(), sampling)
    steps = _Steps(executor, len(case.prompts), grammar)
    steps.run(plans.prompts())
    thread = next(t.ident for t in threading.enumerate() if t.name.startswith("executor"))
    assert thread is not None
    done = steps.count
    with ThreadSampler(thread, classify) as sampler:
        steps.run(plans.decodes())
    count = steps.count - done
    parts = sorted(sampler.spent.items(), key=lambda part: -part[1].cpu_s)
    return {name: Cost(spent.wall_s / count, spent.cpu_s / count) for name, spent in parts}


class _Steps:
    """Runs plans one after the other; owns where each row stands in the grammar."""

    def __init__(self, executor: Executor, rows: int, grammar: Compiled | None) -> None:
        self._executor = executor
        self._words = -(-executor.limits().vocab_size // 32)
        self._matchers: list[Matcher] = [] if grammar is None else [grammar.matcher() for _ in range(rows)]
        self.count = 0

    def run(self, plans: Iterator[BatchPlan]) -> None:
        for plan in plans:
            self._run(plan)
            self.count += 1

    def _run(self, plan: BatchPlan) -> None:
        rows = plan.rows[plan.sample].tolist()
        if not self._matchers or not rows:
            self._executor.launch(plan).wait()
            return
        running = self._executor.launch(replace(plan, step=self.count, masked=plan.sample))
        words = np.full((len(rows), self._words), -1, dtype=np.int32)
        for line, row in zip(words, rows, strict=True):
            if not self._matchers[row].finished:
                self._matchers[row].fill(line)
        self._executor.supply_masks(self.count, TokenMasks(words))
        for row, (token,) in zip(rows, running.wait().tokens.tolist(), strict=True):
            self._matchers[row].accept(token)


def classify(files: list[str]) -> str | None:
    """What a stack of the executor's thread is busy with; None: it waits for work."""
    rooms = {room for file in files if (room := _room_of(PurePath(file))) is not None}
    if any(file.endswith("sampling/masks.py") for file in files):
        return WAITING if PurePath(files[0]).name == "threading.py" else SAMPLING
    if "sampling" in rooms:  # before the forward pass: it uses kernels too
        return SAMPLING
    if rooms & FORWARD_ROOMS:
        return FORWARD
    return REST if "executor" in rooms else None


def _room_of(file: PurePath) -> str | None:
    if file.name in EXECUTOR_FILES:
        return EXECUTOR_FILES[file.name]
    folder = file.parent
    return next((inner.name for inner in (folder, *folder.parents) if inner.parent.name == "bough"), None)
