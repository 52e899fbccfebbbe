"""The arguments of `run` and `run_batch` beside those of the program: names, and types for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict


class SamplingArguments(TypedDict, total=False):
    """What holds for all generations of a program that say nothing themselves."""

    max_new_tokens: int
    n: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    ignore_eos: bool
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None


class BatchArguments(SamplingArguments, total=False):
    """What a batch takes, but for the way in which it gives its states."""

    backend: Any
    num_threads: int | Literal["auto"]
    progress_bar: bool
    timeout_s: float | None


SAMPLING_NAMES = tuple(SamplingArguments.__annotations__)
RUN_NAMES = (*SAMPLING_NAMES, "stream", "backend", "use_thread", "timeout_s")
BATCH_NAMES = frozenset(BatchArguments.__annotations__)
