"""The functions by which programs say what they want: `gen`, `select`, pictures, roles. They check their arguments, so
that a mistake is told on its line, and give expressions. Names and arguments are SGLang's."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bough.core.errors import RequestError
from bough.lang.choices import ChoicesSamplingMethod, token_length_normalized
from bough.lang.expressions import Expr, ExprLike, Gen, Image, RoleBegin, RoleEnd, Row, Select, Video, items_of
from bough.parsers import reasoning_format

__all__ = [
    "REGEX_BOOL", "REGEX_FLOAT", "REGEX_INT", "REGEX_STR", "assistant", "assistant_begin", "assistant_end", "gen",
    "gen_float", "gen_int", "gen_string", "image", "select", "separate_reasoning", "system", "system_begin",
    "system_end", "user", "user_begin", "user_end", "video",
]  # fmt: skip
ONE_CONSTRAINT = "gen() takes one constraint: choices, regex (or dtype), or json_schema."
# The arguments of `gen` that have another name in the engine's sampling parameters, or none.
TRANSLATED = {"name", "max_tokens", "min_tokens", "dtype", "choices", "choices_method", "regex", "json_schema"}
# What `dtype` allows, and where such a value ends.
REGEX_INT = r"[-+]?[0-9]+[ \n]*"  # a number ends at the space behind it, where the stop cuts it off
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r'"[\w\d\s]*"'
DTYPE_REGEXES: dict[type, str] = {int: REGEX_INT, float: REGEX_FLOAT, bool: REGEX_BOOL, str: REGEX_STR}
DTYPE_STOPS = (" ", "\n")


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: Mapping[str, Any] | str | type | None = None,
    lora_path: str | None = None,
) -> Expr:
    """The model continues the text. What is left out takes the value that `run` was given. `json_schema` is a schema,
    its JSON or a pydantic model; with `choices` it is a `select`; with `n` over 1 the variable is a list, and the text
    goes on with its first. `lora_path` names an adapter, which writes this generation alone."""
    arguments = locals()
    if choices is not None:
        if not (dtype is regex is json_schema is None):
            raise RequestError(ONE_CONSTRAINT, field="choices")
        return select(name, choices, temperature or 0.0, choices_method or token_length_normalized)
    given = {name: value for name, value in arguments.items() if name not in TRANSLATED}
    given |= {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "regex": _checked_regex(regex),
        "json_schema": _schema_text(json_schema),
    }
    ends: tuple[str, ...] = ()
    if dtype is not None:
        given["regex"], ends = _dtype_form(dtype, regex)
    if given["regex"] is not None and given["json_schema"] is not None:
        raise RequestError(ONE_CONSTRAINT, field="regex")
    return Gen(name, {key: value for key, value in given.items() if value is not None}, ends=ends)


def _gen_typed(
    dtype: type,
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **arguments: Any,
) -> Expr:
    return gen(name, max_tokens, n=n, stop=stop, **arguments, dtype=dtype)


gen_int, gen_float, gen_string = (partial(_gen_typed, dtype) for dtype in (int, float, str))


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
) -> Expr:
    """The likeliest of the choices, by the method's idea of likely."""
    given = () if choices is None or isinstance(choices, str) else tuple(choices)
    if not given or not all(isinstance(choice, str) and choice for choice in given):
        raise RequestError("select() needs a list of choices, each a text that is not empty.", field="choices")
    if temperature > 1e-5:
        raise RequestError("select() takes the likeliest choice; leave temperature at 0.", field="temperature")
    return Select(name, given, temperature, choices_method)


def image(expr: str | bytes) -> Expr:
    return Image(expr)


def video(path: str, num_frames: int) -> Expr:
    return Video(path, num_frames)


def separate_reasoning(expr: ExprLike, model_type: str) -> Expr:
    """Keeps what the model thinks apart: each generation `name` gives `name` without it and `name_reasoning_content`.
    `model_type` is a name of `--reasoning-parser`. Not for streams."""
    reasoning_format(model_type, field="model_type")
    marked = [dataclasses.replace(e, reasoning=model_type) if isinstance(e, Gen) else e for e in items_of(expr)]
    return Row(tuple(marked))


# What a generation is held to, as the engine's sampling fields `regex` and `json_schema` ------------------------------


def _checked_regex(regex: str | None) -> str | None:
    if regex is not None:
        try:
            re.compile(regex)
        except re.error as error:
            raise RequestError(f"regex {regex!r} is not valid: {error}.", field="regex") from None
    return regex


def _schema_text(schema: Mapping[str, Any] | str | type | None) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        return json.dumps(schema)
    described: Callable[[], Any] | None = getattr(schema, "model_json_schema", None)
    if described is None:
        text = f"json_schema must be a schema, its JSON or a pydantic model, got {schema!r}."
        raise RequestError(text, field="json_schema")
    return json.dumps(described())


def _dtype_form(dtype: type | str, regex: str | None) -> tuple[str, tuple[str, ...]]:
    """What such a value looks like, and what ends it."""
    by_name = {kind.__name__: kind for kind in DTYPE_REGEXES}
    kind = by_name.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if kind not in DTYPE_REGEXES:
        raise RequestError(f"dtype must be one of {', '.join(by_name)}, got {dtype!r}.", field="dtype")
    if regex is not None:
        raise RequestError("gen() takes dtype or regex, not both.", field="dtype")
    return DTYPE_REGEXES[kind], () if kind is str else DTYPE_STOPS  # a text in quotes ends with its quote


def in_role(role: str, expr: ExprLike | None = None) -> Expr:
    items = () if expr is None else items_of(expr)
    generated = any(isinstance(item, Gen | Select) for item in items)
    return Row((RoleBegin(role, generated), *items, RoleEnd(role)))


system, user, assistant = (partial(in_role, role) for role in ("system", "user", "assistant"))
system_begin, user_begin, assistant_begin = (partial(RoleBegin, role) for role in ("system", "user", "assistant"))
system_end, user_end, assistant_end = (partial(RoleEnd, role) for role in ("system", "user", "assistant"))
