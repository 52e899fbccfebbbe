"""Which back end follows a prepared spec: the one that was chosen, unless it would take without end.

xgrammar's masks are the quickest where a text can be read in one way, or a few; where the readings grow with the text
(`readings`), one mask can take it minutes. llguidance bounds the work of each mask, so such specs go there. So do
schemas whose strings have many states, or that name many values: xgrammar would work masks out for each of them
beforehand, llguidance takes them in its stride. Asked of specs that are prepared for xgrammar; owns nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bough.constrained.ebnf import inline, parse_ebnf
from bough.constrained.interface import GrammarSpec
from bough.constrained.readings import grammar_has_many_readings, many_readings
from bough.constrained.regexes import parse_regex
from bough.constrained.scalar_grammar import string_states
from bough.constrained.tag_lark import tag_to_lark
from bough.core.errors import RequestError

UNBOUNDED = "xgrammar"
BOUNDED = "llguidance"
REPEATING = ("star", "plus", "repeat")
DELIMITED = ("tag", "const_string")  # formats that say themselves where they begin
MAX_STRING_STATES = 150  # each takes xgrammar up to a tenth of a second to compile
MAX_VALUES = 1_500  # of all enums: twice as many take it four times as long


def is_ambiguous(spec: GrammarSpec) -> bool:
    """Whether the readings of a text may grow with it. What stands in JSON is written in one way only."""
    match spec.kind:
        case "regex":
            return many_readings(parse_regex(spec.text))
        case "ebnf":
            return _in_grammar(spec.text)
        case "structural_tag":
            return any(map(_in_format, _formats(json.loads(spec.text)["format"])))
    return False


def is_large(spec: GrammarSpec) -> bool:
    """Whether its strings have more states, or its enums more values, than are worth compiling one by one."""
    match spec.kind:
        case "json_schema" | "json_object":
            schemas = [json.loads(spec.text)]
        case "structural_tag":
            schemas = [part["json_schema"] for part in _formats(json.loads(spec.text)["format"])
                       if part["type"] == "json_schema"]  # fmt: skip
        case _:
            return False
    return sum(map(string_states, schemas)) > MAX_STRING_STATES or sum(map(_values, schemas)) > MAX_VALUES


def _values(plain: Any) -> int:
    """The values of all enums in a plain schema; those that are objects or lists are written out as such there."""
    if isinstance(plain, list):
        return sum(map(_values, plain))
    if not isinstance(plain, dict):
        return 0
    return len(plain["enum"]) if isinstance(plain.get("enum"), list) else sum(map(_values, plain.values()))


def can_be_bounded(spec: GrammarSpec) -> bool:
    """Whether llguidance can follow a spec that is prepared for it: not all tags can be written for it."""
    if spec.kind != "structural_tag":
        return True
    try:
        tag_to_lark(json.loads(spec.text), any_whitespace=spec.any_whitespace)
    except RequestError:
        return False
    return True


def _in_grammar(text: str) -> bool:
    rules = parse_ebnf(text)
    regular = inline(rules)
    return grammar_has_many_readings(rules) if regular is None else many_readings(regular)


def _in_format(found: dict[str, Any]) -> bool:
    """In one format of a tag: the ends of tags leave no doubt, only what people write in them."""
    match found["type"]:
        case "regex":
            return many_readings(parse_regex(found["pattern"]))
        case "grammar":
            return _in_grammar(found["grammar"])
    return found["type"] in REPEATING and found["content"]["type"] not in DELIMITED


def _formats(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A format and all those in it."""
    yield found
    for inner in [
        *found.get("elements", ()),
        *found.get("tags", ()),
        *([found["content"]] if "content" in found else []),
    ]:
        yield from _formats(inner)
