"""What Ollama's clients may send. `None` is "not given" throughout, as a JSON `null` is.

Options that concern Ollama's own loading of models (`num_ctx`, `num_gpu`, ...) are taken and change nothing, and so is
`keep_alive`: the one model is always loaded. What this engine lacks is `reading`'s to refuse.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from bough.core.sampling_params import INT32_MAX, INT64_MAX, MAX_TEMPERATURE
from bough.server.bodies import above, between


class Options(msgspec.Struct, kw_only=True):
    """How tokens are chosen. `num_predict` below zero, or left out, means all that is left of the context."""

    num_predict: int | None = None
    temperature: Annotated[float | None, between(0, MAX_TEMPERATURE)] = None
    top_k: Annotated[int | None, between(-1, INT32_MAX)] = None
    top_p: Annotated[float | None, above(0, 1)] = None
    min_p: Annotated[float | None, between(0, 1)] = None
    seed: Annotated[int | None, between(-INT64_MAX - 1, INT64_MAX)] = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float | None, above(0, 2)] = None
    repeat_last_n: int | None = None  # 0 turns the penalty off; else it counts the whole text
    presence_penalty: Annotated[float | None, between(-2, 2)] = None
    frequency_penalty: Annotated[float | None, between(-2, 2)] = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    penalize_newline: Any = None
    num_ctx: Any = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    vocab_only: Any = None
    logits_all: Any = None
    embedding_only: Any = None


class AnswerFields(msgspec.Struct, kw_only=True):
    """What chats and completions share."""

    model: str | None = None
    stream: bool | None = None  # on unless it is false
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: str | float | None = None
    return_timings: bool | None = None
    resume: dict[str, Any] | None = None  # a field of the other protocols, whose streams can be resumed


class GenerateRequest(AnswerFields, kw_only=True):
    """POST /api/generate. Without a prompt it only asks for the model to be loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt as it is, without the model's template
    template: str | None = None
    suffix: str | None = None
    images: list[str] | None = None
    context: list[int] | None = None


class ChatRequest(AnswerFields, kw_only=True):
    """POST /api/chat. Without messages it only asks for the model to be loaded."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """POST /api/show. `name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
