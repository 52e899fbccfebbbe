"""An executor without a model: it answers every step at once, so that what remains is the cost of everything else.

Its tokens are made up from row and step; they are ordinary ones of the vocabulary, so the text that comes out has the
length and variety of real text. It does not check plans. As a program it serves HTTP with this executor; its settings
are JSON on standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass

import numpy as np

from bough.core.control import Command, Ticket
from bough.core.errors import RequestError
from bough.core.model_config import ModelConfig
from bough.core.plan import BatchPlan, IntArray, Limits, StepResult, TokenMasks
from bough.core.settings import Settings
from bough.launch.service import serve
from bough.loader.config import read_config
from bough.loader.locate import ModelFiles

BUILDER = "tests.bench.null_executor:build"
STEP_VARIABLE = "BOUGH_NULL_STEP_MS"  # how long a step pretends to take; passed to child processes by the benchmark
ROWS, TOKENS, CHUNK_TOKENS = 512, 1 << 19, 8192
FIRST_TOKEN, TOKEN_SPAN = 1000, 9000  # neither bytes nor special tokens in the usual vocabularies


@dataclass(frozen=True, slots=True)
class NullModel:
    """What the scheduler process expects of a loaded model."""

    executor: NullExecutor
    config: ModelConfig
    weight_bytes: int = 0
    load_s: float = 0.0
    rank_weight_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NullStep:
    """A step that is done when `ready_at` has come."""

    result: StepResult
    ready_at: float

    def ready(self) -> bool:
        return time.monotonic() >= self.ready_at

    def wait(self) -> StepResult:
        time.sleep(max(0.0, self.ready_at - time.monotonic()))
        return self.result


class NullExecutor:
    """`step_s` is how long a step pretends to take."""

    def __init__(self, context_length: int, vocab_size: int, step_s: float = 0.0) -> None:
        self._limits = Limits(ROWS, 1, (TOKENS,), context_length, vocab_size, CHUNK_TOKENS, "no model: made-up tokens")
        self._step_s = step_s
        self._done_at = 0.0  # when the step before will be done
        self._newest: tuple[BatchPlan, IntArray] | None = None  # the newest step and its tokens

    def limits(self) -> Limits:
        return self._limits

    def launch(self, plan: BatchPlan) -> NullStep:
        tokens = self._tokens(plan.rows[plan.sample], plan.step)
        count = len(tokens)
        self._newest = plan, tokens
        self._done_at = max(self._done_at, time.monotonic()) + self._step_s
        result = StepResult(
            plan.step, tokens[:, None], np.ones(count, dtype=np.int32), np.zeros(count, dtype=np.bool_), {}, {}
        )
        return NullStep(result, self._done_at)

    def drafted(self, step: int) -> BatchPlan:
        raise NotImplementedError  # it makes no drafts

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        """Masked rows take the first token that they may."""
        assert self._newest is not None and self._newest[0].step == step
        plan, tokens = self._newest
        assert plan.masked is not None
        bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")
        tokens[plan.masked[plan.sample]] = bits.argmax(axis=1)

    def control(self, command: Command) -> Ticket:
        raise RequestError("This executor has nothing to control.")

    def idle(self, busy: bool = False) -> bool:
        return False

    def close(self) -> None:
        return

    def _tokens(self, rows: IntArray, step: int) -> IntArray:
        span = max(1, min(TOKEN_SPAN, self._limits.vocab_size - FIRST_TOKEN))
        return ((rows * 31 + step * 17) % span + min(FIRST_TOKEN, self._limits.vocab_size - 1)).astype(np.int32)


def build(files: ModelFiles, settings: Settings) -> NullModel:
    """The stand-in for `files`' model: its configuration is read, its weights are not."""
    config = read_config(files, {})
    context_length = settings.model.context_length or config.context_length
    executor = NullExecutor(context_length, config.vocab_size, float(os.environ.get(STEP_VARIABLE, "0")) / 1e3)
    return NullModel(executor, config)


if __name__ == "__main__":
    serve(Settings.from_flat(json.load(sys.stdin)), BUILDER)
