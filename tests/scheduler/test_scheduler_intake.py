"""What is refused at the door, with which words, and what a request looks like that is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bough.core.errors import RequestError
from bough.core.finish import FinishLength, FinishStop
from bough.core.plan import Limits, LogprobSpec
from bough.core.pooling import Pooling, VectorConfig
from bough.core.settings import SchedulerSettings
from bough.messages.requests import LogprobRequest
from bough.scheduler.intake import Intake, opening
from bough.scheduler.request import Request
from tests.fakes.boxes import generate

VOCAB, CONTEXT = 100, 32


def intake(pages: int = 64, vectors: VectorConfig | None = None, **settings: Any) -> Intake:
    limits = Limits(4, 1, (pages,), CONTEXT, VOCAB, 16, "test", vectors=vectors)
    return Intake(limits, SchedulerSettings(**settings), eos_ids=(98, 99))


@pytest.mark.parametrize(
    ("prompt", "options", "field", "words"),
    [
        ([], {}, "input_ids", "empty"),
        ([1, VOCAB], {}, "input_ids", r"input_ids: token id 100 is outside the vocabulary \(0 to 99\)"),
        ([1, -1], {}, "input_ids", "token id -1 "),
        ([1], {"logit_bias": {5: 1.0, VOCAB: 1.0}}, "logit_bias", r"logit_bias: token id 100 .* \(0 to 99\)"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias", "logit_bias: token id -1 "),
        ([1], {"logprobs": LogprobRequest(ids=(3, 2**40))}, "token_ids_logprob", "token_ids_logprob: token id 1099511"),
        ([1], {"logprobs": LogprobRequest(ids=(-1,))}, "token_ids_logprob", "token_ids_logprob: token id -1 "),
        ([1], {"logprobs": LogprobRequest(start=1)}, "logprob_start_len", "smaller than the prompt's 1 tokens"),
        ([1], {"stop_token_ids": range(98), "min_new_tokens": 1}, "stop_token_ids", "none is left to choose"),
        ([1] * CONTEXT, {}, "input_ids", "32 tokens is longer than the model's context length of 32 tokens"),
    ],
)
def test_refusals_name_the_field(prompt: list[int], options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        intake().request(generate(1, prompt, **options), 0, 0.0)
    assert refusal.value.field == field and refusal.value.status_code == 400


EMBEDS = VectorConfig("mean", size=8)
SCORES = VectorConfig("cls", labels=("no", "yes"), size=8)


@pytest.mark.parametrize(
    ("vectors", "wanted", "words"),
    [
        (None, Pooling(), "generates text; serve an embedding model"),
        (EMBEDS, None, r"gives vectors \(/v1/embeddings\); it does not generate"),
        (SCORES, None, "gives scores of labels"),
        (EMBEDS, Pooling(dimensions=9), "dimensions may be 1 to 8; got 9"),
        (EMBEDS, Pooling(dimensions=0), "dimensions may be 1 to 8; got 0"),
        (SCORES, Pooling(dimensions=2), "this model scores labels"),
    ],
)
def test_models_are_asked_for_what_they_give(vectors: VectorConfig | None, wanted: Pooling | None, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        intake(vectors=vectors).request(generate(1, [1, 2], max_new_tokens=0, pooling=wanted), 0, 0.0)
    assert refusal.value.status_code == 400


def test_a_request_for_a_vector_knows_how_it_is_pooled_and_what_it_may_find_cached() -> None:
    def ask(**fields: Any) -> Request:
        return intake(vectors=EMBEDS).request(
            generate(1, [1, 2, 3], max_new_tokens=0, pooling=Pooling(**fields)), 0, 0.0
        )

    assert ask().pooling == Pooling("mean") and ask().match_cap == 0
    assert ask(mode="last").match_cap == 2


def test_a_model_of_vectors_gives_no_tokens_whatever_is_asked() -> None:
    """Its executor sets up nothing to sample with."""
    message = generate(1, [1, 2], max_new_tokens=5, pooling=Pooling())
    assert intake(vectors=EMBEDS).request(message, 0, 0.0).max_new == 0


def test_a_text_that_is_too_long_keeps_its_last_token() -> None:
    with pytest.raises(RequestError, match="40 tokens is longer than the 32 that this model reads"):
        intake(vectors=EMBEDS).request(generate(1, [*range(40)], max_new_tokens=0, pooling=Pooling()), 0, 0.0)
    cutting = intake(vectors=EMBEDS, allow_auto_truncate=True)
    request = cutting.request(generate(1, [*range(40)], max_new_tokens=0, pooling=Pooling()), 0, 0.0)
    assert request.tokens.tolist() == [*range(31), 39]


def test_stop_tokens_outside_the_vocabulary_are_ignored_with_a_warning() -> None:
    request = intake().request(generate(1, [1], stop_token_ids=(0, -7, VOCAB)), 0, 0.0)
    assert request.sampling.stop_token_ids == (0,) and not {-7, VOCAB} & request.stop_ids
    (warning,) = request.warnings
    assert "stop_token_ids: -7, 100 is ignored" in warning and "(0 to 99)" in warning
    assert intake().request(generate(1, [1], stop_token_ids=(0,)), 0, 0.0).warnings == ()


def test_the_ends_of_the_vocabulary_belong_to_it() -> None:
    options = {"logit_bias": {0: 1.0, VOCAB - 1: 1.0}, "stop_token_ids": (0, VOCAB - 1)}
    message = generate(1, [0, VOCAB - 1], logprobs=LogprobRequest(top=2, ids=(0, VOCAB - 1)), **options)
    request = intake().request(message, 0, 0.0)
    assert request.logprobs == LogprobSpec(2, (0, VOCAB - 1))


def test_a_prompt_that_the_pool_cannot_hold_names_the_pool() -> None:
    with pytest.raises(
        RequestError,
        match=r"exceeds the maximum allowed length: at most 9 fit the KV cache of 10 tokens.*--max-total-tokens",
    ):
        intake(pages=10).request(generate(1, [1] * 10), 0, 0.0)


@pytest.mark.parametrize(
    ("limit", "queued", "taken"), [(None, 10**6, True), (2, 1, True), (2, 2, False), (0, 0, False)]
)
def test_a_full_queue(limit: int | None, queued: int, taken: bool) -> None:
    door = intake(max_queued_requests=limit)
    if taken:
        assert door.request(generate(1, [1]), queued, 0.0).arrival == 0
        return
    with pytest.raises(RequestError, match="--max-queued-requests") as refusal:
        door.request(generate(1, [1]), queued, 0.0)
    assert refusal.value.status_code == 429


@pytest.mark.parametrize(
    ("prompt_len", "asked", "truncate", "kept", "max_new"),
    [
        (10, 5, False, 10, 5),
        (10, 1000, False, 10, 22),  # cut to the context
        (CONTEXT - 1, 5, False, CONTEXT - 1, 1),
        (CONTEXT, 0, False, CONTEXT, 0),  # nothing is generated, so the prompt may fill the context
        (50, 5, True, CONTEXT - 1, 1),
        (50, 0, True, CONTEXT, 0),
    ],
)
def test_lengths(prompt_len: int, asked: int, truncate: bool, kept: int, max_new: int) -> None:
    message = generate(1, [1] * prompt_len, max_new_tokens=asked)
    request = intake(allow_auto_truncate=truncate).request(message, 0, 0.0)
    assert (len(request.tokens), request.prompt_len, request.max_new) == (kept, kept, max_new)
    said = f"The prompt is too long; only its first {kept} tokens are read (--allow-auto-truncate)."
    assert request.warnings == ((said,) if kept < prompt_len else ())


@pytest.mark.parametrize(
    ("options", "stop_ids"),
    [
        ({}, {98, 99}),
        ({"stop_token_ids": (3,)}, {3, 98, 99}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": (3,)}, {3}),
    ],
)
def test_stop_ids(options: dict[str, Any], stop_ids: set[int]) -> None:
    assert intake().request(generate(1, [1], **options), 0, 0.0).stop_ids == stop_ids


@pytest.mark.parametrize(
    ("logprobs", "first", "cap"),
    [(None, 4, 4), (LogprobRequest(), 4, 4), (LogprobRequest(start=0), 0, 0), (LogprobRequest(start=2), 2, 2)],
)
def test_where_logprobs_begin_and_the_cache_ends(logprobs: LogprobRequest | None, first: int, cap: int) -> None:
    request = intake().request(generate(1, [1] * 5, logprobs=logprobs), 0, 7.0)
    assert (request.logprob_next, request.match_cap, request.since) == (first, cap, 7.0)


def test_an_opening_carries_the_end_of_the_prompt_that_is_used() -> None:
    message = generate(3, list(range(60)), stream=True)
    opened = opening(intake(allow_auto_truncate=True).request(message, 0, 0.0))
    assert (opened.handle, opened.stream) == (3, True)
    assert np.frombuffer(opened.prompt_tail, np.int32).tolist() == list(range(CONTEXT - 9, CONTEXT - 1))


def resumed(output: list[int], **options: Any) -> Any:
    return generate(1, [1, 2, 3], output_ids=np.array(output, np.int32).tobytes(), **options)


def test_a_resumed_request_has_its_output_behind_its_prompt() -> None:
    request = intake().request(resumed([5, 6], max_new_tokens=9), 0, 0.0)
    assert request.tokens.tolist() == [1, 2, 3, 5, 6]
    assert (request.prompt_len, request.generated, request.max_new, request.match_cap) == (3, 2, 9, 4)
    opened = opening(request)
    assert np.frombuffer(opened.output_ids, np.int32).tolist() == [5, 6] and opened.ended is None


@pytest.mark.parametrize(
    ("output", "options", "ended"),
    [
        ([5, 98], {}, FinishStop(98)),
        ([5, 98], {"ignore_eos": True}, None),
        ([5, 7], {"stop_token_ids": (7,), "max_new_tokens": 2}, FinishStop(7)),
        ([5, 6], {"max_new_tokens": 2}, FinishLength(2)),
        ([5] * (CONTEXT - 3), {}, FinishLength(CONTEXT - 3)),
    ],
)
def test_a_resumed_request_may_be_over(output: list[int], options: dict[str, Any], ended: Any) -> None:
    assert opening(intake().request(resumed(output, **options), 0, 0.0)).ended == ended


@pytest.mark.parametrize("output", [[VOCAB], [-1, 4], [99, 4]])
def test_an_output_that_nothing_can_have_generated_is_refused(output: list[int]) -> None:
    with pytest.raises(RequestError) as refused:
        intake().request(resumed(output), 0, 0.0)
    assert refused.value.field == "resume.output_ids"


def test_code_is_refused_unless_it_is_allowed() -> None:
    loaded: list[str] = []
    limits = Limits(4, 1, (64,), CONTEXT, VOCAB, 16, "test")
    message = generate(0, [1, 2], custom_logit_processor="code")
    with pytest.raises(RequestError, match="--enable-custom-logit-processor"):
        Intake(limits, SchedulerSettings(), ()).request(message, 0, 0.0)
    request = Intake(limits, SchedulerSettings(), (), loaded.append).request(message, 0, 0.0)
    assert loaded == ["code"] and request.processor == "code"
