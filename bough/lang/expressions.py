"""What a program is made of: text, generations, choices, media and roles, as plain values.

Nothing happens when an expression is made; `s += expression` hands it to the state, whose executor does what it says.
Names and arguments are SGLang's.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bough.core.errors import RequestError
from bough.lang.choices import ChoicesSamplingMethod, token_length_normalized

ExprLike: TypeAlias = "str | Expr"

# What `dtype` allows, and where such a value ends.
DTYPE_REGEXES: dict[type, str] = {
    int: r"[-+]?[0-9]+[ \n]*",  # a number ends at the space behind it, where the stop cuts it off
    float: r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    bool: r"(True|False)",
    str: r'"[\w\d\s]*"',
}
DTYPE_STOPS = (" ", "\n")


class Expr:
    """Anything that can be added to a state; `+` puts expressions and text in a row."""

    __slots__ = ()

    def __add__(self, other: ExprLike) -> Expr:
        return Row((*_items(self), *_items(other)))

    def __radd__(self, other: ExprLike) -> Expr:
        return Row((*_items(other), *_items(self)))


@dataclass(frozen=True, slots=True)
class Row(Expr):
    """Expressions one after the other."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Text that stands as it is."""

    value: str


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Text that the model writes."""

    name: str | None
    sampling: Mapping[str, Any]  # what this generation sets itself, under the names of the engine's parameters
    reasoning: str | None = None  # the kind of model whose reasoning is to be kept apart


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """The one of several texts that the model finds likeliest."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float
    method: ChoicesSamplingMethod


@dataclass(frozen=True, slots=True)
class Image(Expr):
    """A picture: a path, an address, bytes or a base64 text."""

    source: str | bytes


@dataclass(frozen=True, slots=True)
class Video(Expr):
    """Frames of a film."""

    path: str
    num_frames: int


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """A message begins. `generated`: the model writes in it, or may: then the prompt invites it to."""

    role: str
    generated: bool = True


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """A message ends."""

    role: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """What follows becomes a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """The variable ends here."""

    name: str


def as_expr(value: object) -> Expr:
    """A text or an expression as an expression."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    raise TypeError(f"A state takes text and expressions such as gen(), got {type(value).__name__}: {value!r:.80}.")


def walk(expr: Expr) -> tuple[Expr, ...]:
    """The expressions in their order, without rows."""
    return expr.items if isinstance(expr, Row) else (expr,)


def _items(value: object) -> tuple[Expr, ...]:
    return walk(as_expr(value))


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
    if choices:
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
        "regex": _checked_regex(regex),
        "json_schema": _schema_text(json_schema),
    }
    if dtype is not None:
        given |= _dtype_fields(dtype, regex, stop)
    if given["regex"] is not None and given["json_schema"] is not None:
        raise RequestError("gen() takes one constraint: regex (or dtype), or json_schema.", field="regex")
    return Gen(name, {key: value for key, value in given.items() if value is not None})


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
    if not choices or isinstance(choices, str) or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError("select() needs a list of choices, each a text that is not empty.", field="choices")
    if temperature > 1e-5:
        raise RequestError("select() takes the likeliest choice; leave temperature at 0.", field="temperature")
    return Select(name, tuple(choices), temperature, choices_method)


def image(expr: str | bytes) -> Expr:
    """A picture, for models that see."""
    return Image(expr)


def video(path: str, num_frames: int) -> Expr:
    """So many frames of a film, for models that see."""
    return Video(path, num_frames)


def separate_reasoning(expr: ExprLike, model_type: str) -> Expr:
    """Keeps what the model thinks apart: each generation `name` gives `name` without it and `name_reasoning_content`.
    Not for streams."""
    marked = [dataclasses.replace(e, reasoning=model_type) if isinstance(e, Gen) else e for e in _items(expr)]
    return Row(tuple(marked))


# Roles ----------------------------------------------------------------------------------------------------------------


def in_role(role: str, expr: ExprLike | None) -> Expr:
    """A whole message."""
    items = () if expr is None else _items(expr)
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


# ----------------------------------------------------------------------------------------------------------------------


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
        raise RequestError(
            f"json_schema must be a schema, its JSON or a pydantic model, got {schema!r}.", field="json_schema"
        )
    return json.dumps(described())


def _dtype_fields(dtype: type | str, regex: str | None, stop: str | Sequence[str] | None) -> dict[str, Any]:
    by_name = {kind.__name__: kind for kind in DTYPE_REGEXES}
    kind = by_name.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if kind not in DTYPE_REGEXES:
        raise RequestError(f"dtype must be one of {', '.join(by_name)}, got {dtype!r}.", field="dtype")
    if regex is not None:
        raise RequestError("gen() takes dtype or regex, not both.", field="dtype")
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    ends = () if kind is str else DTYPE_STOPS  # a text in quotes ends with its quote
    return {"regex": DTYPE_REGEXES[kind], "stop": (*stops, *ends) or None}
