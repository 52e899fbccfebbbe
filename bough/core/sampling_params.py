"""How the tokens of one request are chosen: SGLang's `sampling_params`, checked once where a request enters.

`SamplingParams.parse` turns a client's mapping into this frozen form or raises a `RequestError` that names the field
and the allowed range. Lists that clients may give as a single value are tuples here, so nobody downstream asks again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import typing
from collections.abc import Collection, Mapping, Sized
from numbers import Real
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from bough.core.errors import RequestError, nearest
from bough.core.stop_patterns import check_patterns

GREEDY_TEMPERATURE = 1e-6  # below this, dividing logits by it overflows: it means "take the best token"
MAX_TEMPERATURE = 1_000_000
MAX_LOGPROBS = 4096
MAX_LISTED = 1 << 18  # entries of any list or table: more than there are tokens, and few enough to look at each
MAX_STOP_IDS = 1024  # they are kept on the device, as many for every row as for the one that has the most
MAX_BIAS = 1_000_000_000
MAX_KEY_DIGITS = 20  # of a token id as text
MAX_STOPS = 128
NAME_SHOWN = 100  # characters of an unknown field's name in an error
MAX_STOP_CHARS = 16_384  # of all stop strings together: the text is compared with all of them
MAX_GRAMMAR_CHARS = 1 << 20  # as it is written: the scheduler reads it; back ends take less of what it says
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
BIAS_TABLE = dict[Annotated[int, Meta(ge=0, le=INT32_MAX)], Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Field names and defaults are SGLang's."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    # Accepted for SGLang's clients, without effect: only slow tokenizers put spaces there, and this engine has none.
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] = {}
    sampling_seed: int | None = None
    stream_interval: int | None = None
    custom_params: dict[str, Any] = {}  # for the request's custom logit processor
    # What the answer must match: at most one of these. Schemas and tags are JSON text here, whatever the client gave.
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    choices: tuple[str, ...] = ()
    grammar_strict: bool = True  # False: what a back end cannot enforce is named in a warning instead of refused

    @property
    def constrained(self) -> bool:
        return self.grammar_field is not None

    @property
    def grammar_field(self) -> str | None:
        return next((name for name in GRAMMAR_FIELDS if getattr(self, name)), None)

    @property
    def greedy(self) -> bool:
        """The best token, always: no random number is drawn."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @classmethod
    def parse(
        cls, given: Mapping[str, Any] | SamplingParams | None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Builds checked parameters from a client's mapping; `None` values mean "not given" and take the default.

        Parameters made by hand say everything themselves, so no defaults apply; but nobody has checked their types.
        """
        if isinstance(given, SamplingParams):
            values = {name: getattr(given, name) for name in cls.__struct_fields__}
            return cls.parse({**values, "choices": given.choices or None})
        if given is not None and not isinstance(given, Mapping):
            raise RequestError(
                f"sampling_params must be an object, not {type(given).__name__}.", field="sampling_params"
            )
        values = {k: v for k, v in (defaults or {}).items() if v is not None}
        values.update({k: v for k, v in (given or {}).items() if v is not None and (v != "" or k not in GRAMMAR_TEXTS)})
        unknown = [name for name in values if name not in cls.__struct_fields__]
        if unknown:
            name, known = str(unknown[0])[:NAME_SHOWN], cls.__struct_fields__
            near = nearest(name, known)
            hint = f"Did you mean {near!r}?" if near else f"Known fields: {', '.join(known)}."
            raise RequestError(f"Unknown sampling field {name!r}. {hint}", field=name)
        if isinstance(values.get("choices"), str | list | tuple) and not values["choices"]:
            raise RequestError("choices is empty; say what the answer must match, or leave it out.", field="choices")
        for name in JSON_TEXT_FIELDS & values.keys():
            values[name] = _json_text(values[name], name)
        for name in ("stop", "stop_token_ids", "stop_regex", "choices"):
            if name in values:
                several = isinstance(values[name], list | tuple | set | frozenset)
                values[name] = tuple(values[name]) if several else (values[name],)
                require_few(values[name], name)
        if "logit_bias" in values:
            values["logit_bias"] = _parse_logit_bias(values["logit_bias"])
        return _convert(cls, values).verified()

    def verified(self) -> SamplingParams:
        """Itself; raises if a value is out of its range."""
        for name, low, high, allowed in RANGES:
            value = getattr(self, name)
            if value is not None and (not low <= value <= high or (name in ABOVE_LOWEST and value == low)):
                raise RequestError(f"{name} must be {allowed}, got {value}.", field=name)
        if self.top_k == 0:
            raise RequestError("top_k must be -1 (off) or at least 1; got 0.", field="top_k")
        if self.min_new_tokens > self.max_new_tokens:
            told = f"min_new_tokens ({self.min_new_tokens}) is larger than max_new_tokens ({self.max_new_tokens})."
            raise RequestError(told, field="min_new_tokens")
        for name, texts in (("stop", self.stop), ("stop_regex", self.stop_regex)):
            require_few(texts, name, MAX_STOPS)
            for text in texts:
                if not text:
                    raise RequestError(f"{name} contains an empty string, which would match at once.", field=name)
                require_utf8(text, name)
        if (chars := sum(map(len, self.stop))) > MAX_STOP_CHARS:
            told = f"stop has {chars} characters; all its strings together may have {MAX_STOP_CHARS}."
            raise RequestError(told, field="stop")
        _require_token_ids(self.stop_token_ids, "stop_token_ids", -INT64_MAX, INT64_MAX)
        require_few(set(self.stop_token_ids), "stop_token_ids", MAX_STOP_IDS)
        _require_token_ids(self.logit_bias, "logit_bias")
        if self.stop_regex:
            check_patterns(self.stop_regex)
        self._verify_grammar()
        return self

    def _verify_grammar(self) -> None:
        given = [name for name in GRAMMAR_FIELDS if getattr(self, name)]
        if len(given) > 1:
            told = f"{' and '.join(given)} each say what the answer must match; give one of them."
            raise RequestError(told, field=given[1])
        for name in given:
            texts = self.choices if name == "choices" else (getattr(self, name),)
            if (chars := sum(map(len, texts))) > MAX_GRAMMAR_CHARS:
                told = f"{name} has {chars} characters; at most {MAX_GRAMMAR_CHARS} are read. Make it smaller."
                raise RequestError(told, field=name)
            for text in texts:
                require_utf8(text, name)


# name, lowest, highest, how the range reads in the error
RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("max_new_tokens", 0, INT32_MAX, f"between 0 and {INT32_MAX}"),
    ("min_new_tokens", 0, INT32_MAX, f"between 0 and {INT32_MAX}"),
    ("n", 1, 1024, "between 1 and 1024"),
    ("temperature", 0.0, MAX_TEMPERATURE, f"a number between 0 and {MAX_TEMPERATURE}"),
    ("top_p", 0.0, 1.0, "in (0, 1]"),
    ("top_k", -1, INT32_MAX, f"-1 (off) or between 1 and {INT32_MAX}"),
    ("min_p", 0.0, 1.0, "in [0, 1]"),
    ("frequency_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("presence_penalty", -2.0, 2.0, "in [-2, 2]"),
    ("repetition_penalty", 0.0, 2.0, "in (0, 2]"),
    ("sampling_seed", -INT64_MAX - 1, INT64_MAX, "a 64-bit whole number (-2**63 to 2**63 - 1)"),
    ("stream_interval", 1, INT32_MAX, f"between 1 and {INT32_MAX}"),
)
msgspec.json.Decoder(SamplingParams)  # msgspec would crash if two threads were the first to read a type
ABOVE_LOWEST = frozenset({"top_p", "repetition_penalty"})  # their lowest value itself is refused

GRAMMAR_TEXTS = ("json_schema", "regex", "ebnf", "structural_tag")  # SGLang's: an empty one asks for nothing
GRAMMAR_FIELDS = (*GRAMMAR_TEXTS, "choices")
ANY_JSON = "$$ANY$$"
JSON_TEXT_FIELDS = frozenset({"json_schema", "structural_tag"})  # objects to many clients, text on the wire


def require_utf8(text: str, name: str, most: int | None = None) -> None:
    """Messages between processes are UTF-8; Python strings may hold what is not."""
    if most is not None and len(text) > most:
        raise RequestError(f"{name} has {len(text)} characters; at most {most} are taken.", field=name)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        told = f"{name} holds a lone surrogate ({text[error.start]!r}), which cannot be encoded as UTF-8."
        raise RequestError(told, field=name) from None


# For ids, keys and adapters, which all prompts of a call have.
require_name = functools.partial(require_utf8, most=4096)


def require_few(listed: Sized, name: str, most: int = MAX_LISTED) -> None:
    if len(listed) > most:
        raise RequestError(f"{name} has {len(listed)} entries; at most {most} are taken.", field=name)


def _require_token_ids(ids: Collection[int], name: str, low: int = 0, high: int = INT32_MAX) -> None:
    if ids and low <= min(ids) and max(ids) <= high:
        return
    for token in ids:
        if not low <= token <= high:
            raise RequestError(f"{name}: {token} is not a token id ({low} to {high}).", field=name)


def _json_text(value: Any, name: str) -> Any:
    """An object or a pydantic model as JSON text; text stays as it is, but for SGLang's word for any JSON at all."""
    if name == "json_schema" and value == ANY_JSON:
        return "{}"
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if not isinstance(value, Mapping | bool):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be written as JSON: {error}.", field=name) from None


def _parse_logit_bias(given: Any) -> dict[int, float]:
    """JSON objects have string keys: `{"17": -100}` means token 17."""
    if not isinstance(given, Mapping):
        raise RequestError("logit_bias must map token ids to numbers.", field="logit_bias")
    require_few(given, "logit_bias")
    # A whole table is read in a tenth of the time that its entries take one by one. Those are for what is unusual or
    # wrong, which is named.
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(given, BIAS_TABLE, str_keys=True)
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not _is_token_key(key) or not _is_number(value):
            raise RequestError(f"logit_bias must map token ids to numbers, got {key!r}: {value!r}.", field="logit_bias")
        try:
            amount = float(value)
        except OverflowError:  # a whole number that no float can hold
            amount = math.inf
        if not -MAX_BIAS <= amount <= MAX_BIAS:  # written so that NaN is refused as well
            text = f"logit_bias[{key}] must be between -{MAX_BIAS:g} and {MAX_BIAS:g}, got {amount}."
            raise RequestError(text, field="logit_bias")
        bias[int(key)] = amount
    return bias


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_token_key(key: Any) -> bool:
    if isinstance(key, str):
        return key.isascii() and key.removeprefix("-").isdigit() and len(key) <= MAX_KEY_DIGITS
    return _is_number(key) and key == key // 1 and abs(key) <= INT64_MAX


def _convert(cls: type[SamplingParams], values: dict[str, Any]) -> SamplingParams:
    # JSON does not tell 1 from 1.0, and neither do all clients.
    values = {name: _whole(value) if name in WHOLE_FIELDS else value for name, value in values.items()}
    try:
        return msgspec.convert(values, cls, strict=True)
    except msgspec.ValidationError as error:
        # msgspec ends its sentence with "- at `$.field`", and adds `[i]` for an element.
        name = str(error).partition("`$.")[2].split("`")[0].split("[")[0]
        words = JSON_WORDS.get(name) or TYPE_WORDS[typing.get_type_hints(cls)[name]]
        wrong = values[name]
        # A single value was put into a tuple; a list is shown as it was given.
        shown = wrong[0] if isinstance(wrong, tuple) and len(wrong) == 1 else wrong
        raise RequestError(f"{name} must be {words}, got {shown!r}.", field=name) from None


def _whole(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_whole, value))
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= INT64_MAX else value


TYPE_WORDS: dict[Any, str] = {
    int: "a whole number",
    int | None: "a whole number",
    float: "a number",
    bool: "true or false",
    str | None: "a string",
    dict[str, Any]: "an object",
    tuple[str, ...]: "a string or a list of strings",
    tuple[int, ...]: "a token id or a list of token ids",
}
JSON_WORDS = {
    "json_schema": "a JSON schema as an object, as JSON text or as a pydantic model",
    "structural_tag": "a structural tag as an object or as JSON text",
}
WHOLE_FIELDS = frozenset(
    name for name, hint in typing.get_type_hints(SamplingParams).items() if hint in (int, int | None, tuple[int, ...])
)
