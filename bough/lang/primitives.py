"""The functions by which programs say what they want: `gen`, `select`, pictures, roles. They check their arguments, so
that a mistake is told on its line, and give expressions. Names and arguments are SGLang's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bough.core.errors import RequestError
from bough.lang.choices import ChoicesSamplingMethod, token_length_normalized
from bough.lang.constraints import checked_regex, dtype_form, schema_text
from bough.lang.expressions import Expr, ExprLike, Gen, Image, RoleBegin, RoleEnd, Row, Select, Video, items_of
from bough.parsers import reasoning_format

ONE_CONSTRAINT = "gen() takes one constraint: choices, regex (or dtype), or json_schema."

# Generation -----------------------------------------------------------------------------------------------------------


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
) -> Expr:
    """The model continues the text. What is left out takes the value that `run` was given. `json_schema` is a schema,
    its JSON or a pydantic model; with `choices` it is a `select`; with `n` over 1 the variable is a list, and the text
    goes on with its first."""
    if choices is not None:
        if not (dtype is regex is json_schema is None):
            raise RequestError(ONE_CONSTRAINT, field="choices")
        return select(name, choices, temperature or 0.0, choices_method or token_length_normalized)
    given = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "stop_regex": stop_regex,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "ignore_eos": ignore_eos,
        "return_logprob": return_logprob,
        "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num,
        "return_text_in_logprobs": return_text_in_logprobs,
        "regex": checked_regex(regex),
        "json_schema": schema_text(json_schema),
    }
    ends: tuple[str, ...] = ()
    if dtype is not None:
        given["regex"], ends = dtype_form(dtype, regex)
    if given["regex"] is not None and given["json_schema"] is not None:
        raise RequestError(ONE_CONSTRAINT, field="regex")
    return Gen(name, {key: value for key, value in given.items() if value is not None}, ends=ends)


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **arguments: Any,
) -> Expr:
    """`gen` of a whole number, with its arguments."""
    return gen(name, max_tokens, n=n, stop=stop, **arguments, dtype=int)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **arguments: Any,
) -> Expr:
    """`gen` of a text in quotes, with its arguments."""
    return gen(name, max_tokens, n=n, stop=stop, **arguments, dtype=str)


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
    """A picture, for models that see."""
    return Image(expr)


def video(path: str, num_frames: int) -> Expr:
    """So many frames of a film, for models that see."""
    return Video(path, num_frames)


def separate_reasoning(expr: ExprLike, model_type: str) -> Expr:
    """Keeps what the model thinks apart: each generation `name` gives `name` without it and `name_reasoning_content`.
    `model_type` is a name of `--reasoning-parser`. Not for streams."""
    reasoning_format(model_type, field="model_type")
    marked = [dataclasses.replace(e, reasoning=model_type) if isinstance(e, Gen) else e for e in items_of(expr)]
    return Row(tuple(marked))


# Roles ----------------------------------------------------------------------------------------------------------------


def in_role(role: str, expr: ExprLike | None) -> Expr:
    """A whole message."""
    items = () if expr is None else items_of(expr)
    generated = any(isinstance(item, Gen | Select) for item in items)
    return Row((RoleBegin(role, generated), *items, RoleEnd(role)))


def system(expr: ExprLike | None = None) -> Expr:
    return in_role("system", expr)


def user(expr: ExprLike | None = None) -> Expr:
    return in_role("user", expr)


def assistant(expr: ExprLike | None = None) -> Expr:
    return in_role("assistant", expr)


def system_begin() -> Expr:
    return RoleBegin("system")


def system_end() -> Expr:
    return RoleEnd("system")


def user_begin() -> Expr:
    return RoleBegin("user")


def user_end() -> Expr:
    return RoleEnd("user")


def assistant_begin() -> Expr:
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    return RoleEnd("assistant")
