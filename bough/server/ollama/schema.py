"""What Ollama's clients may send. `None` is "not given" throughout, as a JSON `null` is.

Options that concern Ollama's own loading of models (`num_ctx`, `num_gpu`, ...) are taken and change nothing, and so is
`keep_alive`: the one model is always loaded. What this engine lacks is `reading`'s to refuse.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


class Options(msgspec.Struct, kw_only=True):
    """How tokens are chosen. `num_predict` below zero, or left out, means all that is left of the context."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # 0 turns the penalty off; else it counts the whole text
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
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


def _options_schema() -> dict[str, Any]:
    _, components = msgspec.json.schema_components([Options])
    schema: dict[str, Any] = components["Options"]
    return schema


# Read as a plain object, so that names which nobody knows can be told.
OptionsObject = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema=_options_schema())]


class AnswerFields(msgspec.Struct, kw_only=True):
    """What chats and completions share."""

    model: str | None = None
    stream: bool | None = None  # on unless it is false
    options: OptionsObject | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: str | float | None = None
    return_timings: bool | None = None


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
